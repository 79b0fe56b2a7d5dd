"""The library entry: forward and backward as `torch.library` operators, the context as an int, what is saved as
outputs.

Checks and the guard of the Comm are inside the operators, so that a compiled graph has them too, and a compiler's fake
run refuses what a real one would.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from cp_gdn import recompute
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.checks import check_call, token_rows
from cp_gdn.context import CONTEXTS, Context
from cp_gdn.op import run_backward, run_forward
from cp_gdn.saved import InputGradients, Manner, Saved, Tapes

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def is_wanted() -> bool:
    """Whether whoever looks at this call sees operators only: a compiler, or a mode such as selective checkpointing."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call(ctx: Context, tensors: Sequence[Tensor | None], scale: float, l2norm: bool) -> tuple[Tensor, Tensor]:
    """o and the final states through the operator; ``tensors`` are q, k, v, g, beta and the initial states."""
    out = forward_op(*tensors, ctx.handle, scale, l2norm)
    return out[0], out[1]


def like_inputs(grads: InputGradients, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of q, k, v, g, beta with the leading 1 where the inputs have it."""
    found = (grads.q, grads.k, grads.v, grads.g, grads.beta)
    return [grad.view(t.shape) for grad, t in zip(found, tensors, strict=True)]


def context_of(handle: int) -> Context:
    """The context behind an operator's int."""
    ctx = CONTEXTS.get(int(handle))  # a compiler may have made it a symbol, and then fixes it
    if ctx is None:
        raise RuntimeError("cp_gdn: the context of this call is gone; keep the context alive as long as its graph")
    return ctx


def refuse_twice(ctx: Any, *grad_outputs: Any) -> Any:
    """The gradient of a backward."""
    raise RuntimeError("cp_gdn: this call has first derivatives only; drop create_graph=True")


class _FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, run: Callable[[], tuple[Any, ...]], *__: Tensor | None) -> tuple[Any, ...]:
        return run()

    backward = staticmethod(refuse_twice)


