"""Comm over nccl, and over gloo with CUDA tensors: a GPU for each rank."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cp_gdn.comm import Batch, Comm
from cp_gdn.twin import twin
from tests.dist import pool
from tests.dist.round_trips import Trip, round_trips
from tests.gpu.nccl_cases import WORLDS

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("world", WORLDS)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def device(rank: int) -> torch.device:
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def trips(rank: int, world: int) -> list[Trip]:
    where, comm = device(rank), Comm()
    try:
        return [round_trips(comm, dtype, where) for dtype in DTYPES]
    finally:
        comm.close()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_groups_of_gpus_give_the_bits_and_the_messages_of_the_twin(backend: str, world: int) -> None:
    results = pool.run(world, trips, backend=backend)
    for index, dtype in enumerate(DTYPES):
        for ours, theirs in zip(results, twin(world, lambda comm, d=dtype: round_trips(comm, d)), strict=True):
            assert ours[index].messages == theirs.messages
            for name, tensor in ours[index].tensors.items():
                assert torch.equal(tensor, theirs.tensors[name]), name


def receive(comm: Comm, where: torch.device) -> None:
    """Make the device wait for a message of the last rank, then the host for the device, then call again."""
    batch = Batch(purpose="STATE", sends=(), recvs=((comm.size - 1, (8,)),), dtype=torch.float32, device=where)
    comm.post(batch).wait()
    torch.cuda.synchronize()
    comm.agree("context", {})


def one_rank_ends(rank: int, world: int, end: str) -> None:
    where, comm = device(rank), Comm(timeout=5.0)
    comm.all_reduce_sum("SUM", torch.ones(4, device=where))
    with comm.guard("forward"):
        if rank < world - 1:
            receive(comm, where)
        time.sleep(1.0)
        if end == "killed":
            os._exit(9)
        if end == "slow":
            time.sleep(12.0)
            comm.agree("context", {})
        raise ValueError("a wrong dtype")


ENDS = {
    "raises": ("ValueError", "by rank {last}: forward: ValueError: a wrong dtype"),
    "killed": ("killed", "by rank {last}: rank {last} gave no sign of life"),
    "slow": ("CommFailed", "by rank {last}: rank {last} did not arrive within 5 s"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_devices_of_the_other_ranks_are_freed_and_the_reason_raised(end: str, world: int) -> None:
    name, text = ENDS[end]
    *others, culprit = pool.run_failing(world, one_rank_ends, end, backend="nccl")
    assert culprit.name == name, culprit
    for waiting in others:
        assert waiting.name == "CommFailed", waiting
        assert text.format(last=world - 1) in waiting.text


def stuck_elsewhere(rank: int, world: int) -> None:
    """The failure aborts our communicator; the main thread hangs in something of its own."""
    where, comm = device(rank), Comm()
    if rank == world - 1:
        comm.fail("stopped on purpose")
        return
    comm.all_gather("ROWS", torch.ones(2, device=where), [2] * world)
    time.sleep(3600)


def test_a_process_that_never_comes_back_is_ended(world: int) -> None:
    for stuck in pool.run_failing(world, stuck_elsewhere, backend="nccl", deadline=50.0)[:-1]:
        assert stuck.name == "killed"
        assert 25 < stuck.seconds < 45  # s: 30 after the failure


def capture(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Capture a graph with messages in it while the monitor watches earlier ones; replay it with other values."""
    where, comm = device(rank), Comm()
    x = torch.full((4,), float(rank), device=where)
    eager = comm.all_reduce_sum("SUM", x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = comm.all_reduce_sum("SUM", x)
        time.sleep(1.0)  # s: the monitor looks at the events of the eager call meanwhile
    x += 10
    graph.replay()
    torch.cuda.synchronize()
    result = eager.cpu(), y.cpu()
    comm.close()
    return result


def test_a_graph_with_messages_is_captured_while_the_monitor_watches(world: int) -> None:
    total = world * (world - 1) / 2
    for eager, replayed in pool.run(world, capture, backend="nccl"):
        assert torch.equal(eager, torch.full((4,), total))
        assert torch.equal(replayed, torch.full((4,), total + 10 * world))


def capture_staged(rank: int, world: int) -> str:
    where, comm = device(rank), Comm()
    with pytest.raises(RuntimeError) as refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        comm.all_reduce_sum("SUM", torch.ones(4, device=where))
    comm.close()
    return str(refused.value)


def test_gloo_refuses_cuda_tensors_during_capture(world: int) -> None:
    for said in pool.run(world, capture_staged, backend="gloo"):
        assert "while a graph is captured" in said


def drop_with_messages_in_flight(rank: int, world: int) -> bool:
    """A Comm that is dropped while its messages are still behind other work on the device must not spoil them."""
    where, comm = device(rank), Comm()
    x = torch.ones(1 << 20, device=where)
    comm.all_reduce_sum("SUM", x)
    torch.cuda._sleep(1_000_000_000)  # about half a second
    y = comm.all_reduce_sum("SUM", x)
    del comm
    return bool((y == world).all())


def test_a_comm_dropped_with_messages_in_flight_lets_them_finish(world: int) -> None:
    assert pool.run(world, drop_with_messages_in_flight, backend="nccl") == [True] * world


def in_a_bound_world(rank: int, world: int, file: str) -> float:
    """A world bound to devices, as launchers make it: the duplicate must not split its communicator."""
    where = device(rank)
    dist.destroy_process_group()
    store = dist.FileStore(file, world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=where)
    comm = Comm()
    total = comm.all_reduce_sum("SUM", torch.ones(1, device=where)).item()
    comm.close()
    return total


def test_a_world_bound_to_devices_works(tmp_path: Path, world: int) -> None:
    sums = pool.run(world, in_a_bound_world, str(tmp_path / "store"), backend="nccl")
    assert sums == [float(world)] * world
