"""The kernels' arithmetic in fp64, rounded to bf16 exactly where they round: what an error budget is computed from.

Rounded: operands of products (states, adjoints, T, P, W, Vn, dV, dP, N'), outputs of 16 bits, and N, which is fp16
before it is made T. Not rounded: accumulators, gates, scans, Q K^T and K K^T. A head of its own per value head;
documents one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
Round = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def noisy(seed: int, device: torch.device | str = "cuda", bits: int = 8) -> Round:
    """To ``bits`` significant bits (8: bf16), of values with noise of a sixteenth of a rounding's step: every call
    rounds another way."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def rounded(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=gen, device=x.device, dtype=x.dtype)
        x = x * (1 + 2.0 ** (-bits - 4) * noise)
        if bits == 8:
            return x.bfloat16().double()
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)

    return rounded


@dataclass(frozen=True, kw_only=True)
class Roundings:
    """Of token rows, of N, of T made of it, of other squares of a chunk (P, dP, N'), of states as operands, and of
    states from chunk to chunk, which no kernel rounds. All exact: `emulate` is an fp64 oracle."""

    rows: Round
    inverse: Round
    t: Round
    squares: Round
    states: Round
    carried: Round = exact

    @classmethod
    def drawn(cls, seed: int, device: torch.device | str = "cuda") -> "Roundings":
        """Of the kernels, one draw.

        T is rounded twice, to 11 bits and to 8. Where beta and the decay are powers of two, an eighth of the first
        results lie halfway between two of the second ones and go to the even one: noise must come before the first.
        """
        one = noisy(seed, device)
        return cls(rows=one, inverse=noisy(seed, device, bits=11), t=bf16, squares=one, states=one)


EXACT = Roundings(rows=exact, inverse=exact, t=exact, squares=exact, states=exact)
FLOORS = dict.fromkeys(("o", "end", "dq", "dk", "dv", "dstart"), 5e-3) | {"dg": 8e-3, "dbeta": 8e-3}
"""Relative L2 per head against fp64 that is always allowed: bf16 operands cost 2.4e-3 to 4.9e-3."""
FACTOR = 1.15
"""By how much a kernel's error may exceed the largest that the emulator draws."""
DRAWS, DRAWN_NUMBERS = 128, 3 << 29
"""Emulations of a case, as many at once as hold so many numbers of 8 bytes."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Errors of the emulator, [draws, heads]: the error of a kernel is one more draw.

    An error is no constant of a case. Where a gradient cancels (dg, dbeta) one rounded number, <S, dS'> say, may decide
    a whole head: the error is then the size of one Gaussian, and among eight draws the largest is passed by the ninth
    every ninth time. So draws count relative to their head's usual error, the root of the mean square, in which heads
    of one case (the same gates, keys and beta) are exchangeable, and two things are compared with `FACTOR` x the
    largest of all draws: every head's relative error, and its root mean square over heads. The first refuses a correct
    kernel, even with one Gaussian per head, in 1 of 300 comparisons of 6 heads with 128 draws. The second is sharp and
    has no floor: it varies by 1 % or less for o, states, dq, dk and dv, and sees what all heads share.
    """

    errors: Tensor

    def fault(self, found: Tensor, floor: float) -> str:
        """Why a kernel's errors [heads] are none of these; empty if they may be. No head is refused alone for an error
        of at most ``floor``."""
        usual = self.errors.square().mean(0).sqrt().clamp(min=floor / 10)
        drawn, own = self.errors / usual, found / usual
        heads, typical = drawn.amax(), drawn.square().mean(1).sqrt().amax()
        if not bool((found <= (FACTOR * heads * usual).clamp(min=floor)).all()):
            budget = (FACTOR * heads * usual).clamp(min=floor)
            return f"heads: {_short(found)}, budget {_short(budget)}"
        if not float(own.square().mean().sqrt()) <= FACTOR * max(1.0, float(typical)):
            return f"all heads: {_short(found)}, usual {_short(usual)}, their ratio at most {FACTOR * typical:.3f}"
        return ""


def _short(x: Tensor) -> str:
    return " ".join(f"{1e3 * value:.2f}" for value in x.tolist()) + " e-3"


