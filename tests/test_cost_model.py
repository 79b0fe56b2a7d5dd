"""The model of a step and the rule "measured": what it counts, what it promises, what it picks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_gdn import cost_model
from cp_gdn.backends.hopper_items import run_items
from cp_gdn.calibration import H200_MODEL, Settings
from cp_gdn.cost_model import ALL, BESIDE, FOR_MEMORY, SUMMARIES, RankModel, quantities, step_ns
from cp_gdn.layout import partition
from cp_gdn.makespan import rank_tables, table_rows
from cp_gdn.plan import build_plan
from cp_gdn.segments import p_vector

Fragments = list[tuple[int, int, int]]
fragment = st.tuples(st.one_of(st.integers(0, 9), st.integers(0, 1200)), st.integers(0, 1), st.integers(0, 1))
tables = st.lists(st.lists(fragment, max_size=6), min_size=1, max_size=5)
heads = st.sampled_from((1, 6, 8, 16, 32, 48, 64, 200))
sm_counts = st.sampled_from((1, 7, 108, 132, 148))


# ---- what it counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 7])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_the_model_walks_the_chunks_of_the_segments_that_the_plan_walks(layout: str, p: int) -> None:
    part = partition([0, 700, 701, 701, 1500, 4000, 4064], 3, layout)
    lone = replace(H200_MODEL, sm_count=1)
    for rank, table in enumerate(rank_tables(part)):
        plan, fragments = build_plan(part, rank, p_vector=[p] * 3), len(part.of_rank(rank).doc)
        segments, chunks = plan.segments, plan.segments.num_chunks
        has_prev, has_next = segments.has_prev.astype(int), segments.has_next.astype(int)
        counts, model = quantities(table, p, 1, lone), RankModel(table, 1, lone, np.array([p]))
        walked = [(chunks * taken).sum() for taken in (1, has_next, has_prev, has_next + has_prev * has_next)]
        assert model.even[ALL, 0] == walked[ALL]
        for of, expected in enumerate(walked):  # segments of a fragment count as equally long
            sets = 1 + (of == SUMMARIES)  # for B, and once more for M
            assert abs(model.even[of, 0] - expected) <= 2 * fragments * sets
            assert model.even[of, 0] <= model.chain[of, 0] <= model.even[of, 0] + len(chunks) * sets
        assert counts["prepare"] == chunks.sum()
        starts = model.starts[ALL, 0]
        assert abs(starts - run_items(plan.segments).shape[1]) <= fragments
        walked = 3 * starts + has_next.sum() + (has_next * has_prev).sum() + has_prev.sum()
        assert counts["segment"] == walked


def test_one_uncut_document_in_two_segments_counts_as_the_module_says() -> None:
    counts = quantities([(100, 0)], 2, 4, H200_MODEL)
    assert counts["walk_output"] == counts["walk_summary"] == counts["adjoint_summary"] == 50
    assert counts["stream_output"] == 4 * BESIDE  # 400 chunks on 132 SMs
    assert counts["fold_hop"] == 2
    assert counts["launch"] == 9
    assert counts["exchange"] == counts["link_mib"] == 0
    whole = quantities([(100, 0)], 1, 4, H200_MODEL)
    assert (whole["walk_summary"], whole["fold_hop"], whole["launch"]) == (0, 0, 5)
    crossing = quantities([(100, 1, 0)], 2, 16, H200_MODEL)
    assert (crossing["exchange"], crossing["link_mib"], crossing["walk_summary"]) == (2, 1, 50)  # B and M at once


def test_decay_leaves_of_every_summary_a_few_chunks_and_of_every_map_none() -> None:
    table, times = table_rows([(100, 1, 1)]), H200_MODEL.times
    found = {}
    for permille in (0, 500, 1000):
        device = replace(H200_MODEL, sm_count=1, settings=Settings(decayed_permille=permille, decayed_chunks=5))
        found[permille] = RankModel(table, 1, device, np.array([4])).times_ns[:, 0].tolist()
    steady, decayed = found[1000]
    lone = (
        1 + BESIDE * times.walk_summary / times.stream_summary,
        1 + BESIDE * times.adjoint_summary / times.stream_adjoint_summary,
    )
    summaries = 200 * times.stream_summary * lone[0] + 100 * times.stream_adjoint_summary * lone[1]
    left = 4 * 5 * (times.walk_summary + times.adjoint_summary)
    hops = quantities(table, 4, 1, replace(H200_MODEL, sm_count=1))["fold_hop"] - 2  # those of messages are not dropped
    assert steady - decayed == pytest.approx(summaries - left + hops * (times.fold_hop - times.dropped_hop), abs=1e-3)
    assert found[0] == [steady, steady]
    assert found[500] == [steady, (steady + decayed) / 2]
    short = RankModel(table_rows([(4, 0, 0)]), 1, replace(H200_MODEL, sm_count=1), np.array([2]))
    assert short.walk_ns("summaries", decayed=True) == short.walk_ns("summaries", decayed=False) > 0


@pytest.mark.parametrize(
    ("value_heads", "chunks", "expected"),
    [
        (48, [1024], 11),
        (48, [512], 5),
        (48, [128] * 8, 1),
        (32, [1024], 4),
        (32, [128] * 8, 1),
        (6, [1024], 21),
        (6, [4094], 22),
        (6, [128] * 8, 2),
        (8, [1024], 16),
        (8, [256] * 4, 4),
        (6, [4], 1),
    ],
)
def test_the_measured_rule_picks_what_was_among_the_best_on_an_h200(
    value_heads: int, chunks: list[int], expected: int
) -> None:
    assert p_vector("measured", [[(nc, 0) for nc in chunks]], value_heads, 132) == [expected]


@pytest.mark.parametrize(
    ("table", "value_heads", "fastest", "expected"),
    [
        ([(1024, 0, 0)], 48, 5, 11),  # 205 chunks; 94
        ([(512, 1, 1)] * 2, 48, 4, 5),  # a rank of four: 128; 103
        ([(1024, 1, 1)] * 2, 48, 4, 4),  # 256, for any of 104 or fewer costs too much
        ([(128, 0, 0)] * 8, 48, 1, 1),  # 128, likewise
        ([(704, 0, 0)], 48, 5, 5),  # one wave of 141: all of its tapes are there at once whatever P is
        ([(4094, 0, 0)], 6, 22, 22),
    ],
    ids=str,
)
def test_where_segments_fill_more_than_a_wave_shorter_ones_are_taken_if_they_cost_little(
    table: Fragments, value_heads: int, fastest: int, expected: int
) -> None:
    free = replace(H200_MODEL, settings=replace(H200_MODEL.settings, wave_chunks=256))
    assert p_vector("measured", [table], value_heads, 132, free) == [fastest]
    assert p_vector("measured", [table], value_heads, 132) == [expected]
    if expected != fastest:
        assert -(-table[0][0] // expected) <= H200_MODEL.settings.wave_chunks < -(-table[0][0] // fastest)
        losses = RankModel(table_rows(table), value_heads, H200_MODEL, np.array([fastest, expected])).losses()
        assert 1 < losses[1] / losses[0] <= FOR_MEMORY


def test_a_plan_for_either_gate_alone_is_another_than_one_for_both() -> None:
    found = []
    for settings_ in (Settings(decayed_permille=0), Settings()):
        device = replace(H200_MODEL, settings=settings_)
        model = RankModel(table_rows([(128, 0)] * 8), 8, device, np.arange(1, 9))
        found.append(1 + int(model.losses().argmin()))
        assert found[-1] == p_vector("measured", [[(128, 0)] * 8], 8, 132, device)[0]
    assert found == [1, 2]  # slow gates: +2.4 % at two segments; gates of models: +15 % at one


def test_segments_shorter_than_a_run_share_a_block_and_are_no_more_items() -> None:
    model = RankModel(table_rows([(96, 0)]), 1, replace(H200_MODEL, sm_count=132), np.array([1, 4, 8, 32]))
    assert model.chain[ALL].tolist() == [96, 24, 24, 24]
    lone = RankModel(table_rows([(96, 0)]), 1, replace(H200_MODEL, sm_count=1), np.array([1, 4, 8, 32]))
    assert lone.starts[ALL].tolist() == [1, 4, 4, 4]
    assert lone.starts[SUMMARIES].tolist() == [0, 3 + 2, 7 + 6, 31 + 30]  # one by one: each has its own decay bound


def test_the_measured_rule_refuses_to_split_where_documents_fill_the_device() -> None:
    assert p_vector("measured", [[(128, 0)] * 22], 48, 132) == [1]
    assert p_vector("occ", [[(128, 0)] * 22], 6, 132) == [1]
    dear = replace(H200_MODEL, times=replace(H200_MODEL.times, fold_hop=10**9))
    assert p_vector("measured", [[(1024, 0)]], 48, 132, dear) == [1]


def test_thousands_of_documents_of_many_lengths_are_planned_near_the_best() -> None:
    listed = [(1 + (7 * i) % 300, 0) for i in range(3000)] + [(3000, 1)]
    (p,) = p_vector("measured", [listed], 6, 132)
    tried = np.array([1, *range(12, 65)])
    losses = RankModel(table_rows(listed), 6, H200_MODEL, tried).losses()
    assert losses[tried.tolist().index(p)] <= 1.02 * losses.min()


# ---- what it promises ------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(ranks=tables, value_heads=heads, sm_count=sm_counts)
def test_the_measured_rule_loses_the_least_whichever_gates_come(
    ranks: list[Fragments], value_heads: int, sm_count: int
) -> None:
    device = replace(H200_MODEL, sm_count=sm_count)
    vector = p_vector("measured", ranks, value_heads, sm_count)
    for rank, p in zip(ranks, vector, strict=True):
        assert p_vector("measured", [rank], value_heads, sm_count) == [p]
        longest = max((nc for nc, _, _ in rank), default=0)
        tried = [1, *(q for q in range(2, min(64, longest) + 1) if q == 64 or -(-longest // q) <= 256)]
        assert p in tried
        losses = RankModel(table_rows(rank), value_heads, device, np.array(tried)).losses()
        for_memory = sum(nc for nc, _, _ in rank) * value_heads > 256 * sm_count and -(-longest // p) <= 104
        most = FOR_MEMORY if for_memory or p == 64 else 1
        assert losses[tried.index(p)] <= most * losses[0]
        assert losses[tried.index(p)] <= max(most, 1.02) * losses.min()


@settings(max_examples=60, deadline=None)
@given(
    rank=tables.map(lambda drawn: drawn[0]), value_heads=heads, p=st.lists(st.integers(1, 64), min_size=3, max_size=3)
)
def test_a_step_costs_its_quantities_times_their_prices_at_every_p(
    rank: Fragments, value_heads: int, p: list[int]
) -> None:
    steady, decayed = RankModel(table_rows(rank), value_heads, H200_MODEL, np.array(p)).times_ns
    for i, q in enumerate(p):
        counted = quantities(rank, q, value_heads, H200_MODEL)
        assert sum(getattr(H200_MODEL.times, name) * count for name, count in counted.items()) == steady[i]
        assert step_ns(rank, q, value_heads, H200_MODEL) == steady[i] >= decayed[i]


def test_the_p_of_a_rank_does_not_depend_on_which_ranks_are_planned_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded, lone = [(1024, 0)] * 3, [(2048, 0)]
    alone = p_vector("measured", [crowded], 6, 132)
    monkeypatch.setattr(cost_model, "USEFUL", 1)  # at most 7 and at most 22 are tried
    assert alone != p_vector("measured", [lone], 6, 132)
    assert p_vector("measured", [crowded, lone], 6, 132)[:1] == p_vector("measured", [crowded], 6, 132)
