"""The public op and its two entries to one pair of functions: an autograd function in eager mode, a library operator
elsewhere.

The operator (`library.py`) serves torch.compile and selective checkpointing, which see operators only; bits are the
same.
"""

from typing import Any

import torch
from torch import Tensor

from cp_gdn import library
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.checks import check_inputs, check_state, check_tensor
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
    with ctx.comm.guard("chunk_gated_delta_rule"):
        x = _inputs(ctx, (q, k, v, g, beta), scale, use_qk_l2norm_in_kernel)
        check_state("initial_state", initial_state, ctx, len(ctx.entry_docs))
        _refuse_workspace(workspace)
        tensors = (x.q, x.k, x.v, x.g, x.beta, initial_state)
        if library.is_wanted():
            o, final = library.call(ctx, x, initial_state)
        else:
            o, final = _GatedDeltaRule.apply(*tensors, ctx, x.scale, x.l2norm)
    return o.view(v.shape), final if output_final_state else None


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
    with ctx.comm.guard("forward"):
        x = _inputs(ctx, (q, k, v, g, beta), scale, use_qk_l2norm_in_kernel)
        check_state("initial_state", initial_state, ctx, len(ctx.entry_docs))
        _refuse_workspace(workspace)
        o, final, saved = run_forward(ctx, x, initial_state)
    return o.view(v.shape), final if output_final_state else None, saved


def backward(dout: Tensor | None, dfinal_state: Tensor | None, saved: Saved, *, ctx: Context) -> InputGradients:
    """Gradients of a `forward`; may be called again on the same ``saved``.

    Args:
        dout: gradient of o, in o's shape and dtype, or None. dfinal_state: gradient of the final states, or None.
        saved: what `forward` returned. ctx: the same context.

    Returns:
        Gradients of the inputs without a leading 1 ([T, ...]), and of the initial states if there were any.
    """
    with ctx.comm.guard("backward"):
        if dout is not None:
            dout = dout[0] if dout.dim() == saved.inputs.v.dim() + 1 else dout
            check_tensor("dout", dout, ctx, saved.inputs.v.shape, (ctx.dtype,))
        check_state("dfinal_state", dfinal_state, ctx, len(ctx.exit_docs))
        return run_backward(ctx, dout, dfinal_state, saved)


def _inputs(ctx: Context, tensors: tuple[Tensor, ...], scale: float | None, l2norm: bool) -> Inputs:
    """Checked inputs without the leading 1."""
    check_inputs(ctx, *tensors)
    batched = tensors[0].dim() == 4
    q, k, v, g, beta = (t[0] for t in tensors) if batched else tensors
    scale = ctx.head_dims[0] ** -0.5 if scale is None else float(scale)
    return Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, l2norm=bool(l2norm))


def _refuse_workspace(workspace: object) -> None:
    if workspace is not None:
        raise NotImplementedError("workspace: caller-held workspaces are not there yet; leave workspace=None")


class _GatedDeltaRule(torch.autograd.Function):
    """Eager entry: o [T, HV, V] and the final states, one node for both."""

    @staticmethod
    def forward(node: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, initial, ctx, scale, l2norm = args
        q, k, v, g, beta = tensors
        x = Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, l2norm=l2norm)
        o, final, saved = run_forward(ctx, x, initial)
        node.save_for_backward(*tensors, saved.states, saved.maps, saved.owned)
        node.ctx, node.scale, node.l2norm, node.has_initial = ctx, scale, l2norm, initial is not None
        node.set_materialize_grads(False)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(node: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, states, maps, owned = node.saved_tensors
        x = Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=node.scale, l2norm=node.l2norm)
        saved = Saved(inputs=x, states=states, maps=maps, owned=owned, has_initial=node.has_initial)
        with node.ctx.comm.guard("chunk_gated_delta_rule backward"):
            grads = run_backward(node.ctx, dout, dfinal, saved)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state, None, None, None
