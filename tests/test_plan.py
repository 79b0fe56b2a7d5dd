"""The plan of any pack: chunks, segments, walks, who holds which end of a document, and the tables made of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from cp_gdn.layout import partition
from cp_gdn.plan import CHUNK, Plan, build_plan
from cp_gdn.walks import DEPENDENT, INDEPENDENT, SUMMARY, TRANSFER
from tests.plans import Drawn, drawn_plans, plan_rank

EXAMPLES = settings(max_examples=60, deadline=None)


def plans(drawn: Drawn) -> list[Plan]:
    return [drawn.plan(rank) for rank in range(drawn.part.world_size)]


def chunk_ends(plan: Plan) -> list[tuple[int, int]]:
    """First and last row of every chunk."""
    return [(a, a + n - 1) for a, n in zip(plan.chunks.first_row, plan.chunks.count, strict=True)]


def test_the_worked_example_a_document_of_150_cut_at_100() -> None:
    part = partition([0, 150], 2, fragments=[[(0, 0, 100)], [(0, 100, 50)]])
    first, second = (build_plan(part, rank, p_vector=(2, 2)) for rank in (0, 1))
    assert (first.chunks.first_row.tolist(), first.chunks.count.tolist()) == ([0, 64], [64, 36])
    assert (second.chunks.first_row.tolist(), second.chunks.count.tolist()) == ([0, 28], [28, 22])
    assert [plan.segments.num_chunks.tolist() for plan in (first, second)] == [[1, 1], [1, 1]]
    assert (first.entry_docs.tolist(), first.exit_docs.tolist()) == ([0], [])
    assert (second.entry_docs.tolist(), second.exit_docs.tolist()) == ([], [0])


@EXAMPLES
@given(drawn=drawn_plans())
def test_chunks_tile_the_tokens_on_the_grid_of_their_document(drawn: Drawn) -> None:
    for rank, plan in enumerate(plans(drawn)):
        positions, ends = drawn.part.positions(rank), chunk_ends(plan)
        assert [row for a, b in ends for row in range(a, b + 1)] == list(range(plan.num_tokens))
        assert plan.num_tokens == drawn.part.local_tokens(rank)
        for a, b in ends:
            assert 0 <= b - a < CHUNK
            assert positions[b] - positions[a] == b - a
            assert positions[a] // CHUNK == positions[b] // CHUNK
        starts = [a for a, _ in ends]
        fragments = [f for f in drawn.part.fragments[rank] if f.length]
        first_rows = np.cumsum([0, *(f.length for f in fragments)])
        for fragment, a, b in zip(fragments, first_rows, first_rows[1:], strict=False):
            expected = -(-(fragment.offset + fragment.length) // CHUNK) - fragment.offset // CHUNK
            assert sum(a <= start < b for start in starts) == expected


@EXAMPLES
@given(drawn=drawn_plans())
def test_segments_tile_the_chunks_of_their_fragment_in_near_equal_runs(drawn: Drawn) -> None:
    for rank, plan in enumerate(plans(drawn)):
        segments, ends = plan.segments, chunk_ends(plan)
        runs = zip(segments.first_chunk, segments.num_chunks, strict=True)
        assert [c for first, n in runs for c in range(first, first + n)] == list(range(len(plan.chunks)))
        for slot, fragment in enumerate(drawn.part.fragments[rank]):
            mine = slice(segments.of_slot[slot], segments.of_slot[slot + 1])
            counts, n = segments.num_chunks[mine].tolist(), int(segments.num_chunks[mine].sum())
            assert set(segments.slot[mine].tolist()) <= {slot}
            if drawn.grid:
                firsts = [ends[c][0] for c in segments.first_chunk[mine]]
                offsets = drawn.part.positions(rank)[firsts]
                assert (offsets % (CHUNK * drawn.grid) == 0).all()
                assert len(counts) == -(-n // drawn.grid)
            else:
                assert len(counts) == min(drawn.p_vector[rank], n)
                assert counts == sorted(counts, reverse=True)
                assert max(counts, default=0) - min(counts, default=0) <= 1
            assert (n > 0) == (fragment.length > 0)


@EXAMPLES
@given(drawn=drawn_plans())
def test_a_segment_knows_whether_its_document_has_tokens_around_it(drawn: Drawn) -> None:
    sizes = np.diff(drawn.part.doc_bounds)
    for rank, plan in enumerate(plans(drawn)):
        positions, ids, ends = drawn.part.positions(rank), drawn.part.token_ids(rank), chunk_ends(plan)
        for s in range(len(plan.segments)):
            first_chunk = plan.segments.first_chunk[s]
            first, last = ends[first_chunk][0], ends[first_chunk + plan.segments.num_chunks[s] - 1][1]
            doc = np.searchsorted(drawn.part.doc_bounds, ids[first], side="right") - 1
            assert plan.segments.has_prev[s] == (positions[first] > 0)
            assert plan.segments.has_next[s] == (positions[last] < sizes[doc] - 1)


@EXAMPLES
@given(drawn=drawn_plans())
def test_every_document_starts_on_one_rank_and_ends_on_one_and_empty_ones_are_rank_0s(drawn: Drawn) -> None:
    found = plans(drawn)
    sizes = np.diff(drawn.part.doc_bounds)
    for docs, edge in ((lambda plan: plan.entry_docs, 0), (lambda plan: plan.exit_docs, -1)):
        per_rank = [docs(plan).tolist() for plan in found]
        assert sorted(doc for mine in per_rank for doc in mine) == list(range(len(sizes)))
        for rank, mine in enumerate(per_rank):
            assert mine == sorted(mine)
            tokens = set(drawn.part.token_ids(rank).tolist())
            for doc in mine:
                first, end = drawn.part.doc_bounds[doc : doc + 2]
                assert (end - 1 if edge else first) in tokens if end > first else rank == 0


@EXAMPLES
@given(drawn=drawn_plans())
def test_every_walk_takes_the_chunks_of_its_segments_in_order_or_in_reverse(drawn: Drawn) -> None:
    for rank, plan in enumerate(plans(drawn)):
        made = plan_rank(drawn, rank, "ring")
        walks = made.schedule.walks
        assert walks is not None
        before, after = plan.segments.around
        wanted = {(SUMMARY, False): after, (SUMMARY, True): before, (TRANSFER, False): before & after}
        for (kind, reverse), chosen in wanted.items():
            assert sorted(walks.of(kind, reverse).segments) == np.flatnonzero(chosen).tolist()
        for reverse in (False, True):
            replayed = [*walks.of(INDEPENDENT, reverse).segments, *walks.of(DEPENDENT, reverse).segments]
            assert sorted(replayed) == list(range(len(plan.segments)))
        for kind, reverse in [*itertools.product((SUMMARY, INDEPENDENT, DEPENDENT), (False, True)), (TRANSFER, False)]:
            walk = walks.of(kind, reverse)
            visited: dict[int, list[int]] = {int(s): [] for s in walk.segments}
            steps = walk.chunks.split(walk.active)
            for active, chunks in zip(walk.active, steps, strict=True):
                for s, chunk in zip(walk.segments[:active], chunks, strict=True):
                    visited[int(s)].append(int(chunk))
            for s, chunks in visited.items():
                first = int(plan.segments.first_chunk[s])
                run = list(range(first, first + int(plan.segments.num_chunks[s])))
                assert chunks == (run[::-1] if reverse else run)


@EXAMPLES
@given(drawn=drawn_plans())
def test_every_token_has_its_place_in_a_chunk_and_every_other_row_is_empty(drawn: Drawn) -> None:
    for rank in range(drawn.part.world_size):
        made = plan_rank(drawn, rank, "ring")
        schedule = made.schedule
        tokens = made.plan.num_tokens
        assert schedule.rows[schedule.back].tolist() == list(range(tokens))
        assert sorted(schedule.rows.tolist()) == [*range(tokens), *[tokens] * (len(schedule.rows) - tokens)]
        assert (schedule.back // CHUNK).tolist() == np.repeat(
            np.arange(len(made.plan.chunks)), made.plan.chunks.count
        ).tolist()


def test_a_document_of_one_segment_needs_no_summary_and_its_middle_only_a_map() -> None:
    whole = Drawn(part=partition([0, 640], 1, "contiguous"), p_vector=(1,), grid=0)
    assert plan_rank(whole, 0, "ring").rows.num_maps == 0
    cut = Drawn(part=partition([0, 640], 1, "contiguous"), p_vector=(3,), grid=0)
    made = plan_rank(cut, 0, "ring")
    assert made.rows.map_of_segment.tolist() == [-1, 0, -1]
    assert made.rows.offset_of_segment.tolist() == [0, 1, -1, -1, 0, 1]  # forward, then mirrored


@pytest.mark.parametrize("grid", [1, 2])
def test_a_cut_off_the_grid_is_refused_with_document_cut_and_the_align_that_helps(grid: int) -> None:
    part = partition([0, 50, 50 + 640], 4, "contiguous")
    for rank in range(4):
        text = (
            f'segments="grid:{grid}": document 1 is cut at its token 123, .* build the partition with align={64 * grid}'
        )
        with pytest.raises(ValueError, match=text):
            build_plan(part, rank, p_vector=(1,) * 4, grid=grid)
        build_plan(partition([0, 50, 690], 4, "contiguous", align=64 * grid), rank, p_vector=(1,) * 4, grid=grid)
