"""The op: forward and backward of the gated delta rule under a context, as explicit functions; backward mirrors
forward.

forward:   prepare -> summarize -> exchange -> fold -> replay
backward:  prepare and states again, or tapes -> adjoint summarize -> exchange -> fold -> adjoint replay -> gradients
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_gdn import affine
from cp_gdn.backends.precision import exact_products
from cp_gdn.backends.torch_adjoint import Adjoints
from cp_gdn.backends.torch_chunked import Inputs, States, Tape
from cp_gdn.context import Context
from cp_gdn.flow import Carried, Exchange, Flow
from cp_gdn.on_kernels import backward_on_kernels, forward_on_kernels
from cp_gdn.saved import InputGradients, Manner, Saved, Tapes, owned_maps
from cp_gdn.schedule import Side
from cp_gdn.workspace import Room, Workspace, bind


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entered:
    """Entry states of a forward: ``states`` [n, HV, K, V] are complete once ``exchange`` has been waited for (at once
    if None)."""

    states: Tensor
    maps: Tensor | None
    offsets: Tensor | None
    exchange: Exchange | None


def run_forward(
    ctx: Context,
    x: Inputs,
    initial_state: Tensor | None,
    manner: Manner = Manner(),  # noqa: B008 - frozen
) -> tuple[Tensor, Tensor, Saved]:
    """o [T, HV, V], the final states [exit_docs, HV, K, V] and what a backward needs; arguments are checked already."""
    if ctx.kernels is not None:
        return forward_on_kernels(ctx, ctx.kernels, x, initial_state, manner)
    side, backend, options = ctx.schedule.forward, ctx.backend, ctx.options
    with exact_products(ctx.device), bind(ctx, "forward", manner.workspace) as room:
        tape = backend.prepare(x)
        entered = _enter(ctx, tape, initial_state, manner.carried, room, "STATE")
        kept = backend.new_states(tape) if manner.tapes else None
        out = room.take("out") if manner.output else None
        final = entered.states.new_zeros((len(ctx.plan.exit_docs), *ctx.state_shape))
        for part in (side.independent, side.dependent):
            if part is side.dependent:
                _settle(side, entered)
            if out is None and kept is None:
                continue  # nobody reads what a replay gives
            end = backend.replay(tape, x, part, entered.states[part.walk.segments], out, kept)
            final[part.end_row] = end[part.end_at]
        if initial_state is not None:
            final[ctx.schedule.empty_exit] = _pad_state(ctx, initial_state[ctx.schedule.empty_entry])
        o = x.v.new_empty(x.v.shape) if out is None else backend.outputs(out, x)
        states = entered.states
        if manner.carried is None and options.keeps_states:
            states = states[: len(ctx.plan.segments)].clone()
    saved = Saved(
        inputs=x,
        states=states if options.keeps_states else None,
        maps=entered.maps if options.keeps_maps else None,
        owned=owned_maps(entered.exchange, manner.carried) if options.keeps_maps else None,
        has_initial=initial_state is not None,
        initial=None if options.keeps_states else initial_state,
        tapes=None if kept is None else Tapes(tape=tape, states=kept),
    )
    return o, _crop_state(ctx, final), saved


def run_backward(
    ctx: Context, dout: Tensor | None, dfinal: Tensor | None, saved: Saved, workspace: Workspace | None = None
) -> InputGradients:
    """Gradients of a forward; a missing gradient of an output counts as zero."""
    if ctx.kernels is not None:
        return backward_on_kernels(ctx, ctx.kernels, (dout, dfinal), saved, workspace)
    side, backend, x = ctx.schedule.adjoint, ctx.backend, saved.inputs
    with exact_products(ctx.device), bind(ctx, "backward", workspace, kept=saved.tapes is not None) as room:
        tape = backend.prepare(x) if saved.tapes is None else saved.tapes.tape
        saved = _boundary(ctx, tape, saved, room)
        assert saved.maps is not None
        chunk_states = _chunk_states(ctx, tape, saved, room) if saved.tapes is None else saved.tapes.states
        adjoint = backend.adjoint_prepare(tape, x, torch.zeros_like(x.v) if dout is None else dout)
        states = _start_states(ctx, side, dfinal, room.take("adjoints"))
        offsets = room.take("adjoint offsets")
        offsets[side.summary_row] = backend.adjoint_summarize(
            tape, adjoint, side.summary, states[side.summary.segments]
        )
        flow = Flow(states=states, maps=saved.maps, offsets=offsets, adjoint=True, kept=saved.owned, purpose="ADJOINT")
        exchange = _begin(ctx, side, flow)
        out = Adjoints(after=room.take("after"), values=room.take("values"))
        dinitial = states.new_zeros((len(ctx.plan.entry_docs), *ctx.state_shape))
        for part in (side.independent, side.dependent):
            if part is side.dependent:
                _finish(side, exchange, states, saved.maps, offsets)
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


def _enter(
    ctx: Context, tape: Tape, initial_state: Tensor | None, carried: Carried | None, room: Room, purpose: str
) -> _Entered:
    """Summarize, and begin the exchange that brings the entry states; with ``carried`` they are there."""
    side, keep = ctx.schedule.forward, ctx.options.keeps_maps
    if carried is not None:
        own = _maps(ctx, tape, None) if keep else None
        return _Entered(states=carried.states, maps=own, offsets=None, exchange=None)
    maps = _maps(ctx, tape, None if keep else room)
    states = _start_states(ctx, side, initial_state, room.take("states"))
    offsets = room.take("offsets")
    offsets[side.summary_row] = ctx.backend.summarize(tape, side.summary, states[side.summary.segments])
    flow = Flow(states=states, maps=maps, offsets=offsets, adjoint=False, kept=None, purpose=purpose)
    return _Entered(states=states, maps=maps, offsets=offsets, exchange=_begin(ctx, side, flow))


def _settle(side: Side, entered: _Entered) -> None:
    """Wait until every entry state is there."""
    if entered.exchange is not None:
        assert entered.maps is not None
        assert entered.offsets is not None
        _finish(side, entered.exchange, entered.states, entered.maps, entered.offsets)


def _boundary(ctx: Context, tape: Tape, saved: Saved, room: Room) -> Saved:
    """``saved`` with entry states and maps, whatever the forward kept: its first half runs again, its messages too, or
    maps alone."""
    if saved.states is not None:
        return saved if saved.maps is not None else replace(saved, maps=_maps(ctx, tape, room))
    entered = _enter(ctx, tape, saved.initial, None, room, "STATE_AGAIN")
    _settle(ctx.schedule.forward, entered)
    owned = owned_maps(entered.exchange, None) if ctx.options.save_transfer else None
    return replace(saved, states=entered.states, maps=entered.maps, owned=owned)


def _chunk_states(ctx: Context, tape: Tape, saved: Saved, room: Room) -> States:
    """States of every chunk, run again from the entry states."""
    assert saved.states is not None
    found = States(before=room.take("before"), residual=room.take("residual"))
    ctx.backend.states(tape, saved.inputs, saved.states, found)
    return found


def _maps(ctx: Context, tape: Tape, room: Room | None) -> Tensor:
    """Maps of all segments that need one, then the composed ones; to be saved if there is no ``room``."""
    _, key_dim, _ = ctx.state_shape
    shape = (ctx.schedule.num_maps, ctx.heads[1], key_dim, key_dim)
    maps = tape.k.new_empty(shape) if room is None else room.take("maps")
    maps[ctx.schedule.transfer_row] = ctx.backend.transfer(tape)
    affine.run(ctx.schedule.compose_maps, maps, maps, None)
    return maps


def _start_states(ctx: Context, side: Side, given: Tensor | None, states: Tensor) -> Tensor:
    """The state buffer: what the caller gave where documents start (in this direction), zero elsewhere."""
    states.zero_()
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
