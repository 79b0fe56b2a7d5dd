"""What is posted and what is got back: messages, batches, and the tensors they will bring."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .transport import Flight

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message as this rank sees it; `peer` is the rank inside the group."""

    direction: str  # "send" or "recv"
    peer: int
    purpose: str
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Point-to-point messages that are posted together, all or none. `recvs` holds (peer, shape)."""

    purpose: str
    sends: tuple[tuple[int, Tensor], ...]
    recvs: tuple[tuple[int, tuple[int, ...]], ...]
    dtype: torch.dtype
    device: torch.device


class Pending(Generic[T]):
    """Messages on their way and what they will bring. Keeps every tensor alive until `wait`, which is called once."""

    def __init__(self, wait: Callable[[Flight, str], None], flight: Flight, purpose: str, result: T) -> None:
        self._wait, self._purpose, self._result = wait, purpose, result
        self._flight: Flight | None = flight

    def wait(self) -> T:
        """The received tensors. Under NCCL the current stream waits, not the host. Raises CommFailed."""
        if self._flight is None:
            raise RuntimeError(f"{self._purpose}: wait() was called twice; keep what the first call returned")
        flight, result = self._flight, self._result
        del self._result
        self._flight = None
        self._wait(flight, self._purpose)
        return result


def check_batch(batch: Batch, rank: int, size: int) -> None:
    for peer in (peer for peer, _ in (*batch.sends, *batch.recvs)):
        if peer == rank or not 0 <= peer < size:
            raise ValueError(
                f"{batch.purpose}: peer: got {peer}, expected a rank of 0..{size - 1} other than this rank, {rank} "
                "(what stays on a rank is copied, never sent)"
            )
    for _, tensor in batch.sends:
        if (tensor.dtype, tensor.device) != (batch.dtype, batch.device):
            raise ValueError(
                f"{batch.purpose}: sends: got a tensor of {tensor.dtype} on {tensor.device}, "
                f"expected {batch.dtype} on {batch.device} as the batch says"
            )


def check_counts(name: str, counts: Sequence[int], size: int) -> None:
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"{name}: got {list(counts)}, expected {size} counts of 0 or more, one per rank")


def pieces(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of x along dim 0, counts[r] rows each."""
    return [x[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def differences(values: Sequence[Mapping[str, str]]) -> str:
    """One line per field that differs, with every rank's value."""
    names = dict.fromkeys(name for value in values for name in value)
    lines = []
    for name in names:
        column = [value.get(name, "(not given)") for value in values]
        if len(set(column)) > 1:
            lines.append(f"  {name}: " + ", ".join(f"rank {rank}: {got}" for rank, got in enumerate(column)))
    return "\n".join(lines)
