"""The public op and its two entries to one pair of functions: an autograd function in eager mode, a library operator
elsewhere.

The operator (`library.py`) serves torch.compile and selective checkpointing, which see operators only; bits are the
same.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cp_gdn import eager, library, recompute
from cp_gdn.checks import (
    check_call,
    check_choices,
    check_state,
    check_tensor,
    like_rows,
    token_rows,
    token_shape,
)
from cp_gdn.context import Context
from cp_gdn.handles import RecomputeHandle, check_handle
from cp_gdn.op import run_backward, run_forward
from cp_gdn.saved import InputGradients, Manner, Saved
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
            check_call(ctx, tensors[:5], initial_state)
            keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
            phases, asked = PHASES if keeps else PHASES[:1], output_final_state or initial_state is not None
            workspace = check_workspace(workspace, ctx, phases, document_states=asked)
            _refuse_capture(ctx)
            call = eager.Call(
                ctx=ctx,
                scale=factor,
                l2norm=l2norm,
                keeps=keeps,
                final=output_final_state,
                workspace=workspace,
                handle=handle,
            )
            o, final = eager.run(call, tensors[:5], initial_state)
    return o, final


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
        check_call(ctx, (q, k, v, g, beta), initial_state)
        asked = output_final_state or initial_state is not None
        own = check_workspace(workspace, ctx, PHASES[:1], document_states=asked)
        decision = _explicit(ctx)
        manner = Manner(tapes=decision.tapes == "saved", workspace=own, final=output_final_state)
        o, final, saved = run_forward(ctx, token_rows((q, k, v, g, beta), factor, l2norm), initial_state, manner)
        ctx.note_call("explicit", "forward", **recompute.named(decision))
    return like_rows(o, v), final if output_final_state else None, saved


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
        ctx.note_call("explicit", "backward", **recompute.named(_explicit(ctx)))
    return grads


def _explicit(ctx: Context) -> recompute.Decision:
    return recompute.decide_outside(ctx.options, recompute.EXPLICIT, small=ctx.kernels is not None)


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


def _guard(ctx: Context, what: str) -> AbstractContextManager[None]:
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx: got {type(ctx).__name__}, expected the result of cp_gdn.build_context")
    # A compiler traces what stands here once; the operator it keeps guards its own runs.
    return nullcontext() if torch.compiler.is_compiling() else ctx.comm.guard(what)
