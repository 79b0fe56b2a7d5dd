"""Closed forms of the cut layouts against the table of every rank's fragments."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cp_gdn.fragments import Places
from cp_gdn.layout import Partition, partition
from cp_gdn.listing import ListedCuts
from tests.cases import LAYOUTS

EXAMPLES = settings(max_examples=150, deadline=None)


@st.composite
def cut_packs(draw: st.DrawFn) -> Partition:
    longest = draw(st.sampled_from((6, 40, 700)))
    lengths = draw(st.lists(st.integers(0, longest), max_size=8))
    align = draw(st.sampled_from((1, 1, 2, 3, 64)))
    bounds = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    return partition(bounds, draw(st.integers(1, 9)), draw(st.sampled_from(LAYOUTS)), align=align)


# Pieces of 64 tokens: the two around the middle lie on ranks 3 and 0, not on one.
OFF_CENTRE = [partition([0, 134, 134], 4, layout, align=64) for layout in ("zigzag", "zigzag_per_document")]


def listed(part: Partition) -> ListedCuts:
    return ListedCuts(bounds=part.bounds, table=part.table)


@EXAMPLES
@given(part=cut_packs())
def test_a_ranks_own_fragments_are_its_rows_of_the_table(part: Partition) -> None:
    for rank in range(part.world_size):
        own, rows = part.of_rank(rank), listed(part).fragments(rank)
        for name in ("doc", "offset", "length", "size", "num_chunks"):
            assert np.array_equal(getattr(own, name), getattr(rows, name)), name
            assert getattr(own, name).dtype == np.int64
        assert np.array_equal(own.around, rows.around)


@EXAMPLES
@given(part=cut_packs())
@example(part=OFF_CENTRE[0])
@example(part=OFF_CENTRE[1])
def test_places_in_the_chain_and_neighbours_are_those_of_the_table(part: Partition) -> None:
    table = listed(part)
    for rank in range(part.world_size):
        own = part.of_rank(rank)
        closed, found = part.cuts.places(own, rank), table.places(own, rank)
        everywhere = np.ones((2, len(own.doc)), dtype=bool)
        meant = {"before": everywhere, "after": everywhere, "crosses": everywhere[0]}
        meant["after_slot"] = found.after == rank
        slot = np.arange(len(own.doc))
        assert closed.after_slot is None
        following = replace(closed, after_slot=np.array((slot + 1, slot - 1)))
        for field in fields(Places):
            got, want = getattr(following, field.name), getattr(found, field.name)
            where = meant.get(field.name, everywhere & (own.length > 0))
            assert np.array_equal(got[where], want[where]), field.name


@EXAMPLES
@given(part=cut_packs())
@example(part=OFF_CENTRE[0])
@example(part=OFF_CENTRE[1])
def test_hops_of_each_document_are_those_of_the_table(part: Partition) -> None:
    table, chains = listed(part), part.cuts.chain_list()
    assert np.array_equal(chains.hops[1], table.levels[chains.doc])
    assert np.array_equal(chains.hops[0], table._orders[0].level[table.table.chains])
    assert part.crosses == bool((table.levels > 0).any())


@EXAMPLES
@given(part=cut_packs())
@example(part=OFF_CENTRE[0])
@example(part=OFF_CENTRE[1])
def test_every_token_has_the_owner_that_the_table_says(part: Partition) -> None:
    lengths = np.diff(part.doc_bounds)
    doc = np.repeat(np.arange(part.num_docs), lengths)
    offset = np.arange(part.num_tokens) - part.bounds[doc]
    owner = part.cuts.owner_of(doc, offset)
    assert np.array_equal(owner, listed(part).owner_of(doc, offset))
    for rank in range(part.world_size):
        assert np.array_equal(np.flatnonzero(owner == rank), np.sort(part.token_ids(rank)))


@EXAMPLES
@given(part=cut_packs())
def test_the_load_of_links_is_counted_exactly_where_cuts_are_not_moved(part: Partition) -> None:
    if part.layout == "zigzag_per_document" and part.align > 1:
        return
    got, want = part.cuts.link_load(), listed(part).link_load()
    for name in ("busiest", "fragments", "middles"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_ranks_and_ten_thousand_documents_are_cut_without_a_table(layout: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 13_000, 10_000)
    part = partition(np.concatenate([[0], np.cumsum(lengths)]), 1024, layout)
    for rank in (0, 511, 1023):
        own = part.of_rank(rank)
        part.cuts.places(own, rank)
        assert len(own.doc) <= 2 * part.num_docs
        assert abs(own.length.sum() - part.num_tokens / 1024) < part.num_docs
    assert part.crosses
    assert "table" not in vars(part)
