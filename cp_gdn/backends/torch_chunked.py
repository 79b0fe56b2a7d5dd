"""The stages in torch: any device, fp64 or fp32 inside, chunks as batched products; no autograd, no loop over tokens.

Forms (docs/design.md derives them), with strict = strictly lower, D_ij = exp(g_{j+1} + .. + g_i) for i >= j:
    N  = (I + strict(K K^T) diag b)^-1 strict(K K^T)                 has neither b_i nor b_j as a factor
    R  = (I - (N o D) diag b) (V - diag(gam) K S) = U - W S,   Vn = b R
    S' = gam_C S + (e b K)^T R,   O = (gam s Q) S + P Vn,   P = s (Q K^T) o D
so no division by b is needed anywhere, forward or backward.

Legend: n segments, N chunks (a walk's m of them), H heads, HV value heads, C = 64, K and V head dims padded to a
multiple of 16.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_gdn.backends.precision import state_dtype
from cp_gdn.plan import CHUNK
from cp_gdn.reference import L2NORM_EPS, gate_floor
from cp_gdn.walks import Walk

PAD = 16
"""Head dims are padded with zeros to a multiple of this, so that every matrix starts at a 64-byte border: some BLAS
libraries pick another summation order for a matrix that does not, and batch position would decide bits."""


def padded(dim: int) -> int:
    """Head dim as it is stored and sent."""
    return -(-dim // PAD) * PAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One call's local tensors: q, k [T, H, K]; v [T, HV, V]; g, beta [T, HV]; the scale, whether to normalise q and
    k."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    l2norm: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tape:
    """What `prepare` makes of every chunk.

    Attributes:
        q, k: [N, HV, C, K], normalised if asked for, q not scaled. q_rstd, k_rstd: [N, H, C, 1] or None.
        beta, gam, e: [N, HV, C, 1]; gam_i is the decay from the chunk's start through i, e_i from after i to its end.
        decay: [N, HV, C, C], D. kk: [N, HV, C, C], strict(K K^T). nd: [N, HV, C, C], N o D.
        u, w: [N, HV, C, V] and [N, HV, C, K], R = u - w S. bound: [N, HV], log bound of the chunk's map, None without a
            cutoff.
        live: [N, HV, C, 1], where the raw gate was above its floor.
    """

    q: Tensor
    k: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    beta: Tensor
    gam: Tensor
    e: Tensor
    decay: Tensor
    kk: Tensor
    nd: Tensor
    u: Tensor
    w: Tensor
    bound: Tensor | None
    live: Tensor

    @property
    def gam_end(self) -> Tensor:
        """[N, HV, 1, 1], the decay of the whole chunk."""
        return self.gam[:, :, -1:]


def to_chunks(x: Tensor, rows: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """[T, heads, any] -> [N, heads, C, dim] in ``dtype``; what lies beyond the tensor is zero, chunk rows without a
    token too."""
    table = F.pad(x.to(dtype), (0, dim - x.shape[2], 0, 0, 0, 1))
    chunks = table.index_select(0, rows).view(-1, CHUNK, *table.shape[1:])
    return chunks.transpose(1, 2).contiguous()


def from_chunks(x: Tensor, back: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[N, heads, C, dim padded] -> [T, heads, dim] in ``dtype``."""
    rows = x[..., :dim].transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, back).to(dtype)


def _normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)
    return x * rstd, rstd


def decay_matrix(g: Tensor) -> Tensor:
    """D of [N, HV, C] gates: exp of masked segment sums, so that one reset does not round its neighbours away."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    steps = torch.where(lower.mT, g[:, :, None, :], 0.0)  # [.., j, i] = g_i for i > j
    sums = steps.cumsum(-1).exp_()
    return torch.where(lower.mT, sums, 0.0).mT.contiguous() + torch.eye(CHUNK, dtype=g.dtype, device=g.device)


def prepare(x: Inputs, rows: Tensor, cutoff: float | None) -> Tape:
    """Everything about a chunk that does not depend on a state."""
    dtype, group = state_dtype(x.q.dtype), x.v.shape[1] // x.q.shape[1]
    q, k, v = (to_chunks(t, rows, dtype, padded(t.shape[2])) for t in (x.q, x.k, x.v))
    raw, beta = (to_chunks(t[..., None], rows, dtype, 1) for t in (x.g, x.beta))
    floor = gate_floor(dtype)
    g = raw.clamp(min=floor)
    q_rstd = k_rstd = None
    if x.l2norm:
        (q, q_rstd), (k, k_rstd) = _normalise(q), _normalise(k)
    kk = (k @ k.mT).tril_(-1).repeat_interleave(group, 1)
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    decay = decay_matrix(g[..., 0])
    gam = g.cumsum(2).exp_()
    nd = torch.linalg.solve_triangular(kk * beta.mT, kk, upper=False, unitriangular=True) * decay
    gk = gam * k
    return Tape(
        q=q,
        k=k,
        q_rstd=q_rstd,
        k_rstd=k_rstd,
        beta=beta,
        gam=gam,
        e=decay[:, :, -1, :, None].contiguous(),
        decay=decay,
        kk=kk,
        nd=nd,
        u=v - nd @ (beta * v),
        w=gk - nd @ (beta * gk),
        bound=None if cutoff is None else _log_bound(g, k, beta),
        live=raw >= floor,
    )


def _log_bound(g: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """[N, HV]: log of a bound on the chunk's map (docs/design.md, decay bound), also for keys that are not unit
    length."""
    factor = (1 - beta * (k * k).sum(-1, keepdim=True)).abs().clamp(min=1.0)
    return (g + factor.log()).sum((2, 3))


def outer_bound(bound: Tensor, walk: Walk) -> tuple[Tensor, Tensor]:
    """Per chunk of a walk the log bound of what follows it in its segment, [m, HV], and of the whole segment, [n,
    HV]."""
    total = bound.new_zeros(len(walk.segments), bound.shape[1])
    chunks = bound[walk.chunks].split(walk.active)
    after = []
    for here in reversed(chunks):
        after.append(total[: len(here)].clone())
        total[: len(here)] += here
    return torch.cat(after[::-1]) if after else bound[walk.chunks], total


def steps(walk: Walk, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A walk's chunks of [N, HV, ...] tensors, one step after the other, flattened to batches of matrices."""
    heads = tensors[0].shape[1]
    sizes = [a * heads for a in walk.active]
    return zip(*(t[walk.chunks].flatten(0, 1).split(sizes) for t in tensors), strict=True)


