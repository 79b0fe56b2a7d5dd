"""The Hopper kernels against fp64 on one GPU: values, partial chunks, poisoned neighbours, bits that do not move."""

import itertools
from dataclasses import asdict, replace

import pytest
import torch

import cp_gdn
from cp_gdn.backends.hopper_walk import Items, Summaries, load_adjoint, load_walk, summarize
from tests.gpu.kernel_cases import CASES, Work, heads_of, inputs, oracle, prepared_by, run, squares, summary, worst_head
from tests.spread import spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

OUTPUT_BUDGET, INVERSE_BUDGET, SCORE_BUDGET = 5e-3, 2.0**-8, 5e-4
"""docs/design.md, kernels: bf16 operands cost 2.4e-3 to 4.9e-3 of o and S; rounding costs at most 2**-8 of T (bf16) and
2**-11 of Q K^T (fp16)."""


def rows_of(x: dict[str, torch.Tensor], lengths: list[int], *, l2norm: bool = False) -> dict[str, torch.Tensor]:
    """What `prepare` leaves, T and Q K^T in rows (unswizzled), and the chunk rows."""
    given = prepared_by(x, Work.of(lengths, heads_of(x)).chunks, l2norm=l2norm)
    made = given.prepared
    assert given.out.isnan().all()  # outputs are left alone
    found = squares(given) | {"bound": made.bound, "chunks": made.chunks.rows}
    return found | ({"rstd": made.rstd} if l2norm else {})


