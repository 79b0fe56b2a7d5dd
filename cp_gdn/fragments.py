"""One rank's fragments and where they stand in their chains, whatever the layout: what `cuts` and `listing` give.

Legend of array shapes: n fragments of one rank in slot order, W ranks. All are int64 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        first_row, first_chunk: tokens and chunks of this rank before it. num_tokens, total_chunks: of all.
        around: whether its document has tokens before it, and after it, on any rank; bool [2, n], False where empty.
    """

    doc: Ints
    offset: Ints
    length: Ints
    size: Ints
    num_chunks: Ints
    first_row: Ints
    first_chunk: Ints
    num_tokens: int
    total_chunks: int
    around: Ints


def rank_fragments(doc: Ints, offset: Ints, length: Ints, size: Ints) -> RankFragments:
    """The fragments given by the first four columns, with what follows from them."""
    around = np.array((offset > 0, offset + length < size))
    around &= length > 0
    num_chunks = chunk_counts(offset, length)
    rows, chunks = np.add.accumulate(length), np.add.accumulate(num_chunks)
    return RankFragments(
        doc=doc,
        offset=offset,
        length=length,
        size=size,
        num_chunks=num_chunks,
        first_row=rows - length,
        first_chunk=chunks - num_chunks,
        num_tokens=rows.item(-1) if len(rows) else 0,
        total_chunks=chunks.item(-1) if len(chunks) else 0,
        around=around,
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
        after_slot: slot of the one after where it lies on this rank too, else any number; None: the next
            slot, in the mirror the one before.
        position: fragments before it. level: hops between ranks before it. wave: hops inside its rank since the last
            such hop. Of no meaning for empty fragments.
        crosses: whether the chain leaves its first rank at all; bool [n], False for empty fragments.
    """

    before: Ints
    after: Ints
    after_slot: Ints | None
    position: Ints
    level: Ints
    wave: Ints
    crosses: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainList:
    """Every rank's non-empty fragments, chain after chain, [F]. `row`: where slots do not follow that order, of each
    fragment its row in the table by rank, then slot."""

    rank: Ints
    doc: Ints
    offset: Ints
    length: Ints
    row: Ints | None = None

    @cached_property
    def edge(self) -> Ints:
        """Whether a chain begins at each fragment, bool [F + 1], True behind the last one."""
        edge = np.empty(len(self.doc) + 1, dtype=bool)
        edge[0] = edge[-1] = True
        np.not_equal(self.doc[1:], self.doc[:-1], out=edge[1:-1])
        return edge

    @cached_property
    def ends(self) -> tuple[Ints, Ints]:
        """Index of the first and of the last fragment of each one's chain, [F] each."""
        edge = self.edge
        starts = edge.nonzero()[0]
        chain = np.add.accumulate(edge[:-1], dtype=np.int64)
        return starts[chain - 1], starts[chain] - 1

    @cached_property
    def hops(self) -> tuple[Ints, Ints]:
        """Hops between ranks into each fragment since its chain began, and those of the whole chain, [F] each."""
        first, last = self.ends
        hop = np.zeros(len(self.rank), dtype=bool)
        np.not_equal(self.rank[1:], self.rank[:-1], out=hop[1:])
        before = np.add.accumulate(hop, dtype=np.int64)
        at_start = before[first]
        return before - at_start, before[last] - at_start

    @cached_property
    def crosses(self) -> Ints:
        """Whether the chain of each fragment leaves its first rank, bool [F]."""
        crosses: Ints = self.hops[1] > 0
        return crosses


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


def differs(keys: Ints) -> Ints:
    """Whether each of sorted ``keys`` differs from the one before it, bool; the first does."""
    fresh = np.empty(len(keys), dtype=bool)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return fresh


def runs(counts: Ints) -> tuple[Ints, Ints]:
    """Owner and position inside the owner of every item, when owner i has counts[i] items."""
    ends = np.add.accumulate(counts)
    owner = np.arange(len(counts)).repeat(counts)
    position: Ints = np.arange(len(owner)) - (ends - counts)[owner]
    return owner, position


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate the ranges [start, start + length)."""
    ends = np.add.accumulate(lengths)
    shift = (starts - ends + lengths).repeat(lengths)
    ids: Ints = shift + np.arange(len(shift))
    return ids
