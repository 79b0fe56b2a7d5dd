"""Host side of ``kernels/prepare.cu``: per chunk Q K^T and T, once for all walks."""

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.hopper_strips import ROWS, Chunks, in_rows, strip_bytes, strip_maps
from cp_gdn.backends.launch import Kernel, load
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
        memory: its bytes. at: addresses of ``qk``, ``bound``, ``rstd``, then of the strips of T of each kind.
        tokens, heads (H, HV): how many.
    """

    memory: Tensor
    at: tuple[int, ...]
    chunks: Chunks
    tokens: int
    heads: tuple[int, int]

    @classmethod
    def inside(cls, memory: Tensor, chunks: Chunks, tokens: int, heads: tuple[int, int]) -> "Prepared":
        """In ``memory`` of `prepared_parts` bytes."""
        base, (*starts, _) = memory.data_ptr(), prepared_parts(tokens, heads, chunks.kinds)
        return cls(memory=memory, at=tuple([base + x for x in starts]), chunks=chunks, tokens=tokens, heads=heads)

    @property
    def t_maps(self) -> bytes:
        """Tensor maps of the strips of T."""
        return strip_maps(self.at[3:], self.chunks.kinds, self.heads[1])

    @property
    def t(self) -> Tensor:
        """[T, HV, 64] bf16, T = diag b - diag b (N o D) diag b (docs/design.md)."""
        kinds = enumerate(self.chunks.kinds)
        shapes = [(count, self.heads[1], ROWS, ROWS * (kind + 1)) for kind, count in kinds]
        strips = [self._part(3 + kind, torch.bfloat16, shape) for kind, shape in enumerate(shapes)]
        return in_rows(strips, self.chunks, self.tokens)

    @property
    def qk(self) -> Tensor:
        """[H, T, 64] fp16, Q K^T, zero above the diagonal, each chunk as a swizzled image."""
        return self._part(0, torch.float16, (self.heads[0], self.tokens, CHUNK))

    @property
    def bound(self) -> Tensor:
        """[HV, N] fp32, log bound of each chunk's map."""
        return self._part(1, torch.float32, (self.heads[1], self.chunks.count))

    @property
    def rstd(self) -> Tensor:
        """[2, H, T] fp32, reciprocal norms of q, then of k; filled where the kernel took raw q and k."""
        return self._part(2, torch.float32, (2, self.heads[0], self.tokens))

    def _part(self, which: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        first = self.at[which] - self.memory.data_ptr()
        count = torch.Size(shape).numel()
        return self.memory[first : first + count * dtype.itemsize].view(dtype).view(shape)


@functools.lru_cache(maxsize=1024)
def prepared_parts(tokens: int, heads: tuple[int, int], kinds: tuple[int, ...]) -> tuple[int, ...]:
    """Where ``qk``, ``bound``, ``rstd`` and the strips of T start, and the bytes of all; norms have their place whether
    they are asked for or not. ``kinds``: see `Chunks`."""
    sizes = (heads[0] * tokens * CHUNK * 2, heads[1] * kinds[0] * 4, 2 * heads[0] * tokens * 4)
    ends = [0]
    for size in (*sizes, *strip_bytes(kinds, heads[1])):
        ends.append(ends[-1] - (-size // ALIGN) * ALIGN)
    return tuple(ends)


_PARAMS = struct.Struct("<6Q4q2i3Q16x")
"""What follows the tensor maps in the kernel's struct, padded to its alignment of 64."""


def prepare(
    kernel: PrepareKernel, queries_keys: tuple[Tensor, Tensor], gates: tuple[Tensor, Tensor], made: Prepared
) -> None:
    """Everything about a chunk that no state is needed for, into ``made``.

    Args:
        queries_keys: q, k [T, H, 128] bf16 (head rows dense). gates: g and beta [T, HV] fp32.
    """
    if not made.chunks.count:
        return
    (q, k), (g, beta), (qk, bound, rstd, *_), chunks = queries_keys, gates, made.at, made.chunks
    pointers = (q.data_ptr(), k.data_ptr(), beta.data_ptr(), qk, chunks.rows.data_ptr(), chunks.ranks.data_ptr())
    strides = (*q.stride()[:2], *k.stride()[:2])
    sizes = (made.tokens, made.heads[1])
    params = _PARAMS.pack(*pointers, *strides, *sizes, g.data_ptr(), bound, rstd if kernel.l2norm else 0)
    kernel.launch((chunks.count * made.heads[0],), made.t_maps + params)
