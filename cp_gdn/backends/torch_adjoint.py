"""The adjoint stages in torch, each the mirror of a stage in `torch_chunked`, and the gradients of a chunk.

With Z = P^T dO and Y0 = (gam s Q)^T dO the adjoint walk is
    dVn = Z + e K dS',   dS = gam_C dS' + Y0 - (b W)^T dVn
and everything else is parallel over chunks:
    Y = dVn - (N o D)^T (b dVn),   dV = b Y,   db = Y . R,   dU = -gam dV
    dPg = tril(dO Vn^T),   dN = -strict(D o (dV Vn^T))
The raw gate's gradient is written as what flows across time t, so that nothing large cancels:
    dg_t = sum_{i>=t} (q . dQ_state + k . dK_read)_i + gam_C <S, dS'>
         + sum_{j<t} (k . dK_write)_j + sum_{j<t<=i} (dPg o P + dN o K K^T)_ij
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.torch_chunked import (
    Inputs,
    States,
    Tape,
    attention,
    from_chunks,
    outer_bound,
    stack_steps,
    steps,
    to_chunks,
)
from cp_gdn.plan import CHUNK
from cp_gdn.walks import Walk


@dataclass(frozen=True, kw_only=True, slots=True)
class AdjointTape:
    """What `adjoint_prepare` makes of every chunk: dO and Z [N, HV, C, V], Y0 [N, HV, K, V]."""

    dout: Tensor
    to_values: Tensor
    to_state: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjoints:
    """What an adjoint walk emits per chunk, in its order: the adjoint after it [m, HV, K, V] and dVn [m, HV, C, V]."""

    after: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Gradients of the inputs, in their shapes and dtypes."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def adjoint_prepare(tape: Tape, dout: Tensor, rows: Tensor, scale: float) -> AdjointTape:
    """Everything about a chunk's adjoint that does not depend on an adjoint state."""
    do = to_chunks(dout, rows, tape.k.dtype, tape.u.shape[-1])
    everything = torch.arange(len(do), device=do.device)
    to_values = attention(tape, everything, scale).mT @ do
    return AdjointTape(dout=do, to_values=to_values, to_state=((scale * tape.gam) * tape.q).mT @ do)


def adjoint_summarize(tape: Tape, adjoint: AdjointTape, walk: Walk, start: Tensor, cutoff: float | None) -> Tensor:
    """Bt of each segment of a reversed walk (its entry adjoint from ``start``, [n, HV, K, V])."""
    to_values, to_state = adjoint.to_values, adjoint.to_state
    if tape.bound is not None and cutoff is not None:
        after, _ = outer_bound(tape.bound, walk)
        keep = (after > cutoff)[..., None, None]
        to_values, to_state = to_values.clone(), to_state.clone()
        to_values[walk.chunks] = torch.where(keep, to_values[walk.chunks], 0.0)
        to_state[walk.chunks] = torch.where(keep, to_state[walk.chunks], 0.0)
    return _adjoint_walk(tape, walk, (to_values, to_state), start)


