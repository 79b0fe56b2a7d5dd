"""Host side of ``kernels/norm_forward.cu`` and ``kernels/norm_grad.cu``: the gated RMS norm of value heads."""

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cp_gdn.backends.hopper_layer import column_sums, load_sums, loaded, taken
from cp_gdn.backends.launch import Kernel, load, map_ready, on_device

if TYPE_CHECKING:
    from cp_gdn.context import Context

DIM, THREADS, BLOCK_ROWS, TILE = 128, 256, 64, 1024
_TENSOR = struct.Struct("<3q")
_FORWARD, _GRAD = struct.Struct("<2Qf2i4x"), struct.Struct("<4Qqf2i4x")


@dataclass(frozen=True, kw_only=True, slots=True)
class NormKernels:
    """Loaded kernels of one device. Tensors are bf16 [T, HV, 128], of any strides in which heads are dense."""

    index: int
    norm: Kernel
    grad: Kernel
    sums: Kernel

    def forward(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """o / sqrt(mean(o^2) + eps) * weight * silu(z), dense."""
        y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        rows, heads = o.shape[0] * o.shape[1], o.shape[1]
        if rows:
            o, z, weight = map_ready(o), map_ready(z), weight.float().contiguous()
            with on_device(self.index):
                params = _FORWARD.pack(weight.data_ptr(), y.data_ptr(), eps, rows, heads)
                self.norm.launch((-(-rows // BLOCK_ROWS),), _packed(o) + _packed(z) + params)
        return y

    def backward(
        self, dy: Tensor, tensors: tuple[Tensor, Tensor, Tensor], eps: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(do, dz, dweight), the last fp32 [128], summed over all rows. tensors: o, z, weight. out: where dz may be
        written, any token stride."""
        o, z, weight = tensors
        d_o = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        dz = out if out is not None and _fits(out) else torch.empty_like(d_o)
        rows, heads = o.shape[0] * o.shape[1], o.shape[1]
        parts = torch.empty(-(-rows // TILE), DIM, dtype=torch.float32, device=o.device)
        with on_device(self.index):
            if rows:
                dy, o, z, weight = map_ready(dy), map_ready(o), map_ready(z), weight.float().contiguous()
                pointers = [x.data_ptr() for x in (weight, d_o, dz, parts)]
                params = _GRAD.pack(*pointers, dz.stride(0), eps, rows, heads)
                self.grad.launch((len(parts),), _packed(dy) + _packed(o) + _packed(z) + params)
            return d_o, dz, column_sums(self.sums, parts)


def kernels_for(ctx: "Context") -> NormKernels | None:
    """The kernels of a context's gated norm, or None for the torch form; see `hopper_layer.taken`."""
    return taken(ctx, "the gated norm", unfit(ctx), load_kernels)


def unfit(ctx: "Context") -> str:
    """Why the kernels do not fit a context's arguments, whatever the machine; empty if they do."""
    if ctx.dtype != torch.bfloat16:
        return f"dtype {ctx.dtype}: its kernels take torch.bfloat16"
    return "" if ctx.head_dims[1] == DIM else f"value heads of {ctx.head_dims[1]} channels: its kernels take {DIM}"


@functools.cache
def load_kernels(index: int) -> NormKernels | str:
    """The kernels on a device, or what stands against them; tried once."""

    def make() -> NormKernels:
        with on_device(index):
            norm, grad = (load(name, {}, THREADS, 0) for name in ("norm_forward", "norm_grad"))
            return NormKernels(index=index, norm=norm, grad=grad, sums=load_sums())

    return loaded([("norm_forward", {}), ("norm_grad", {}), ("sums", {})], make)


def _fits(out: Tensor) -> bool:
    """Heads dense, rows at borders of 16 bytes."""
    return out.stride()[1:] == (DIM, 1) and not (out.stride(0) % 8 or out.data_ptr() % 16)


def _packed(x: Tensor) -> bytes:
    return _TENSOR.pack(x.data_ptr(), x.stride(0), x.stride(1))
