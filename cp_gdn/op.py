"""The op: forward and backward of the gated delta rule under a context, as explicit functions; backward mirrors
forward.

forward:   prepare -> summarize -> exchange -> fold -> replay
backward:  prepare and states again -> adjoint summarize -> exchange -> fold -> adjoint replay -> gradients
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_gdn import affine
from cp_gdn.a2a.exchange import OwnerExchange
from cp_gdn.backends.precision import exact_products
from cp_gdn.backends.torch_adjoint import Adjoints
from cp_gdn.backends.torch_chunked import Inputs, Tape
from cp_gdn.context import Context
from cp_gdn.flow import Exchange, Flow
from cp_gdn.schedule import Side


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a backward needs of its forward.

    Attributes:
        inputs: the call's tensors, without the leading 1.
        states: [n, HV, K, V], the entry state of every segment (padded head dims).
        maps: [m, HV, K, K], segment and composed maps; None without ``save_transfer``.
        owned: maps that this rank received as an owner (a2a with ``save_transfer``), else None.
        has_initial: whether an initial state came in.
    """

    inputs: Inputs
    states: Tensor
    maps: Tensor | None
    owned: Tensor | None
    has_initial: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class InputGradients:
    """Gradients of a call: q, k, v, g, beta in their shapes and dtypes; initial_state [entry_docs, HV, K, V], None if
    none came in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None


def run_forward(ctx: Context, x: Inputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor, Saved]:
    """o [T, HV, V], the final states [exit_docs, HV, K, V] and what a backward needs; arguments are checked already."""
    side, backend = ctx.schedule.forward, ctx.backend
    with exact_products(ctx.device):
        tape = backend.prepare(x)
        maps = _maps(ctx, tape)
        states = _start_states(ctx, side, initial_state)
        offsets = states.new_empty((side.num_offsets, *ctx.state_shape))
        offsets[side.summary_row] = backend.summarize(tape, side.summary, states[side.summary.segments])
        exchange = _begin(
            ctx, side, Flow(states=states, maps=maps, offsets=offsets, adjoint=False, kept=None, purpose="STATE")
        )
        out = tape.u.new_empty(tape.u.shape)
        final = states.new_zeros((len(ctx.plan.exit_docs), *ctx.state_shape))
        for part in (side.independent, side.dependent):
            if part is side.dependent:
                _finish(side, exchange, states, maps, offsets)
            end = backend.replay(tape, x, part, states[part.walk.segments], out)
            final[part.end_row] = end[part.end_at]
        if initial_state is not None:
            final[ctx.schedule.empty_exit] = _pad_state(ctx, initial_state[ctx.schedule.empty_entry])
        o = backend.outputs(out, x)
    keep = ctx.options.save_transfer
    owned = exchange.owned_maps if keep and isinstance(exchange, OwnerExchange) else None
    saved = Saved(
        inputs=x,
        states=states[: len(ctx.plan.segments)].clone(),
        maps=maps if keep else None,
        owned=owned,
        has_initial=initial_state is not None,
    )
    return o, _crop_state(ctx, final), saved


def run_backward(ctx: Context, dout: Tensor | None, dfinal: Tensor | None, saved: Saved) -> InputGradients:
    """Gradients of a forward; a missing gradient of an output counts as zero."""
    side, backend, x = ctx.schedule.adjoint, ctx.backend, saved.inputs
    with exact_products(ctx.device):
        tape = backend.prepare(x)
        chunk_states = backend.states(tape, saved.states)
        adjoint = backend.adjoint_prepare(tape, x, torch.zeros_like(x.v) if dout is None else dout)
        maps = _maps(ctx, tape) if saved.maps is None else saved.maps
        states = _start_states(ctx, side, dfinal)
        offsets = states.new_empty((side.num_offsets, *ctx.state_shape))
        offsets[side.summary_row] = backend.adjoint_summarize(
            tape, adjoint, side.summary, states[side.summary.segments]
        )
        flow = Flow(states=states, maps=maps, offsets=offsets, adjoint=True, kept=saved.owned, purpose="ADJOINT")
        exchange = _begin(ctx, side, flow)
        out = Adjoints(after=torch.empty_like(chunk_states.before), values=torch.empty_like(chunk_states.residual))
        dinitial = states.new_zeros((len(ctx.plan.entry_docs), *ctx.state_shape))
        for part in (side.independent, side.dependent):
            if part is side.dependent:
                _finish(side, exchange, states, maps, offsets)
            end = backend.adjoint_replay(tape, adjoint, part, states[part.walk.segments], out)
            dinitial[part.end_row] = end[part.end_at]
        if dfinal is not None:
            dinitial[ctx.schedule.empty_entry] = _pad_state(ctx, dfinal[ctx.schedule.empty_exit])
        grads = backend.gradients(tape, adjoint, chunk_states, out, x)
    return InputGradients(
        q=grads.q,
        k=grads.k,
        v=grads.v,
        g=grads.g,
        beta=grads.beta,
        initial_state=_crop_state(ctx, dinitial) if saved.has_initial else None,
    )


def _maps(ctx: Context, tape: Tape) -> Tensor:
    """Maps of all segments that need one, then the composed ones."""
    _, key_dim, _ = ctx.state_shape
    maps = tape.k.new_empty((ctx.schedule.num_maps, ctx.heads[1], key_dim, key_dim))
    maps[ctx.schedule.transfer_row] = ctx.backend.transfer(tape)
    affine.run(ctx.schedule.compose_maps, maps, maps, None)
    return maps


def _start_states(ctx: Context, side: Side, given: Tensor | None) -> Tensor:
    """The state buffer: what the caller gave where documents start (in this direction), zero elsewhere."""
    states = torch.zeros((side.num_states, *ctx.state_shape), dtype=ctx.state_dtype, device=ctx.device)
    if given is not None:
        states[side.start_state] = _pad_state(ctx, given[side.start_row])
    return states


def _begin(ctx: Context, side: Side, flow: Flow) -> Exchange:
    """Compose, step what needs no message, post what is ready, and step inside the fragments that are."""
    affine.run(side.compose, flow.offsets, flow.maps, flow.offsets, adjoint=flow.adjoint)
    affine.run(side.local, flow.states, flow.maps, flow.offsets, adjoint=flow.adjoint)
    exchange = ctx.routes.exchange(ctx.comm, flow)
    exchange.start()
    affine.run(side.inner_independent, flow.states, flow.maps, flow.offsets, adjoint=flow.adjoint)
    return exchange


def _finish(side: Side, exchange: Exchange, states: Tensor, maps: Tensor, offsets: Tensor) -> None:
    """Take the messages, and step inside the fragments that waited for them."""
    exchange.wait()
    affine.run(side.inner_dependent, states, maps, offsets, adjoint=side.reverse)


def _pad_state(ctx: Context, x: Tensor) -> Tensor:
    _, key_dim, value_dim = ctx.state_shape
    return F.pad(x, (0, value_dim - x.shape[-1], 0, key_dim - x.shape[-2]))


def _crop_state(ctx: Context, x: Tensor) -> Tensor:
    return x[..., : ctx.head_dims[0], : ctx.head_dims[1]].contiguous()
