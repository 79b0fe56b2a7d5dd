"""Host side of ``kernels/grad.cu``: gradients of q, k, gates and beta, chunk by chunk, from what the walks emitted."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.hopper_walk import Tapes, WalkInputs
from cp_gdn.backends.launch import Kernel, load, tensor_map

GRAD_THREADS = 512


def load_grad(group: int, *, l2norm: bool = False) -> Kernel:
    """`grad` for ``group`` value heads per q/k head; with ``l2norm`` q and k are raw."""
    return load("grad", {"GROUP": group, "L2NORM": int(l2norm)}, GRAD_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelGradients:
    """dq, dk [T, H, 128] and dv [T, HV, 128] bf16, dg, dbeta [T, HV] fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def empty(cls, x: WalkInputs) -> "KernelGradients":
        """Room, dense whatever the strides of the inputs."""
        return cls(**{name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in _tensors(x)})


def _tensors(x: WalkInputs) -> tuple[tuple[str, Tensor], ...]:
    return (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta))


_TAIL = struct.Struct("<11Qf6i12x")
"""What follows the six tensor maps in the kernel's struct, padded to its alignment of 64."""


def grad(kernel: Kernel, x: WalkInputs, chunks: Tensor, tapes: Tapes, adjoints: Tensor, out: KernelGradients) -> None:
    """Fill dq, dk, dg and dbeta of the chunks of ``tapes``; dv is there already.

    Args:
        x: as the adjoint walk took it: v is dO. chunks: packed [N, 2] int32, first row and count.
        adjoints: images as ``tapes.states``.
    """
    count, heads = len(tapes.states), x.q.shape[1]
    if not count:
        return
    maps = b"".join(tensor_map(t) for t in (x.k, x.q, x.v, out.v, out.q, out.k))
    tensors = (
        tapes.states,
        adjoints,
        tapes.values,
        x.g,
        x.beta,
        x.prepared.rstd,
        chunks,
        out.q,
        out.k,
        out.g,
        out.beta,
    )
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    place = (tapes.first_chunk, count, tapes.first_row, tapes.values.shape[2])
    blocks = min(torch.cuda.get_device_properties(x.v.device).multi_processor_count, count * heads)
    kernel.launch((blocks,), maps + _TAIL.pack(*pointers, x.scale, x.v.shape[0], x.v.shape[1], *place))
