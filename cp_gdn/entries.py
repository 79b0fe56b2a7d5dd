"""The public op and its two entries to one pair of functions: an autograd function in eager mode, a library operator
elsewhere.

The operator (`library.py`) serves torch.compile and selective checkpointing, which see operators only; bits are the
same.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn import library, recompute
from cp_gdn.checks import check_call, check_choices, check_state, check_tensor, token_rows, token_shape
from cp_gdn.context import Context
from cp_gdn.flow import Carried
from cp_gdn.handles import RecomputeHandle, check_handle
from cp_gdn.op import run_backward, run_forward
from cp_gdn.saved import InputGradients, Manner, Saved, Tapes
from cp_gdn.workspace import PHASES, Workspace, check_workspace


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ctx: Context,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    workspace: Workspace | None = None,
    recompute: RecomputeHandle | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over this rank's tokens, as if the whole pack were here; differentiable.

    Args:
        q, k: [1, T, H, K] or [T, H, K] in ``ctx.dtype``. v: [.., T, HV, V]. T = ``ctx.num_tokens``, may be 0.
        g: [.., T, HV], log decay (natural logarithm, <= 0). beta: [.., T, HV], after the sigmoid, 0..2. Both in fp32
            (fp64 for fp64 inputs) or in ``ctx.dtype``.
        ctx: the pack's context. Every rank calls in the same order.
        scale: factor of the queries, K ** -0.5 when None.
        initial_state: [len(ctx.entry_docs), HV, K, V], one row per document that starts here, in ``ctx.state_dtype``.
        output_final_state: return one row per document that ends here (``ctx.exit_docs``).
        use_qk_l2norm_in_kernel: normalise q and k over K inside.
        workspace: caller-held memory of this call and its backward, instead of memory of their own.
        recompute: what this layer's checkpointed forward hands to its recompute, which then sends nothing.

    Returns:
        o like v in ``ctx.dtype``, and the final states [len(ctx.exit_docs), HV, K, V] or None.

    Raises:
        ValueError, TypeError: an argument does not fit the context; nothing was sent.
        CommFailed: another rank failed; names it and its reason.
    """
    tensors = (q, k, v, g, beta, initial_state)
    with _guard(ctx, "chunk_gated_delta_rule"):
        factor, l2norm = check_choices(ctx, scale, use_qk_l2norm_in_kernel)
        handle = check_handle(recompute, ctx)
        if library.is_wanted():
            _refuse_workspace(check_workspace(workspace, ctx, PHASES[:1], document_states=True))
            o, final = library.call(ctx, tensors, factor, l2norm, final=output_final_state)
        else:
            check_call(ctx, tensors[:5], initial_state, factor, l2norm)
            keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
            phases, asked = PHASES if keeps else PHASES[:1], output_final_state or initial_state is not None
            workspace = check_workspace(workspace, ctx, phases, document_states=asked)
            _refuse_capture(ctx)
            call = _Call(
                ctx=ctx,
                scale=factor,
                l2norm=l2norm,
                keeps=keeps,
                final=output_final_state,
                workspace=workspace,
                handle=handle,
            )
            o, final = _GatedDeltaRule.apply(*tensors, call)
    return o, final if output_final_state else None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ctx: Context,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor | None, Saved]:
    """`chunk_gated_delta_rule` without autograd: also returns what `backward` takes. Same arguments, same bits."""
    with _guard(ctx, "forward"):
        factor, l2norm = check_choices(ctx, scale, use_qk_l2norm_in_kernel)
        x = check_call(ctx, (q, k, v, g, beta), initial_state, factor, l2norm)
        asked = output_final_state or initial_state is not None
        own = check_workspace(workspace, ctx, PHASES[:1], document_states=asked)
        saves = recompute.saves_tapes(ctx.options, recompute.EXPLICIT, small=ctx.kernels is not None)
        manner = Manner(tapes=bool(saves), workspace=own, final=output_final_state)
        o, final, saved = run_forward(ctx, x, initial_state, manner)
        ctx.note_call("explicit", "forward", **_explicit(ctx))
    return o.view(v.shape), final if output_final_state else None, saved


def backward(
    dout: Tensor | None,
    dfinal_state: Tensor | None,
    saved: Saved,
    *,
    ctx: Context,
    workspace: Workspace | None = None,
) -> InputGradients:
    """Gradients of a `forward`; may be called again on the same ``saved``.

    Args:
        dout: gradient of o, in o's shape and dtype, or None. dfinal_state: gradient of the final states, or None.
        saved: what `forward` returned. ctx: the same context. workspace: caller-held memory.

    Returns:
        Gradients of the inputs without a leading 1 ([T, ...]), and of the initial states if there were any.
    """
    with _guard(ctx, "backward"):
        if not isinstance(saved, Saved):
            raise TypeError(f"saved: got {type(saved).__name__}, expected what cp_gdn.forward returned")
        if dout is not None:
            shape = saved.inputs.v.shape
            check_tensor("dout", dout, ctx, token_shape(dout, *shape), (ctx.dtype,))
            dout = dout.view(shape)
        check_state("dfinal_state", dfinal_state, ctx, len(ctx.plan.exit_docs))
        asked = saved.has_initial or dfinal_state is not None
        own = check_workspace(workspace, ctx, PHASES[1:], document_states=asked)
        grads = run_backward(ctx, dout, dfinal_state, saved, own)
        ctx.note_call("explicit", "backward", **_explicit(ctx))
    return grads


