"""The table of every rank's fragments, ordered by rank, then slot, and every fragment's place in its chain.

Only layouts that are given fragment by fragment need it to plan (explicit, or with cut points), and whoever asks about
all ranks at once: byte queries, tests. Legend: F fragments, D documents, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_gdn.fragments import ChainList, Ints, LinkLoad, Places, RankFragments, rank_fragments, stable_order, unset


@dataclass(frozen=True, kw_only=True, eq=False)
class FragmentTable:
    """Every fragment of every rank, ordered by rank, then slot: int64 columns [F].

    `prev` and `next` are rows of this table: the neighbouring non-empty fragment of the chain, -1 where there is none
    and for empty fragments. Rows `starts[r]:starts[r + 1]` belong to rank r; `starts` is [W + 1]. `chains`: rows of all
    non-empty fragments by document, then offset.
    """

    rank: Ints
    slot: Ints
    doc: Ints
    offset: Ints
    length: Ints
    prev: Ints
    next: Ints
    starts: Ints
    chains: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOrder:
    """Every non-empty fragment's place in its chain, in one direction; columns over the rows of the fragment table.

    Attributes:
        before, after: rows of the neighbours, -1 at the ends.
        position, level, wave, crosses: see `Places`; 0 and False for empty fragments.
    """

    before: Ints
    after: Ints
    position: Ints
    level: Ints
    wave: Ints
    crosses: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedCuts:
    """Fragments as the caller gave them. `bounds`: documents, [D + 1]."""

    bounds: Ints
    table: FragmentTable

    @property
    def given(self) -> tuple[Ints, ...]:
        """Columns that the caller gave."""
        return self.table.rank, self.table.doc, self.table.offset, self.table.length

    def fragments(self, rank: int) -> RankFragments:
        t, mine = self.table, self._rows(rank)
        doc = t.doc[mine]
        size = self.bounds[doc + 1] - self.bounds[doc]
        return rank_fragments(doc, t.offset[mine], t.length[mine], size)

    def _rows(self, rank: int) -> slice:
        return slice(int(self.table.starts[rank]), int(self.table.starts[rank + 1]))

    def places(self, own: RankFragments, rank: int) -> Places:
        """Places of the fragments of ``rank``; neighbours as ranks and slots instead of rows."""
        t, mine = self.table, self._rows(rank)

        def columns(name: str) -> Ints:
            return np.array([getattr(order, name)[mine] for order in self._orders])

        before, after = columns("before"), columns("after")
        return Places(
            before=np.where(before >= 0, t.rank[before], -1),
            after=np.where(after >= 0, t.rank[after], -1),
            after_slot=t.slot[after],
            position=columns("position"),
            level=columns("level"),
            wave=columns("wave"),
            crosses=self._orders[0].crosses[mine],
        )

    @cached_property
    def _orders(self) -> tuple[ChainOrder, ChainOrder]:
        return chain_orders(self.table)

    def chain_list(self) -> ChainList:
        t, rows = self.table, self.table.chains
        return ChainList(
            rank=t.rank[rows],
            doc=t.doc[rows],
            offset=t.offset[rows],
            length=t.length[rows],
            row=rows,
        )

    def owner_of(self, doc: Ints, offset: Ints) -> Ints:
        """Rank that holds each token."""
        t = self.table
        row = self._starts.searchsorted(self.bounds[doc] + offset, "right") - 1
        rank: Ints = t.rank[t.chains[row]]
        return rank

    @cached_property
    def _starts(self) -> Ints:
        """Global index of the first token of each non-empty fragment, in chain order."""
        t = self.table
        starts: Ints = self.bounds[t.doc[t.chains]] + t.offset[t.chains]
        return starts

    @property
    def crosses(self) -> bool:
        """Whether any chain leaves its first rank."""
        return bool(np.count_nonzero(self.levels > 0))

    @cached_property
    def levels(self) -> Ints:
        """Hops between ranks of each document's chain, [D]."""
        levels = np.zeros(len(self.bounds) - 1, dtype=np.int64)
        chains = self.table.chains
        levels[self.table.doc[chains]] = self._orders[0].level[chains]  # the last write is a chain's end
        return levels

    def link_load(self) -> LinkLoad:
        t, order, world = self.table, self._orders[0], len(self.table.starts) - 1
        entering = ((order.before >= 0) & (t.rank[order.before] != t.rank)).nonzero()[0]
        level = order.level[entering]
        pair = (level * world + t.rank[order.before[entering]]) * world + t.rank[entering]
        _, first, states = np.unique(pair, return_index=True, return_counts=True)
        busiest = np.zeros(int(level.max(initial=0)), dtype=np.int64)
        np.maximum.at(busiest, level[first] - 1, states)
        middle = order.crosses & (order.before >= 0) & (order.after >= 0)
        fragments, middles = (np.bincount(t.rank[rows], minlength=world) for rows in (order.crosses, middle))
        return LinkLoad(busiest=busiest, fragments=fragments, middles=middles)


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_in_chain_order(rank: Ints, columns: tuple[Ints, Ints, Ints], world_size: int) -> FragmentTable:
    """The table of fragments (doc, offset, length) given by document, then offset; a rank's slots keep that order."""
    rows = stable_order(rank, world_size)
    chain = np.empty_like(rows)
    chain[rows] = np.arange(len(rows))
    doc, offset, length = (column[rows] for column in columns)
    return linked_table(rank[rows], (doc, offset, length), chain, world_size)