def _adjoint_walk(
    tape: Tape,
    walk: Walk,
    sources: tuple[Tensor, Tensor],
    start: Tensor,
    emit: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """dS = gam_C dS' + Y0 - (b W)^T (Z + e K dS'), chunk by chunk from the last; returns the entry adjoints."""
    heads = tape.k.shape[1]
    state = start.reshape(-1, *start.shape[2:]).clone()
    tensors = (tape.beta * tape.w, tape.e * tape.k, tape.gam_end, *sources)
    for w, key, gam_end, to_values, to_state in steps(walk, *tensors):
        s = state[: len(w)]
        values = torch.baddbmm(to_values, key, s)
        if emit is not None:
            emit.append((s.clone(), values))
        s.mul_(gam_end).add_(to_state).baddbmm_(w.mT, values, alpha=-1)
    return state.view(-1, heads, *start.shape[2:])


def adjoint_replay(tape: Tape, adjoint: AdjointTape, walk: Walk, start: Tensor) -> tuple[Adjoints, Tensor]:
    """Reversed walk from known exit adjoints [n, HV, K, V]: the adjoints of every chunk and the entry adjoints."""
    emitted: list[tuple[Tensor, Tensor]] = []
    end = _adjoint_walk(tape, walk, (adjoint.to_values, adjoint.to_state), start, emitted)
    after, values = stack_steps(emitted, start, tape.u)
    return Adjoints(after=after, values=values), end


def gradients(
    tape: Tape, adjoint: AdjointTape, states: States, adjoints: Adjoints, x: Inputs, back: Tensor
) -> Gradients:
    """Gradients of all chunks; every tensor in the order of the tape's chunks."""
    weighted = tape.beta * adjoints.values
    y = adjoints.values - tape.nd.mT @ weighted
    dv = tape.beta * y
    dbeta = (y * states.residual).sum(-1, keepdim=True)
    dq, dk, dg = _query_key_gate(tape, adjoint, states, adjoints, dv, x.scale)
    group = x.v.shape[1] // x.q.shape[1]
    dq, dk = _sum_groups(dq, group), _sum_groups(dk, group)
    if x.l2norm:
        dq, dk = (
            _norm_backward(dq, tape.q[:, ::group], tape.q_rstd),
            _norm_backward(dk, tape.k[:, ::group], tape.k_rstd),
        )
    dg = torch.where(tape.live, dg, 0.0)
    return Gradients(
        q=from_chunks(dq, back, x.q.shape[2], x.q.dtype),
        k=from_chunks(dk, back, x.k.shape[2], x.k.dtype),
        v=from_chunks(dv, back, x.v.shape[2], x.v.dtype),
        g=from_chunks(dg, back, 1, x.g.dtype)[..., 0],
        beta=from_chunks(dbeta, back, 1, x.beta.dtype)[..., 0],
    )


def _query_key_gate(
    tape: Tape, adjoint: AdjointTape, states: States, adjoints: Adjoints, dv: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk per value head and the gradient of the raw gate."""
    values = tape.beta * states.residual
    products = adjoint.dout @ values.mT
    inverse = (dv @ values.mT).mul_(tape.decay).tril_(-1).neg_()
    scores = products.mul_(tape.decay).tril_()
    strict = (tape.q @ tape.k.mT).mul_(scores).mul_(scale).tril_(-1).addcmul_(inverse, tape.kk)
    scores.mul_(scale)
    dq_state = (scale * tape.gam) * (adjoint.dout @ states.before.mT)
    dk_write = tape.e * (values @ adjoints.after.mT)
    dk_read = (-tape.gam * dv) @ states.before.mT
    dg = _gate(tape, states, adjoints, strict, ((tape.q * dq_state + tape.k * dk_read), tape.k * dk_write))
    dq = dq_state.add_(scores @ tape.k)
    dk = dk_write.add_(scores.mT @ tape.q).add_(dk_read).add_((inverse + inverse.mT) @ tape.k)
    return dq, dk, dg


def _gate(tape: Tape, states: States, adjoints: Adjoints, strict: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """[N, HV, C, 1]: per token the sum of all that flows across it: chunk state, rows read and written, pairs."""
    upper = torch.ones(CHUNK, CHUNK, dtype=strict.dtype, device=strict.device).triu()
    across = (upper @ strict).tril_(-1).sum(-1, keepdim=True)  # sum over i >= t, then over j < t
    read, written = (x.sum(-1, keepdim=True) for x in rows)
    earlier = torch.cat([torch.zeros_like(written[:, :, :1]), written[:, :, :-1].cumsum(2)], 2)
    # two sums, never one over all dims: a library may split a lone output over threads
    carried = tape.gam_end * (states.before * adjoints.after).sum(3, keepdim=True).sum(2, keepdim=True)
    return across + read.flip(2).cumsum(2).flip(2) + earlier + carried


def _sum_groups(x: Tensor, group: int) -> Tensor:
    """Sum over the value heads of each query/key head, in head order."""
    parts = x.unflatten(1, (-1, group)).unbind(2)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _norm_backward(dy: Tensor, y: Tensor, rstd: Tensor | None) -> Tensor:
    """dx of y = x rstd, linear in dy."""
    assert rstd is not None
    return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))
