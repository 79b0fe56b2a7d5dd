"""Depthwise causal convolution over the documents of a pack whose tokens are split over ranks.

y[t] = act(sum_j weight[:, w - 1 - j] * x[t - j] + bias) over the tokens t - j of the same document. Taps are added in
the order j = 0 .. w - 1, each a multiply and then an add, so the bits of y and dx depend neither on the split nor on T.
Computed in fp64 for fp64 inputs, else in fp32. Legend: T local tokens, C channels, w width, R halo rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cp_gdn import library
from cp_gdn.checks import DTYPES, check_tensor, token_shape
from cp_gdn.halo import DeviceSide, Halo
from cp_gdn.handles import RecomputeHandle, check_handle

if TYPE_CHECKING:
    from cp_gdn.comm import Pending
    from cp_gdn.context import Context


def causal_conv1d(
    x_l: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ctx: Context,
    activation: str | None = "silu",
    recompute: RecomputeHandle | None = None,
) -> torch.Tensor:
    """Convolve this rank's tokens, x_l [1, T, C] or [T, C], with weight [C, w] and bias [C]; y is shaped like x_l.

    History that lies on other ranks is fetched in one all-to-all, in which every rank takes part if any document is
    cut; the backward is its mirror. The gradients of weight and bias are this rank's partial sums: sum them over the
    group. With ``recompute`` a checkpoint's recompute fetches nothing. Errors name the argument and come before any
    message.
    """
    if library.is_wanted():
        check_handle(recompute, ctx)
        out: tuple[torch.Tensor, torch.Tensor] = forward_op(x_l, weight, bias, ctx.handle, activation)
        return out[0]
    with ctx.comm.guard("causal_conv1d"):
        _check(x_l, weight, bias, ctx, activation)
        handle = check_handle(recompute, ctx)
        y: torch.Tensor = _CausalConv.apply(x_l, weight, bias, ctx, activation, handle)
        return y


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        fctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ctx: Context,
        activation: str | None,
        handle: RecomputeHandle | None,
    ) -> torch.Tensor:
        halo = None if handle is None else handle.take("halo", ctx)
        y, saved = forward(x, weight, bias, ctx, activation, halo)
        if handle is not None:
            # an empty halo is a view of x, which a handle must not keep
            handle.fill("halo", ctx, saved[1] if saved[1].numel() else torch.empty_like(saved[1]))
        fctx.save_for_backward(*saved)
        fctx.cp, fctx.activation = ctx, activation
        return y

    @staticmethod
    def backward(fctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: Saved = fctx.saved_tensors
        with fctx.cp.comm.guard("causal_conv1d backward"):
            grads = library.only_once(lambda: backward(dy, saved, fctx.cp, fctx.activation), (dy, *saved))
            return *grads, None, None, None


Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: Context,
    activation: str | None,
    halo: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Saved]:
    """y like x, and what `backward` needs: (x, halo rows [R, C], weight, bias). A given halo is not fetched."""
    plan = _halo(ctx)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        own = x.reshape(ctx.num_tokens, weight.shape[0])
        halo = _finish(_start(own, plan.forward, ctx, "HALO"), own) if halo is None else halo
        pre = _pre_activation(_extend(own, halo), weight, bias, plan.forward.taps)
        y = pre * _sigmoid(pre) if activation == "silu" else pre
        return y.to(x.dtype).reshape(x.shape), (x, halo, weight, bias)


def backward(
    dy: torch.Tensor, saved: Saved, ctx: Context, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dx, dweight, dbias), the last two summed over this rank's tokens; dbias is None without a bias."""
    plan = _halo(ctx)
    x, halo, weight, bias = saved
    shape = (ctx.num_tokens, weight.shape[0])
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        extended = _extend(x.reshape(shape), halo)
        dpre = dy.reshape(shape).to(_compute_dtype(x)).contiguous()  # a strided sum may round in another order
        if activation == "silu":
            dpre = dpre * _silu_slope(_pre_activation(extended, weight, bias, plan.forward.taps))
        pending = _start(dpre, plan.adjoint, ctx, "HALO_GRAD")
        dweight = _weight_gradient(dpre, extended, plan.forward.taps).to(weight.dtype)
        dbias = None if bias is None else dpre.sum(0).to(bias.dtype)
        adj_extended = _extend(dpre, _finish(pending, dpre))
        dx = _tap_sum(adj_extended, weight, plan.adjoint.taps)
        return dx.to(x.dtype).reshape(x.shape), dweight, dbias


# ---- the library entry: see library.py -------------------------------------------------------------------------------