def wanted_t(keys: torch.Tensor, beta: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """T of one chunk and head in fp64: diag b - diag b (N o D) diag b."""
    kk, scan = torch.tril(keys @ keys.T, -1), g.double().clamp(min=-104).cumsum(0)
    n = torch.linalg.solve_triangular(
        torch.eye(len(kk), device="cuda", dtype=torch.float64) + kk * beta, kk, upper=False
    )
    b, decay = beta.clamp(min=2.0**-40), (scan[:, None] - scan).clamp(max=0).exp()
    return torch.diag(b) - b[:, None] * n * decay * b


def raw_rows(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """q and k of lengths between a quarter and four times one, the last row of all zero."""
    gen = torch.Generator(device="cuda").manual_seed(1)
    found = {}
    for name in ("q", "k"):
        lengths = 4 ** (2 * torch.rand(*x[name].shape[:2], 1, generator=gen, device="cuda") - 1)
        found[name] = (x[name] * lengths).bfloat16()
        found[name][-1] = 0
    return {**x, **found}


def close(got: torch.Tensor, want: torch.Tensor, budget: float) -> bool:
    return float((got.double() - want).norm()) <= budget * float(want.norm())


@pytest.mark.parametrize(("lengths", "gate", "group"), CASES)
def test_outputs_states_and_summaries_match_fp64_per_head(lengths: list[int], gate: str, group: int) -> None:
    x = inputs(lengths, gate, group)
    got, want = run(x, lengths), oracle(x, lengths)
    assert worst_head(got["o"], want["o"]) < OUTPUT_BUDGET
    assert worst_head(got["end"], want["end"]) < OUTPUT_BUDGET
    assert worst_head(got["m"] @ x["start"] + got["b"], want["end"]) < OUTPUT_BUDGET
    assert torch.equal(got["end"], got["end_without_o"])


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 1.99, 2.0])
def test_the_stored_inverse_matches_fp64(beta: float | None) -> None:
    """Keys of correlation 0.9, the hard case for the merges."""
    x = inputs([64, 37], "none", 3)
    base = x["k"][:1].double()
    k = torch.nn.functional.normalize(x["k"].double() + 3 * base, dim=-1).bfloat16()
    x["k"] = k
    if beta is not None:
        x["beta"].fill_(beta)
    got = run(x, [64, 37])["t"].double()
    for head, (first, count) in itertools.product(range(6), ((0, 64), (64, 37))):
        rows = slice(first, first + count)
        want = wanted_t(k[rows, head // 3].double(), x["beta"][rows, head].double(), x["g"][rows, head])
        assert close(got[head, rows, :count], want, INVERSE_BUDGET)


@pytest.mark.parametrize("gate", ["none", "model", "A16", "reset"])
def test_the_inverse_is_gated_and_zero_above_the_diagonal(gate: str) -> None:
    lengths = [64, 37, 200]
    x = inputs(lengths, gate, 3)
    got = rows_of(x, lengths)
    for first, count in got["chunks"].tolist():
        rows = slice(first, first + count)
        assert not got["qk"][:, rows].triu(1).any()
        for head in range(6):
            want = wanted_t(x["k"][rows, head // 3].double(), x["beta"][rows, head].double(), x["g"][rows, head])
            assert close(got["t"][head, rows, :count], want, INVERSE_BUDGET)
            assert not got["t"][head, rows].triu(1).any()


@pytest.mark.parametrize("beta", [None, 1.0, 2.0])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_chunk_bounds_match_fp64_also_for_resets_and_long_keys(group: int, beta: float | None) -> None:
    lengths = [64, 37, 200, 1]
    x = inputs(lengths, "reset", group)
    x["k"] = (x["k"] * torch.linspace(0.5, 1.5, sum(lengths), device="cuda")[:, None, None]).bfloat16()
    if beta is not None:
        x["beta"].fill_(beta)
    got = rows_of(x, lengths)
    norms = (x["k"].double() ** 2).sum(-1).repeat_interleave(group, 1)
    terms = x["g"].double().clamp(min=-104) + (1 - x["beta"].double() * norms).abs().clamp(min=1).log()
    want = torch.stack([terms[first : first + count].sum(0) for first, count in got["chunks"].tolist()], 1)
    assert torch.allclose(got["bound"].double(), want, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_norms_of_raw_rows_are_folded_into_the_products(group: int) -> None:
    lengths = [64, 37, 70]
    x = raw_rows(inputs(lengths, "model", group))
    got = rows_of(x, lengths, l2norm=True)
    rstd = torch.stack([((x[name].double() ** 2).sum(-1) + 1e-6).rsqrt().T for name in ("q", "k")])
    assert torch.allclose(got["rstd"].double(), rstd, rtol=2e-6, atol=0)
    q, k = (x[name].double() * rstd[i].T[..., None] for i, name in enumerate(("q", "k")))
    for first, count in got["chunks"].tolist():
        rows = slice(first, first + count)
        for head in range(x["beta"].shape[1]):
            keys, queries = k[rows, head // group], q[rows, head // group]
            want = wanted_t(keys, x["beta"][rows, head].double(), x["g"][rows, head])
            assert close(got["t"][head, rows, :count], want, INVERSE_BUDGET)
            assert close(got["qk"][head // group, rows, :count], (queries @ keys.T).tril(), SCORE_BUDGET)
        terms = x["g"][rows].double() + (1 - x["beta"][rows].double()).clamp(min=1).log()
        chunk = got["chunks"].tolist().index([first, count])
        assert torch.allclose(got["bound"][:, chunk].double(), terms.sum(0), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("l2norm", [False, True])
def test_prepare_reads_no_row_of_a_neighbour(l2norm: bool) -> None:
    lengths = [70, 58]
    x = inputs(lengths, "reset", 3)
    clean = rows_of(x, lengths, l2norm=l2norm)
    poisoned = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "g", "beta"):
        poisoned[name][70:] = float("nan")
    got = rows_of(poisoned, lengths, l2norm=l2norm)
    assert torch.equal(got["t"][:, :70], clean["t"][:, :70])
    assert torch.equal(got["qk"][:, :70], clean["qk"][:, :70])
    assert torch.equal(got["bound"][:, :2], clean["bound"][:, :2])
    if l2norm:
        assert torch.equal(got["rstd"][:, :, :70], clean["rstd"][:, :, :70])


COUNTS = (1, 2, 31, 32, 33, 64, 65)
"""Chunks of the documents below: the decay bound is summed 32 chunks at a time."""


def by_hand(
    work: Work, bound: torch.Tensor, cutoff: float, *, adjoint: bool
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, slice]]]:
    """Items without what decay hides, as torch finds it; which maps are zero [segments, HV]; hidden rows, by head."""
    items, hidden = work.items.clone(), []
    zero = torch.zeros(work.count, len(bound), dtype=torch.int32, device=bound.device)
    for item in items:
        chunk, count, head, segment = item[0].item(), item[1].item(), item[2].item() & 0xFFFF, item[3].item()
        own = bound[head, chunk : chunk + count]
        zero[segment, head] = int(own.sum() <= cutoff)
        beyond = own.cumsum(0) - own if adjoint else own.sum() - own.cumsum(0)
        kept = int((beyond > cutoff).sum())  # no bound here is above 0, so that what is kept is one run
        first = chunk + kept if adjoint else chunk
        hidden.append((head, slice(64 * first, 64 * (first + count - kept))))
        item[:3] = torch.tensor([chunk if adjoint else chunk + count - kept, kept, head])
    return items, zero, hidden


@pytest.mark.parametrize("adjoint", [False, True])
def test_summaries_leave_out_what_decay_hides_and_nothing_else(adjoint: bool) -> None:
    """The same bits as items that were cut by hand; what is hidden is never read."""
    x, cutoff = inputs([64 * n for n in COUNTS], "none", 3), -17.0
    gen = torch.Generator(device=x["g"].device).manual_seed(0)
    x["g"] = (-8 * torch.rand(sum(COUNTS), 6, generator=gen, device=x["g"].device) ** 4).repeat_interleave(64, 0) / 64
    x["g"][64 * 40, 0] = -200.0
    work, kernel = Work.of([64 * n for n in COUNTS], heads_of(x)), load_adjoint(emit=False) if adjoint else load_walk()
    given = prepared_by(x, work.chunks)
    items, zero, hidden = by_hand(work, given.prepared.bound.double(), cutoff, adjoint=adjoint)
    for head, rows in hidden:
        x["v"][rows, head] = float("nan")
    want = torch.full((len(COUNTS), 6, 128, 128), float("nan"), device=x["g"].device)
    got, no_map = want.clone(), Summaries(maps=None, cutoff=None, dropped=None)
    summarize(kernel, given, Items(items=items, segments=work.segments), work.ends(None, want), no_map)
    summarize(kernel, given, work.blocks(run=0), work.ends(None, got), replace(no_map, cutoff=cutoff))
    assert torch.equal(got, want)
    assert not want.isnan().any()
    assert sum(rows.stop - rows.start for _, rows in hidden) > 64 * 6 * sum(COUNTS) / 5
    if not adjoint:
        made, without = summary(kernel, given, work, None, cutoff), summary(kernel, given, work, None)
        assert torch.equal(made["dropped"], zero)
        assert torch.equal(made["m"], without["m"].where(zero[..., None, None] == 0, torch.zeros_like(want)))
        assert 0 < zero.float().mean() < 1


MANY = [0, *itertools.accumulate(1 + 7 * i % 25 for i in range(2000))]


@pytest.mark.parametrize(
    ("bounds", "heads", "world"),
    [
        ([0, 65_536], (16, 48), 1),
        ([0, 65_536], (2, 6), 1),
        (MANY, (2, 8), 1),
        ([0, 5, 8_000, 8_000, 20_001], (4, 4), 4),
    ],
    ids=["slabs", "many segments", "many documents", "a rank of four"],
)
def test_tables_of_heads_steps_and_strips_are_those_of_plain_python(
    bounds: list[int], heads: tuple[int, int], world: int
) -> None:
    def of_rank(comm: cp_gdn.Comm) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        part = cp_gdn.partition(bounds, world, "zigzag")
        ctx = cp_gdn.build_context(part, comm, device="cuda", heads=heads, backend="hopper")
        made, tables = ctx.kernels.forward.made, ctx.kernels.forward.tables
        return asdict(made), asdict(spread(None, tables, heads))

    for got, want in cp_gdn.twin(world, of_rank):
        assert got.keys() == want.keys()
        for name, table in want.items():
            assert torch.equal(got[name], table), name
