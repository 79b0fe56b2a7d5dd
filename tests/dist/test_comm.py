"""Comm over gloo process groups."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_gdn.comm import Batch, Comm, CommFailed
from cp_gdn.twin import twin
from tests.dist import pool
from tests.dist.round_trips import CPU, Trip, round_trips
from tests.test_twin import DISAGREEMENT, assert_lists_match, disagree

pytestmark = pytest.mark.dist
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def to_peer(x: torch.Tensor, peer: int, *, back: bool = True) -> Batch:
    """Send x to the peer and, with `back`, get as much from it."""
    recvs = ((peer, tuple(x.shape)),) if back else ()
    return Batch(purpose="STATE", sends=((peer, x),), recvs=recvs, dtype=x.dtype, device=CPU)


def trips(rank: int, world: int) -> list[Trip]:
    comm = Comm()
    try:
        return [round_trips(comm, dtype) for dtype in DTYPES]
    finally:
        comm.close()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_process_groups_give_the_bits_and_the_messages_of_the_twin(world: int) -> None:
    results = pool.run(world, trips)
    for index, dtype in enumerate(DTYPES):
        got, expected = [result[index] for result in results], twin(world, lambda comm, d=dtype: round_trips(comm, d))
        assert_lists_match(got)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.messages == theirs.messages
            assert ours.tensors.keys() == theirs.tensors.keys()
            for name, tensor in ours.tensors.items():
                assert torch.equal(tensor, theirs.tensors[name]), name


def in_subgroup(rank: int, world: int) -> Any:
    """Ranks {1, 3} with no collective before; one is in one more group, which changes the names that torch derives."""
    group = dist.new_group([1, 3])
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True)
    if rank not in (1, 3):
        with pytest.raises(ValueError, match="not a member"):
            Comm(group)
        return None
    got = []
    for _ in range(3):  # a Comm made again must not meet what the last one left in the store
        comm = Comm(group)
        batch = to_peer(torch.full((2,), float(rank)), 1, back=False)
        if comm.rank == 1:
            batch = Batch(purpose="STATE", sends=(), recvs=((0, (2,)),), dtype=torch.float32, device=CPU)
        got.append((comm.rank, comm.size, comm.post(batch).wait(), comm.all_reduce_sum("SUM", torch.tensor([rank]))))
        comm.close()
    return got


def test_a_subgroup_of_the_world_works_with_ranks_of_its_own() -> None:
    outside, first, also_outside, second = pool.run(4, in_subgroup)
    assert outside is None
    assert also_outside is None
    for round_ in first:
        assert round_ == (0, 2, [], torch.tensor([4]))
    for rank, size, received, total in second:
        assert (rank, size, total.tolist()) == (1, 2, [4])
        assert torch.equal(received[0], torch.full((2,), 1.0))


def disagree_over_the_store(rank: int, world: int) -> list[str]:
    comm = Comm()
    texts = disagree(comm)
    comm.close()
    return texts


def test_a_disagreement_lists_every_value_on_every_rank_and_leaves_the_comm_usable() -> None:
    assert pool.run(3, disagree_over_the_store) == [[DISAGREEMENT]] * 3


def agree_often(rank: int, world: int) -> int:
    comm = Comm()
    for step in range(20):
        comm.agree("context", {"step": str(step)})
    comm.agree("context", {"step": "last"})
    keys = sum(comm._board.read(f"agree/{n}/{r}") is not None for n in range(1, 20) for r in range(world))
    comm.close()
    return keys


def test_agreements_do_not_mix_and_do_not_pile_up_in_the_store() -> None:
    assert pool.run(3, agree_often) == [0, 0, 0]


def numpy_backed(numel: int) -> tuple[torch.Tensor, "weakref.ref[np.ndarray]"]:
    """A tensor and a reference that dies with its storage, whoever holds it."""
    array = np.ones(numel, dtype=np.float32)
    return torch.from_numpy(array), weakref.ref(array)


def hold_until_waited(rank: int, world: int) -> tuple[bool, bool]:
    comm = Comm()
    x, alive = numpy_backed(4096)
    pending = comm.post(to_peer(x, 1 - rank))
    del x
    gc.collect()
    before = alive() is not None
    pending.wait()
    gc.collect()
    comm.close()
    return before, alive() is not None


def test_tensors_are_kept_until_waited_and_not_longer() -> None:
    assert pool.run(2, hold_until_waited) == [(True, False)] * 2


def raise_between(rank: int, world: int) -> tuple[bool, int]:
    comm = Comm()
    x, alive = numpy_backed(4096)
    received = len(tensors_of(4097))
    try:
        with comm.guard("forward"):
            batch = Batch(
                purpose="STATE", sends=((1 - rank, x),), recvs=((1 - rank, (4097,)),), dtype=x.dtype, device=CPU
            )
            pending = comm.post(batch)
            comm.agree("both have posted", {})
            raise ValueError("between post and wait")
    except (ValueError, CommFailed):  # the slower rank may hear of the other one's first
        pass
    del pending, batch, x
    gc.collect()
    return alive() is not None, len(tensors_of(4097)) - received


def tensors_of(numel: int) -> list[torch.Tensor]:
    return [x for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() == numel]


def test_an_exception_between_post_and_wait_leaks_nothing() -> None:
    for outcome in pool.run_failing(2, raise_between):
        assert (outcome.name, outcome.value) == ("returned", (False, 0)), outcome


class Counted:
    """A gloo backend that counts handles and the waits for them."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.made, self.waited = backend, 0, 0

    def send(self, *args: Any) -> "CountedWork":
        return self._count(self._backend.send(*args))

    def recv(self, *args: Any) -> "CountedWork":
        return self._count(self._backend.recv(*args))

    def _count(self, work: Any) -> "CountedWork":
        self.made += 1
        return CountedWork(work, self)