def only_once(run: Callable[[], tuple[Any, ...]], tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """run(), the gradients of a backward that reads ``tensors``; differentiating them again raises."""
    return _FirstOnly.apply(run, *tensors) if torch.is_grad_enabled() else run()


def empty_if_none(x: Tensor | None, like: Tensor) -> Tensor:
    """What an operator returns for None: it has no optional outputs."""
    return like.new_empty((0,)) if x is None else x


def none_if_empty(x: Tensor) -> Tensor | None:
    return None if x.dim() == 1 else x


@torch.library.custom_op("cp_gdn::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    handle: int,
    scale: float,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    context = context_of(handle)
    with context.comm.guard("chunk_gated_delta_rule"):
        x = check_call(context, (q, k, v, g, beta), initial, scale, l2norm)
        o, final, saved = run_forward(context, x, initial, Manner(tapes=context.options.keeps_tapes))
        context.note_call("library", "forward", **decided(context))
    states, maps, owned = (empty_if_none(each, final) for each in (saved.states, saved.maps, saved.owned))
    return o.view(v.shape), final, states, maps, owned, _flat(context, saved.tapes, final)


def decided(ctx: Context) -> dict[str, Any]:
    """The decisions of a call of this entry."""
    return asdict(recompute.decide(ctx.options, recompute.OPERATOR, 0))


def _flat(ctx: Context, tapes: Tapes | None, like: Tensor) -> Tensor:
    """Tapes as one tensor, for an operator has a fixed number of outputs."""
    if tapes is None:
        return like.new_empty((0,))
    return torch.cat([x.reshape(-1) for x in ctx.backend.kept_tensors(tapes.tape, tapes.states)])


def _tapes(ctx: Context, x: Inputs, flat: Tensor) -> Tapes | None:
    if not ctx.options.keeps_tapes:
        return None
    shapes = ctx.backend.kept_shapes(ctx.heads[0], ctx.state_shape, l2norm=x.l2norm).values()
    pieces = flat.split([math.prod(shape) for shape in shapes])
    tape, states = ctx.backend.from_kept([p.view(shape) for p, shape in zip(pieces, shapes, strict=True)], x)
    return Tapes(tape=tape, states=states)


@forward_op.register_fake
def _(*args: Any) -> Outputs:
    *tensors, initial, handle, scale, l2norm = args
    ctx = context_of(handle)
    with ctx.comm.guard("chunk_gated_delta_rule"):
        check_call(ctx, tensors, initial, scale, l2norm)
    value_heads, key_dim, _ = ctx.state_shape
    v, options = tensors[2], ctx.options

    def state(*shape: int) -> Tensor:
        return v.new_empty(shape, dtype=ctx.state_dtype)

    owner, keep = ctx.routes.forward_owner, options.keeps_maps
    shapes = ctx.backend.kept_shapes(ctx.heads[0], ctx.state_shape, l2norm=l2norm) if options.keeps_tapes else {}
    segments = len(ctx.plan.segments) if ctx.kernels is None else ctx.kernels.saved_rows(initial=initial is not None)
    owned = owner.owned_shape(ctx.rank, ctx.world_size, ctx.state_shape) if keep and owner else (0,)
    return (
        v.new_empty(v.shape),
        state(len(ctx.plan.exit_docs), ctx.heads[1], *ctx.head_dims),
        state(segments, *ctx.state_shape) if options.keeps_states else state(0),
        state(ctx.schedule.num_maps, value_heads, key_dim, key_dim) if keep else state(0),
        state(*owned),
        state(sum(math.prod(shape) for shape in shapes.values())),
    )


@torch.library.custom_op("cp_gdn::backward", mutates_args=())
def backward_op(
    dout: Tensor | None,
    dfinal: Tensor | None,
    tensors: list[Tensor],
    handle: int,
    scale: float,
    l2norm: bool,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, (states, maps, owned, flat, *initial) = tensors[:5], tensors[5:]
    x, ctx = token_rows(inputs, scale, l2norm), context_of(handle)
    saved = Saved(
        inputs=x,
        states=states if ctx.options.keeps_states else None,
        maps=maps if ctx.options.keeps_maps else None,
        owned=none_if_empty(owned),
        has_initial=has_initial,
        initial=initial[0] if initial else None,
        tapes=_tapes(ctx, x, flat),
    )
    with ctx.comm.guard("chunk_gated_delta_rule backward"):
        grads = run_backward(ctx, dout if dout is None else dout.reshape(x.v.shape), dfinal, saved)
        ctx.note_call("library", "backward", **decided(ctx))
    dq, dk, dv, dg, dbeta = (grad.contiguous() for grad in like_inputs(grads, inputs))  # results must not share memory
    return dq, dk, dv, dg, dbeta, empty_if_none(grads.initial_state, states)


@backward_op.register_fake
def _(
    dout: Tensor | None,
    dfinal: Tensor | None,
    tensors: list[Tensor],
    handle: int,
    scale: float,
    l2norm: bool,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ctx = context_of(handle)
    rows = (len(ctx.plan.entry_docs), ctx.heads[1], *ctx.head_dims) if has_initial else (0,)
    dq, dk, dv, dg, dbeta = (t.new_empty(t.shape) for t in tensors[:5])
    return dq, dk, dv, dg, dbeta, tensors[5].new_empty(rows)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    *tensors, initial, handle, scale, l2norm = inputs
    again = [] if initial is None or context_of(handle).options.keeps_states else [initial]
    ctx.save_for_backward(*tensors, *output[2:], *again)
    ctx.call = (handle, scale, l2norm, initial is not None)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Any, ...]:
    handle, scale, l2norm, has_initial = ctx.call
    *grads, dinitial = backward_op(dout, dfinal, list(ctx.saved_tensors), handle, scale, l2norm, has_initial)
    return *grads, dinitial if has_initial else None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)
backward_op.register_autograd(refuse_twice)
