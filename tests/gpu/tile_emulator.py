"""The kernels' arithmetic in fp64, rounded to bf16 exactly where they round: what an error budget is computed from.

Rounded: operands of products (states, adjoints, T, P, W, Vn, dV, dP, N'), outputs of 16 bits. Not rounded:
accumulators, gates, scans, Q K^T and K K^T. A head of its own per value head; documents one after the other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
Round = Callable[[Tensor], Tensor]


def rounding(seed: int) -> Round:
    """To bf16, of values with noise of an eighth of a bf16 rounding: an error is one draw of many, and where nothing
    decays or a gradient cancels the draws differ by more than a tenth."""
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def to_bf16(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=gen, device=x.device, dtype=x.dtype)
        return (x * (1 + 2.0**-12 * noise)).bfloat16().double()

    return to_bf16


DRAWS = 8


def drawn_errors(
    x: dict[str, Tensor], lengths: list[int], want: dict[str, Tensor], names: Iterable[str]
) -> dict[str, Tensor]:
    """Per head the largest error of `DRAWS` emulations against ``want``."""
    drawn = [emulate(x, lengths, seed) for seed in range(DRAWS)]
    return {name: torch.stack([head_errors(each[name], want[name]) for each in drawn]).amax(0) for name in names}


def head_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of each head (dim 1)."""
    got, want = (t.double().transpose(0, 1).flatten(1) for t in (got, want))
    return (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk, all heads: rows [HV, c, 128], gates [HV, c], squares [HV, c, c]; ``before``: its first state."""

    rows: slice
    q: Tensor
    k: Tensor
    gam: Tensor
    e: Tensor
    decay: Tensor
    t: Tensor
    p: Tensor
    before: Tensor
    vn: Tensor


def emulate(x: dict[str, Tensor], lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """o, end and the gradients of a pack whose documents start from ``x["start"]``, in the inputs' layouts."""
    bf16, dout, dfinal = rounding(seed), x["dout"].double(), x["dend"]
    group = x["v"].shape[1] // x["q"].shape[1]
    wide = {name: x[name].double().transpose(0, 1) for name in ("q", "k", "v", "g", "beta")}
    wide["q"], wide["k"] = (wide[name].repeat_interleave(group, 0) for name in ("q", "k"))
    wide["beta"] = wide["beta"].clamp(min=2.0**-40)
    grads = {name: torch.zeros_like(t) for name, t in wide.items()} | {"o": torch.zeros_like(wide["v"])}
    ends, starts, first = [], [], 0
    for doc, length in enumerate(lengths):
        state, chunks = x["start"][doc].double(), []
        for at in range(first, first + length, CHUNK):
            state, chunk = forward_chunk(wide, slice(at, min(at + CHUNK, first + length)), state, grads["o"], bf16)
            chunks.append(chunk)
        ends.append(state)
        adjoint = dfinal[doc].double()
        for chunk in reversed(chunks):
            adjoint = backward_chunk(wide, chunk, dout[chunk.rows].transpose(0, 1), adjoint, grads, bf16)
        starts.append(adjoint)
        first += length
    found = {name: t.transpose(0, 1) for name, t in grads.items()}
    for name in ("q", "k"):
        found[name] = found[name].unflatten(1, (-1, group)).sum(2)
    renamed = {"o": bf16(found["o"]), "end": torch.stack(ends), "dstart": torch.stack(starts)}
    renamed |= {f"d{name}": bf16(found[name]) for name in ("q", "k", "v")}
    return renamed | {"dg": found["g"], "dbeta": found["beta"]}


def forward_chunk(x: dict[str, Tensor], rows: slice, state: Tensor, out: Tensor, bf16: Round) -> tuple[Tensor, Chunk]:
    q, k, v, beta = (x[name][:, rows] for name in ("q", "k", "v", "beta"))
    scan, scale = x["g"][:, rows].clamp(min=-104).cumsum(1), q.shape[-1] ** -0.5
    gam, e = scan.exp(), (scan[:, -1:] - scan).exp()
    decay = (scan[:, :, None] - scan[:, None]).clamp(max=0).exp().tril()
    kk = (k @ k.mT).tril(-1)
    n = torch.linalg.solve_triangular(torch.eye(kk.shape[-1], device=kk.device) + kk * beta[:, None], kk, upper=False)
    t = bf16(torch.diag_embed(beta) - beta[..., None] * n * decay * beta[:, None])
    p = bf16(scale * (q @ k.mT) * decay)
    stored = bf16(state)
    vn = t @ bf16(v - gam[..., None] * (k @ stored))
    out[:, rows] = scale * gam[..., None] * (q @ stored) + p @ bf16(vn)
    after = gam[:, -1, None, None] * state + k.mT @ bf16(e[..., None] * vn)
    return after, Chunk(rows=rows, q=q, k=k, gam=gam, e=e, decay=decay, t=t, p=p, before=stored, vn=bf16(vn))


def backward_chunk(
    x: dict[str, Tensor], c: Chunk, dout: Tensor, adjoint: Tensor, grads: dict[str, Tensor], bf16: Round
) -> Tensor:
    scale, gam, e, beta = c.q.shape[-1] ** -0.5, c.gam[..., None], c.e[..., None], x["beta"][:, c.rows]
    stored = bf16(adjoint)
    dvn = c.p.mT @ dout + e * (c.k @ stored)
    dv = c.t.mT @ bf16(dvn)
    before = c.gam[:, -1, None, None] * adjoint + c.q.mT @ bf16(scale * gam * dout) - c.k.mT @ bf16(gam * dv)
    dv = bf16(dv)
    dp, n = scale * (dout @ c.vn.mT).tril() * c.decay, -((dv @ c.vn.mT) * c.decay).tril(-1)
    pairs = (dp * (c.q @ c.k.mT)).tril(-1) + n * (c.k @ c.k.mT)
    read_q, read_k, write_k = scale * gam * (dout @ c.before.mT), -gam * (dv @ c.before.mT), e * (c.vn @ stored.mT)
    dp, n = bf16(dp), bf16(n)
    grads["q"][:, c.rows] = read_q + dp @ c.k
    grads["k"][:, c.rows] = write_k + read_k + dp.mT @ c.q + (n + n.mT) @ c.k
    grads["v"][:, c.rows] = dv
    grads["beta"][:, c.rows] = (dv * c.vn).sum(-1) / beta**2
    read, written = (c.q * read_q + c.k * read_k).sum(-1), (c.k * write_k).sum(-1)
    upper = torch.ones_like(pairs).triu()
    crossing = (upper @ pairs).tril(-1).sum(-1)
    earlier = torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1].cumsum(1)], 1)
    carried = c.gam[:, -1] * (c.before * stored).sum((1, 2))
    dg = crossing + read.flip(1).cumsum(1).flip(1) + earlier + carried[:, None]
    grads["g"][:, c.rows] = torch.where(x["g"][:, c.rows] >= -104, dg, 0.0)
    return before
