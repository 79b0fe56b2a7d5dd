"""Host side of ``kernels/conv.cu`` and ``kernels/conv_grad.cu``: the causal convolution in one pass per direction."""

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cp_gdn.backends.cubins import CONV_WIDTHS
from cp_gdn.backends.hopper_layer import column_sums, load_sums, loaded, taken
from cp_gdn.backends.launch import Kernel, load, on_device
from cp_gdn.backends.torch_conv import ConvInput, TorchConv

if TYPE_CHECKING:
    from cp_gdn.context import Context

THREADS, BLOCK_CHANNELS, STRIP = 128, 512, 128
VEC, MULTIPLE = 4, 8
TORCH = TorchConv()

_INPUT, _REST, _GRAD = struct.Struct("<5Qq4i"), struct.Struct("<Q"), struct.Struct("<7Q2qi4x")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvKernels:
    """Loaded kernels of one device, width and dtype. A call's tensors are on ``index``."""

    index: int
    conv: Kernel
    grad: Kernel
    sums: Kernel

    def forward(self, call: ConvInput) -> Tensor:
        """As `TorchConv.forward`."""
        tokens, channels = call.x.shape
        y = call.x.new_empty(tokens, channels)
        if y.numel():
            call = _ready(call)
            with on_device(self.index):
                self.conv.launch(_grid(channels, _strips(tokens)), _packed(call) + _REST.pack(y.data_ptr()))
        return y

    def listed(self, call: ConvInput, dy: Tensor, rows: Tensor) -> Tensor:
        """As `TorchConv.listed`."""
        edge = dy.new_empty(len(rows), dy.shape[1], dtype=torch.float32)
        if edge.numel():
            call, dy = _ready(call), _rows(dy)
            rest = _GRAD.pack(*map(_pointer, (dy, None, None, rows, edge, None, None)), dy.stride(0), 0, 0)
            with on_device(self.index):
                self.grad.launch(_grid(dy.shape[1], len(rows)), _packed(call) + rest)
        return edge

    def backward(
        self, call: ConvInput, dy: Tensor, adj_taps: Tensor, adj_halo: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `TorchConv.backward`."""
        (tokens, channels), width = call.x.shape, call.weight.shape[1]
        dx = out if out is not None and _fits(out) else call.x.new_empty(tokens, channels)
        parts = dx.new_empty(_strips(tokens), width + 1, channels, dtype=torch.float32)
        with on_device(self.index):
            if dx.numel():
                call, dy, adj_halo = _ready(call), _rows(dy), adj_halo.contiguous()
                tensors = (dy, adj_taps, adj_halo, None, None, dx, parts)
                rest = _GRAD.pack(*map(_pointer, tensors), dy.stride(0), dx.stride(0), len(adj_halo))
                self.grad.launch(_grid(channels, len(parts)), _packed(call) + rest)
            return dx, column_sums(self.sums, parts)


def form_for(ctx: "Context") -> ConvKernels | TorchConv:
    """How a context's convolution is computed; see `hopper_layer.taken`."""
    if ctx.device.type != "cuda" or ctx.conv is None:
        return TORCH
    width, dtype = ctx.conv[1], ctx.dtype
    return taken(ctx, "the convolution", unfit(ctx), lambda index: load_kernels(index, width, dtype)) or TORCH


def unfit(ctx: "Context") -> str:
    """Why the kernels do not fit a context's arguments, whatever the machine; empty if they do."""
    assert ctx.conv is not None
    channels, width = ctx.conv
    if ctx.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {ctx.dtype}: its kernels take torch.bfloat16 and torch.float32"
    if channels % MULTIPLE:
        return f"{channels} channels: its kernels take multiples of {MULTIPLE}"
    if width not in CONV_WIDTHS:
        return f"width {width}: its kernels take {CONV_WIDTHS[0]} to {CONV_WIDTHS[-1]}"
    return ""


@functools.cache
def load_kernels(index: int, width: int, dtype: torch.dtype) -> ConvKernels | str:
    """The kernels on a device, or what stands against them; tried once."""
    defines = {"WIDTH": width, "BF16": int(dtype == torch.bfloat16)}

    def make() -> ConvKernels:
        with on_device(index):
            conv, grad = (load(name, defines, THREADS, 0) for name in ("conv", "conv_grad"))
            return ConvKernels(index=index, conv=conv, grad=grad, sums=load_sums())

    return loaded([("conv", defines), ("conv_grad", defines), ("sums", {})], make)


def _strips(tokens: int) -> int:
    return -(-tokens // STRIP)


def _grid(channels: int, rows: int) -> tuple[int]:
    return (-(-channels // BLOCK_CHANNELS) * rows,)


def _ready(call: ConvInput) -> ConvInput:
    """As the kernels read it: parameters fp32 and dense, rows at borders of four numbers."""
    bias = None if call.bias is None else call.bias.float().contiguous()
    weight = call.weight.float().contiguous()
    return call._replace(x=_rows(call.x), halo=call.halo.contiguous(), weight=weight, bias=bias)


def _packed(call: ConvInput) -> bytes:
    """The struct that both kernels begin with; ``call`` must live until they are launched."""
    pointers = map(_pointer, (call.x, call.halo, call.weight, call.bias, call.taps))
    tokens, channels = call.x.shape
    return _INPUT.pack(*pointers, call.x.stride(0), tokens, len(call.halo), channels, int(call.silu))


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: Tensor) -> Tensor:
    """``x`` [T, C] itself where a thread can load four numbers of a row at once, else a dense copy."""
    return x if _fits(x) else x.clone(memory_format=torch.contiguous_format)


def _fits(x: Tensor) -> bool:
    return x.stride(1) == 1 and not (x.stride(0) % VEC or x.data_ptr() % (VEC * x.element_size()))
