"""What the backward on the kernels looks up: the adjoint side of `hopper_tables`, and slabs of segments.

Row numbering of the adjoint state buffer mirrors the forward's: segments with tokens of their document behind them, the
outbox, then the segments that end a document, for which there is room only where a gradient of the final states came
in.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cp_gdn.backends.hopper_hops import packed
from cp_gdn.exchange import Routes
from cp_gdn.fragments import Ints
from cp_gdn.plan import Index, Plan
from cp_gdn.schedule import Schedule, Side

SLAB_BYTES = 4 << 30
CHUNK_BYTES = 2 * 128 * 128 * 2 + 64 * 128 * 2
"""Of a chunk and value head: its state, the adjoint after it, Vn."""


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A run of segments whose states, adjoints and Vn are in memory at once: its chunks and its local rows."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class MirrorTables:
    """Everything the backward on the kernels looks up beside the forward's tables.

    Attributes:
        side, routes: the adjoint's, states renumbered. num_rows: rows of the state buffer without and with a gradient
            of the final states.
        items: packed [m, 4], first chunk, chunks, 0, segment: of the summaries, then of each slab, longest first.
        counts: segments of each of them. slabs: see `Slab`.
        rows: [8, n], by `mirror_index`: where the walk of each segment starts from and where its end goes, two int32
            each, -1 for nowhere.
    """

    side: Side
    routes: Routes
    num_rows: tuple[int, int]
    items: Index
    counts: tuple[int, ...]
    slabs: tuple[Slab, ...]
    rows: Index


def mirror_index(*, replay: bool, final: bool, initial: bool) -> int:
    """Row of `MirrorTables.rows` for summaries or the replay, by whether a gradient of the final states came in and
    one of the initial states is wanted."""
    return 4 * replay + 2 * final + initial


def mirror_tables(
    plan: Plan, schedule: Schedule, adjoint: tuple[Side, Routes], row: Ints, value_heads: int
) -> MirrorTables:
    """The tables of a rank, not yet uploaded; ``adjoint``: side and routes with hops for `fold`, states renumbered by
    ``row`` [num_states]."""
    side, segments = schedule.adjoint, plan.segments
    limit = max(1, SLAB_BYTES // (CHUNK_BYTES * value_heads))
    cuts = slab_cuts(segments.num_chunks, limit)
    lists = [side.summary.segments, *(_longest_first(segments.num_chunks, a, b) for a, b in pairwise(cuts))]
    items = [np.stack((segments.first_chunk[i], segments.num_chunks[i], np.zeros_like(i), i), 1) for i in lists]
    return MirrorTables(
        side=adjoint[0],
        routes=adjoint[1],
        num_rows=(len(row) - len(side.start_state), len(row)),
        items=packed(np.concatenate(items)),
        counts=tuple(map(len, lists)),
        slabs=tuple(_slab(plan, a, b) for a, b in pairwise(cuts)),
        rows=_rows(side, row[: len(segments)]),
    )


def slab_cuts(num_chunks: Ints, limit: int) -> list[int]:
    """Segments at which slabs of about ``limit`` chunks begin, and the end."""
    if not len(num_chunks):
        return [0]
    ends = num_chunks.cumsum()
    count = -(-int(ends[-1]) // limit)
    targets = ends[-1] * np.arange(1, count) / count
    return np.unique([0, *ends.searchsorted(targets, side="right"), len(ends)]).tolist()


def _longest_first(num_chunks: Ints, first: int, end: int) -> Ints:
    return first + np.argsort(-num_chunks[first:end], kind="stable")


def _slab(plan: Plan, first: int, end: int) -> Slab:
    chunks = plan.chunks
    a = int(plan.segments.first_chunk[first])
    b = a + int(plan.segments.num_chunks[first:end].sum())
    row = int(chunks.first_row[a])
    last = int(chunks.first_row[b - 1] + chunks.count[b - 1])
    return Slab(first_chunk=a, num_chunks=b - a, first_row=row, num_rows=last - row)


def _rows(side: Side, row: Ints) -> Ints:
    """`MirrorTables.rows`."""
    first = side.start_state
    pairs = np.full((2, 2, 2, len(row), 2), -1, dtype=np.int32)  # replay, final, initial, segment, (start, end)
    start, end = pairs[..., 0], pairs[..., 1]
    start[0, 1, :, first] = row[first][:, None]
    start[1] = row
    start[1, 0, :, first] = -1
    end[0][..., side.summary.segments] = side.summary_row
    for part in (side.independent, side.dependent):
        end[1, :, 1, part.walk.segments[part.end_at]] = part.end_row[:, None]
    return packed(pairs).reshape(8, len(row))
