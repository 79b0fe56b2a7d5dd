"""What one rank does with a partition: its chunks, its segments, and which segments are walked together.

Pure integers in, a frozen `Plan` out; no torch, no groups. Worked example: a document of 150 tokens cut at 100 over two
ranks. The grid of 64 is counted from the document's start, so rank 0 holds chunks of 64 and 36 tokens, rank 1 of 28 (to
token 128) and 22. With P = 2 every chunk is a segment of its own; with "grid:1" the cut at 100 is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cp_gdn.layout import Partition

CHUNK = 64
"""Tokens per chunk: the tile of every kernel and of the torch backend."""

Ints = np.ndarray
"""An int64 array."""

Index = Any
"""An int64 array in a plan, an int64 tensor once `tables.upload` has put it on a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSet:
    """Segments that are walked side by side, chunk after chunk; the longest come first.

    Attributes:
        segments: [n] segments of this rank.
        chunks: [m] their chunks, step by step: all first chunks, then all second chunks, ...
        active: segments still walking at each step; its sum is m.
    """

    segments: Index
    chunks: Index
    active: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """This rank's segments, in slot order and in token order inside a fragment; row s of every array is segment s.

    Attributes:
        slot: fragment it belongs to.
        first_chunk, num_chunks: its run of this rank's chunks.
        has_prev, has_next: whether the document has tokens before or after it, on any rank.
        of_slot: [slots + 1] the segments of slot f are of_slot[f]:of_slot[f + 1].
    """

    slot: Ints
    first_chunk: Ints
    num_chunks: Ints
    has_prev: Ints
    has_next: Ints
    of_slot: Ints

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """This rank's chunks in token order: the first local row of each and how many of its 64 rows hold tokens."""

    first_row: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One rank's share of a pack.

    Attributes:
        rank, num_tokens: this rank and how many tokens it holds.
        p_vector: segments per fragment, one number per rank.
        grid: N of "grid:N" (segment borders every N chunks from the document's start), 0 in ordinary mode.
        chunks, segments: see there.
        entry_docs, exit_docs: documents whose first or last fragment this rank holds, ascending.
    """

    rank: int
    num_tokens: int
    p_vector: tuple[int, ...]
    grid: int
    chunks: Chunks
    segments: Segments
    entry_docs: Ints
    exit_docs: Ints

    def segment_set(self, ids: Ints, *, reverse: bool = False) -> SegmentSet:
        """The segments ``ids`` as a walk, from their first chunk on or (``reverse``) from their last."""
        count = self.segments.num_chunks[ids]
        order = np.argsort(-count, kind="stable")
        ids, count = ids[order], count[order]
        owner = np.repeat(np.arange(len(ids)), count)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        inside = np.repeat(count, count) - 1 - step if reverse else step
        chunks = self.segments.first_chunk[ids][owner] + inside
        active = np.bincount(step, minlength=0)
        return SegmentSet(segments=ids, chunks=chunks[np.argsort(step, kind="stable")], active=tuple(active.tolist()))


def chunk_counts(offset: Ints, length: Ints) -> Ints:
    """Chunks of a fragment on its document's grid: ceil((offset + length) / 64) - floor(offset / 64), none if empty."""
    return np.where(length > 0, -(-(offset + length) // CHUNK) - offset // CHUNK, 0)


def segment_counts(num_chunks: Ints, p: Ints | int, grid: int) -> Ints:
    """Segments of a fragment with ``num_chunks`` chunks: min(P, n), or ceil(n / N) in grid mode."""
    return -(-num_chunks // grid) if grid else np.minimum(p, num_chunks)


def runs(counts: Ints) -> tuple[Ints, Ints]:
    """Owner and position inside the owner of every item, when owner i has counts[i] items."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def check_grid(part: Partition, grid: int) -> None:
    """Refuse a cut that is off the grid of ``grid`` chunks."""
    table, step = part.table, CHUNK * grid
    off = (table.length > 0) & (table.offset % step != 0)
    if off.any():
        row = int(np.flatnonzero(off)[0])
        raise ValueError(
            f'segments="grid:{grid}": document {table.doc[row]} is cut at its token {table.offset[row]}, which is not '
            f"a multiple of {step} (64 * {grid}); build the partition with align={step}, or use an int or a P vector"
        )


def build_plan(part: Partition, rank: int, *, p_vector: Sequence[int], grid: int = 0) -> Plan:
    """The plan of ``rank``.

    Args:
        part: the partition, the same on every rank.
        p_vector: segments per fragment of every rank; ignored in grid mode.
        grid: N of "grid:N", or 0.

    Raises:
        ValueError: a cut of ``part`` is off the grid.
    """
    if grid:
        check_grid(part, grid)
    table = part.table
    mine = slice(int(table.starts[rank]), int(table.starts[rank + 1]))
    doc, offset, length = table.doc[mine], table.offset[mine], table.length[mine]
    num_chunks = chunk_counts(offset, length)
    first_doc = (length > 0) & (table.prev[mine] < 0)
    last_doc = (length > 0) & (table.next[mine] < 0)
    sizes = np.diff(np.asarray(part.doc_bounds, dtype=np.int64))
    empty = np.flatnonzero(sizes == 0) if rank == 0 else np.zeros(0, dtype=np.int64)
    return Plan(
        rank=rank,
        num_tokens=int(length.sum()),
        p_vector=tuple(int(p) for p in p_vector),
        grid=grid,
        chunks=_chunks(offset, length, num_chunks),
        segments=_segments(
            num_chunks, segment_counts(num_chunks, int(p_vector[rank]), grid), grid, ~first_doc, ~last_doc
        ),
        entry_docs=np.sort(np.concatenate([doc[first_doc], empty])),
        exit_docs=np.sort(np.concatenate([doc[last_doc], empty])),
    )


def _chunks(offset: Ints, length: Ints, num_chunks: Ints) -> Chunks:
    slot, index = runs(num_chunks)
    row = (np.cumsum(length) - length)[slot]
    start, end = offset[slot], (offset + length)[slot]
    border = (start // CHUNK + index) * CHUNK
    first = np.maximum(border, start)
    return Chunks(first_row=row + first - start, count=np.minimum(border + CHUNK, end) - first)


def _segments(num_chunks: Ints, num_segments: Ints, grid: int, has_prev: Ints, has_next: Ints) -> Segments:
    slot, index = runs(num_segments)
    chunks, parts = num_chunks[slot], num_segments[slot]
    if grid:
        first, count = index * grid, np.minimum(chunks - index * grid, grid)
    else:
        base, longer = chunks // np.maximum(parts, 1), chunks % np.maximum(parts, 1)
        first, count = index * base + np.minimum(index, longer), base + (index < longer)
    return Segments(
        slot=slot,
        first_chunk=(np.cumsum(num_chunks) - num_chunks)[slot] + first,
        num_chunks=count,
        has_prev=(index > 0) | has_prev[slot],
        has_next=(index < parts - 1) | has_next[slot],
        of_slot=np.concatenate([[0], np.cumsum(num_segments)]),
    )
