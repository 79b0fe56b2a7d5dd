"""The rules for P: golden vectors to the last integer, the measured rule's promises, and every refusal by name."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_gdn.calibration import H200_MODEL
from cp_gdn.layout import partition
from cp_gdn.makespan import RankTable, lpt_makespan, makespan_bound, rank_tables, table_rows
from cp_gdn.seed_rules import RankCosts
from cp_gdn.segments import GB300, H200, RULES, p_vector, parse_segments, resolve_segments, row_cost

GOLDEN = Path(__file__).parent / "golden"
ROWS = json.loads((GOLDEN / "plan_rows.json").read_text())
MAKESPANS = json.loads((GOLDEN / "lpt_makespan.json").read_text())
ALL_RULES = (*RULES, "measured")

Fragments = list[tuple[int, int, int]]
fragment = st.tuples(st.one_of(st.integers(0, 9), st.integers(0, 1200)), st.integers(0, 1), st.integers(0, 1))
tables = st.lists(st.lists(fragment, max_size=6), min_size=1, max_size=5)
jobs = st.lists(st.tuples(st.one_of(st.integers(0, 6), st.integers(0, 900)), st.integers(0, 40)), max_size=7)
heads = st.sampled_from((1, 6, 8, 16, 32, 48, 64, 200))
sm_counts = st.sampled_from((1, 7, 108, 132, 148))


def seed_fragments(row: dict[str, Any]) -> list[list[tuple[int, bool]]]:
    """(NC, crosses_out) of every fragment as the seed counts chunks, straight from the fragments."""
    part = partition(row["cu_seqlens"], row["world_size"], row["layout"])
    return [[(-(-f.length // 64), f.next is not None) for f in fragments] for fragments in part.fragments]


def in_rounds(listed: Sequence[tuple[int, int]], machines: int) -> int:
    """Longest first, job by job, each to the least loaded machine."""
    loads = [0] * machines
    for length, count in sorted(listed, reverse=True):
        for _ in range(count):
            heapq.heapreplace(loads, loads[0] + length)
    return max(loads)


# ---- golden ----------------------------------------------------------------------------------------------------------


def test_every_rule_reproduces_the_golden_p_vectors_and_the_golden_cost() -> None:
    assert len(ROWS) == 787
    for row in ROWS:
        listed = seed_fragments(row)
        for rule, expected in row["P"].items():
            assert p_vector(rule, listed, row["HV"], row["sm_count"]) == expected, (rule, row)
        assert row_cost(listed, row["P"]["row_cost_lpt"], row["HV"], row["sm_count"]) == row["row_cost_10ns"], row


def test_makespans_equal_the_golden_ones() -> None:
    assert len(MAKESPANS) == 400
    for case in MAKESPANS:
        assert lpt_makespan([tuple(chain) for chain in case["chains"]], case["machines"]) == case["makespan"], case


@pytest.mark.parametrize("rule", ALL_RULES)
def test_arrays_and_multisets_give_the_p_vector_of_the_plain_lists(rule: str) -> None:
    for row in ROWS[::40]:
        listed = seed_fragments(row)
        arrays = [np.array(fragments, dtype=np.int64).reshape(-1, 2) for fragments in listed]
        columns = [np.array(table_rows(fragments), dtype=np.int64).reshape(-1, 4).T for fragments in listed]
        multisets = [RankTable(nc=nc, crosses=out, count=count) for nc, out, _, count in columns]
        expected = p_vector(rule, listed, row["HV"], row["sm_count"])
        assert p_vector(rule, arrays, row["HV"], row["sm_count"]) == expected
        assert p_vector(rule, multisets, row["HV"], row["sm_count"]) == expected


def test_rank_tables_hold_every_fragment_with_its_chunks_and_crossings() -> None:
    for row in ROWS[::25]:
        part = partition(row["cu_seqlens"], row["world_size"], row["layout"])
        for own, fragments in zip(rank_tables(part), part.fragments, strict=True):
            ends = [(f, f.offset + f.length) for f in fragments]
            listed = [
                (-(-end // 64) - f.offset // 64 if f.length else 0, f.next is not None, f.prev is not None)
                for f, end in ends
            ]
            assert table_rows(own) == table_rows(listed)
        seed = [table_rows(table) for table in rank_tables(part, grid="fragment")]
        assert [{(nc, out) for nc, out, _, _ in rows} for rows in seed] == [set(f) for f in seed_fragments(row)]


def test_a_table_beyond_the_small_ones_has_the_same_canonical_form() -> None:
    rng = np.random.default_rng(0)
    listed = np.stack([rng.integers(0, 300, 500), rng.integers(0, 2, 500), rng.integers(0, 2, 500)], axis=1)
    assert table_rows(listed) == table_rows(listed.tolist())
    assert sum(row[3] for row in table_rows(listed)) == 500


# ---- makespans -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(listed=jobs, machines=st.integers(1, 11))
def test_a_makespan_is_that_of_placing_single_jobs(listed: list[tuple[int, int]], machines: int) -> None:
    assert lpt_makespan(listed, machines) == in_rounds(listed, machines)


@settings(deadline=None)
@given(listed=jobs.filter(len), machines=st.integers(1, 11))
def test_a_bound_is_never_above_the_makespan_and_exact_for_one_length(
    listed: list[tuple[int, int]], machines: int
) -> None:
    lengths, counts = np.array(sorted(listed, reverse=True)).T
    assert makespan_bound(lengths, counts, machines) <= lpt_makespan(listed, machines)
    assert makespan_bound(lengths[:1], counts[:1], machines) == lpt_makespan([(lengths[0], counts[0])], machines)


# ---- properties of rules ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(ranks=tables, value_heads=heads, sm_count=sm_counts, order=st.randoms())
@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_p_vector_is_capped_repeatable_and_follows_its_ranks(
    rule: str, ranks: list[Fragments], value_heads: int, sm_count: int, order: Any
) -> None:
    vector = p_vector(rule, ranks, value_heads, sm_count)
    for p, rank in zip(vector, ranks, strict=True):
        assert 1 <= p <= max(1, min(64, max((nc for nc, _, _ in rank), default=0)))
    assert vector == p_vector(rule, ranks, value_heads, sm_count)
    shuffled = list(range(len(ranks)))
    order.shuffle(shuffled)
    moved = p_vector(rule, [ranks[r] for r in shuffled], value_heads, sm_count)
    assert moved == [vector[r] for r in shuffled]


def test_seed_rules_on_an_h200_weigh_its_own_walks() -> None:
    assert (H200.tape, H200.xfer, H200.offset, H200.compose) == (195, 115, 115, 313)
    own, seed = (p_vector("row_cost_lpt", [[(512, 1)]], 6, 132, costs) for costs in (H200_MODEL, GB300))
    assert own == p_vector("row_cost_lpt", [[(512, 1)]], 6, 132, H200)
    assert own != seed


def test_walk_steps_weigh_summaries_five_to_three() -> None:
    assert RankCosts(table_rows([(10, 1), (20, 0)]), 1, 1, GB300).steps(1) == 5 * 10 + 3 * 30


def test_no_ranks_and_ranks_without_fragments_are_planned() -> None:
    for rule in ALL_RULES:
        assert p_vector(rule, [], 48, 132) == []
        assert p_vector(rule, [[], [(0, 0)], [(3, 1)]], 48, 132)[:2] == [1, 1]


# ---- what segments= may say ------------------------------------------------------------------------------------------

READ = [
    (1, ("fixed", (1, 1, 1), 0, "")),
    (np.int64(5), ("fixed", (5, 5, 5), 0, "")),
    ([1, 2, 3], ("fixed", (1, 2, 3), 0, "")),
    (np.array([4, 4, 9]), ("fixed", (4, 4, 9), 0, "")),
    ("grid:12", ("grid", (), 12, "")),
    ("auto", ("rule", (), 0, "measured")),
    *((rule, ("rule", (), 0, rule)) for rule in ALL_RULES),
]
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (0, ValueError, "got 0, expected an int >= 1"),
    (-3, ValueError, "got -3"),
    (True, TypeError, "got True"),
    (2.0, TypeError, r"got 2\.0"),
    (None, TypeError, "got None"),
    ([1, 2], ValueError, "got 2 numbers, expected one per rank, 3"),
    ([1, 2, 0], ValueError, r"got \[1, 2, 0\]"),
    ([1, 2, "3"], TypeError, r"got \[1, 2, '3'\]"),
    ("grid:0", ValueError, "got 'grid:0', expected \"grid:N\""),
    ("grid:", ValueError, 'expected "grid:N"'),
    ("grid:-4", ValueError, 'expected "grid:N"'),
    ("fastest", ValueError, "got 'fastest', expected .*row_cost_lpt, measured"),
]


@pytest.mark.parametrize(("spec", "expected"), READ)
def test_segments_are_read(spec: Any, expected: tuple[Any, ...]) -> None:
    read = parse_segments(spec, 3)
    assert (read.kind, read.p, read.grid, read.rule) == expected


@pytest.mark.parametrize(("spec", "error", "text"), REFUSED)
def test_segments_that_mean_nothing_are_refused_by_name(spec: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^segments: .*{text}"):
        parse_segments(spec, 3)


def test_segments_of_a_partition_come_from_what_was_asked() -> None:
    part = partition([0, 30000, 65536], 2, "contiguous")
    assert resolve_segments(3, part, 48).p_vector == (3, 3)
    grid = resolve_segments("grid:4", part, 48)
    assert (grid.p_vector, grid.grid, grid.rule, grid.note) == ((1, 1), 4, "grid", "")
    auto = resolve_segments("auto", part, 48)
    assert auto.rule == "measured"
    assert auto.note == "cpu: planned as one H200 of 132 SMs"
    assert list(auto.p_vector) == p_vector("measured", rank_tables(part), 48, 132)
    occ = resolve_segments("occ", part, 48, replace(H200_MODEL, sm_count=200), "half a device")
    assert list(occ.p_vector) == p_vector("occ", rank_tables(part, grid="fragment"), 48, 200)
    assert occ.note == "half a device"


def test_the_seed_rules_count_chunks_from_the_fragment_and_the_measured_rule_from_the_document() -> None:
    part = partition(
        [0, 120], 2, "contiguous"
    )  # 60 tokens each; the second fragment lies on two chunks of the document
    assert resolve_segments("occ", part, 1).p_vector == (1, 1)
    assert [rows[0][0] for rows in rank_tables(part)] == [1, 2]


def test_rules_refuse_what_they_cannot_plan_by_name() -> None:
    with pytest.raises(ValueError, match=r"^rule: got 'lpt', expected one of one, .*measured"):
        p_vector("lpt", [[(1, 0)]], 48, 132)
    with pytest.raises(ValueError, match=r"^value_heads, sm_count: got 0 and 132"):
        p_vector("one", [[(1, 0)]], 0, 132)
    with pytest.raises(ValueError, match=r"^tables: got a fragment of -1 chunks"):
        p_vector("one", [[(-1, 0)]], 48, 132)
    with pytest.raises(ValueError, match=r"^grid: got 'rank'"):
        rank_tables(partition([0, 5], 1), grid="rank")
