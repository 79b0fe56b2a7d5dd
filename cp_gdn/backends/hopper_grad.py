"""Host side of ``kernels/grad.cu``: gradients of q, k, gates and beta, chunk by chunk, from what the walks left."""

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.hopper_walk import SlabTapes, WalkInputs
from cp_gdn.backends.launch import MAP_BYTES, Kernel, load, tensor_map
from cp_gdn.packing import are_packed, split_heads

GRAD_THREADS = 512


def load_grad(group: int, *, l2norm: bool = False) -> Kernel:
    """`grad` for ``group`` value heads per q/k head; with ``l2norm`` q and k are raw."""
    return load("grad", {"GROUP": group, "L2NORM": int(l2norm)}, GRAD_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelGradients:
    """dq, dk [T, H, 128] and dv [T, HV, 128] bf16, heads dense, dg, dbeta [T, HV] fp32; dq and dk have the same
    strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def empty(cls, **like: Tensor) -> "KernelGradients":
        """Room: of q, k and v that lie side by side as `packed_qkv_views` has them likewise, else dense."""
        q, k, v = (like.get(name) for name in "qkv")
        found: dict[str, Tensor] = {}
        if q is not None and k is not None and v is not None and are_packed(q, k, v):
            heads, head_dims = (q.shape[1], v.shape[1]), (q.shape[2], v.shape[2])
            rows = q.new_empty(len(q), sum(t.shape[1] * t.shape[2] for t in (q, k, v)))
            found |= zip("qkv", split_heads(rows, heads, head_dims), strict=True)
        for name in like.keys() - found.keys():
            found[name] = torch.empty_like(like[name], memory_format=torch.contiguous_format)
        return cls(**found)


_TAIL = struct.Struct("<11Qf5i16x")
"""What follows the six tensor maps in the kernel's struct, padded to its alignment of 64."""


def grad(kernel: Kernel, x: WalkInputs, steps: Tensor, tapes: SlabTapes, out: KernelGradients) -> None:
    """Fill dq, dk, dg and dbeta of the chunks and q/k heads of ``steps``; dv is there already.

    Args:
        x: as the adjoint walk took it: v is dO, its output dv. steps: [n, 4] int32, see `hopper_spread.Spread`, in the
            order of ``tapes``.
    """
    count = steps.shape[0]
    if not count:
        return
    maps = x.call[: 4 * MAP_BYTES] + tensor_map(out.q) + tensor_map(out.k)
    read = (tapes.states, tapes.adjoints, tapes.values, x.g.data_ptr(), x.beta.data_ptr(), x.rstd)
    written = [t.data_ptr() for t in (steps, out.q, out.k, out.g, out.beta)]
    sizes = (*x.v.shape[:2], count, out.q.stride(0), tapes.zero)
    blocks = min(_multiprocessors(x.v.device.index), count)
    kernel.launch((blocks,), maps + _TAIL.pack(*read, *written, x.scale, *sizes))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
