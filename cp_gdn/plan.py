"""What one rank does with a partition: its chunks and its segments.

Pure integers in, a frozen `Plan` out; no torch, no groups. Worked example: a document of 150 tokens cut at 100 over two
ranks. The grid of 64 is counted from the document's start, so rank 0 holds chunks of 64 and 36 tokens, rank 1 of 28 (to
token 128) and 22. With P = 2 every chunk is a segment of its own; with "grid:1" the cut at 100 is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cp_gdn.fragments import CHUNK as CHUNK
from cp_gdn.fragments import Ints as Ints
from cp_gdn.fragments import Places, RankFragments, runs
from cp_gdn.fragments import chunk_counts as chunk_counts
from cp_gdn.layout import Partition

Index = Any
"""An int64 array in a plan, an int64 tensor once `Page.upload` has put it on a device."""

NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """This rank's segments, in slot order and in token order inside a fragment; row s of every array is segment s.

    Attributes:
        slot: fragment it belongs to.
        first_chunk, num_chunks: its run of this rank's chunks.
        around: whether its document has tokens before it, and after it, on any rank; bool [2, n].
        of_slot: [slots + 1] the segments of slot f are of_slot[f]:of_slot[f + 1]. per_slot: [slots] how many.
    """

    slot: Ints
    first_chunk: Ints
    num_chunks: Ints
    around: Ints
    of_slot: Ints
    per_slot: Ints

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def has_prev(self) -> Ints:
        has_prev: Ints = self.around[0]
        return has_prev

    @property
    def has_next(self) -> Ints:
        has_next: Ints = self.around[1]
        return has_next

    @cached_property
    def longest_first(self) -> Ints:
        """All segments, those of many chunks first."""
        order: Ints = (-self.num_chunks).argsort(kind="stable")
        return order

    @cached_property
    def joints(self) -> tuple[Ints, Ints]:
        """k and fragment of every pair of neighbouring segments (k, k + 1) of a fragment: all first pairs, then all
        second ones, ..."""
        slots = (self.per_slot > 1).nonzero()[0]
        if not len(slots):
            return NONE, NONE
        count = self.per_slot[slots] - 1
        slots = slots[(-count).argsort(kind="stable")]
        k, place = runs(active_counts(count))
        return k, slots[place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """This rank's chunks in token order: the first local row of each and how many of its 64 rows hold tokens."""

    first_row: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One rank's share of a pack.

    Attributes:
        rank, num_tokens: this rank and how many tokens it holds.
        p: segments per fragment on this rank; of no effect in grid mode.
        grid: N of "grid:N" (segment borders every N chunks from the document's start), 0 in ordinary mode.
        fragments: what this rank holds. places: where they stand in their chains.
        chunks, segments: see there.
        entry_docs, exit_docs: documents whose first or last fragment this rank holds, ascending.
        empty_docs: those of them without tokens.
    """

    rank: int
    num_tokens: int
    p: int
    grid: int
    fragments: RankFragments
    places: Places
    chunks: Chunks
    segments: Segments
    entry_docs: Ints
    exit_docs: Ints
    empty_docs: Ints

    @cached_property
    def document_rows(self) -> Ints:
        """[2, n]: of segments that start their document its row in the initial states, of those that end it its row in
        the final states; -1 of the others."""
        doc = self.fragments.doc[self.segments.slot]
        found = np.array((self.entry_docs.searchsorted(doc), self.exit_docs.searchsorted(doc)))
        found[self.segments.around] = -1
        return found


def active_counts(counts: Ints) -> Ints:
    """How many of ``counts``, all positive, are above 0, 1, .., up to the largest but one."""
    return len(counts) - np.add.accumulate(np.bincount(counts))[:-1] if len(counts) else counts


def segment_counts(num_chunks: Ints, p: Ints | int, grid: int) -> Ints:
    """Segments of a fragment with ``num_chunks`` chunks: min(P, n), or ceil(n / N) in grid mode."""
    return -(-num_chunks // grid) if grid else np.minimum(p, num_chunks)


def check_grid(part: Partition, grid: int) -> None:
    """Refuse a cut that is off the grid of ``grid`` chunks, on any rank."""
    step = CHUNK * grid
    if part.align % step == 0:
        return
    for rank in range(part.world_size):
        own = part.of_rank(rank)
        off = (own.length > 0) & (own.offset % step != 0)
        if off.any():
            slot = int(off.argmax())
            raise ValueError(
                f'segments="grid:{grid}": document {own.doc[slot]} is cut at its token {own.offset[slot]}, which is '
                f"not a multiple of {step} (64 * {grid}); build the partition with align={step}, or use an int or a P "
                "vector"
            )


def build_plan(part: Partition, rank: int, *, p_vector: Sequence[int] | int, grid: int = 0) -> Plan:
    """The plan of ``rank``.

    Args:
        part: the partition, the same on every rank.
        p_vector: segments per fragment, of every rank or (one int) of this one; ignored in grid mode.
        grid: N of "grid:N", or 0.

    Raises:
        ValueError: a cut of ``part`` is off the grid.
    """
    if grid:
        check_grid(part, grid)
    p = int(p_vector if isinstance(p_vector, int) else p_vector[rank])
    own = part.of_rank(rank)
    (before, after), filled = own.around, own.length > 0
    entry_docs, exit_docs, empty = own.doc[filled & ~before], own.doc[filled & ~after], NONE
    if rank == 0:
        empty = (part.bounds[1:] == part.bounds[:-1]).nonzero()[0]
        entry_docs, exit_docs = (np.concatenate((docs, empty)) for docs in (entry_docs, exit_docs))
    entry_docs.sort()
    exit_docs.sort()
    return Plan(
        rank=rank,
        num_tokens=own.num_tokens,
        p=p,
        grid=grid,
        fragments=own,
        places=part.cuts.places(own, rank),
        chunks=_chunks(own),
        segments=_segments(own, segment_counts(own.num_chunks, p, grid), grid),
        entry_docs=entry_docs,
        exit_docs=exit_docs,
        empty_docs=empty,
    )


def _chunks(own: RankFragments) -> Chunks:
    filled = own.length.nonzero()[0]
    start, counts, first = own.first_row[filled], own.num_chunks[filled], own.first_chunk[filled]
    # A fragment's chunks begin at multiples of 64 tokens of its document, but the first where the fragment does.
    borders = np.arange(0, CHUNK * own.total_chunks + 1, CHUNK)
    borders[:-1] += (start - own.offset[filled] % CHUNK - CHUNK * first).repeat(counts)
    borders[first], borders[-1] = start, own.num_tokens
    return Chunks(first_row=borders[:-1], count=borders[1:] - borders[:-1])


def _segments(own: RankFragments, per_slot: Ints, grid: int) -> Segments:
    slot, index = runs(per_slot)
    chunks, parts = own.num_chunks[slot], per_slot[slot]
    if grid:
        first, count = index * grid, np.minimum(chunks - index * grid, grid)
    else:
        base, longer = np.divmod(chunks, parts)
        first, count = index * base + np.minimum(index, longer), base + (index < longer)
    of_slot = np.zeros(len(per_slot) + 1, dtype=np.int64)
    per_slot.cumsum(out=of_slot[1:])
    around = own.around.take(slot, axis=1)
    around |= np.array((index > 0, index < parts - 1))
    return Segments(
        slot=slot,
        first_chunk=own.first_chunk[slot] + first,
        num_chunks=count,
        around=around,
        of_slot=of_slot,
        per_slot=per_slot,
    )
