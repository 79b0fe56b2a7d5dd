"""Depthwise causal convolution over the documents of a pack whose tokens are split over ranks.

y[t] = act(sum_j weight[:, w - 1 - j] * x[t - j] + bias) over the tokens t - j of the same document. Taps are added in
the order j = 0 .. w - 1, each a multiply and then an add, so the bits of y and dx depend neither on the split nor on T.

Here are the messages; the arithmetic is in `backends/torch_conv.py` and, for Hopper GPUs, `backends/hopper_conv.py`.
Legend: T local tokens, C channels, w width, R halo rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cp_gdn import library
from cp_gdn.backends import hopper_conv
from cp_gdn.backends.torch_conv import ConvInput
from cp_gdn.checks import DTYPES, check_tensor, token_shape
from cp_gdn.column_gradients import ColumnGradients
from cp_gdn.halo import Halo, HaloSide
from cp_gdn.handles import RecomputeHandle, check_handle
from cp_gdn.traced import flat, shaped

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
        seen = ctx.traced
        out: tuple[torch.Tensor, torch.Tensor] = forward_op(x_l, weight, bias, seen.handle, seen.halo, activation)
        return out[0]
    return _convolve((x_l, weight, bias), ctx, activation, recompute, None)


def convolve_part(
    x: torch.Tensor, weight: torch.Tensor, ctx: Context, recompute: RecomputeHandle | None, room: ColumnGradients
) -> torch.Tensor:
    """`causal_conv1d` of a layer in eager mode, whose x is the first part of a room."""
    return _convolve((x, weight, None), ctx, "silu", recompute, room)


def _convolve(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ctx: Context,
    activation: str | None,
    recompute: RecomputeHandle | None,
    room: ColumnGradients | None,
) -> torch.Tensor:
    with ctx.comm.guard("causal_conv1d"):
        _check(*tensors, ctx, activation)
        handle = check_handle(recompute, ctx)
        y: torch.Tensor = _CausalConv.apply(*tensors, ctx, activation, handle, room)
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
        room: ColumnGradients | None,
    ) -> torch.Tensor:
        halo = None if handle is None else handle.take("halo", ctx)
        y, saved = forward(x, weight, bias, ctx, activation, halo)
        if handle is not None:
            # an empty halo is a view of x, which a handle must not keep
            handle.fill("halo", ctx, saved[1] if saved[1].numel() else torch.empty_like(saved[1]))
        fctx.save_for_backward(*saved)
        fctx.cp, fctx.activation, fctx.room = ctx, activation, room
        return y

    @staticmethod
    def backward(fctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: Saved = fctx.saved_tensors
        with fctx.cp.comm.guard("causal_conv1d backward"):
            out = None if fctx.room is None else fctx.room.part(0, dy)
            grads = library.only_once(lambda: backward(dy, saved, fctx.cp, fctx.activation, out), (dy, *saved))
            return *grads, None, None, None, None


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
    plan, form = _halo(ctx), hopper_conv.form_for(ctx)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        own = x.reshape(ctx.num_tokens, weight.shape[0])
        if halo is None:
            side = plan.forward
            halo = _finish(_start(own.index_select(0, side.send_rows), side, ctx, "HALO"), own)
        call = ConvInput(own, halo, weight, bias, plan.forward.taps, activation == "silu")
        return form.forward(call).view(x.shape), (x, halo, weight, bias)


def backward(
    dy: torch.Tensor, saved: Saved, ctx: Context, activation: str | None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dx, dweight, dbias), the last two summed over this rank's tokens; dbias is None without a bias. A form may
    write dx to ``out``, of its shape and any row stride."""
    plan, form = _halo(ctx), hopper_conv.form_for(ctx)
    x, halo, weight, bias = saved
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        own, dy = (t.reshape(ctx.num_tokens, weight.shape[0]) for t in (x, dy))
        call, side = ConvInput(own, halo, weight, bias, plan.forward.taps, activation == "silu"), plan.adjoint
        edge = form.listed(call, dy, side.send_rows)
        adj_halo = _finish(_start(edge, side, ctx, "HALO_GRAD"), edge)
        room = None if out is None else out.view(own.shape)
        dx, sums = form.backward(call, dy, side.taps, adj_halo, room)
        # copies: results of an operator must not share memory
        dbias = None if bias is None else sums[-1].to(bias.dtype, copy=True)
        dweight = sums[:-1].T.to(weight.dtype, copy=True, memory_format=torch.contiguous_format)
        return dx.view(x.shape), dweight, dbias


# ---- the library entry: see library.py -------------------------------------------------------------------------------


@torch.library.custom_op("cp_gdn::conv_forward", mutates_args=())
def forward_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: int, size: int, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and, in one dim of ``size``, the halo rows."""
    context = library.context_of(handle)
    with context.comm.guard("causal_conv1d"):
        _check(x, weight, bias, context, activation)
        y, saved = forward(x, weight, bias, context, activation)
    return y, flat(saved[1], x)


@forward_op.register_fake
def _(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, bias, handle, size, activation = args
    if isinstance(handle, int):  # a symbol stands for any context, whose own call checks
        context = library.context_of(handle)
        with context.comm.guard("causal_conv1d"):
            _check(x, weight, bias, context, activation)
    return x.new_empty(x.shape), x.new_empty((size,))


@torch.library.custom_op("cp_gdn::conv_backward", mutates_args=())
def backward_op(
    dy: torch.Tensor, tensors: list[torch.Tensor], handle: int, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dbias); ``tensors`` are x, the halo, weight and, if there is one, bias."""
    context, bias = library.context_of(handle), tensors[3] if len(tensors) > 3 else None
    halo = shaped(tensors[1], (sum(_halo(context).forward.recv_counts), tensors[2].shape[0]))
    with context.comm.guard("causal_conv1d backward"):
        dx, dweight, dbias = backward(dy, (tensors[0], halo, tensors[2], bias), context, activation)
    return dx, dweight, dweight.new_empty((0,)) if dbias is None else dbias


@backward_op.register_fake
def _(dy: torch.Tensor, tensors: list[torch.Tensor], *_: Any) -> tuple[torch.Tensor, ...]:
    dx, _halo, dweight, *dbias = (t.new_empty(t.shape) for t in tensors)
    return dx, dweight, dbias[0] if dbias else dweight.new_empty((0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, handle, _, activation = inputs
    ctx.call = handle, activation
    ctx.save_for_backward(x, output[1], weight, *(() if bias is None else (bias,)))
    ctx.has_bias = bias is not None


def _backward(ctx: Any, dy: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx, dweight, dbias = backward_op(dy, list(ctx.saved_tensors), *ctx.call)
    return dx, dweight, dbias if ctx.has_bias else None, None, None, None


forward_op.register_autograd(_backward, setup_context=_keep)
backward_op.register_autograd(library.refuse_twice)


# ---- communication: no arithmetic ------------------------------------------------------------------------------------


def _start(rows: torch.Tensor, side: HaloSide, ctx: Context, purpose: str) -> Pending[torch.Tensor] | None:
    """Send ``rows`` [S, C], which are those of ``side.send_rows``."""
    if not _halo(ctx).crosses:
        return None
    channels = rows.shape[1]
    send_counts, recv_counts = ([n * channels for n in counts] for counts in (side.send_counts, side.recv_counts))
    return ctx.comm.all_to_all(purpose, rows.view(-1), send_counts, recv_counts)


def _finish(pending: Pending[torch.Tensor] | None, like: torch.Tensor) -> torch.Tensor:
    """The halo rows [R, C]."""
    return like[:0] if pending is None else pending.wait().view(-1, like.shape[1])


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
