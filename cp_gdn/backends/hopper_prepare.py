"""Host side of ``kernels/prepare.cu``: per chunk Q K^T and T, once for all walks."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.launch import Kernel, load, tensor_map
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
        t: [T, HV, 128] bf16, whose first 64 channels hold T = diag b - diag b (N o D) diag b (docs/design.md), until a
            walk that takes it as its output overwrites them.
        room: bytes of ``qk``, ``bound`` and ``rstd``, which start ``at`` these addresses; 0: it is not there.
        heads: (H, HV). chunks: how many.
    """

    t: Tensor
    room: Tensor
    at: tuple[int, int, int]
    heads: tuple[int, int]
    chunks: int

    @property
    def qk(self) -> Tensor:
        """[H, T, 64] fp16, Q K^T, zero above the diagonal, each chunk as a swizzled image."""
        return self._part(0, torch.float16, (self.heads[0], len(self.t), CHUNK))

    @property
    def bound(self) -> Tensor:
        """[HV, N] fp32, log bound of each chunk's map."""
        return self._part(1, torch.float32, (self.heads[1], self.chunks))

    @property
    def rstd(self) -> Tensor | None:
        """[2, H, T] fp32, reciprocal norms of q, then of k; None unless the kernel took raw q and k."""
        return self._part(2, torch.float32, (2, self.heads[0], len(self.t))) if self.at[2] else None

    def _part(self, which: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        first = self.at[which] - self.room.data_ptr()
        count = torch.Size(shape).numel()
        return self.room[first : first + count * dtype.itemsize].view(dtype).view(shape)


def prepared_parts(tokens: int, heads: tuple[int, int], chunks: int) -> tuple[int, ...]:
    """Where ``qk``, ``bound`` and ``rstd`` start, and the bytes of all; norms have their place whether they are asked
    for or not."""
    sizes = (heads[0] * tokens * CHUNK * 2, heads[1] * chunks * 4, 2 * heads[0] * tokens * 4)
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] - (-size // ALIGN) * ALIGN)
    return tuple(ends)


_PARAMS = struct.Struct("<6Q4q3i4x3Q8x")
"""What follows the tensor map in the kernel's struct, padded to its alignment of 64."""


def prepare(
    kernel: PrepareKernel,
    queries_keys: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    chunks: Tensor,
    t: Tensor,
    room: Tensor,
) -> Prepared:
    """Everything about a chunk that no state is needed for.

    Args:
        queries_keys: q, k [T, H, 128] bf16 (head rows dense). gates: g and beta [T, HV] fp32.
        chunks: [N, 2] int32, first row, count. t: [T, HV, 128] bf16, head rows and heads dense, takes T.
        room: bytes as `prepared_parts` says.
    """
    q, k = queries_keys
    tokens, heads, value_heads = q.shape[0], q.shape[1], t.shape[1]
    count, base = chunks.shape[0], room.data_ptr()
    parts = prepared_parts(tokens, (heads, value_heads), count)
    qk, bound, rstd = base, base + parts[1], base + parts[2] if kernel.l2norm else 0
    if count:
        g, beta = gates
        pointers = (q.data_ptr(), k.data_ptr(), beta.data_ptr(), t.data_ptr(), qk, chunks.data_ptr())
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
        sizes = (tokens, value_heads, t.stride(0))
        params = _PARAMS.pack(*pointers, *strides, *sizes, g.data_ptr(), bound, rstd)
        kernel.launch((count * heads,), tensor_map(t) + params)
    return Prepared(t=t, room=room, at=(qk, bound, rstd), heads=(heads, value_heads), chunks=count)
