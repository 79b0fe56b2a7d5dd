"""The specification: Gated DeltaNet token by token, in the dtype of its inputs. Everything else in this package follows
it.

One document after the other, one token after the other, differentiable by autograd; tests call it in fp64. Shapes: T
tokens, H query/key heads, HV = G * H value heads (value head h reads q/k head h // G), K and V head dims, D documents.
"""

from itertools import pairwise

import torch
from torch import Tensor

L2NORM_EPS = 1e-6
"""Added to the sum of squares inside the inverse square root, as the peers and Hugging Face models do."""


def gate_floor(dtype: torch.dtype) -> float:
    """Smallest raw log gate that is told apart from a full reset: exp of it is exactly 0 in ``dtype``."""
    return -746.0 if dtype == torch.float64 else -104.0


def l2norm(x: Tensor) -> Tensor:
    """x / |x| over the last dim, with the epsilon inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def gated_delta_step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t = a S + k beta (v - (a S)^T k)^T with a = exp(g).

    Args:
        state: [HV, K, V], the state before the token.
        k, v: [HV, K] and [HV, V], the token's key and value.
        g, beta: [HV], the log decay (natural logarithm, <= 0) and the write strength (0..2).

    Returns:
        [HV, K, V], the state after the token.
    """
    state = g.clamp(min=gate_floor(g.dtype)).exp()[:, None, None] * state
    error = v - torch.einsum("hkv,hk->hv", state, k)
    return state + torch.einsum("hk,hv->hkv", k, beta[:, None] * error)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    doc_bounds: list[int],
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states of a pack of documents.

    Args:
        q, k: [T, H, K]; v: [T, HV, V]; g, beta: [T, HV].
        doc_bounds: D + 1 ints from 0 to T; document d owns tokens doc_bounds[d]:doc_bounds[d + 1].
        scale: factor of the queries, K ** -0.5 when None.
        initial_state: [D, HV, K, V], zeros when None.
        use_qk_l2norm: normalise q and k over K first.

    Returns:
        o [T, HV, V] and the final states [D, HV, K, V]; an empty document returns its initial state.
    """
    group = v.shape[1] // q.shape[1]
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs, finals = [], []
    for d, (start, end) in enumerate(pairwise(doc_bounds)):
        shape = (v.shape[1], q.shape[2], v.shape[2])
        state = v.new_zeros(shape) if initial_state is None else initial_state[d]
        for t in range(start, end):
            state = gated_delta_step(state, k[t], v[t], g[t], beta[t])
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[t]))
        finals.append(state)
    return torch.stack(outputs) if outputs else torch.zeros_like(v), torch.stack(finals)
