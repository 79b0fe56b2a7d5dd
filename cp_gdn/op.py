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
from cp_gdn.chains import COMPOSE, COMPOSE_MAPS, INNER_DEPENDENT, INNER_INDEPENDENT, LOCAL
from cp_gdn.context import Context
from cp_gdn.flow import Carried, Exchange, Flow
from cp_gdn.on_kernels import backward_on_kernels, forward_on_kernels
from cp_gdn.saved import InputGradients, Manner, Saved, Tapes, owned_maps
from cp_gdn.walks import DEPENDENT, INDEPENDENT, SUMMARY, TRANSFER
from cp_gdn.workspace import Room, Workspace, bind


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entered:
    """Entry states of a forward: ``states`` [n, HV, K, V] are complete once the exchange that has ``begun`` has been
    waited for (at once if None)."""

    states: Tensor
    maps: Tensor | None
    begun: tuple[Exchange, Flow] | None

    @property
    def exchange(self) -> Exchange | None:
        return None if self.begun is None else self.begun[0]


def run_forward(
    ctx: Context,
    x: Inputs,
    initial_state: Tensor | None,
    manner: Manner = Manner(),  # noqa: B008 - frozen
) -> tuple[Tensor, Tensor, Saved]:
    """o [T, HV, V], the final states [exit_docs, HV, K, V] and what a backward needs; arguments are checked already."""
    if ctx.kernels is not None:
        return forward_on_kernels(ctx, ctx.kernels, x, initial_state, manner)
    backend, options = ctx.backend, ctx.options
    with exact_products(ctx.device), bind(ctx, "forward", manner.workspace) as room:
        tape = backend.prepare(x)
        entered = _enter(ctx, tape, initial_state, manner.carried, room, "STATE")
        kept = backend.new_states(tape) if manner.tapes else None
        out = room.take("out") if manner.output else None
        final = entered.states.new_zeros((len(ctx.plan.exit_docs), *ctx.state_shape))
        for part in (INDEPENDENT, DEPENDENT):
            if part == DEPENDENT:
                _settle(ctx, entered)
            if out is None and kept is None:
                continue  # nobody reads what a replay gives
            walk = backend.walks.of(part)
            end = backend.replay(tape, x, walk, entered.states[walk.segments], out, kept)
            final[walk.ends[1]] = end[walk.ends[0]]
        if initial_state is not None:
            entry, exits = ctx.schedule.empty.data
            final[exits] = _pad_state(ctx, initial_state[entry])
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
    backend, x = ctx.backend, saved.inputs
    with exact_products(ctx.device), bind(ctx, "backward", workspace, kept=saved.tapes is not None) as room:
        tape = backend.prepare(x) if saved.tapes is None else saved.tapes.tape
        saved = _boundary(ctx, tape, saved, room)
        assert saved.maps is not None
        chunk_states = _chunk_states(ctx, tape, saved, room) if saved.tapes is None else saved.tapes.states
        adjoint = backend.adjoint_prepare(tape, x, torch.zeros_like(x.v) if dout is None else dout)
        states = _start_states(ctx, dfinal, room.take("adjoints"), reverse=True)
        offsets, walk = room.take("adjoint offsets"), backend.walks.of(SUMMARY, reverse=True)
        offsets[walk.rows] = backend.adjoint_summarize(tape, adjoint, walk, states[walk.segments])
        flow = Flow(states=states, maps=saved.maps, offsets=offsets, adjoint=True, kept=saved.owned, purpose="ADJOINT")
        exchange = _begin(ctx, flow)
        out = Adjoints(after=room.take("after"), values=room.take("values"))
        dinitial = states.new_zeros((len(ctx.plan.entry_docs), *ctx.state_shape))
        for part in (INDEPENDENT, DEPENDENT):
            if part == DEPENDENT:
                _finish(ctx, exchange, flow)
            walk = backend.walks.of(part, reverse=True)
            end = backend.adjoint_replay(tape, adjoint, walk, states[walk.segments], out)
            dinitial[walk.ends[1]] = end[walk.ends[0]]
        if dfinal is not None:
            entry, exits = ctx.schedule.empty.data
            dinitial[entry] = _pad_state(ctx, dfinal[exits])
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
    keep, walk = ctx.options.keeps_maps, ctx.backend.walks.of(SUMMARY)
    if carried is not None:
        own = _maps(ctx, tape, None) if keep else None
        return _Entered(states=carried.states, maps=own, begun=None)
    maps = _maps(ctx, tape, None if keep else room)
    states = _start_states(ctx, initial_state, room.take("states"), reverse=False)
    offsets = room.take("offsets")
    offsets[walk.rows] = ctx.backend.summarize(tape, walk, states[walk.segments])
    flow = Flow(states=states, maps=maps, offsets=offsets, adjoint=False, kept=None, purpose=purpose)
    return _Entered(states=states, maps=maps, begun=(_begin(ctx, flow), flow))


def _settle(ctx: Context, entered: _Entered) -> None:
    """Wait until every entry state is there."""
    if entered.begun is not None:
        _finish(ctx, *entered.begun)


def _boundary(ctx: Context, tape: Tape, saved: Saved, room: Room) -> Saved:
    """``saved`` with entry states and maps, whatever the forward kept: its first half runs again, its messages too, or
    maps alone."""
    if saved.states is not None:
        return saved if saved.maps is not None else replace(saved, maps=_maps(ctx, tape, room))
    entered = _enter(ctx, tape, saved.initial, None, room, "STATE_AGAIN")
    _settle(ctx, entered)
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
    maps[ctx.backend.walks.of(TRANSFER).rows] = ctx.backend.transfer(tape)
    affine.run(ctx.schedule.hops.of(COMPOSE_MAPS), maps, maps, None)
    return maps


def _start_states(ctx: Context, given: Tensor | None, states: Tensor, *, reverse: bool) -> Tensor:
    """The state buffer: what the caller gave where documents start (in this direction), zero elsewhere."""
    states.zero_()
    if given is not None:
        starts, rows = ctx.schedule.starts[reverse]
        states[starts] = _pad_state(ctx, given[rows])
    return states


def _begin(ctx: Context, flow: Flow) -> Exchange:
    """Compose, step what needs no message, post what is ready, and step inside the fragments that are."""
    hops, adjoint = ctx.schedule.hops, flow.adjoint
    affine.run(hops.of(COMPOSE, adjoint), flow.offsets, flow.maps, flow.offsets, adjoint=adjoint)
    affine.run(hops.of(LOCAL, adjoint), flow.states, flow.maps, flow.offsets, adjoint=adjoint)
    exchange = ctx.routes.exchange(ctx.comm, flow)
    exchange.start()
    affine.run(hops.of(INNER_INDEPENDENT, adjoint), flow.states, flow.maps, flow.offsets, adjoint=adjoint)
    return exchange


def _finish(ctx: Context, exchange: Exchange, flow: Flow) -> None:
    """Take the messages, and step inside the fragments that waited for them."""
    exchange.wait()
    hops = ctx.schedule.hops.of(INNER_DEPENDENT, flow.adjoint)
    affine.run(hops, flow.states, flow.maps, flow.offsets, adjoint=flow.adjoint)


def _pad_state(ctx: Context, x: Tensor) -> Tensor:
    _, key_dim, value_dim = ctx.state_shape
    return F.pad(x, (0, value_dim - x.shape[-1], 0, key_dim - x.shape[-2]))


def _crop_state(ctx: Context, x: Tensor) -> Tensor:
    return x[..., : ctx.head_dims[0], : ctx.head_dims[1]].contiguous()
