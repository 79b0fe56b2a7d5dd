"""Host side of ``kernels/prepare.cu``: per chunk Q K^T and T, once for all walks."""

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.launch import Kernel, Place, load, map_at
from cp_gdn.plan import CHUNK

ALIGN = 256
"""Bytes at which every part of scratch memory starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareKernel(Kernel):
    """`prepare`; with ``l2norm`` it takes raw q and k."""

    l2norm: bool


def load_prepare(group: int, *, l2norm: bool = False) -> PrepareKernel:
    """`prepare` for ``group`` value heads per q/k head."""
    kernel = load("prepare", {"GROUP": group, "L2NORM": int(l2norm)}, max(128, 64 * group))
    return PrepareKernel(handle=kernel.handle, threads=kernel.threads, smem=kernel.smem, l2norm=l2norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What `prepare` leaves, of the normalised q and k.

    Attributes:
        memory: bytes of ``qk``, ``bound`` and ``rstd``, which start ``at`` these addresses, and of T, if it is kept.
        waiting: [T, HV, 128] bf16 whose first channels hold T until a walk overwrites it; None where T is kept.
        tokens, heads (H, HV), chunks: how many.
    """

    memory: Tensor
    waiting: Tensor | None
    at: tuple[int, int, int]
    tokens: int
    heads: tuple[int, int]
    chunks: int

    @classmethod
    def inside(
        cls, memory: Tensor, waiting: Tensor | None, tokens: int, heads: tuple[int, int], chunks: int
    ) -> "Prepared":
        """In ``memory`` of `prepared_parts` bytes, or of `tape_bytes` where nothing is ``waiting``."""
        base, (_, bound, rstd, _) = memory.data_ptr(), prepared_parts(tokens, heads, chunks)
        at = (base, base + bound, base + rstd)
        return cls(memory=memory, waiting=waiting, at=at, tokens=tokens, heads=heads, chunks=chunks)

    @property
    def place_of_t(self) -> Place:
        """Of T [T, HV, 64] bf16 = diag b - diag b (N o D) diag b (docs/design.md)."""
        shape = (self.tokens, self.heads[1], CHUNK)
        if self.waiting is not None:
            return self.waiting.data_ptr(), shape, self.waiting.stride()
        end = prepared_parts(self.tokens, self.heads, self.chunks)[-1]
        return self.at[0] + end, shape, (self.heads[1] * CHUNK, CHUNK, 1)

    @property
    def t(self) -> Tensor:
        """T as a tensor."""
        if self.waiting is not None:
            return self.waiting.narrow(2, 0, CHUNK)
        end = prepared_parts(self.tokens, self.heads, self.chunks)[-1]
        return self.memory[end:].view(torch.bfloat16).view(self.tokens, self.heads[1], CHUNK)

    @property
    def qk(self) -> Tensor:
        """[H, T, 64] fp16, Q K^T, zero above the diagonal, each chunk as a swizzled image."""
        return self._part(0, torch.float16, (self.heads[0], self.tokens, CHUNK))

    @property
    def bound(self) -> Tensor:
        """[HV, N] fp32, log bound of each chunk's map."""
        return self._part(1, torch.float32, (self.heads[1], self.chunks))

    @property
    def rstd(self) -> Tensor:
        """[2, H, T] fp32, reciprocal norms of q, then of k; filled where the kernel took raw q and k."""
        return self._part(2, torch.float32, (2, self.heads[0], self.tokens))

    def _part(self, which: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        first = self.at[which] - self.memory.data_ptr()
        count = torch.Size(shape).numel()
        return self.memory[first : first + count * dtype.itemsize].view(dtype).view(shape)


@functools.lru_cache(maxsize=1024)
def prepared_parts(tokens: int, heads: tuple[int, int], chunks: int) -> tuple[int, ...]:
    """Where ``qk``, ``bound`` and ``rstd`` start, and the bytes of all; norms have their place whether they are asked
    for or not."""
    sizes = (heads[0] * tokens * CHUNK * 2, heads[1] * chunks * 4, 2 * heads[0] * tokens * 4)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] - (-size // ALIGN) * ALIGN)
    return tuple(ends)


def tape_bytes(tokens: int, heads: tuple[int, int], chunks: int) -> int:
    """Of all that `prepare` leaves, T included."""
    return prepared_parts(tokens, heads, chunks)[-1] + tokens * heads[1] * CHUNK * 2


_PARAMS = struct.Struct("<6Q4q4i3Q8x")
"""What follows the tensor map in the kernel's struct, padded to its alignment of 64."""


def prepare(
    kernel: PrepareKernel,
    queries_keys: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    chunks: Tensor,
    made: Prepared,
) -> None:
    """Everything about a chunk that no state is needed for, into ``made``.

    Args:
        queries_keys: q, k [T, H, 128] bf16 (head rows dense). gates: g and beta [T, HV] fp32.
        chunks: [N, 2] int32, first row, count.
    """
    if not made.chunks:
        return
    (q, k), (g, beta), (qk, bound, rstd) = queries_keys, gates, made.at
    t, _, strides_of_t = place = made.place_of_t
    pointers = (q.data_ptr(), k.data_ptr(), beta.data_ptr(), t, qk, chunks.data_ptr())
    strides = (*q.stride()[:2], *k.stride()[:2])
    sizes = (made.tokens, made.heads[1], *strides_of_t[:2])
    params = _PARAMS.pack(*pointers, *strides, *sizes, g.data_ptr(), bound, rstd if kernel.l2norm else 0)
    kernel.launch((made.chunks * made.heads[0],), map_at(*place) + params)
