"""What a Gated DeltaNet layer does beside projections, convolution and op: its gates, and the gated RMS norm.

Each has a torch form, and on Hopper GPUs kernels, through an autograd Function or, where a compiler or a mode looks on,
a library operator. No messages: a token's results depend on that token alone, and their bits on nothing else. Gradients
of parameters are this rank's sums over its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cp_gdn import library
from cp_gdn.backends import hopper_gates, hopper_norm
from cp_gdn.column_gradients import ColumnGradients
from cp_gdn.gates import sigmoid, silu, softplus
from cp_gdn.traced import FAMILIES

if TYPE_CHECKING:
    from cp_gdn.context import Context


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- gates -----------------------------------------------------------------------------------------------------------


def gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor, factor: float, ctx: Context) -> tuple[Tensor, Tensor]:
    """The log decay g = -exp(a_log) softplus(a + dt_bias) and beta = factor sigmoid(b), fp32 or fp64 [1, T, HV].

    ba: [1, T, 2 HV], b | a. a_log, dt_bias: [HV].
    """
    if ctx.device.type != "cuda" or ba.dtype != ctx.dtype or not _gates_fit(ctx.traced.family):
        return torch_gates(ba, a_log, dt_bias, factor)
    if library.is_wanted():
        g, beta = gates_forward_op(ba, a_log, dt_bias, ctx.handle, factor)
    else:
        g, beta = _Gates.apply(ba, a_log, dt_bias, ctx.handle, factor)
    return g, beta


def torch_gates(ba: Tensor, a_log: Tensor, dt_bias: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """`gates` in torch."""
    (b, a), wide = ba.chunk(2, dim=-1), wide_dtype(ba.dtype)
    g = -torch.exp(a_log.to(wide)) * softplus(a.to(wide) + dt_bias.to(wide))
    beta = sigmoid(b.to(wide))
    return g, beta if factor == 1.0 else factor * beta


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gates_fit(family: str) -> bool:
    return hopper_gates.kernels_for(cast("Context", FAMILIES[family])) is not None


def _gates_kernels(handle: int) -> hopper_gates.GatesKernels:
    found = hopper_gates.kernels_for(library.context_of(handle))
    assert found is not None
    return found


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ba: Tensor, a_log: Tensor, dt_bias: Tensor, handle: int, factor: float) -> Any:
        ctx.save_for_backward(ba, a_log, dt_bias)
        ctx.call = handle, factor
        return _gates_forward(ba, a_log, dt_bias, handle, factor)

    @staticmethod
    def backward(ctx: Any, dg: Tensor, dbeta: Tensor) -> Any:
        grads = library.only_once(
            lambda: _gates_backward(dg, dbeta, *ctx.saved_tensors, *ctx.call), (dg, dbeta, *ctx.saved_tensors)
        )
        return *grads, None, None


def _gates_forward(ba: Tensor, a_log: Tensor, dt_bias: Tensor, handle: int, factor: float) -> tuple[Tensor, Tensor]:
    g, beta = _gates_kernels(handle).forward(ba[0], a_log, dt_bias, factor)
    return g[None], beta[None]


def _gates_backward(
    dg: Tensor, dbeta: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, handle: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    dba, sums = _gates_kernels(handle).backward((dg[0], dbeta[0]), ba[0], a_log, dt_bias, factor)
    return dba[None], sums[0].to(a_log.dtype, copy=True), sums[1].to(dt_bias.dtype, copy=True)


gates_forward_op = torch.library.custom_op("cp_gdn::gates_forward", _gates_forward, mutates_args=())
gates_backward_op = torch.library.custom_op("cp_gdn::gates_backward", _gates_backward, mutates_args=())


@gates_forward_op.register_fake
def _(ba: Tensor, a_log: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    g, beta = (ba.new_empty((*ba.shape[:-1], len(a_log)), dtype=torch.float32) for _ in range(2))
    return g, beta


@gates_backward_op.register_fake
def _(dg: Tensor, dbeta: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return ba.new_empty(ba.shape), a_log.new_empty(a_log.shape), dt_bias.new_empty(dt_bias.shape)


# ---- gated norm ------------------------------------------------------------------------------------------------------


def gated_norm(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, ctx: Context, room: ColumnGradients | None = None
) -> Tensor:
    """norm(o) * weight * silu(z), the RMS norm of every value head; o, z: [1, T, HV, V], weight: [V]. z may be the
    second part of a room."""
    if ctx.device.type != "cuda" or not o.dtype == z.dtype == ctx.dtype or not _norm_fits(ctx.traced.family):
        return torch_norm(o, z, weight, eps)
    y: Tensor
    if library.is_wanted():
        y = norm_forward_op(o, z, weight, ctx.handle, eps)
    else:
        y = _GatedNorm.apply(o, z, weight, ctx.handle, eps, room)
    return y


def torch_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_norm` in torch."""
    wide = o.to(wide_dtype(o.dtype))
    # NOTE: division by sqrt, since rsqrt is vectorised like the functions that gates.py avoids.
    normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype) * silu(z.to(wide.dtype))).to(o.dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _norm_fits(family: str) -> bool:
    return hopper_norm.kernels_for(cast("Context", FAMILIES[family])) is not None


def _norm_kernels(handle: int) -> hopper_norm.NormKernels:
    found = hopper_norm.kernels_for(library.context_of(handle))
    assert found is not None
    return found


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, z: Tensor, weight: Tensor, handle: int, eps: float, room: ColumnGradients | None
    ) -> Tensor:
        ctx.save_for_backward(o, z, weight)
        ctx.call = handle, eps, room
        return _norm_forward(o, z, weight, handle, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (handle, eps, room), saved = ctx.call, ctx.saved_tensors
        out = None if room is None else room.part(1, dy.flatten(-2)).unflatten(-1, dy.shape[-2:])
        grads = library.only_once(lambda: _norm_gradients(dy, saved, handle, eps, out), (dy, *saved))
        return *grads, None, None, None


def _norm_forward(o: Tensor, z: Tensor, weight: Tensor, handle: int, eps: float) -> Tensor:
    return _norm_kernels(handle).forward(o[0], z[0], weight, eps)[None]


def _norm_gradients(
    dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], handle: int, eps: float, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    o, z, weight = saved
    place = None if out is None else out[0]
    d_o, dz, dweight = _norm_kernels(handle).backward(dy[0], (o[0], z[0], weight), eps, place)
    return d_o[None], dz[None], dweight.to(weight.dtype)


def _norm_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, handle: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _norm_gradients(dy, (o, z, weight), handle, eps, None)


norm_forward_op = torch.library.custom_op("cp_gdn::norm_forward", _norm_forward, mutates_args=())
norm_backward_op = torch.library.custom_op("cp_gdn::norm_backward", _norm_backward, mutates_args=())


@norm_forward_op.register_fake
def _(o: Tensor, *_: Any) -> Tensor:
    return o.new_empty(o.shape)


@norm_backward_op.register_fake
def _(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return o.new_empty(o.shape), z.new_empty(z.shape), weight.new_empty(weight.shape)


# ---- derivatives of the operators ------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, handle, number = inputs
    ctx.save_for_backward(*tensors)
    ctx.call = handle, number


def _through(backward: Any) -> Any:
    def run(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(*grads, *ctx.saved_tensors, *ctx.call), None, None

    return run


for _forward, _backward in ((gates_forward_op, gates_backward_op), (norm_forward_op, norm_backward_op)):
    _forward.register_autograd(_through(_backward), setup_context=_keep)
    _backward.register_autograd(library.refuse_twice)
