"""What the kernels look up, against definitions: items of every walk, steps of slabs, chains of hops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cp_gdn import Comm, build_context, partition
from cp_gdn.a2a.routes import draft_owner, owner_routes
from cp_gdn.backends import hopper_items, hopper_slabs
from cp_gdn.backends.hopper_exchange import KEPT, TRAVELLING, kernel_routes
from cp_gdn.backends.hopper_hops import KernelHops, chainwise, packed
from cp_gdn.chains import hop_columns
from cp_gdn.page import Page
from cp_gdn.plan import Segments
from tests.plans import Drawn, drawn_plans, plan_rank
from tests.spread import places_of_heads, steps_of, table

HEADS = (1, 2)


def segments_of(num_chunks: list[int]) -> Segments:
    """Segments of whole documents with so many chunks."""
    lengths = [64 * n for n in num_chunks]
    part = partition([0, *np.cumsum(lengths).tolist()], 1, "contiguous")
    return build_context(part, Comm.alone(), heads=HEADS, segments=1).plan.segments


@pytest.mark.parametrize(
    ("num_chunks", "apart", "want"),
    [
        ([24, 1, 1, 30, 2], None, [(3, 1), (0, 1), (1, 2), (4, 1)]),  # a long one is alone, its neighbours share
        ([24, 25], None, [(1, 1), (0, 1)]),
        ([10, 10, 10, 10], None, [(0, 3), (3, 1)]),  # as many as start below the limit
        ([1, 1, 1, 1], [False, True, True], [(0, 2), (2, 1), (3, 1)]),  # the third is another walk's
        ([1] * 50, None, [(0, 24), (24, 24), (48, 2)]),
        ([5], None, [(0, 1)]),
    ],
    ids=str,
)
def test_short_neighbours_share_a_block(num_chunks: list, apart: list | None, want: list) -> None:
    segments = segments_of(num_chunks)
    runs = hopper_items.run_items(segments, None if apart is None else np.array(apart))
    assert [(segment, run) for segment, _, run in runs.T.tolist()] == want
    assert runs[1].tolist() == [sum(num_chunks[s : s + run]) for s, run in want]


def listed_items(items: hopper_items.Items, walk: int, segments: Segments) -> list[tuple[int, int, int]]:
    """First segment, chunks and run of the items of a walk, which come longest first."""
    found = items.of(walk).tolist()
    assert [first for first, *_ in found] == [segments.first_chunk[segment] for *_, segment in found]
    assert [chunks for _, chunks, *_ in found] == sorted((chunks for _, chunks, *_ in found), reverse=True)
    return [(segment, chunks, packed >> 16) for _, chunks, packed, segment in found]


def segments_of_runs(items: hopper_items.Items, walk: int, segments: Segments) -> list[int]:
    """Segments of the runs of a walk, each of which has as many chunks as it says."""
    found: list[int] = []
    for first, chunks, run in listed_items(items, walk, segments):
        assert segments.num_chunks[first : first + run].sum() == chunks
        found += range(first, first + run)
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(drawn=drawn_plans())
def test_items_of_every_walk_are_its_segments_longest_first(drawn: Drawn) -> None:
    for rank in range(drawn.part.world_size):
        made = plan_rank(drawn, rank, "ring")
        segments, count = made.plan.segments, len(made.plan.segments)
        before, after = segments.around
        nobody, remote = np.zeros(count, dtype=bool), made.rows.remote[: len(made.rows.map_of_slot)]
        items = hopper_items.build_items(made.plan, remote, 1)
        assert sum(items.counts) == len(items.table)
        for walk, offsets, maps in (
            (hopper_items.SUMMARY, after, before & after),
            (hopper_items.TRANSFER, nobody, before & after),
            (hopper_items.ADJOINT_SUMMARY, before, nobody),
        ):
            want = [(int(s), int(segments.num_chunks[s]), 0) for s in offsets.nonzero()[0]]
            want += [(int(s), int(segments.num_chunks[s]), hopper_items.MAP) for s in maps.nonzero()[0]]
            assert sorted(listed_items(items, walk, segments)) == sorted(want)
        waits = remote[segments.slot]
        independent, dependent = (~waits).nonzero()[0].tolist(), waits.nonzero()[0].tolist()
        if not items.counts[hopper_items.INDEPENDENT] and dependent:  # both at once
            independent, dependent = [], list(range(count))
        assert segments_of_runs(items, hopper_items.REPLAY, segments) == list(range(count))
        assert segments_of_runs(items, hopper_items.INDEPENDENT, segments) == independent
        assert segments_of_runs(items, hopper_items.DEPENDENT, segments) == dependent


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    heads=st.sampled_from([(1, 1), (2, 6), (4, 8), (3, 3)]),
    slab=st.integers(1, 40),
    blocks=st.integers(1, 20),
)
def test_every_chunk_and_head_has_one_step_and_every_tape_one_place(
    lengths: list[int], heads: tuple[int, int], slab: int, blocks: int
) -> None:
    first = np.cumsum(lengths) - lengths
    items = np.stack((first, lengths, np.full(len(lengths), 1 << 16), np.arange(len(lengths))), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_slabs, "BLOCKS", blocks)
        patch.setattr(hopper_slabs, "SLAB_BYTES", slab * hopper_slabs.CHUNK_BYTES)
        tables = hopper_slabs.slab_tables(items, heads, Page())
    steps = table(steps_of(tables, [[64 * c, 64] for c in range(sum(lengths))], {}), 4)
    assert tables.pairs.data.view(np.int32)[1::4][: tables.num_pairs].min() > 0  # no run of pairs is empty
    group = heads[1] // heads[0]
    assert sorted(map(tuple, steps[:, [3, 2]].tolist())) == [
        (c, h) for c in range(sum(lengths)) for h in range(heads[0])
    ]
    assert torch.equal(steps[:, 0], 64 * steps[:, 3])
    places = places_of_heads(tables, group)
    assert len(places) == len(items) * heads[1]
    wave, count = max(1, blocks // group), len(items) * heads[0]
    waves = -(-count // wave)
    assert sum(-(-(each.end_pair - each.first_pair) // wave) for each in tables.slabs) == waves  # no wave more
    for each in tables.slabs:
        pairs = each.end_pair - each.first_pair
        assert pairs == -(-count // waves) or each.steps * group <= slab or each.end_pair == count
        for pair in range(each.first_pair, each.end_pair):
            item, head = divmod(pair, heads[0])
            for member in range(group):
                place, stride = places[item * heads[1] + head * group + member]
                for c in range(lengths[item]):
                    step, of_group = divmod(place + c * stride, group)
                    assert of_group == member
                    assert steps[each.first_step + step, [3, 2]].tolist() == [first[item] + c, head]
                    assert step < each.steps


def test_hops_of_a_chain_follow_each_other_and_lists_share_their_tables() -> None:
    """Columns: kind, chain, step, later, dst, src, offset row, map row; given step after step."""
    kinds = {
        4: [(7, 0, 0, 5, 0), (9, 0, 0, 6, 3), (7, 1, 1, 7, 5), (9, 1, 1, 8, 6), (7, 2, 1, 9, 7)],
        5: [(7, 0, 1, 1, 2)],
    }
    hops = [(kind, *hop, i, i) for kind, found in kinds.items() for i, hop in enumerate(found)]
    made = chainwise(np.array(hops[::-1]).T, Page())
    found, mirrored = made.of(2), made.of(2, reverse=True)
    rows, chains = (x.view(np.int32).tolist() for x in (found.table, found.chains))
    assert rows == [5, 0, 0, -1, 7, 5, 2, 2, 9, 7, 4, 4, 6, 3, 1, -1, 8, 6, 3, 3, 1, 2, 0, 0]
    assert chains == [0, 3, 5, 6]
    assert [(x.first_chain, x.num_chains) for x in (found, mirrored, made.of(3))] == [(0, 2), (2, 1), (0, 0)]
    assert mirrored.table is found.table
    assert mirrored.chains is found.chains


@settings(max_examples=60, deadline=None)
@given(drawn=drawn_plans(), exchange=st.sampled_from(("ring", "a2a")))
def test_kernels_take_the_hops_that_torch_takes_and_chains_do_not_depend_on_each_other(
    drawn: Drawn, exchange: str
) -> None:
    for rank in range(drawn.part.world_size):
        made = plan_rank(drawn, rank, exchange)
        columns = hop_columns(made.plan, made.rows, steps_on=made.routes.kind == "ring")
        of_kernels = chainwise(columns, Page())
        assert of_kernels.kinds == made.hops.kinds
        for kind in made.hops.kinds:
            want, got = made.hops.of(*divmod(kind, 2)), of_kernels.of(*divmod(kind, 2))
            starts = [is_start for count, is_start in want.steps for _ in range(count)]
            rows = [(*hop[:3], -1 if s else hop[3]) for hop, s in zip(want.table.T.tolist(), starts, strict=True)]
            first, last = got.first_chain, got.first_chain + got.num_chains
            borders = got.chains.view(np.int32)[first : last + 1].tolist()
            table = [tuple(hop) for hop in got.table.view(np.int32).reshape(-1, 4).tolist()]
            chains = [table[a:b] for a, b in pairwise(borders)]
            assert sorted(hop for chain in chains for hop in chain) == sorted(rows)
            place = {hop: i for i, hop in enumerate(rows)}
            for chain in chains:
                assert [place[hop] for hop in chain] == sorted(place[hop] for hop in chain)
                others = {dst for other in chains if other is not chain for dst, *_ in other}
                assert not others & {src for _, src, _, row in chain if row >= 0}


def read_of(hops: KernelHops) -> np.ndarray:
    """[4, hops] of a list: dst, src, offset row, map row."""
    first, last = hops.chains.view(np.int32)[[hops.first_chain, hops.first_chain + hops.num_chains]]
    return hops.table.view(np.int32).reshape(-1, 4)[first:last].T


def labelled_message(heads: Sequence[int], rows: Sequence[int], maps: bool) -> np.ndarray:
    """An owner's message in rows: of every rank its heads, offsets and maps. Heads are numbered from 0, offsets after
    all heads, maps from -2 down."""
    found: list[int] = []
    head, row = 0, 0
    for num_heads, num_rows in zip(heads, rows, strict=True):
        found += range(head, head + num_heads)
        found += range(sum(heads) + row, sum(heads) + row + num_rows)
        found += [-2 - i for i in range(row, row + num_rows)] * maps
        head, row = head + num_heads, row + num_rows
    return np.array(found)


@settings(max_examples=60, deadline=None)
@given(drawn=drawn_plans())
def test_an_owner_on_the_kernels_finds_in_the_message_what_others_take_out_of_it_first(drawn: Drawn) -> None:
    made = plan_rank(drawn, 0, "a2a")
    assume(made.routes.owners is not None)
    draft = draft_owner(drawn.part, made.plan, made.rows)
    apart = owner_routes(draft, Page(), chainwise)
    packed_routes = kernel_routes(draft, Page(), drawn.part.world_size)
    for generic, routes in zip(apart, packed_routes, strict=True):
        want, heads = read_of(generic.hops.of(0, generic.reverse)), routes.num_heads
        goes_on = want[3] >= 0
        for kind in (TRAVELLING, KEPT)[: 1 + generic.reverse]:
            dst, src, offsets, maps = read_of(routes.hops.of(kind, generic.reverse))
            message = labelled_message(heads, routes.num_rows, kind == TRAVELLING)
            assert np.array_equal((dst, src, message[offsets]), want[:3])
            assert np.array_equal(maps[~goes_on], want[3, ~goes_on])
            taken = message[maps[goes_on]] if kind == TRAVELLING else -2 - maps[goes_on]
            assert np.array_equal(taken, -2 - want[3, goes_on])
        owned = labelled_message(heads, routes.num_rows, True)[routes.owned_rows]
        assert owned.tolist() == [-2 - i for i in range(sum(routes.num_rows))]


def test_packed_tables_hold_int32_with_an_odd_one_padded() -> None:
    assert packed([1, -2, 3]).view(np.int32).tolist() == [1, -2, 3, 0]
    assert packed(np.zeros((0, 4))).shape == (0,)
