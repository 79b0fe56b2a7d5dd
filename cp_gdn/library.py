"""The library entry: forward and backward as `torch.library` operators, the context as an int, what is saved as
outputs.

Checks and the guard of the Comm are inside the operators, so that a compiled graph has them too, and a compiler's fake
run refuses what a real one would.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_gdn import recompute
from cp_gdn.backends.precision import state_dtype
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.checks import check_call, like_rows, token_rows
from cp_gdn.context import CONTEXTS, Context
from cp_gdn.op import run_backward, run_forward
from cp_gdn.saved import InputGradients, Manner, Saved, Tapes
from cp_gdn.traced import flat, rows_of_states, shape_of_maps, shape_of_owned, shaped, shapes_of_tapes

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def is_wanted() -> bool:
    """Whether whoever looks at this call sees operators only: a compiler, or a mode such as selective checkpointing."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call(
    ctx: Context, tensors: Sequence[Tensor | None], scale: float, l2norm: bool, *, final: bool
) -> tuple[Tensor, Tensor | None]:
    """o and, if asked for, the final states through the operator; ``tensors`` are q, k, v, g, beta and the initial
    states."""
    out = forward_op(*arguments(ctx, tensors, scale, l2norm))
    return out[0], shaped(out[1], (ctx.traced.documents, ctx.heads[1], *ctx.head_dims)) if final else None


def arguments(ctx: Context, tensors: Sequence[Tensor | None], scale: float, l2norm: bool) -> tuple[Any, ...]:
    """What `forward_op` takes."""
    seen, initial, raw = ctx.traced, int(tensors[5] is not None), int(l2norm)  # torch 2.11 traces no bool as an index
    sizes = [seen.final, seen.states[initial], seen.maps, seen.owned, seen.tapes[raw]]
    return *tensors, seen.handle, sizes, scale, l2norm, seen.holds_initial


def like_inputs(grads: InputGradients, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of q, k, v, g, beta with the leading 1 where the inputs have it."""
    found = (grads.q, grads.k, grads.v, grads.g, grads.beta)
    return [like_rows(grad, t) for grad, t in zip(found, tensors, strict=True)]


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


@torch.library.custom_op("cp_gdn::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    handle: int,
    sizes: list[int],
    scale: float,
    l2norm: bool,
    holds_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o; in one dim each, of ``sizes``: final states, entry states, maps, owned maps, bytes of tapes."""
    context = context_of(handle)
    with context.comm.guard("chunk_gated_delta_rule"):
        tensors = (q, k, v, g, beta)
        check_call(context, tensors, initial)
        x = token_rows(tensors, scale, l2norm)
        o, final, saved = run_forward(context, x, initial, Manner(tapes=context.options.keeps_tapes))
        context.note_call("library", "forward", **decided(context))
    ends, states, maps, owned = (flat(each, final) for each in (final, saved.states, saved.maps, saved.owned))
    return o.view(v.shape), ends, states, maps, owned, _flat(context, saved.tapes, final)


def decided(ctx: Context) -> dict[str, Any]:
    """The decisions of a call of this entry."""
    return recompute.named(recompute.decide_outside(ctx.options, recompute.OPERATOR))


def _flat(ctx: Context, tapes: Tapes | None, like: Tensor) -> Tensor:
    """Tapes as one tensor of bytes, for an operator has a fixed number of outputs."""
    if tapes is None:
        return flat(None, like.new_empty(0, dtype=torch.uint8))
    pieces = ctx.tape_store.kept_tensors(tapes.tape, tapes.states)
    return flat(torch.cat([x.reshape(-1).view(torch.uint8) for x in pieces]), like.new_empty(0, dtype=torch.uint8))


def _tapes(ctx: Context, x: Inputs, found: Tensor) -> Tapes | None:
    if not ctx.options.keeps_tapes:
        return None
    shapes = shapes_of_tapes(ctx, l2norm=x.l2norm)
    counts = [math.prod(shape) for shape in shapes]
    pieces = found[: sum(counts) * ctx.tape_dtype.itemsize].view(ctx.tape_dtype).split(counts)
    tape, states = ctx.tape_store.from_kept([p.view(shape) for p, shape in zip(pieces, shapes, strict=True)], x)
    return Tapes(tape=tape, states=states)


@forward_op.register_fake
def _(*args: Any) -> Outputs:
    *tensors, initial, handle, sizes, _, _, _ = args
    if isinstance(handle, int):  # a symbol stands for any context, whose own call checks
        ctx = context_of(handle)
        with ctx.comm.guard("chunk_gated_delta_rule"):
            check_call(ctx, tensors, initial)
    v = tensors[2]
    final, states, maps, owned = (v.new_empty((size,), dtype=state_dtype(v.dtype)) for size in sizes[:4])
    return v.new_empty(v.shape), final, states, maps, owned, v.new_empty((sizes[4],), dtype=torch.uint8)


@torch.library.custom_op("cp_gdn::backward", mutates_args=())
def backward_op(
    dout: Tensor | None,
    dfinal: Tensor | None,
    tensors: list[Tensor],
    handle: int,
    scale: float,
    l2norm: bool,
    initial_shape: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs, as they are, and of initial states of a shape; [] without any."""
    inputs, (states, maps, owned, tapes, *initial) = tensors[:5], tensors[5:]
    x, ctx, has_initial = token_rows(inputs, scale, l2norm), context_of(handle), bool(initial_shape)
    rows, docs = rows_of_states(ctx, initial=has_initial), (len(ctx.plan.exit_docs), ctx.heads[1], *ctx.head_dims)
    saved = Saved(
        inputs=x,
        states=shaped(states, (rows, *ctx.state_shape)) if ctx.options.keeps_states else None,
        maps=shaped(maps, shape_of_maps(ctx)) if ctx.options.keeps_maps else None,
        owned=shaped(owned, shape_of_owned(ctx)) if ctx.options.keeps_maps and ctx.routes.owners else None,
        has_initial=has_initial,
        initial=initial[0] if initial else None,
        tapes=_tapes(ctx, x, tapes),
    )
    with ctx.comm.guard("chunk_gated_delta_rule backward"):
        given = None if dfinal is None else shaped(dfinal, docs)
        grads = run_backward(ctx, dout if dout is None else dout.reshape(x.v.shape), given, saved)
        ctx.note_call("library", "backward", **decided(ctx))
    dq, dk, dv, dg, dbeta = (grad.contiguous() for grad in like_inputs(grads, inputs))  # results must not share memory
    dinitial = states.new_empty((0,)) if grads.initial_state is None else grads.initial_state
    return dq, dk, dv, dg, dbeta, dinitial


@backward_op.register_fake
def _(
    dout: Tensor | None,
    dfinal: Tensor | None,
    tensors: list[Tensor],
    handle: int,
    scale: float,
    l2norm: bool,
    initial_shape: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (t.new_empty(t.shape) for t in tensors[:5])
    return dq, dk, dv, dg, dbeta, tensors[5].new_empty(initial_shape or (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    *tensors, initial, handle, _, scale, l2norm, holds_initial = inputs
    again = [] if initial is None or not holds_initial else [initial]
    ctx.save_for_backward(*tensors, *output[2:], *again)
    ctx.call = (handle, scale, l2norm, [] if initial is None else list(initial.shape))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Any, ...]:
    *grads, dinitial = backward_op(dout, dfinal, list(ctx.saved_tensors), *ctx.call)
    return *grads, dinitial if ctx.call[3] else None, *(None,) * 5


forward_op.register_autograd(_backward, setup_context=_setup_context)
backward_op.register_autograd(refuse_twice)
