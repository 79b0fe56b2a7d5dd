"""zigzag_per_document in closed form: a document's pieces follow from two lengths, whatever their number.

A document of n tokens in 2W pieces: the first n mod 2W hold one token more than the others. See `cuts` for the words.
Legend of array shapes: D documents, W ranks, n fragments of one rank in slot order, m any number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_gdn.cuts import Cuts
from cp_gdn.fragments import ChainList, Ints, LinkLoad, Places, RankFragments, rank_fragments
from cp_gdn.listing import FragmentTable, zigzag_table


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentCuts(Cuts):
    """zigzag_per_document: every document in 2W near-equal pieces, cuts moved down to multiples of `align`."""

    align: int

    @cached_property
    def _shares(self) -> tuple[Ints, Ints]:
        """Tokens per piece of each document, and how many of its first pieces hold one more, [D] each."""
        return np.divmod(self.sizes, self.num_pieces)

    def borders(self, index: Ints) -> Ints:
        """Offset at which piece ``index`` of each document begins, [D, len(index)]."""
        base, longer = self._shares
        borders: Ints = index * base[:, None] + np.minimum(index, longer[:, None])
        if self.align == 1:
            return borders
        size = self.sizes[:, None]
        return np.where(borders == size, size, borders // self.align * self.align)

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of each document, [D]."""
        sizes: Ints = self.bounds[1:] - self.bounds[:-1]
        return sizes

    @cached_property
    def levels(self) -> Ints:
        """Hops between ranks of the chain of each document, [D]; -1 of empty ones."""
        levels: Ints = self.last_position - self.turns
        return levels

    @property
    def crosses(self) -> bool:
        """Whether any chain leaves its first rank."""
        return bool(np.count_nonzero(self.levels > 0))

    def fragments(self, rank: int) -> RankFragments:
        """What ``rank`` holds, by document, then offset."""
        other = self.num_pieces - 1 - rank
        borders = self.borders(np.array([rank, other, rank + 1, other + 1]))
        doc = np.arange(len(borders)).repeat(2)
        offset, end = borders[:, :2].ravel(), borders[:, 2:].ravel()
        return rank_fragments(doc, offset, end - offset, self.sizes[doc])

    def places(self, own: RankFragments, rank: int) -> Places:
        """Places of the fragments of ``rank``."""
        doc = own.doc
        piece = np.array([rank, self.num_pieces - 1 - rank] * len(self.sizes), dtype=np.int64)
        before = np.where(own.around, self.rank_of(self.neighbours(own, piece)), -1)
        position, last, turns = self.position(doc, piece), self.last_position[doc], self.turns[doc]
        level = position - (turns & (piece >= self.world_size))
        last_level = last - turns
        # NOTE: neighbours of a chain that lie on one rank are neighbours in slot order.
        return Places(
            before=before,
            after=before[::-1],
            after_slot=None,
            position=np.array((position, last - position)),
            level=np.array((level, last_level - level)),
            wave=(before == rank) * 1,
            crosses=(own.length > 0) & (last_level > 0),
        )

    def owner_of(self, doc: Ints, offset: Ints) -> Ints:
        """Rank that holds each token, [m]."""
        return self.rank_of(self.piece_of(doc, offset))

    def piece_of(self, doc: Ints, offset: Ints) -> Ints:
        """Piece that holds each token, [m]."""
        base, longer = (share[doc] for share in self._shares)
        if self.align > 1:  # of all pieces that begin at or before it once cuts have moved down, the last
            offset = np.minimum(offset // self.align * self.align + self.align, self.sizes[doc]) - 1
        beyond = offset - longer * (base + 1)
        return np.where(beyond < 0, offset // (base + 1), longer + beyond // np.maximum(base, 1))

    def neighbours(self, own: RankFragments, piece: Ints) -> Ints:
        """Non-empty pieces before and after each fragment, [2, n]; any number where there is none."""
        if self.align == 1:  # empty pieces are a document's last
            return np.array((piece - 1, piece + 1))
        return self.piece_of(own.doc, np.array((own.offset - 1, own.offset + own.length)))

    def position(self, doc: Ints, piece: Ints) -> Ints:
        """Non-empty fragments of the document before each piece, [m]; the piece holds tokens of it."""
        if self.align == 1:
            return piece
        # Pieces shorter than `align`: each multiple of it below the last border is the border of one that is not empty.
        base, longer = (share[doc] for share in self._shares)
        return np.where(base >= self.align, piece, (piece * base + np.minimum(piece, longer)) // self.align)

    @cached_property
    def last_position(self) -> Ints:
        """Position of the last fragment of each document, [D]; -1 of empty ones."""
        if self.align == 1:
            return np.minimum(self.sizes, self.num_pieces) - 1
        docs = np.arange(len(self.sizes))
        return np.where(self.sizes > 0, self.position(docs, self.piece_of(docs, self.sizes - 1)), -1)

    @cached_property
    def turns(self) -> Ints:
        """Whether the chain of a document has a hop that stays on its rank; bool [D]."""
        if self.align == 1:
            turns: Ints = self.sizes > self.world_size
            return turns
        docs, middle = np.arange(len(self.sizes)), self.borders(np.array([self.world_size]))[:, 0]
        around = self.piece_of(docs, middle - 1) + self.piece_of(docs, middle)
        inside: Ints = (middle > 0) & (middle < self.sizes)
        return inside & (around == self.num_pieces - 1)

    def chain_list(self) -> ChainList:
        """Every rank's non-empty fragments; what an owner of an all-to-all exchange walks."""
        borders = self.borders(np.arange(self.num_pieces + 1))
        length = borders[:, 1:] - borders[:, :-1]
        doc, piece = length.nonzero()
        rank = self.rank_of(piece)
        return ChainList(rank=rank, doc=doc, offset=borders[doc, piece], length=length[doc, piece])

    @property
    def table(self) -> FragmentTable:
        """Every rank's fragments, listed anew."""
        return zigzag_table(self.borders(np.arange(self.num_pieces + 1)))

    def link_load(self) -> LinkLoad:
        """Exact for align = 1; else the few pieces of a document shorter than 2 W align count as its first ones."""
        world, pieces = self.world_size, self.num_pieces
        counts = self.last_position[self.levels > 0] + 1
        reached = len(counts) - np.bincount(counts, minlength=pieces + 1).cumsum()  # chains that have each piece
        goes_on = reached[1:].copy()
        goes_on[0] = 0  # the first piece ends its chain in the mirror
        busiest = np.concatenate((reached[1:world], reached[world + 1 : pieces]))
        fragments, middles = (x[:world] + x[pieces - 1 : world - 1 : -1] for x in (reached, goes_on))
        return LinkLoad(busiest=busiest[: np.count_nonzero(busiest)], fragments=fragments, middles=middles)
