"""One of each kind of call of a Comm, for process groups and the twin alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.comm import Batch, Comm, Message

CPU = torch.device("cpu")
Own = Callable[..., Tensor]  # (seed, *shape) -> this rank's values


@dataclass(frozen=True, kw_only=True)
class Trip:
    """What a rank received, and every message it saw."""

    tensors: dict[str, Tensor]
    messages: list[Message]


def values(rank: int, seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers that differ between ranks and uses."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def round_trips(comm: Comm, dtype: torch.dtype, device: torch.device = CPU) -> Trip:
    """Every kind of call, on tensors of this device; what comes back is on the CPU."""

    def own(seed: int, *shape: int) -> Tensor:
        return values(comm.rank, seed, *shape, dtype=dtype).to(device)

    with comm.record() as messages:
        tensors = {
            **_ring(comm, own(1, 4, 6).t(), own(2, 24)),
            "all_to_all": _all_to_all(comm, own),
            "all_gather": _all_gather(comm, own, [(2 * r) % 3 for r in range(comm.size)]),
            "all_gather_nothing": _all_gather(comm, own, [0] * comm.size),
            "all_reduce_sum": comm.all_reduce_sum("SUM", own(5, 3, 4)),
        }
    return Trip(tensors={name: tensor.cpu() for name, tensor in tensors.items()}, messages=messages)


def _ring(comm: Comm, state: Tensor, tail: Tensor) -> dict[str, Tensor]:
    """Two batches in flight, the later one waited for first; of one size, to the same peer, one of them strided."""
    if comm.size == 1:
        return {}
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    dtype, device = tail.dtype, tail.device
    first = comm.post(
        Batch(
            purpose="STATE",
            sends=((after, state), (after, tail), (after, tail[:0])),
            recvs=((before, (6, 4)), (before, (24,)), (before, (0, 3))),
            dtype=dtype,
            device=device,
        )
    )
    second = comm.post(
        Batch(purpose="TAIL", sends=((after, 2 * tail),), recvs=((before, (24,)),), dtype=dtype, device=device)
    )
    (doubled,) = second.wait()
    got_state, got_tail, got_nothing = first.wait()
    return {"state": got_state, "tail": got_tail, "nothing": got_nothing, "doubled": doubled}


def pair_count(source: int, target: int) -> int:
    return (3 * source + 2 * target) % 4  # with zeros, and unlike in the two directions


def _all_to_all(comm: Comm, own: Own) -> Tensor:
    sent = [pair_count(comm.rank, peer) for peer in range(comm.size)]
    received = [pair_count(peer, comm.rank) for peer in range(comm.size)]
    return comm.all_to_all("SUMMARY", own(3, sum(sent)), sent, received).wait()


def _all_gather(comm: Comm, own: Own, counts: list[int]) -> Tensor:
    return comm.all_gather("ROWS", own(4, counts[comm.rank], 2), counts)
