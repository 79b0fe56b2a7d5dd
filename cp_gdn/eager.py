"""The eager entry: the forward of a call, and the node that autograd gets of it.

The forward runs before its node is made, so that kernels are under way while autograd works.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn import library, recompute
from cp_gdn.checks import like_rows, token_rows
from cp_gdn.context import Context
from cp_gdn.flow import Carried
from cp_gdn.handles import RecomputeHandle
from cp_gdn.on_kernels import no_grad
from cp_gdn.op import run_backward, run_forward
from cp_gdn.saved import Manner, Saved, Tapes
from cp_gdn.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a call has beside its tensors. ``keeps``: whether a node is made, which saves tensors. ``final``:
    whether final states are wanted."""

    ctx: Context
    scale: float
    l2norm: bool
    keeps: bool
    final: bool
    workspace: Workspace | None
    handle: RecomputeHandle | None

    def kept_count(self, has_initial: bool, saves_tapes: bool) -> int:
        """Tensors that the node of this call saves."""
        ctx, options = self.ctx, self.ctx.options
        count = 5 + options.keeps_states + options.keeps_maps * (1 + (ctx.exchange == "a2a"))
        if saves_tapes:
            count += len(ctx.tape_store.kept_shapes(ctx.heads[0], ctx.state_shape, l2norm=self.l2norm))
        return count + (has_initial and not options.keeps_states)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ran:
    """A forward that has run: what `run` returns, and what its node is made of."""

    call: Call
    o: Tensor
    final: Tensor | None
    saved: Saved
    region: recompute.Region | str
    decision: recompute.Decision


def run(call: Call, tensors: Sequence[Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """o like v, and the final states if they are wanted, of checked q, k, v, g, beta and initial states."""
    with no_grad():
        ran = _forward(call, tensors, initial)
    o, final = _GatedDeltaRule.apply(*tensors, initial, ran)
    return o, final


def _forward(call: Call, tensors: Sequence[Tensor], initial: Tensor | None) -> _Ran:
    ctx, handle = call.ctx, call.handle
    region = recompute.find_region() if call.keeps else recompute.NO_GRADIENT
    decision = _decide(call, region, initial is not None)
    recompute.make_room(region, decision)
    carried: Carried | None = None if handle is None else handle.take("states", ctx)
    manner = Manner(
        tapes=decision.tapes != "rerun",
        output=decision.output == "written",
        carried=carried,
        workspace=call.workspace,
        final=call.final,
    )
    o, final, saved = run_forward(ctx, token_rows(tensors, call.scale, call.l2norm), initial, manner)
    if handle is not None and saved.states is not None:
        handle.fill("states", ctx, Carried(states=saved.states, owned=saved.owned))
    exchanged = "carried by a RecomputeHandle" if carried is not None else "exchanged"
    ctx.note_call("eager", "forward", keeps=call.keeps, **recompute.named(decision), states=exchanged)
    return _Ran(
        call=call,
        o=like_rows(o, tensors[2]),
        final=final if call.final else None,
        saved=saved,
        region=region,
        decision=decision,
    )


def _decide(call: Call, region: recompute.Region | str, has_initial: bool) -> recompute.Decision:
    ctx, small, no_tapes = call.ctx, call.ctx.kernels is not None, _no_tapes(call.ctx)
    if isinstance(region, str):
        return recompute.decide_outside(ctx.options, region, small=small, no_tapes=no_tapes)
    count = call.kept_count(has_initial, bool(recompute.saves_tapes(ctx.options, region, small=small)))
    return recompute.decide(ctx.options, region, count, small=small, no_tapes=no_tapes)


def _no_tapes(ctx: Context) -> str:
    """Why a recompute cannot hand tapes on, wherever it is."""
    return recompute.CAPTURED if recompute.is_capturing(ctx.device) else ""


class _GatedDeltaRule(torch.autograd.Function):
    """Eager entry: one node for what a forward gave."""

    @staticmethod
    def forward(node: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, _, ran = args
        call, saved, region, decision = ran.call, ran.saved, ran.region, ran.decision
        saves = decision.tapes == "saved"
        kept = _kept(call.ctx, tensors, saved, tapes=saves)
        node.save_for_backward(*kept)
        # a region counts on so many
        assert isinstance(region, str) or sum(x is not None for x in kept) == call.kept_count(saved.has_initial, saves)
        node.call, node.has_initial, node.decision = call, saved.has_initial, decision
        node.place = recompute.leave(region, node, decision, saved.tapes if decision.tapes == "kept" else None)
        node.set_materialize_grads(False)
        return ran.o, ran.final

    @staticmethod
    def backward(node: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        call, kept = node.call, node.saved_tensors
        decision, tapes = recompute.take(node.place, node.decision)
        ctx: Context = call.ctx
        saved = _from_kept(call, kept, node.has_initial, tapes)

        def gradients() -> tuple[Tensor | None, ...]:
            shaped = None if dout is None else like_rows(dout, saved.inputs.v)
            grads = run_backward(ctx, shaped, dfinal, saved, call.workspace)
            ctx.note_call("eager", "backward", **recompute.named(decision))
            return *library.like_inputs(grads, kept[:5]), grads.initial_state

        with ctx.comm.guard("chunk_gated_delta_rule backward"):
            return *library.only_once(gradients, (*kept, dout, dfinal)), None


def _kept(ctx: Context, tensors: list[Tensor], saved: Saved, *, tapes: bool) -> list[Tensor | None]:
    """What the node saves."""
    listed = [*tensors, saved.states, saved.maps, saved.owned, saved.initial]
    if tapes and saved.tapes is not None:
        listed += ctx.tape_store.kept_tensors(saved.tapes.tape, saved.tapes.states)
    return listed


def _from_kept(call: Call, kept: tuple[Any, ...], has_initial: bool, tapes: Tapes | None) -> Saved:
    """What `_kept` listed, with the tapes of a recompute if there are some."""
    ctx, (states, maps, owned, initial, *saved_tapes) = call.ctx, kept[5:]
    x = token_rows(kept[:5], call.scale, call.l2norm)
    if saved_tapes:
        tape, chunk_states = ctx.tape_store.from_kept(saved_tapes, x)
        tapes = Tapes(tape=tape, states=chunk_states)
    return Saved(inputs=x, states=states, maps=maps, owned=owned, has_initial=has_initial, initial=initial, tapes=tapes)
