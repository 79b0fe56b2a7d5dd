"""The model of a step and the rule "measured": what it counts, what it promises, what it picks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_gdn import cost_model
from cp_gdn.calibration import H200_MODEL, Settings
from cp_gdn.cost_model import StepModel, quantities, step_ns
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
    lone = replace(H200_MODEL, sm_count=1, settings=Settings(item_chunks=1))
    for rank, table in enumerate(rank_tables(part)):
        segments = build_plan(part, rank, p_vector=[p] * 3).segments
        chunks = segments.num_chunks
        has_prev, has_next = segments.has_prev.astype(int), segments.has_next.astype(int)
        counts = quantities(table, p, 1, lone)
        assert counts["walk_output"] == counts["walk_states"] == counts["walk_adjoint"] == chunks.sum()
        assert counts["walk_summary"] == (chunks * has_next).sum() + (chunks * has_next * has_prev).sum()
        assert counts["adjoint_summary"] == (chunks * has_prev).sum()
        assert counts["prepare"] == 2 * chunks.sum()
        walked = 3 * len(chunks) + has_next.sum() + (has_next * has_prev).sum() + has_prev.sum()
        assert counts["segment"] == walked


def test_one_uncut_document_in_two_segments_counts_as_the_module_says() -> None:
    counts = quantities([(100, 0)], 2, 4, H200_MODEL)
    assert counts["walk_output"] == counts["walk_summary"] == counts["adjoint_summary"] == 50
    assert counts["fold_hop"] == 2
    assert counts["launch"] == 10
    assert counts["exchange"] == counts["link_mib"] == 0
    assert quantities([(100, 0)], 1, 4, H200_MODEL)["walk_summary"] == 0
    crossing = quantities([(100, 1, 0)], 2, 16, H200_MODEL)
    assert (crossing["exchange"], crossing["link_mib"], crossing["walk_summary"]) == (2, 1, 50)


def test_decay_removes_its_share_of_the_maps_alone() -> None:
    device = replace(H200_MODEL, sm_count=1)
    kept = quantities([(100, 1, 1)], 4, 1, device)
    some = quantities([(100, 1, 1)], 4, 1, replace(device, settings=Settings(decayed_permille=500)))
    assert kept["walk_summary"] == 200
    assert some["walk_summary"] == 150
    assert {k: v for k, v in some.items() if k not in ("walk_summary", "segment")} == {
        k: v for k, v in kept.items() if k not in ("walk_summary", "segment")
    }


@pytest.mark.parametrize(
    ("value_heads", "chunks", "expected"), [(48, 1024, 11), (6, 1024, 22), (8, 1024, 16), (6, 4, 1)]
)
def test_the_measured_rule_fills_whole_waves_with_a_lone_document(value_heads: int, chunks: int, expected: int) -> None:
    assert p_vector("measured", [[(chunks, 0)]], value_heads, 132) == [expected]


def test_the_measured_rule_refuses_to_split_where_documents_fill_the_device() -> None:
    assert p_vector("measured", [[(128, 0)] * 22], 48, 132) == [1]
    assert p_vector("occ", [[(128, 0)] * 22], 6, 132) == [1]
    dear = replace(H200_MODEL, times=replace(H200_MODEL.times, fold_hop=10**9))
    assert p_vector("measured", [[(1024, 0)]], 48, 132, dear) == [1]


def test_thousands_of_documents_of_many_lengths_are_planned_near_the_best() -> None:
    listed = [(1 + (7 * i) % 300, 0) for i in range(3000)] + [(3000, 1)]
    (p,) = p_vector("measured", [listed], 6, 132)
    rows = [table_rows(listed)]
    model = StepModel(rows, 6, H200_MODEL, np.arange(1, 65))
    times = [model.step_ns(0, i) for i in (0, *range(11, 64))]
    assert 100 * model.step_ns(0, p - 1) <= 102 * min(times)


# ---- what it promises ------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(ranks=tables, value_heads=heads, sm_count=sm_counts)
def test_the_measured_rule_is_never_predicted_above_one_segment_and_is_near_the_best(
    ranks: list[Fragments], value_heads: int, sm_count: int
) -> None:
    device = replace(H200_MODEL, sm_count=sm_count)
    vector = p_vector("measured", ranks, value_heads, sm_count)
    for rank, p in zip(ranks, vector, strict=True):
        assert p_vector("measured", [rank], value_heads, sm_count) == [p]
        assert step_ns(rank, p, value_heads, device) <= step_ns(rank, 1, value_heads, device)
        longest = max((nc for nc, _, _ in rank), default=0)
        tried = [1, *(q for q in range(2, min(64, longest) + 1) if q == 64 or -(-longest // q) <= 256)]
        assert p in tried
        model = StepModel([table_rows(rank)], value_heads, device, np.array(tried))
        best = min(model.step_ns(0, i) for i in range(len(model.p)))
        assert 100 * step_ns(rank, p, value_heads, device) <= 102 * best


@settings(max_examples=60, deadline=None)
@given(ranks=tables, value_heads=heads, p=st.lists(st.integers(1, 64), min_size=3, max_size=3))
def test_bounds_of_the_step_are_never_above_it_and_several_ranks_give_what_one_does(
    ranks: list[Fragments], value_heads: int, p: list[int]
) -> None:
    model = StepModel([table_rows(rank) for rank in ranks], value_heads, H200_MODEL, np.array(p))
    for r, rank in enumerate(ranks):
        for i, q in enumerate(p):
            assert model.bounds()[r, i] <= model.varying_ns(r, i)
            assert model.step_ns(r, i) == step_ns(rank, q, value_heads, H200_MODEL)


def test_the_p_of_a_rank_does_not_depend_on_which_ranks_are_planned_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "USEFUL", 1)
    crowded, lone = [(1024, 0)] * 3, [(2048, 0)]  # at most 4 and at most 8 are tried
    alone = p_vector("measured", [crowded], 48, 132)
    monkeypatch.setattr(cost_model, "USEFUL", 16)
    assert alone != p_vector("measured", [crowded], 48, 132)
    monkeypatch.setattr(cost_model, "USEFUL", 1)
    assert p_vector("measured", [crowded, lone], 48, 132)[:1] == alone