@torch.library.custom_op("cp_gdn::conv_forward", mutates_args=())
def forward_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: int, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the halo rows."""
    context = library.context_of(handle)
    with context.comm.guard("causal_conv1d"):
        _check(x, weight, bias, context, activation)
        y, saved = forward(x, weight, bias, context, activation)
    halo = saved[1]
    return y, halo if halo.numel() else torch.empty_like(halo)  # no output of an operator may be a view of an input


@forward_op.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, bias, handle, activation = args
    context = library.context_of(handle)
    with context.comm.guard("causal_conv1d"):
        _check(x, weight, bias, context, activation)
    return x.new_empty(x.shape), x.new_empty((sum(_halo(context).forward.recv_counts), weight.shape[0]))


@torch.library.custom_op("cp_gdn::conv_backward", mutates_args=())
def backward_op(
    dy: torch.Tensor, tensors: list[torch.Tensor], handle: int, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias); ``tensors`` are x, the halo, weight and, if there is one, bias."""
    context, bias = library.context_of(handle), tensors[3] if len(tensors) > 3 else None
    with context.comm.guard("causal_conv1d backward"):
        dx, dweight, dbias = backward(dy, (tensors[0], tensors[1], tensors[2], bias), context, activation)
    return dx, dweight, library.empty_if_none(dbias, dweight)


@backward_op.register_fake
def _(dy: torch.Tensor, tensors: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, ...]:
    dx, _halo, dweight, *dbias = (t.new_empty(t.shape) for t in tensors)
    return dx, dweight, dbias[0] if dbias else dweight.new_empty((0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, *ctx.call = inputs
    ctx.save_for_backward(x, output[1], weight, *(() if bias is None else (bias,)))
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, dweight, dbias = backward_op(dy, list(ctx.saved_tensors), *ctx.call)
    return dx, dweight, dbias if ctx.has_bias else None, None, None


forward_op.register_autograd(_backward, setup_context=_keep)
backward_op.register_autograd(library.refuse_twice)


# ---- mathematics: plain tensors, no messages -------------------------------------------------------------------------


def _pre_activation(
    extended: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, taps: torch.Tensor
) -> torch.Tensor:
    pre = _tap_sum(extended, weight, taps)
    return pre if bias is None else pre + bias.to(pre.dtype)


def _tap_sum(extended: torch.Tensor, weight: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """sum_j weight[:, w - 1 - j] * extended[taps[:, j]], added in the order of j; [T, C]."""
    dtype = _compute_dtype(extended)
    weight_by_tap = weight.to(dtype).flip(1).unbind(1)
    total = extended.index_select(0, taps[:, 0]).to(dtype) * weight_by_tap[0]
    for j in range(1, len(weight_by_tap)):
        total = total + extended.index_select(0, taps[:, j]).to(dtype) * weight_by_tap[j]
    return total


def _weight_gradient(dpre: torch.Tensor, extended: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    by_tap = [(dpre * extended.index_select(0, rows).to(dpre.dtype)).sum(0) for rows in taps.unbind(1)]
    return torch.stack(by_tap[::-1], dim=1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Written with exp of a non-positive number: no overflow, and no vector routine whose bits depend on strides."""
    small = torch.exp(-x.abs())
    return torch.where(x < 0, small, 1.0) / (1.0 + small)


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    gate = _sigmoid(x)
    return gate * (1.0 + x * (1.0 - gate))


def _extend(own: torch.Tensor, halo: torch.Tensor) -> torch.Tensor:
    """concat(own [T, C], halo [R, C], zero row), the rows that taps index."""
    return torch.cat((own, halo, own.new_zeros(1, own.shape[1])))


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- communication: no arithmetic ------------------------------------------------------------------------------------


def _start(own: torch.Tensor, side: DeviceSide, ctx: Context, purpose: str) -> Pending[torch.Tensor] | None:
    if not _halo(ctx).crosses:
        return None
    channels = own.shape[1]
    send_counts, recv_counts = ([n * channels for n in rows] for rows in (side.send_counts, side.recv_counts))
    return ctx.comm.all_to_all(purpose, own.index_select(0, side.send_rows).view(-1), send_counts, recv_counts)


def _finish(pending: Pending[torch.Tensor] | None, own: torch.Tensor) -> torch.Tensor:
    """The halo rows [R, C]."""
    return own[:0] if pending is None else pending.wait().view(-1, own.shape[1])


# ---- checks ----------------------------------------------------------------------------------------------------------


def _halo(ctx: Context) -> Halo:
    if ctx.halo is None:
        raise ValueError("ctx: built without a convolution; pass conv=(channels, width) to build_context")
    return ctx.halo


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ctx: Context, activation: str | None
) -> None:
    _halo(ctx)
    assert ctx.conv is not None
    check_tensor("x_l", x, ctx, token_shape(x, ctx.num_tokens, ctx.conv[0]), (ctx.dtype,))
    _check_parameter("weight", weight, ctx, ctx.conv)
    if bias is not None:
        _check_parameter("bias", bias, ctx, ctx.conv[:1])
    if activation not in ("silu", None):
        raise ValueError(f'activation: got {activation!r}, expected "silu" or None')


def _check_parameter(name: str, x: torch.Tensor, ctx: Context, shape: tuple[int, ...]) -> None:
    check_tensor(name, x, ctx, x.shape, DTYPES)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected {shape}: the context was built for conv={ctx.conv}"
        )
