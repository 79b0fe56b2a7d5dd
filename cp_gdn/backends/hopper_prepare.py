"""Host side of ``kernels/prepare.cu``: per chunk Q K^T and T, once for all walks."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.launch import Kernel, load
from cp_gdn.plan import CHUNK


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
    """What `prepare` leaves, each chunk of ``t`` and ``qk`` as a swizzled image; of the normalised q and k.

    Attributes:
        t: [HV, T, 64] bf16, T = diag b - diag b (N o D) diag b (docs/design.md).
        qk: [H, T, 64] fp16, Q K^T, zero above the diagonal.
        bound: [HV, N] fp32, log bound of each chunk's map.
        rstd: [2, H, T] fp32, reciprocal norms of q, then of k; None unless the kernel takes raw q and k.
    """

    t: Tensor
    qk: Tensor
    bound: Tensor
    rstd: Tensor | None


_PARAMS = struct.Struct("<6Q4q2i3Q")


def prepare(kernel: PrepareKernel, q: Tensor, k: Tensor, beta: Tensor, g: Tensor, chunks: Tensor) -> Prepared:
    """q, k [T, H, 128] bf16 (head rows dense), beta and g [T, HV] fp32, chunks [N, 2] int32 (first row, count)."""
    tokens, heads, value_heads = q.shape[0], q.shape[1], beta.shape[1]
    t = q.new_empty(value_heads, tokens, CHUNK)
    qk = torch.empty(heads, tokens, CHUNK, dtype=torch.float16, device=q.device)
    bound = beta.new_empty(value_heads, len(chunks))
    rstd = beta.new_empty(2, heads, tokens) if kernel.l2norm else None
    pointers = [x.data_ptr() for x in (q, k, beta, t, qk, chunks)]
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    last = (g.data_ptr(), bound.data_ptr(), 0 if rstd is None else rstd.data_ptr())
    if len(chunks):
        kernel.launch((len(chunks) * heads,), _PARAMS.pack(*pointers, *strides, tokens, value_heads, *last))
    return Prepared(t=t, qk=qk, bound=bound, rstd=rstd)
