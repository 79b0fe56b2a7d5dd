"""Documents of a pack know nothing of each other, and tokens nothing of what comes after them: by bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cp_gdn import Comm, GatedDeltaNet, build_context, partition, twin
from tests.cases import LAYOUTS, Content, Run, name_of
from tests.pack import (
    LIMITS,
    OF_DOCUMENTS,
    TOKENS,
    Pack,
    Share,
    assemble,
    assert_close,
    context_of,
    differences,
    expected,
    make_pack,
    run_in_twin,
    share_of,
    step,
)
from tests.test_layer import make_rows

Tensors = dict[str, Tensor]
LEAKY = Content(pack="long", gate="slow", inputs=torch.bfloat16)
"""With fast decay a leak would hide below the rounding of 16 bit."""


def documents(pack: Pack, tensors: Tensors, docs: Sequence[int]) -> Tensors:
    """The rows of some documents, in that order."""
    rows = torch.cat([torch.arange(*pack.bounds[d : d + 2]) for d in docs])
    return {name: x[list(docs)] if name in OF_DOCUMENTS else x[rows] for name, x in tensors.items()}


def only(pack: Pack, doc: int) -> Pack:
    """The same pack with a loss on one document alone."""
    start, end = pack.bounds[doc : doc + 2]
    dout, dfinal = torch.zeros_like(pack.dout), torch.zeros_like(pack.dfinal)
    dout[start:end], dfinal[doc] = pack.dout[start:end], pack.dfinal[doc]
    return replace(pack, dout=dout, dfinal=dfinal)


# ---- documents do not leak into each other ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_changing_the_end_of_a_document_changes_no_bit_of_another(world: int, layout: str) -> None:
    """With packing, one document's tokens changed the next one's outputs while the loss looked normal."""
    pack, run = make_pack(LEAKY), Run(world=world, layout=layout, dtype=torch.bfloat16, segments=2)
    end = pack.bounds[2]
    changed = {name: getattr(pack, name).clone() for name in (*TOKENS, "dout")}
    for x in changed.values():
        x[end - 3 : end] *= 0.5
    before, after = (assemble(run_in_twin(run, p)) for p in (pack, replace(pack, **changed)))
    assert differences(*(documents(pack, x, [0, 2]) for x in (before, after))) == []
    assert len(differences(*(documents(pack, x, [1]) for x in (before, after)))) == len(before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_documents_loss_has_exactly_no_gradient_in_another_document(world: int, layout: str) -> None:
    pack, run = make_pack(LEAKY), Run(world=world, layout=layout, dtype=torch.float64, segments=2)
    grads = assemble(run_in_twin(run, only(pack, 2)))
    others = {name: x for name, x in documents(pack, grads, [0, 1]).items() if name[0] == "d"}
    assert [name for name, x in others.items() if x.any()] == []
    assert all(x.any() for x in documents(pack, grads, [2]).values())


def slow_layer() -> GatedDeltaNet:
    torch.manual_seed(3)
    layer = GatedDeltaNet(40, heads=(1, 2), head_dims=(16, 16)).double()
    with torch.no_grad():
        layer.A_log.fill_(-4.0)
        layer.dt_bias.fill_(-3.0)
    return layer


def layer_rows(layer: GatedDeltaNet, bounds: Sequence[int], run: Run, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx in global order."""

    def on_rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        part, conv = partition(bounds, comm.size, run.layout), (layer.conv_channels, layer.conv_width)
        shape = {"heads": layer.heads, "head_dims": layer.head_dims, "dtype": torch.float64, "conv": conv}
        ctx = build_context(part, comm, **shape)
        mine = x[:, ctx.token_ids].requires_grad_()
        y = layer(mine, ctx)
        return ctx.token_ids, y.detach()[0], torch.autograd.grad(y, mine, dy[:, ctx.token_ids])[0][0]

    ids, y, dx = (torch.cat(x) for x in zip(*twin(run.world, on_rank), strict=True))
    return y[ids.argsort()], dx[ids.argsort()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_layer_with_its_convolution_keeps_documents_apart_too(world: int, layout: str) -> None:
    """The boundaries reached the convolution but not the scan, or were dropped one call earlier."""
    layer, bounds, run = slow_layer(), (0, 37, 88, 128), Run(world=world, layout=layout)
    x, dy = make_rows(128)
    changed = x.clone()
    changed[:, 85:88] *= 0.5
    (y, dx), (y_changed, dx_changed) = (layer_rows(layer, bounds, run, rows, dy) for rows in (x, changed))
    for a, b in ((y, y_changed), (dx, dx_changed)):
        assert torch.equal(a[:37], b[:37])
        assert torch.equal(a[88:], b[88:])
        assert not torch.equal(a[37:88], b[37:88])
    dy[:, :88] = 0
    _, dx = layer_rows(layer, bounds, run, x, dy)
    assert not dx[:88].any()
    assert dx[88:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_lengths_that_nothing_divides_are_computed_as_they_are(world: int, layout: str) -> None:
    """Boundaries divided by the number of ranks: a document of 7 was computed as if it had 6 tokens."""
    content, run = Content(pack="ragged", gate="slow"), Run(world=world, layout=layout)
    assert_close(run_in_twin(run, make_pack(content)), expected(content), LIMITS[run.dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_of_every_rank_with_heads_far_apart_and_documents_off_the_start(layout: str) -> None:
    """Only the last rank's gradients were right: the gate was read without its head and sequence offset."""
    content = Content(pack="long", gate="heads apart", heads=(2, 6))
    assert_close(run_in_twin(Run(world=4, layout=layout), make_pack(content)), expected(content), LIMITS[torch.float64])


# ---- what comes later or beside changes nothing ----------------------------------------------------------------------

APPENDED = 7


def first_tokens(pack: Pack, tokens: int) -> Pack:
    """The first tokens of a pack of one document."""
    return replace(pack, lengths=(tokens,), **{name: getattr(pack, name)[:tokens] for name in (*TOKENS, "dout")})


def without_end(pack: Pack, tokens: int) -> Pack:
    """A loss on the first tokens' outputs alone."""
    rest = len(pack.dout) - tokens
    return replace(pack, dout=F.pad(pack.dout[:tokens], (0, 0, 0, 0, 0, rest)), dfinal=0 * pack.dfinal)


def run_cut_at(run: Run, pack: Pack, cuts: Sequence[int]) -> list[Share]:
    """One document cut at some offsets, piece i on rank i."""
    ends = [0, *cuts, sum(pack.lengths)]
    pieces = [[(0, a, b - a)] for a, b in pairwise(ends)]
    part = partition(pack.bounds, len(pieces), fragments=pieces)

    def on_rank(comm: Comm) -> Share:
        ctx = context_of(part, comm, run, pack)
        return share_of(ctx, step(ctx, pack), [])

    return twin(len(pieces), on_rank)


@pytest.mark.parametrize("run", [Run(dtype=torch.float32), Run(dtype=torch.float32, segments="grid:1")], ids=name_of)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 100])
def test_appending_tokens_changes_no_bit_of_what_came_before(tokens: int, run: Run) -> None:
    """The exponents of a partly filled chunk were anchored at its last row, a future token."""
    whole = make_pack(Content(pack=(tokens + APPENDED,), gate="model"))
    cuts: tuple[tuple[int, ...], ...] = ((), (tokens // 2,)) if run.segments == 1 else ((), (64,))
    for cut_at in (c for c in cuts if all(0 < x < tokens for x in c)):
        short = assemble(run_cut_at(run, without_end(first_tokens(whole, tokens), tokens), cut_at))
        long = assemble(run_cut_at(run, without_end(whole, tokens), cut_at))
        for name in short:
            if name != "final_state":
                assert torch.equal(long[name][: len(short[name])], short[name]), (name, cut_at)


def arranged(pack: Pack, docs: Sequence[int]) -> Pack:
    """Some documents of a pack as a pack of their own."""
    named = {name: getattr(pack, name) for name in (*TOKENS, "dout")}
    states = {"final_state": pack.dfinal, "dinitial_state": pack.initial}
    rows = documents(pack, {**named, **states}, docs)  # type: ignore[dict-item]
    dfinal, initial = (rows.pop(name) for name in states)
    return replace(pack, lengths=tuple(pack.lengths[d] for d in docs), dfinal=dfinal, initial=initial, **rows)


@pytest.mark.parametrize("segments", [1, 2, "grid:1"])
@pytest.mark.parametrize(("world", "exchange"), [(1, "ring"), (2, "a2a"), (4, "ring")])
def test_moving_a_document_or_changing_its_neighbours_changes_no_bit(
    world: int, exchange: str, segments: int | str
) -> None:
    pack = make_pack(Content(pack=(37, 130, 40, 5, 66, 130), heads=(2, 6), head_dims=(5, 7), gate="slow"))
    run = Run(world=world, exchange=exchange, segments=segments, dtype=torch.float32)
    want = documents(pack, assemble(run_in_twin(run, pack)), [1])
    for docs in ((1,), (5, 1), (1, 3, 0, 2), (4, 3, 2, 1, 0, 5)):
        moved = arranged(pack, docs)
        assert differences(documents(moved, assemble(run_in_twin(run, moved)), [docs.index(1)]), want) == [], docs
