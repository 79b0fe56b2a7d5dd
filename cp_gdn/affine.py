"""The algebra of summaries: the only place that multiplies maps. S_out = M S_in + B; the adjoint dS_in = M^T dS_out +
Bt.

Order and precision, stated once: one matrix product per map and state, in the dtype of the states (fp32, or fp64 for
fp64 inputs), never TF32; on the kernels in the fixed order of ``kernels/fold.cu``, one launch per list of hops. Every
product has the same shape whatever the number of heads, documents or segments in the call, so that a library that picks
its algorithm by batch size cannot change bits; entry states are always reached hop by hop from the chain's start.
"""

import torch
from torch import Tensor

from cp_gdn.backends.hopper_fold import fold
from cp_gdn.backends.hopper_hops import KernelHops
from cp_gdn.hops import Hops


def apply(maps: Tensor, states: Tensor, *, adjoint: bool) -> Tensor:
    """M S (or M^T S) per row and head: maps [n, HV, K, K], states [n, HV, K, X] -> [n, HV, K, X]."""
    out = torch.empty_like(states)
    flat = zip(maps.flatten(0, 1), states.flatten(0, 1), out.flatten(0, 1), strict=True)
    for m, s, product in flat:
        torch.mm(m.mT if adjoint else m, s, out=product)
    return out


def run(
    hops: Hops,
    states: Tensor,
    maps: Tensor,
    offsets: Tensor | None,
    *,
    adjoint: bool = False,
    dropped: Tensor | None = None,
) -> None:
    """Take hops step after step, in place: states[dst] = M[map_row] states[src] + offsets[offset_row].

    Args:
        hops: uploaded hops; where chains start the offset alone is the state.
        states: [n, HV, K, X], read at src and written at dst.
        maps: [m, HV, K, K]. offsets: [b, HV, K, X], or None for products of maps alone.
        dropped: [m, HV] int32, not 0 where a map is known to be zero, so that a kernel need not read it; None if that
            is not known. With ``offsets`` None the flags of the products are written.
    """
    if isinstance(hops, KernelHops):
        fold(hops, states, maps, offsets, adjoint=adjoint, dropped=dropped)
        return
    pieces = hops.table.split([count for count, _ in hops.steps], dim=1)
    for (_, starts), piece in zip(hops.steps, pieces, strict=True):
        dst, src, offset_row, map_row = piece.unbind()
        if starts:
            assert offsets is not None
            states[dst] = offsets[offset_row]
            continue
        out = apply(maps[map_row], states[src], adjoint=adjoint)
        states[dst] = out if offsets is None else out.add_(offsets[offset_row])