class CountedWork:
    def __init__(self, work: Any, counter: Counted) -> None:
        self._work, self._counter = work, counter

    def wait(self, *args: Any) -> None:
        self._counter.waited += 1
        self._work.wait(*args)


def count_handles(rank: int, world: int) -> tuple[int, int, int]:
    comm = Comm()
    counter = comm._link._backends["gloo"] = Counted(comm._link._backends["gloo"])
    messages = round_trips(comm, torch.float32).messages
    comm.close()
    return len(messages), counter.made, counter.waited


def test_every_handle_is_waited_for() -> None:
    for messages, made, waited in pool.run(3, count_handles):
        assert messages == made == waited > 0


def drop_comms(rank: int, world: int) -> list[int]:
    """Monitor threads after close, after a drop, and with one Comm alive."""
    counts = []
    comm = Comm()
    comm.close()
    counts.append(monitors())
    comm = Comm()
    counts.append(monitors())
    del comm
    gc.collect()
    return [*counts, monitors()]


def monitors() -> int:
    return sum("cp_gdn" in thread.name for thread in threading.enumerate())


def test_no_thread_outlives_its_comm() -> None:
    assert pool.run(2, drop_comms) == [[0, 1, 0]] * 2


def in_backward(rank: int, world: int) -> torch.Tensor:
    """Post here, wait in another thread, as autograd does on devices."""
    comm = Comm()
    pending = comm.post(to_peer(torch.full((3,), float(rank)), 1 - rank))
    got = []
    thread = threading.Thread(target=lambda: got.extend(pending.wait()))
    thread.start()
    thread.join()
    comm.close()
    return got[0]


def test_waiting_in_another_thread_works() -> None:
    first, second = pool.run(2, in_backward)
    assert torch.equal(first, torch.full((3,), 1.0))
    assert torch.equal(second, torch.full((3,), 0.0))


EXIT = """
import sys, torch, torch.distributed as dist
from cp_gdn.comm import Comm
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
comm = Comm()
comm.all_reduce_sum("SUM", torch.ones(1))
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroyed", "left"])
def test_an_interpreter_ends_in_silence_with_a_comm_open(end: str, tmp_path: Any) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store"), end],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert [e for e in errors if "Traceback" in e or "terminate" in e or "cp_gdn" in e] == []
