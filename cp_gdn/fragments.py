"""One rank's fragments and where they stand in their chains, whatever the layout: what `cuts` and `listing` give.

Legend of array shapes: n fragments of one rank in slot order, W ranks. All are int64 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNK = 64
"""Tokens per chunk: the tile of every kernel and of the torch backend."""

Ints = np.ndarray
"""An int64 array."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankFragments:
    """One rank's fragments in slot order, [n]; made by `rank_fragments`.

    Attributes:
        doc, offset, length: which tokens. size: tokens of the fragment's document. num_chunks: see `chunk_counts`.
        around: whether its document has tokens before it, and after it, on any rank; bool [2, n], False where empty.
    """

    doc: Ints
    offset: Ints
    length: Ints
    size: Ints
    num_chunks: Ints
    around: Ints


def rank_fragments(doc: Ints, offset: Ints, length: Ints, size: Ints) -> RankFragments:
    """The fragments given by the first four columns, with what follows from them."""
    around = np.array((offset > 0, offset + length < size))
    around &= length > 0
    return RankFragments(
        doc=doc, offset=offset, length=length, size=size, num_chunks=chunk_counts(offset, length), around=around
    )


def chunk_counts(offset: Ints, length: Ints) -> Ints:
    """Chunks of a fragment on its document's grid: ceil((offset + length) / 64) - floor(offset / 64), none if empty."""
    counts: Ints = (offset + length + (CHUNK - 1)) // CHUNK - offset // CHUNK
    counts *= length > 0
    return counts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """Where one rank's fragments stand in their chains; [2, n], forward and mirrored.

    Attributes:
        before, after: ranks of the neighbouring non-empty fragments, -1 at the ends and for empty fragments.
        after_slot: slot of the one after where it lies on this rank too, else any number.
        position: fragments before it. level: hops between ranks before it. wave: hops inside its rank since the last
            such hop. Of no meaning for empty fragments.
        crosses: whether the chain leaves its first rank at all; bool [n], False for empty fragments.
    """

    before: Ints
    after: Ints
    after_slot: Ints
    position: Ints
    level: Ints
    wave: Ints
    crosses: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainList:
    """Every rank's non-empty fragments, chain after chain, [F]. `by_rank`: their indices by rank, then slot."""

    rank: Ints
    doc: Ints
    offset: Ints
    length: Ints
    by_rank: Ints

    def of_documents(self, chosen: Ints) -> ChainList:
        """Those of the documents of a mask, bool [D]."""
        keep = chosen[self.doc]
        if np.count_nonzero(keep) == len(keep):
            return self
        return ChainList(
            rank=self.rank[keep],
            doc=self.doc[keep],
            offset=self.offset[keep],
            length=self.length[keep],
            by_rank=(keep.cumsum() - 1)[self.by_rank[keep[self.by_rank]]],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinkLoad:
    """States that chains put on links in one direction.

    Attributes:
        busiest: per hop of the longest chain the states between the busiest pair of ranks.
        fragments, middles: [W], each rank's fragments of chains that cross ranks, and those that end no chain.
    """

    busiest: Ints
    fragments: Ints
    middles: Ints


def stable_order(rank: Ints, world_size: int) -> Ints:
    """Indices by ``rank``; equal ones stay in order."""
    key = rank.astype(np.uint16) if world_size <= 1 << 16 else rank  # 16-bit keys are sorted by radix
    order: Ints = key.argsort(kind="stable")
    return order


def unset(*shape: int) -> Ints:
    """-1 everywhere."""
    values = np.empty(shape, dtype=np.int64)
    values.fill(-1)
    return values


def runs(counts: Ints) -> tuple[Ints, Ints]:
    """Owner and position inside the owner of every item, when owner i has counts[i] items."""
    ends = counts.cumsum()
    owner = np.arange(len(counts)).repeat(counts)
    position: Ints = np.arange(len(owner)) - (ends - counts)[owner]
    return owner, position


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate the ranges [start, start + length)."""
    ends = lengths.cumsum()
    shift = (starts - ends + lengths).repeat(lengths)
    ids: Ints = shift + np.arange(len(shift))
    return ids