def summarize(tape: Tape, walk: Walk, start: Tensor, cutoff: float | None) -> Tensor:
    """B of each segment of a walk (its end state from ``start``, [n, HV, K, V]); chunks that cannot reach its end are
    left out."""
    u = tape.u
    if tape.bound is not None and cutoff is not None:
        after, _ = outer_bound(tape.bound, walk)
        u = u.clone()
        u[walk.chunks] = torch.where((after > cutoff)[..., None, None], u[walk.chunks], 0.0)
    return _walk(tape, walk, u, start)


def transfer(tape: Tape, walk: Walk, cutoff: float | None) -> Tensor:
    """M of each segment of a walk, [n, HV, K, K]: the same recurrence from the identity with v = 0; zero below the
    cutoff."""
    size = tape.k.shape[-1]
    eye = torch.eye(size, dtype=tape.k.dtype, device=tape.k.device)
    maps = _walk(tape, walk, None, eye.expand(len(walk.segments), tape.k.shape[1], size, size))
    if tape.bound is None or cutoff is None:
        return maps
    _, total = outer_bound(tape.bound, walk)
    return torch.where((total > cutoff)[..., None, None], maps, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """What a walk emits per chunk, in its order: the state before it [m, HV, K, V] and R [m, HV, C, V]."""

    before: Tensor
    residual: Tensor


def _walk(
    tape: Tape, walk: Walk, u: Tensor | None, start: Tensor, emit: list[tuple[Tensor, Tensor]] | None = None
) -> Tensor:
    """S' = gam_C S + (e b K)^T (u - w S), chunk by chunk; returns the end states."""
    heads = tape.k.shape[1]
    state = start.reshape(-1, *start.shape[2:]).clone()
    write = (tape.e * tape.beta) * tape.k
    sources = (tape.w, write, tape.gam_end) if u is None else (tape.w, write, tape.gam_end, u)
    for w, key, gam_end, *u_step in steps(walk, *sources):
        s = state[: len(w)]
        residual = torch.bmm(w, s).neg_() if u is None else torch.baddbmm(u_step[0], w, s, alpha=-1)
        if emit is not None:
            emit.append((s.clone(), residual))
        s.mul_(gam_end).baddbmm_(key.mT, residual)
    return state.view(-1, heads, *start.shape[2:])


def replay(tape: Tape, walk: Walk, start: Tensor) -> tuple[States, Tensor]:
    """Walk from known entry states [n, HV, K, V]: the states of every chunk and the end states."""
    emitted: list[tuple[Tensor, Tensor]] = []
    end = _walk(tape, walk, tape.u, start, emitted)
    before, residual = stack_steps(emitted, start, tape.u)
    return States(before=before, residual=residual), end


def stack_steps(emitted: list[tuple[Tensor, Tensor]], state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What a walk emitted step by step as [m, HV, K, V] and [m, HV, C, V]; ``state`` and ``rows`` give the shapes of an
    empty walk."""
    if not emitted:
        return state[:0], rows[:0]
    states, values = (torch.cat(x).unflatten(0, (-1, rows.shape[1])) for x in zip(*emitted, strict=True))
    return states, values


def attention(tape: Tape, chunks: Tensor, scale: float) -> Tensor:
    """P = s (Q K^T) o D of some chunks, [m, HV, C, C], the diagonal included."""
    return (scale * (tape.q[chunks] @ tape.k[chunks].mT)).mul_(tape.decay[chunks])


def outputs(tape: Tape, walk: Walk, states: States, scale: float) -> Tensor:
    """O of a walk's chunks, [m, HV, C, V]."""
    chunks = walk.chunks
    queries = (scale * tape.gam[chunks]) * tape.q[chunks]
    values = tape.beta[chunks] * states.residual
    return (queries @ states.before).add_(attention(tape, chunks, scale) @ values)