def drawn_errors(
    x: dict[str, Tensor], lengths: Sequence[int], want: dict[str, Tensor], names: Iterable[str]
) -> dict[str, Drawn]:
    """Of emulations against ``want``, several draws at once as heads of their own."""
    held = 16 * x["v"].numel() + 4 * x["start"].numel()
    at_once = max(1, min(DRAWS, DRAWN_NUMBERS // max(1, held)))
    many = {name: x[name].repeat(1, at_once, *(1,) * (x[name].dim() - 2)) for name in READ}
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for seed in range(-(-DRAWS // at_once)):
        drawn = emulate(many, lengths, Roundings.drawn(seed, x["v"].device))
        for name, errors in found.items():
            each = drawn[name].unflatten(1, (at_once, want[name].shape[1])).unbind(1)
            errors += [head_errors(one, want[name]) for one in each]
    return {name: Drawn(errors=torch.stack(errors)) for name, errors in found.items()}


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


READ = ("q", "k", "v", "g", "beta", "start", "dout", "dend")


def emulate(x: dict[str, Tensor], lengths: Sequence[int], to: Roundings) -> dict[str, Tensor]:
    """o, end and the gradients of a pack whose documents start from ``x["start"]``, in the inputs' layouts."""
    dout, dfinal = x["dout"].double(), x["dend"]
    group = x["v"].shape[1] // x["q"].shape[1]
    wide = {name: x[name].double().transpose(0, 1) for name in ("q", "k", "v", "g", "beta")}
    wide["q"], wide["k"] = (wide[name].repeat_interleave(group, 0) for name in ("q", "k"))
    wide["beta"] = wide["beta"].clamp(min=2.0**-40)
    grads = {name: torch.zeros_like(t) for name, t in wide.items()} | {"o": torch.zeros_like(wide["v"])}
    ends, starts, first = [], [], 0
    for doc, length in enumerate(lengths):
        state, chunks = x["start"][doc].double(), []
        for at in range(first, first + length, CHUNK):
            state, chunk = forward_chunk(wide, slice(at, min(at + CHUNK, first + length)), state, grads["o"], to)
            chunks.append(chunk)
        ends.append(state)
        adjoint = dfinal[doc].double()
        for chunk in reversed(chunks):
            adjoint = backward_chunk(wide, chunk, dout[chunk.rows].transpose(0, 1), adjoint, grads, to)
        starts.append(adjoint)
        first += length
    found = {name: t.transpose(0, 1) for name, t in grads.items()}
    for name in ("q", "k"):
        found[name] = found[name].unflatten(1, (-1, group)).sum(2)
    renamed = {"o": to.rows(found["o"]), "end": torch.stack(ends), "dstart": torch.stack(starts)}
    renamed |= {f"d{name}": to.rows(found[name]) for name in ("q", "k", "v")}
    return renamed | {"dg": found["g"], "dbeta": found["beta"]}


def forward_chunk(x: dict[str, Tensor], rows: slice, state: Tensor, out: Tensor, to: Roundings) -> tuple[Tensor, Chunk]:
    q, k, v, beta = (x[name][:, rows] for name in ("q", "k", "v", "beta"))
    scan, scale = x["g"][:, rows].clamp(min=-104).cumsum(1), q.shape[-1] ** -0.5
    gam, e = scan.exp(), (scan[:, -1:] - scan).exp()
    decay = (scan[:, :, None] - scan[:, None]).clamp(max=0).exp().tril()
    kk = (k @ k.mT).tril(-1)
    n = torch.linalg.solve_triangular(torch.eye(kk.shape[-1], device=kk.device) + kk * beta[:, None], kk, upper=False)
    t = to.t(torch.diag_embed(beta) - beta[..., None] * to.inverse(n) * decay * beta[:, None])
    p = to.squares(scale * (q @ k.mT) * decay)
    stored = to.states(state)
    vn = t @ to.rows(v - gam[..., None] * (k @ stored))
    stored_vn = to.rows(vn)
    out[:, rows] = scale * gam[..., None] * (q @ stored) + p @ stored_vn
    after = gam[:, -1, None, None] * state + k.mT @ to.rows(e[..., None] * vn)
    return to.carried(after), Chunk(
        rows=rows, q=q, k=k, gam=gam, e=e, decay=decay, t=t, p=p, before=stored, vn=stored_vn
    )


def backward_chunk(
    x: dict[str, Tensor], c: Chunk, dout: Tensor, adjoint: Tensor, grads: dict[str, Tensor], to: Roundings
) -> Tensor:
    scale, gam, e, beta = c.q.shape[-1] ** -0.5, c.gam[..., None], c.e[..., None], x["beta"][:, c.rows]
    stored = to.states(adjoint)
    dvn = c.p.mT @ dout + e * (c.k @ stored)
    dv = c.t.mT @ to.rows(dvn)
    before = c.gam[:, -1, None, None] * adjoint + c.q.mT @ to.rows(scale * gam * dout) - c.k.mT @ to.rows(gam * dv)
    dv = to.rows(dv)
    dp, n = scale * (dout @ c.vn.mT).tril() * c.decay, -((dv @ c.vn.mT) * c.decay).tril(-1)
    pairs = (dp * (c.q @ c.k.mT)).tril(-1) + n * (c.k @ c.k.mT)
    read_q, read_k, write_k = scale * gam * (dout @ c.before.mT), -gam * (dv @ c.before.mT), e * (c.vn @ stored.mT)
    dp, n = to.squares(dp), to.squares(n)
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
    return to.carried(before)