def _explicit(ctx: Context) -> dict[str, Any]:
    return _named(recompute.decide(ctx.options, recompute.EXPLICIT, 0, small=ctx.kernels is not None))


def _no_tapes(ctx: Context) -> str:
    """Why a recompute cannot hand tapes on, wherever it is."""
    return recompute.CAPTURED if recompute.is_capturing(ctx.device) else ""


def _refuse_workspace(workspace: Workspace | None) -> None:
    if workspace is not None:
        raise NotImplementedError(
            "workspace: got one where a compiler or a mode sees operators only, whose memory is theirs; pass None"
        )


def _refuse_capture(ctx: Context) -> None:
    if ctx.options.reuse_recompute_tapes is True and recompute.is_capturing(ctx.device):
        raise RuntimeError(
            "Options(reuse_recompute_tapes=True): got a call while a CUDA graph is being captured, whose replay has no "
            "checkpoint to hand tapes on; use 'auto' or False"
        )


@functools.lru_cache(maxsize=64)
def _named(decision: recompute.Decision) -> dict[str, Any]:
    """A decision as `Context.note_call` takes it."""
    return asdict(decision)


def _guard(ctx: Context, what: str) -> AbstractContextManager[None]:
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx: got {type(ctx).__name__}, expected the result of cp_gdn.build_context")
    # A compiler traces what stands here once; the operator it keeps guards its own runs.
    return nullcontext() if torch.compiler.is_compiling() else ctx.comm.guard(what)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
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


class _GatedDeltaRule(torch.autograd.Function):
    """Eager entry: o like v and the final states, one node for both."""

    @staticmethod
    def forward(node: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, initial, call = args
        ctx: Context = call.ctx
        region = recompute.find_region() if call.keeps else recompute.NO_GRADIENT
        small = ctx.kernels is not None
        saves = bool(recompute.saves_tapes(ctx.options, region, small=small))
        count = call.kept_count(initial is not None, saves)
        decision = recompute.decide(ctx.options, region, count, small=small, no_tapes=_no_tapes(ctx))
        recompute.make_room(region, decision)
        carried: Carried | None = None if call.handle is None else call.handle.take("states", ctx)
        manner = Manner(
            tapes=decision.tapes != "rerun",
            output=decision.output == "written",
            carried=carried,
            workspace=call.workspace,
            final=call.final,
        )
        o, final, saved = run_forward(ctx, token_rows(tensors, call.scale, call.l2norm), initial, manner)
        if call.handle is not None and saved.states is not None:
            call.handle.fill("states", ctx, Carried(states=saved.states, owned=saved.owned))
        kept = _kept(ctx, tensors, saved, tapes=saves)
        assert sum(x is not None for x in kept) == count
        node.save_for_backward(*kept)
        node.call, node.has_initial, node.decision = call, initial is not None, decision
        node.place = recompute.leave(region, node, decision, saved.tapes if decision.tapes == "kept" else None)
        node.set_materialize_grads(False)
        exchanged = "carried by a RecomputeHandle" if carried is not None else "exchanged"
        ctx.note_call("eager", "forward", keeps=call.keeps, **_named(decision), states=exchanged)
        return o.view(tensors[2].shape), final

    @staticmethod
    def backward(node: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        call, kept = node.call, node.saved_tensors
        decision, tapes = recompute.take(node.place, node.decision)
        ctx: Context = call.ctx
        saved = _from_kept(call, kept, node.has_initial, tapes)

        def run() -> tuple[Tensor | None, ...]:
            shaped = dout if dout is None else dout.reshape(saved.inputs.v.shape)
            grads = run_backward(ctx, shaped, dfinal, saved, call.workspace)
            ctx.note_call("eager", "backward", **_named(decision))
            return *library.like_inputs(grads, kept[:5]), grads.initial_state

        with ctx.comm.guard("chunk_gated_delta_rule backward"):
            return *library.only_once(run, (*kept, dout, dfinal)), None


def _kept(ctx: Context, tensors: list[Tensor], saved: Saved, *, tapes: bool) -> list[Tensor | None]:
    """What the node saves."""
    listed = [*tensors, saved.states, saved.maps, saved.owned, saved.initial]
    if tapes and saved.tapes is not None:
        listed += ctx.tape_store.kept_tensors(saved.tapes.tape, saved.tapes.states)
    return listed


def _from_kept(call: _Call, kept: tuple[Any, ...], has_initial: bool, tapes: Tapes | None) -> Saved:
    """What `_kept` listed, with the tapes of a recompute if there are some."""
    ctx, (states, maps, owned, initial, *saved_tapes) = call.ctx, kept[5:]
    x = token_rows(kept[:5], call.scale, call.l2norm)
    if saved_tapes:
        tape, chunk_states = ctx.tape_store.from_kept(saved_tapes, x)
        tapes = Tapes(tape=tape, states=chunk_states)
    return Saved(inputs=x, states=states, maps=maps, owned=owned, has_initial=has_initial, initial=initial, tapes=tapes)
