"""Byte queries against counted messages and counted tensors."""

from collections import Counter

import numpy as np
import pytest
import torch

import cp_gdn
from cp_gdn.byte_counts import busiest, comm_bytes, halo_ends, saved_bytes
from cp_gdn.forecast import Forecast, LayerSpec, forecast
from cp_gdn.layout import Partition
from tests.cases import LAYOUTS as CUT_LAYOUTS
from tests.cases import PACKS, cut
from tests.token_cases import halo_of

PACK = [0, 200, 200, 264, 301, 900]
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
CASES = [
    (world, layout, exchange, save, segments)
    for world in (1, 2, 4)
    for layout in LAYOUTS
    for exchange in ("ring", "a2a")
    for save in (True, False)
    for segments in (2, "grid:1")
]

MODES = {
    "full": cp_gdn.Options(save="full"),
    "full, cutoff": cp_gdn.Options(save="full", decay_cutoff=-17.0),
    "full, no maps": cp_gdn.Options(save="full", save_transfer=False),
    "nothing": cp_gdn.Options(boundary="recompute"),
    "nothing, no maps": cp_gdn.Options(boundary="recompute", save_transfer=False),
}

BUSY = [[(0, 0, 10), (1, 0, 10)], [(2, 0, 10)], [(0, 10, 54), (1, 10, 126), (2, 10, 90)]]
"""Pieces of three documents; rank 2 takes over all of them."""


def step(
    comm: cp_gdn.Comm, layout: str, exchange: str, options: cp_gdn.Options, segments: int | str, l2norm: bool = False
) -> tuple:
    """One convolution and one op, forward and backward: counted bytes by purpose, the queries, and what was kept."""
    part = cp_gdn.partition(PACK, comm.size, layout, align=64 if segments == "grid:1" else 1)
    ctx = cp_gdn.build_context(
        part,
        comm,
        heads=(1, 3),
        head_dims=(16, 24),
        dtype=torch.float32,
        conv=(10, 4),
        exchange=exchange,
        segments=segments,
        options=options,
    )
    gen, tokens = torch.Generator().manual_seed(comm.rank), ctx.num_tokens
    shapes = ((1, 16), (1, 16), (3, 24), (3,), (3,))
    q, k, v, g, beta = (torch.rand(tokens, *s, generator=gen).sub_(0.5).requires_grad_() for s in shapes)
    gate = -g.abs()
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(x.data_ptr(), x)

    with comm.record() as log:
        y = cp_gdn.causal_conv1d(torch.zeros(tokens, 10, requires_grad=True), torch.ones(10, 4), ctx=ctx)
        y.sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o, _ = cp_gdn.chunk_gated_delta_rule(q, k, v, gate, beta, ctx=ctx, use_qk_l2norm_in_kernel=l2norm)
        o.sum().backward()
    held = sum(x.numel() * x.element_size() for x in kept.values() if x.numel())
    counted: Counter[tuple[str, str]] = Counter()
    for message in log:
        counted[message.purpose, message.direction] += message.numel * message.dtype.itemsize
    asked = {r: comm_bytes(ctx, r) for r in range(comm.size)}
    return counted, asked, held, saved_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)


def on_paper(world: int, layout: str, exchange: str, save: bool, segments: int | str) -> Forecast:
    """The same layer and pack without a group or a context."""
    part = cp_gdn.partition(PACK, world, layout, align=64 if segments == "grid:1" else 1)
    spec = LayerSpec(
        heads=(1, 3),
        head_dims=(16, 24),
        dtype=torch.float32,
        conv=(10, 4),
        segments=segments,
        exchange=exchange,
        save_transfer=save,
    )
    return forecast(part, spec)


@pytest.mark.parametrize(("world", "layout", "exchange", "save", "segments"), CASES)
def test_queried_bytes_equal_the_counted_ones(
    world: int, layout: str, exchange: str, save: bool, segments: int | str
) -> None:
    options = cp_gdn.Options(save_transfer=save)
    ranks = cp_gdn.twin(world, lambda comm: step(comm, layout, exchange, options, segments))
    assert_queried(ranks)
    paper = on_paper(world, layout, exchange, save, segments)
    for rank, (_, asked, _, saved) in enumerate(ranks):
        assert {purpose: each.of(rank) for purpose, each in paper.traffic.items()} == asked[rank]
        assert {name: each[rank] for name, each in paper.kept.items()} == saved


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("mode", MODES)
def test_queried_bytes_equal_the_counted_ones_in_every_mode(mode: str, exchange: str, l2norm: bool) -> None:
    assert_queried(cp_gdn.twin(2, lambda comm: step(comm, "zigzag", exchange, MODES[mode], 2, l2norm)))


def assert_queried(ranks: list[tuple]) -> None:
    for rank, (counted, _, held, saved) in enumerate(ranks):
        for _, asked, _, _ in ranks:  # every rank knows every rank's
            for purpose, traffic in asked[rank].items():
                assert (traffic.sent, traffic.received) == (counted[purpose, "send"], counted[purpose, "recv"]), purpose
        assert {purpose for purpose, _ in counted} <= set(ranks[rank][1][rank])
        assert held == sum(saved.values())


def test_a_rank_outside_the_group_is_refused() -> None:
    part = cp_gdn.partition(PACK, 1)
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), heads=(1, 1), head_dims=(16, 16))
    with pytest.raises(ValueError, match="rank: got 1, expected 0 to 0"):
        comm_bytes(ctx, 1)


def rows_by_rank(part: Partition, width: int, *, reverse: bool) -> tuple[list[int], list[int]]:
    """Rows sent and received, from every rank's own halo plan."""
    plans = [halo_of(part, rank, width) for rank in range(part.world_size)]
    sides = [plan.adjoint if reverse else plan.forward for plan in plans]
    return [sum(side.send_counts) for side in sides], [sum(side.recv_counts) for side in sides]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", [*CUT_LAYOUTS, "explicit"])
@pytest.mark.parametrize("pack", ["ragged", "five tokens", "empty documents", "no tokens", "300 documents"])
def test_rows_of_the_halo_are_those_of_every_ranks_own_plan(pack: str, layout: str, width: int) -> None:
    part = cut(PACKS[pack], 4, layout)
    for reverse in (False, True):
        source, target = halo_ends(part, width, reverse=reverse)
        counted = tuple(np.bincount(end, minlength=4).tolist() for end in (source, target))
        assert counted == rows_by_rank(part, width, reverse=reverse)


def test_the_busiest_rank_has_the_most_bytes_in_or_out() -> None:
    spec = LayerSpec(heads=(1, 2), head_dims=(16, 16), dtype=torch.float32, exchange="ring", segments=1)
    found = forecast(cp_gdn.partition([0, 64, 200, 300], 3, fragments=BUSY), spec)
    rank, traffic = busiest(found.traffic, forward=True)
    state = 2 * 16 * 16 * 4
    assert (rank, traffic.sent, traffic.received) == (2, 0, 3 * state)
    rank, traffic = busiest(found.traffic, forward=False)
    assert (rank, traffic.sent, traffic.received) == (2, 3 * state, 0)
