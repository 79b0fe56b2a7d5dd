"""The library entry: forward and backward as `torch.library` operators, the context as an int, what is saved as
outputs."""

import torch
from torch import Tensor

from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.context import CONTEXTS, Context
from cp_gdn.op import Saved, run_backward, run_forward


def is_wanted() -> bool:
    """Whether whoever looks at this call sees operators only: a compiler, or a mode such as selective checkpointing."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def call(ctx: Context, x: Inputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and the final states through the operator."""
    out = forward_op(x.q, x.k, x.v, x.g, x.beta, initial_state, ctx.handle, x.scale, x.l2norm)
    return out[0], out[1]


def _context(handle: int) -> Context:
    ctx = CONTEXTS.get(handle)
    if ctx is None:
        raise RuntimeError("cp_gdn: the context of this call is gone; keep the context alive as long as its graph")
    return ctx


def _empty_if_none(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty((0,)) if x is None else x


def _none_if_empty(x: Tensor) -> Tensor | None:
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, l2norm=l2norm)
    o, final, saved = run_forward(_context(handle), x, initial)
    return o, final, saved.states, _empty_if_none(saved.maps, final), _empty_if_none(saved.owned, final)


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    handle: int,
    scale: float,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ctx = _context(handle)
    value_heads, key_dim, _ = ctx.state_shape

    def state(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=ctx.state_dtype, device=q.device)

    keep = ctx.options.save_transfer
    owned = (
        ctx.routes.forward_owner.owned_shape(ctx.rank, ctx.world_size, ctx.state_shape)
        if ctx.routes.forward_owner
        else None
    )
    return (
        torch.empty(v.shape, dtype=q.dtype, device=q.device),
        state(len(ctx.plan.exit_docs), ctx.heads[1], *ctx.head_dims),
        state(len(ctx.plan.segments), *ctx.state_shape),
        state(ctx.schedule.num_maps, value_heads, key_dim, key_dim) if keep else state(0),
        state(*owned) if keep and owned is not None else state(0),
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
    q, k, v, g, beta, states, maps, owned = tensors
    x = Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, l2norm=l2norm)
    saved = Saved(
        inputs=x, states=states, maps=_none_if_empty(maps), owned=_none_if_empty(owned), has_initial=has_initial
    )
    ctx = _context(handle)
    with ctx.comm.guard("chunk_gated_delta_rule backward"):
        grads = run_backward(ctx, dout, dfinal, saved)
    return grads.q, grads.k, grads.v, grads.g, grads.beta, _empty_if_none(grads.initial_state, states)


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
    ctx = _context(handle)
    rows = (len(ctx.plan.entry_docs), ctx.heads[1], *ctx.head_dims) if has_initial else (0,)
    dq, dk, dv, dg, dbeta = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors[:5])
    return dq, dk, dv, dg, dbeta, tensors[5].new_empty(rows)


def _setup_context(node: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    q, k, v, g, beta, initial, handle, scale, l2norm = inputs
    node.save_for_backward(q, k, v, g, beta, *output[2:])
    node.call = (handle, scale, l2norm, initial is not None)  # type: ignore[attr-defined]
    node.set_materialize_grads(False)


def _backward(node, dout, dfinal, *_):  # type: ignore[no-untyped-def]
    handle, scale, l2norm, has_initial = node.call
    *grads, dinitial = backward_op(dout, dfinal, list(node.saved_tensors), handle, scale, l2norm, has_initial)
    return *grads, dinitial if has_initial else None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)
