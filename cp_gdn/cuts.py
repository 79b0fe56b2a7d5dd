"""Where layouts cut, in closed form: one rank's fragments and their neighbours without a list of every rank's.

A *piece* is what a layout deals to a rank: a part of the global order (contiguous, zigzag) or of a document (zigzag per
document). A document runs through ascending pieces, so a fragment's place in its chain follows from its piece. Worked
example, one document of 6 over W = 2, zigzag: pieces of tokens 0 1 | 2 3 | 4 | 5 lie on ranks 0, 1, 1, 0. The third has
two fragments before it but one hop between ranks, for the chain *turns* on rank 1: that hop stays there.
Here: what all such layouts share, and those that cut the global order; `document_cuts` has zigzag per document.
Legend of array shapes: D documents, W ranks, n fragments of one rank in slot order, m any number of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_gdn.fragments import ChainList, Ints, LinkLoad, Places, RankFragments, rank_fragments, runs, stable_order
from cp_gdn.listing import FragmentTable, table_in_chain_order


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts(ABC):
    """A layout that follows from the documents' `bounds` [D + 1]. `mirrored`: rank r holds pieces r and 2W - 1 - r,
    else piece r alone."""

    bounds: Ints
    world_size: int
    mirrored: bool

    @abstractmethod
    def fragments(self, rank: int) -> RankFragments:
        """What ``rank`` holds, by document, then offset."""

    @abstractmethod
    def piece_of(self, doc: Ints, offset: Ints) -> Ints:
        """Piece that holds each token, [m]."""

    @abstractmethod
    def position(self, doc: Ints, piece: Ints) -> Ints:
        """Non-empty fragments of the document before each piece, [m]; the piece holds tokens of it."""

    @property
    @abstractmethod
    def last_position(self) -> Ints:
        """Position of the last fragment of each document, [D]; -1 of empty ones."""

    @property
    @abstractmethod
    def turns(self) -> Ints:
        """Whether the chain of a document has a hop that stays on its rank; bool [D]."""

    @abstractmethod
    def neighbours(self, own: RankFragments, piece: Ints) -> Ints:
        """Non-empty pieces before and after each fragment, [2, n]; any number where there is none."""

    @abstractmethod
    def chain_list(self) -> ChainList:
        """Every rank's non-empty fragments; what an owner of an all-to-all exchange walks."""

    @property
    @abstractmethod
    def table(self) -> FragmentTable:
        """Every rank's fragments, listed anew."""

    @abstractmethod
    def link_load(self) -> LinkLoad:
        """What the chains of all documents load."""

    @property
    def given(self) -> tuple[Ints, ...]:
        """What the caller gave beyond the documents and the layout's name: nothing."""
        return ()

    @property
    def num_pieces(self) -> int:
        return 2 * self.world_size if self.mirrored else self.world_size

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of each document, [D]."""
        sizes: Ints = self.bounds[1:] - self.bounds[:-1]
        return sizes

    def rank_of(self, piece: Ints) -> Ints:
        rank: Ints = np.minimum(piece, self.num_pieces - 1 - piece) if self.mirrored else piece
        return rank

    def owner_of(self, doc: Ints, offset: Ints) -> Ints:
        """Rank that holds each token, [m]."""
        return self.rank_of(self.piece_of(doc, offset))

    @cached_property
    def levels(self) -> Ints:
        """Hops between ranks of the chain of each document, [D]; -1 of empty ones."""
        levels: Ints = self.last_position - self.turns
        return levels

    def places(self, own: RankFragments, rank: int) -> Places:
        """Places of the fragments of ``rank``."""
        doc, slot, piece = own.doc, np.arange(len(own.doc)), self._pieces(own, rank)
        before = np.where(own.around, self.rank_of(self.neighbours(own, piece)), -1)
        position, last, turns = self.position(doc, piece), self.last_position[doc], self.turns[doc]
        level = position - (turns & (piece >= self.world_size))
        last_level = last - turns
        # NOTE: neighbours of a chain that lie on one rank are neighbours in slot order.
        return Places(
            before=before,
            after=before[::-1].copy(),
            after_slot=np.array((slot + 1, slot - 1)),
            position=np.array((position, last - position)),
            level=np.array((level, last_level - level)),
            wave=(before == rank).astype(np.int64),
            crosses=(own.length > 0) & (last_level > 0),
        )

    def _pieces(self, own: RankFragments, rank: int) -> Ints:
        return self.piece_of(own.doc, own.offset)


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalCuts(Cuts):
    """contiguous (W pieces) and zigzag (2W): parts of the global token order, between `cuts` [pieces + 1]."""

    cuts: Ints

    def fragments(self, rank: int) -> RankFragments:
        pieces = np.array((rank, self.num_pieces - 1 - rank) if self.mirrored else (rank,))
        left, right = self.cuts[pieces], self.cuts[pieces + 1]
        first = self.bounds.searchsorted(left, "right") - 1
        owner, index = runs(np.maximum(self.bounds.searchsorted(right, "left") - first, 0))
        doc = first[owner] + index
        start = self.bounds[doc]
        offset = np.maximum(left[owner], start) - start
        length, size = np.minimum(right[owner], self.bounds[doc + 1]) - start - offset, self.sizes[doc]
        if np.count_nonzero(length > 0) < len(length):
            doc, offset, length, size = (x[length > 0] for x in (doc, offset, length, size))
        return rank_fragments(doc, offset, length, size)

    def piece_of(self, doc: Ints, offset: Ints) -> Ints:
        piece: Ints = self.cuts.searchsorted(self.bounds[doc] + offset, "right") - 1
        return piece

    def neighbours(self, own: RankFragments, piece: Ints) -> Ints:
        start = self.bounds[own.doc] + own.offset
        neighbours: Ints = self.cuts.searchsorted((start - 1, start + own.length), "right") - 1
        return neighbours

    @cached_property
    def _filled_before(self) -> Ints:
        """Non-empty pieces before each, [pieces + 1]."""
        before = np.zeros(len(self.cuts), dtype=np.int64)
        (self.cuts[1:] > self.cuts[:-1]).cumsum(out=before[1:])
        return before

    @cached_property
    def _ends(self) -> Ints:
        """Pieces of the first and the last token of each document, [2, D]; of no meaning for empty ones."""
        ends: Ints = self.cuts.searchsorted((self.bounds[:-1], self.bounds[1:] - 1), "right") - 1
        return ends

    def position(self, doc: Ints, piece: Ints) -> Ints:
        position: Ints = self._filled_before[piece] - self._filled_before[self._ends[0, doc]]
        return position

    @cached_property
    def last_position(self) -> Ints:
        first, last = self._filled_before[self._ends]
        return np.where(self.sizes > 0, last - first, -1)

    @cached_property
    def turns(self) -> Ints:
        if not self.mirrored:
            return np.zeros(len(self.sizes), dtype=bool)
        middle = self.cuts[self.world_size]
        before, after = self.cuts.searchsorted((middle - 1, middle), "right") - 1
        same_rank = before + after == self.num_pieces - 1
        turns: Ints = (self.bounds[:-1] < middle) & (middle < self.bounds[1:]) & same_rank
        return turns

    def chain_list(self) -> ChainList:
        points = np.concatenate((self.cuts, self.bounds))
        points.sort()
        filled = (points[1:] > points[:-1]).nonzero()[0]
        left = points[filled]
        doc = self.bounds.searchsorted(left, "right") - 1
        rank = self.rank_of(self.cuts.searchsorted(left, "right") - 1)
        return ChainList(
            rank=rank,
            doc=doc,
            offset=left - self.bounds[doc],
            length=points[filled + 1] - left,
            by_rank=stable_order(rank, self.world_size),
        )

    @property
    def table(self) -> FragmentTable:
        c = self.chain_list()
        return table_in_chain_order(c.rank, (c.doc, c.offset, c.length), self.world_size)

    def link_load(self) -> LinkLoad:
        """Exact: one document crosses a border, and no two borders lie between the same ranks in one direction."""
        ends, size = self._ends[:, self.levels > 0], self.num_pieces + 1
        first, last = ends
        covered = np.bincount(first, minlength=size) - np.bincount(last + 1, minlength=size)
        fragments = covered.cumsum()[:-1] * (self.cuts[1:] > self.cuts[:-1])
        middles = fragments - np.bincount(ends.reshape(-1), minlength=size)[:-1]
        if self.mirrored:
            fragments, middles = (x[: self.world_size] + x[: self.world_size - 1 : -1] for x in (fragments, middles))
        longest = int(self.levels.max(initial=0))
        return LinkLoad(busiest=np.ones(longest, dtype=np.int64), fragments=fragments, middles=middles)
