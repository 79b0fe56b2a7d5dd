"""The public op and its two entries to one pair of functions: an autograd function in eager mode, a library operator
elsewhere.

The operator (`library.py`) serves torch.compile and selective checkpointing, which see operators only; bits are the
same.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cp_gdn import library
from cp_gdn.checks import check_call, check_choices, check_state, check_tensor, token_rows, token_shape
from cp_gdn.context import Context
from cp_gdn.op import InputGradients, Saved, run_backward, run_forward


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
    workspace: None = None,
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
        workspace: caller-held memory; not there yet, leave it None.

    Returns:
        o like v in ``ctx.dtype``, and the final states [len(ctx.exit_docs), HV, K, V] or None.

    Raises:
        ValueError, TypeError: an argument does not fit the context; nothing was sent.
        CommFailed: another rank failed; names it and its reason.
    """
    tensors = (q, k, v, g, beta, initial_state)
    with _guard(ctx, "chunk_gated_delta_rule"):
        factor, l2norm = check_choices(ctx, scale, use_qk_l2norm_in_kernel, workspace)
        if library.is_wanted():
            o, final = library.call(ctx, tensors, factor, l2norm)
        else:
            check_call(ctx, tensors[:5], initial_state, factor, l2norm)
            o, final = _GatedDeltaRule.apply(*tensors, ctx, factor, l2norm)
            keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
            ctx.note_call("eager", "forward", keeps=keeps)
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
    workspace: None = None,
) -> tuple[Tensor, Tensor | None, Saved]:
    """`chunk_gated_delta_rule` without autograd: also returns what `backward` takes. Same arguments, same bits."""
    with _guard(ctx, "forward"):
        factor, l2norm = check_choices(ctx, scale, use_qk_l2norm_in_kernel, workspace)
        x = check_call(ctx, (q, k, v, g, beta), initial_state, factor, l2norm)
        o, final, saved = run_forward(ctx, x, initial_state)
        ctx.note_call("explicit", "forward")
    return o.view(v.shape), final if output_final_state else None, saved


def backward(dout: Tensor | None, dfinal_state: Tensor | None, saved: Saved, *, ctx: Context) -> InputGradients:
    """Gradients of a `forward`; may be called again on the same ``saved``.

    Args:
        dout: gradient of o, in o's shape and dtype, or None. dfinal_state: gradient of the final states, or None.
        saved: what `forward` returned. ctx: the same context.

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
        check_state("dfinal_state", dfinal_state, ctx, len(ctx.exit_docs))
        grads = run_backward(ctx, dout, dfinal_state, saved)
        ctx.note_call("explicit", "backward")
    return grads


def _guard(ctx: Context, what: str) -> AbstractContextManager[None]:
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx: got {type(ctx).__name__}, expected the result of cp_gdn.build_context")
    # A compiler traces what stands here once; the operator it keeps guards its own runs.
    return nullcontext() if torch.compiler.is_compiling() else ctx.comm.guard(what)


class _GatedDeltaRule(torch.autograd.Function):
    """Eager entry: o like v and the final states, one node for both."""

    @staticmethod
    def forward(node: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, initial, ctx, scale, l2norm = args
        o, final, saved = run_forward(ctx, token_rows(tensors, scale, l2norm), initial)
        node.save_for_backward(*tensors, saved.states, saved.maps, saved.owned)
        node.ctx, node.scale, node.l2norm, node.has_initial = ctx, scale, l2norm, initial is not None
        node.set_materialize_grads(False)
        return o.view(tensors[2].shape), final

    @staticmethod
    def backward(node: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        *tensors, states, maps, owned = kept = node.saved_tensors
        ctx: Context = node.ctx
        x = token_rows(tensors, node.scale, node.l2norm)
        saved = Saved(inputs=x, states=states, maps=maps, owned=owned, has_initial=node.has_initial)

        def run() -> tuple[Tensor | None, ...]:
            grads = run_backward(ctx, dout if dout is None else dout.reshape(x.v.shape), dfinal, saved)
            ctx.note_call("eager", "backward")
            return *library.like_inputs(grads, tensors), grads.initial_state

        with ctx.comm.guard("chunk_gated_delta_rule backward"):
            return *library.only_once(run, (*kept, dout, dfinal)), None, None, None
