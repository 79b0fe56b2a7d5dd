"""Host side of ``kernels/gates.cu``: log decay and write strength of a layer from its projection b | a."""

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cp_gdn.backends.hopper_layer import column_sums, load_sums, loaded, taken
from cp_gdn.backends.launch import Kernel, load, on_device

if TYPE_CHECKING:
    from cp_gdn.context import Context

HEADS, THREADS, TILE = 32, 256, 256
_PARAMS = struct.Struct("<7Qqf2i4x")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatesKernels:
    """Loaded kernels of one device. ba: bf16 [T, 2 HV], rows dense; a_log, dt_bias: [HV]."""

    index: int
    gates: Kernel
    grad: Kernel
    sums: Kernel

    def forward(self, ba: Tensor, a_log: Tensor, dt_bias: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """g = -exp(a_log) softplus(a + dt_bias) and beta = factor sigmoid(b), fp32 [T, HV]."""
        ba = _rows(ba)
        shape = len(ba), len(a_log)
        g, beta = (torch.empty(shape, dtype=torch.float32, device=ba.device) for _ in range(2))
        self._launch(self.gates, (ba, a_log, dt_bias, g, beta, None, None), factor)
        return g, beta

    def backward(
        self, grads: tuple[Tensor, Tensor], ba: Tensor, a_log: Tensor, dt_bias: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """dba, dense, and fp32 [2, HV]: the gradients of a_log and dt_bias. ``grads``: those of g and beta, fp32."""
        ba, (dg, dbeta) = _rows(ba), (x.contiguous() for x in grads)
        dba = torch.empty(ba.shape, dtype=ba.dtype, device=ba.device)
        parts = dg.new_empty(-(-len(ba) // TILE), 2, len(a_log))
        self._launch(self.grad, (ba, a_log, dt_bias, dg, dbeta, dba, parts), factor)
        with on_device(self.index):
            return dba, column_sums(self.sums, parts)

    def _launch(self, kernel: Kernel, tensors: tuple[Tensor | None, ...], factor: float) -> None:
        ba, a_log, dt_bias, *rest = tensors
        assert ba is not None
        assert a_log is not None
        assert dt_bias is not None
        a_log, dt_bias = a_log.float().contiguous(), dt_bias.float().contiguous()
        tokens, heads = len(ba), len(a_log)
        if not tokens:
            return
        pointers = [0 if x is None else x.data_ptr() for x in (ba, a_log, dt_bias, *rest)]
        with on_device(self.index):
            grid = -(-heads // HEADS), -(-tokens // TILE)
            kernel.launch(grid, _PARAMS.pack(*pointers, ba.stride(0), factor, tokens, heads))


def kernels_for(ctx: "Context") -> GatesKernels | None:
    """The kernels of a context's gates, or None for the torch form; see `hopper_layer.taken`."""
    unfit = "" if ctx.dtype == torch.bfloat16 else f"dtype {ctx.dtype}: their kernels take torch.bfloat16"
    return taken(ctx, "the gates", unfit, load_kernels)


@functools.cache
def load_kernels(index: int) -> GatesKernels | str:
    """The kernels on a device, or what stands against them; tried once."""

    def make() -> GatesKernels:
        with on_device(index):
            gates, grad = (load("gates", {"BACKWARD": backward}, THREADS, 0) for backward in (0, 1))
            return GatesKernels(index=index, gates=gates, grad=grad, sums=load_sums())

    return loaded([("gates", {"BACKWARD": 0}), ("gates", {"BACKWARD": 1}), ("sums", {})], make)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