def zigzag_table(cuts: Ints) -> FragmentTable:
    """Every document cut in 2W pieces at the offsets [D, 2W + 1]; rank r holds pieces r and 2W - 1 - r."""
    num_docs, pieces = len(cuts), cuts.shape[1] - 1
    doc, rank = np.arange(num_docs), np.arange(pieces // 2)
    held = np.stack((rank, pieces - 1 - rank), axis=1)
    offset, length = (x[:, held].transpose(1, 0, 2).ravel() for x in (cuts[:, :-1], cuts[:, 1:] - cuts[:, :-1]))
    first_row = np.empty(pieces, dtype=np.int64)  # of each piece the row in the first document
    first_row[held] = 2 * num_docs * rank[:, None] + (0, 1)
    chain = (first_row + 2 * doc[:, None]).ravel()
    columns = np.tile(doc.repeat(2), len(rank)), offset, length
    return linked_table(rank.repeat(2 * num_docs), columns, chain, len(rank))


def linked_table(rank: Ints, columns: tuple[Ints, Ints, Ints], chain: Ints, world_size: int) -> FragmentTable:
    """Link neighbours of a chain. `chain`: row numbers [F] ordered by document, then offset."""
    doc, offset, length = columns
    live = chain[length[chain] > 0]
    before, after = live[:-1], live[1:]
    same = doc[before] == doc[after]
    prev, following = unset(2, len(rank))
    prev[after[same]] = before[same]
    following[before[same]] = after[same]
    starts = rank.searchsorted(np.arange(world_size + 1))
    return FragmentTable(
        rank=rank,
        slot=np.arange(len(rank)) - starts[rank],
        doc=doc,
        offset=offset,
        length=length,
        prev=prev,
        next=following,
        starts=starts,
        chains=live,
    )


def chain_order(table: FragmentTable, *, reverse: bool = False) -> ChainOrder:
    """Places of all fragments, for the forward direction or its mirror."""
    return chain_orders(table)[reverse]


def chain_orders(table: FragmentTable) -> tuple[ChainOrder, ChainOrder]:
    """The same in both directions."""
    order = table.chains
    index, rank = np.arange(len(order)), table.rank[order]
    start, end = table.prev[order] < 0, table.next[order] < 0
    hop = np.zeros(len(order) + 1, dtype=bool)  # between ranks, into each fragment
    np.not_equal(rank[1:], rank[:-1], out=hop[1:-1])
    hop[:-1] &= ~start
    chain = start.cumsum() - 1
    first, last = start.nonzero()[0][chain], end.nonzero()[0][chain]
    hops = hop.cumsum()
    level, last_level = hops[index] - hops[first], hops[last] - hops[first]
    into, out_of = start | hop[:-1], end | hop[1:]
    wave = index - np.maximum.accumulate(np.where(into, index, 0))
    wave_back = np.minimum.accumulate(np.where(out_of, index, len(order))[::-1])[::-1] - index

    def column(values: Ints) -> Ints:
        out = np.zeros(len(table.doc), dtype=values.dtype)
        out[order] = values
        return out

    crosses = column(last_level > 0)
    forward, mirror = (
        ChainOrder(
            before=before,
            after=after,
            position=column(place),
            level=column(level),
            wave=column(wave),
            crosses=crosses,
        )
        for before, after, place, level, wave in (
            (table.prev, table.next, index - first, level, wave),
            (table.next, table.prev, last - index, last_level - level, wave_back),
        )
    )
    return forward, mirror
