"""Inputs of a case, what one rank makes of them, what the specification says, and how the two are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_gdn import Comm, Context, Options, build_context, chunk_gated_delta_rule, twin
from cp_gdn.comm import Message
from cp_gdn.layout import Partition
from cp_gdn.reference import gated_delta_rule
from tests.cases import GATES, Content, Run, cut

# Bits are promised at a fixed thread count only; process pools pin the same.
torch.set_num_threads(1)

TOKENS = ("q", "k", "v", "g", "beta")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
OF_DOCUMENTS = {"final_state": "exit_docs", "dinitial_state": "entry_docs"}
LIMITS = {torch.float64: (1e-10, 1e-8), torch.float32: (1e-5, 1e-4)}
"""Relative L2 per rank and head: of everything, and of dg."""
FEW = 32
"""Numbers of a rank and head below which a relative error says little."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Global tensors in fp64: q, k [T, H, K]; v, dout [T, HV, V]; g, beta [T, HV]; states [D, HV, K, V]."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    dout: Tensor
    initial: Tensor | None
    dfinal: Tensor
    l2norm: bool

    @property
    def bounds(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank holds and computed; rows of `tensors` are its tokens, or documents that start or end on it."""

    token_ids: Tensor
    entry_docs: tuple[int, ...]
    exit_docs: tuple[int, ...]
    tensors: dict[str, Tensor]
    messages: list[Message]

    def rows(self, name: str) -> Tensor:
        """Global rows of a tensor."""
        docs = OF_DOCUMENTS.get(name)
        return self.token_ids if docs is None else torch.tensor(getattr(self, docs), dtype=torch.int64)


@cache
def make_pack(content: Content) -> Pack:
    """Inputs of a case; every number is representable in fp32, and q, k, v, dout in ``content.inputs``."""
    gen = torch.Generator().manual_seed(sum(content.lengths))
    (heads, value_heads), (key_dim, value_dim) = content.heads, content.head_dims
    tokens, docs = sum(content.lengths), len(content.lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    q, k = normal(2, tokens, heads, key_dim)
    if not content.l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v, dout = normal(2, tokens, value_heads, value_dim)
    noise, strength = normal(2, tokens, value_heads)
    beta = strength.sigmoid() if content.beta == "sigmoid" else torch.full_like(strength, float(content.beta))
    initial, dfinal = normal(2, docs, value_heads, key_dim, value_dim)
    q, k, v, dout = (x.to(content.inputs).double() for x in (q, k, v, dout))
    return Pack(
        lengths=content.lengths,
        q=q,
        k=k,
        v=v,
        g=GATES[content.gate](noise).double(),
        beta=beta.double(),
        dout=dout,
        initial=initial.double() if content.initial else None,
        dfinal=dfinal.double(),
        l2norm=content.l2norm,
    )


def specification(pack: Pack) -> dict[str, Tensor]:
    """Outputs and gradients of the token recurrence in fp64."""
    named = {name: getattr(pack, name) for name in (*TOKENS, "initial") if getattr(pack, name) is not None}
    leaves = {name: x.clone().requires_grad_() for name, x in named.items()}
    initial = leaves.get("initial")
    o, final = gated_delta_rule(
        *(leaves[name] for name in TOKENS), pack.bounds, initial_state=initial, use_qk_l2norm=pack.l2norm
    )
    nothing = sum(x[:0].sum() for x in leaves.values())  # gives an empty pack a graph
    loss = (o * pack.dout).sum() + (final * pack.dfinal).sum() + nothing
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"o": o.detach(), "final_state": final.detach(), **dict(zip(GRADIENTS, grads, strict=False))}


@cache
def expected(content: Content) -> dict[str, Tensor]:
    return specification(make_pack(content))


def make_context(comm: Comm, run: Run, pack: Pack, **changes: Any) -> Context:
    return context_of(cut(pack.lengths, run.world, run.layout, run.align), comm, run, pack, **changes)


def context_of(part: Partition, comm: Comm, run: Run, pack: Pack, **changes: Any) -> Context:
    """A context for a pack that is cut in some other way than the run says."""
    segments = [1 + 3 * r % 4 for r in range(run.world)] if run.segments == "vector" else run.segments
    arguments = {
        "heads": (pack.q.shape[1], pack.v.shape[1]),
        "head_dims": (pack.q.shape[2], pack.v.shape[2]),
        "dtype": run.dtype,
        "segments": segments,
        "exchange": run.exchange,
        "options": Options(save_transfer=run.save_transfer, decay_cutoff=run.decay_cutoff),
    }
    return build_context(part, comm, **{**arguments, **changes})


def local_inputs(ctx: Context, pack: Pack) -> dict[str, Tensor]:
    """This rank's rows as leaves, g and beta in the dtype of states; initial states if the pack has them."""
    wide = dict.fromkeys(("g", "beta"), ctx.state_dtype)
    rows = {name: getattr(pack, name)[ctx.token_ids].to(wide.get(name, ctx.dtype)) for name in TOKENS}
    if pack.initial is not None:
        rows["initial_state"] = pack.initial[list(ctx.entry_docs)].to(ctx.state_dtype)
    return {name: x.requires_grad_() for name, x in rows.items()}


def local_gradients(ctx: Context, pack: Pack) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's outputs and final states."""
    return pack.dout[ctx.token_ids].to(ctx.dtype), pack.dfinal[list(ctx.exit_docs)].to(ctx.state_dtype)


def call(ctx: Context, leaves: Mapping[str, Tensor], pack: Pack, **more: Any) -> tuple[Tensor, Tensor]:
    """The op with final states."""
    l2norm = pack.l2norm
    o, final = chunk_gated_delta_rule(
        **leaves, ctx=ctx, output_final_state=True, use_qk_l2norm_in_kernel=l2norm, **more
    )
    assert final is not None
    return o, final


def step(ctx: Context, pack: Pack, leaves: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Forward and backward of one rank: its outputs, and its gradients of ``leaves``."""
    leaves = local_inputs(ctx, pack) if leaves is None else leaves
    outputs = call(ctx, leaves, pack)
    grads = torch.autograd.grad(outputs, list(leaves.values()), local_gradients(ctx, pack))
    return dict(zip(("o", "final_state", *GRADIENTS), (*(x.detach() for x in outputs), *grads), strict=False))


def share_of(ctx: Context, tensors: dict[str, Tensor], messages: list[Message]) -> Share:
    return Share(
        token_ids=ctx.token_ids,
        entry_docs=ctx.entry_docs,
        exit_docs=ctx.exit_docs,
        tensors=tensors,
        messages=messages,
    )


def run_on_rank(comm: Comm, run: Run, pack: Pack) -> Share:
    ctx = make_context(comm, run, pack)
    with comm.record() as messages:
        tensors = step(ctx, pack)
    return share_of(ctx, tensors, messages)


def run_in_twin(run: Run, pack: Pack) -> list[Share]:
    return twin(run.world, lambda comm: run_on_rank(comm, run, pack))


def assemble(shares: Iterable[Share]) -> dict[str, Tensor]:
    """The ranks' results in global order; every row must be there once."""
    whole: dict[str, Tensor] = {}
    shares = list(shares)
    for name in shares[0].tensors:
        rows = torch.cat([share.rows(name) for share in shares])
        assert rows.sort().values.tolist() == list(range(len(rows))), f"rows of {name}"
        whole[name] = torch.cat([share.tensors[name] for share in shares])[rows.argsort()]
    return whole


def head_sizes(x: Tensor) -> Tensor:
    """L2 norm of every head [HV]; heads are dim 1."""
    return x.double().square().transpose(0, 1).flatten(1).sum(1).sqrt()


def head_errors(got: Tensor, want: Tensor, whole: Tensor) -> Tensor:
    """Relative L2 of every head [HV] of a rank's rows. A lone dg or dbeta is a dot product that may cancel, so few
    numbers are measured by their root mean square in the ``whole`` tensor if that is larger. What is so small that its
    parts lose digits to underflow in got's dtype counts as just large enough."""
    limits = torch.finfo(got.dtype)
    size = head_sizes(want).clamp(min=limits.tiny / limits.eps)
    if 0 < want.numel() < FEW * want.shape[1]:
        size = torch.maximum(size, head_sizes(whole) * (len(want) / len(whole)) ** 0.5)
    return head_sizes(got.double() - want) / size


def worst_errors(shares: Sequence[Share], want: Mapping[str, Tensor]) -> dict[str, tuple[float, int, int]]:
    """Per tensor its largest error, and the rank and the head that has it."""
    worst: dict[str, tuple[float, int, int]] = {}
    for rank, share in enumerate(shares):
        for name, got in share.tensors.items():
            errors = head_errors(got, want[name][share.rows(name)], want[name])
            for head, error in enumerate(errors.tolist()):
                if not error <= worst.get(name, (-1.0, 0, 0))[0]:  # a NaN stays
                    worst[name] = (error, rank, head)
    return worst


def assert_close(shares: Sequence[Share], want: Mapping[str, Tensor], limits: tuple[float, float]) -> None:
    """Every rank and head within ``limits`` (of everything, of dg); names the worst rank and head."""
    over = {
        f"{name}: rank {rank}, head {head}": error
        for name, (error, rank, head) in worst_errors(shares, want).items()
        if not error <= limits[name == "dg"]
    }
    assert over == {}, over


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(got[name], want[name])]


def assert_same_bits(got: Sequence[Share], want: Sequence[Share]) -> None:
    """Every tensor of every rank."""
    found = [(rank, differences(a.tensors, b.tensors)) for rank, (a, b) in enumerate(zip(got, want, strict=True))]
    differing = [(rank, names) for rank, names in found if names]
    assert differing == [], differing
