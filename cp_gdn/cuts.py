"""Layouts that cut the global token order, contiguous and zigzag: one rank's fragments and their neighbours.

A *piece* is what a layout deals to a rank, here a part of the global order. Borders of pieces and of documents cut it
into at most D + 2 W fragments, which are listed; `document_cuts` has zigzag per document, where they would be 2 W D.
Worked example, one document of 6 over W = 2, zigzag: pieces of tokens 0 1 | 2 3 | 4 | 5 lie on ranks 0, 1, 1, 0. The
third has two fragments before it but one hop between ranks, for the chain turns on rank 1: that hop stays there.
Legend of array shapes: D documents, W ranks, n fragments of one rank in slot order, m any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_gdn.fragments import ChainList, Ints, LinkLoad, Places, RankFragments, rank_fragments
from cp_gdn.listing import FragmentTable, table_in_chain_order


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts:
    """A layout that follows from the documents' `bounds` [D + 1]. `mirrored`: rank r holds pieces r and 2W - 1 - r,
    else piece r alone."""

    bounds: Ints
    world_size: int
    mirrored: bool

    @property
    def given(self) -> tuple[Ints, ...]:
        """What the caller gave beyond the documents and the layout's name: nothing."""
        return ()

    @property
    def num_pieces(self) -> int:
        return 2 * self.world_size if self.mirrored else self.world_size

    def rank_of(self, piece: Ints) -> Ints:
        rank: Ints = np.minimum(piece, self.num_pieces - 1 - piece) if self.mirrored else piece
        return rank


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalCuts(Cuts):
    """contiguous (W pieces) and zigzag (2W): parts of the global token order, between `cuts` [pieces + 1]."""

    cuts: Ints

    @cached_property
    def chains(self) -> ChainList:
        """Every rank's non-empty fragments."""
        points = np.concatenate((self.cuts, self.bounds))
        points.sort()
        filled = (points[1:] > points[:-1]).nonzero()[0]
        left = points[filled]
        doc = self.bounds.searchsorted(left, "right") - 1
        return ChainList(
            rank=self.rank_of(self.cuts.searchsorted(left, "right") - 1),
            doc=doc,
            offset=left - self.bounds[doc],
            length=points[filled + 1] - left,
        )

    @property
    def crosses(self) -> bool:
        """Whether any chain leaves its first rank."""
        return bool(np.count_nonzero(self.chains.crosses))

    def _held(self, rank: int) -> Ints:
        held: Ints = (self.chains.rank == rank).nonzero()[0]
        return held

    def fragments(self, rank: int) -> RankFragments:
        """What ``rank`` holds, by document, then offset."""
        held, chains = self._held(rank), self.chains
        doc = chains.doc[held]
        return rank_fragments(doc, chains.offset[held], chains.length[held], self.bounds[doc + 1] - self.bounds[doc])

    def places(self, own: RankFragments, rank: int) -> Places:
        """Places of the fragments of ``rank``."""
        held, chains = self._held(rank), self.chains
        (first, last), (level, levels) = chains.ends, chains.hops
        level, levels = level[held], levels[held]
        neighbours = chains.rank.take((held - 1, held + 1), mode="clip")
        before = np.where(own.around, neighbours, -1)
        # NOTE: neighbours of a chain that lie on one rank are neighbours in slot order.
        return Places(
            before=before,
            after=before[::-1],
            after_slot=None,
            position=np.array((held - first[held], last[held] - held)),
            level=np.array((level, levels - level)),
            wave=(before == rank).astype(np.int64),
            crosses=levels > 0,
        )

    def chain_list(self) -> ChainList:
        """Every rank's non-empty fragments; what an owner of an all-to-all exchange walks."""
        return self.chains

    @property
    def table(self) -> FragmentTable:
        """Every rank's fragments, listed anew."""
        c = self.chains
        return table_in_chain_order(c.rank, (c.doc, c.offset, c.length), self.world_size)

    def owner_of(self, doc: Ints, offset: Ints) -> Ints:
        """Rank that holds each token, [m]."""
        return self.rank_of(self.cuts.searchsorted(self.bounds[doc] + offset, "right") - 1)

    def link_load(self) -> LinkLoad:
        """Exact: one document crosses a border, and no two borders lie between the same ranks in one direction."""
        chains, world = self.chains, self.world_size
        crosses, edge = chains.crosses, chains.edge
        middle = crosses & ~(edge[:-1] | edge[1:])
        fragments, middles = (np.bincount(chains.rank[x], minlength=world) for x in (crosses, middle))
        longest = int(chains.hops[1].max(initial=0))
        return LinkLoad(busiest=np.ones(longest, dtype=np.int64), fragments=fragments, middles=middles)
