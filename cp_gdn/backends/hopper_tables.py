"""What the kernels look up, made of a rank's plan before it is uploaded: chunks, segments, items of walks, where walks
start and end, slabs.

States on the kernels are numbered with `starts_last`: first the segments with tokens of their document before them,
then the outbox, last the segments that start a document; in the mirror those with tokens behind them, and those that
end one. Without states from the caller nobody reads or writes those last ones, and the buffer ends before them. Tables
are int32, packed two by two into the int64 that a `Page` moves.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.backends.hopper_hops import packed
from cp_gdn.backends.hopper_items import INDEPENDENT, REPLAY, build_items
from cp_gdn.backends.hopper_slabs import SlabTables, slab_tables
from cp_gdn.backends.hopper_strips import partial_chunks, strips_of
from cp_gdn.chains import Rows
from cp_gdn.fragments import Ints
from cp_gdn.page import Page, Table
from cp_gdn.plan import Plan

TRANSFER_ROWS = 16
"""Row of `KernelTables.rows` for a walk of maps alone."""


@dataclass(frozen=True, kw_only=True)
class KernelTables:
    """Everything that kernels look up beside a schedule and routes.

    Attributes:
        row_of_segment: [n] row of each segment's entry state.
        num_rows: of the forward and of the mirror, rows of the state buffer without and with states from the caller.
        free_rows: of o, see the function of that name.
        chunks: packed [N, 2], first row and count. partial, strips: packed `partial_chunks` of these, and `strips_of`.
        segments: packed [n, 4], first chunk, chunks, map row, 0.
        items: packed [m, 4], see `hopper_items`, of all walks one after the other. counts: items of each walk.
        rows: [17, n], by `rows_index` and `TRANSFER_ROWS`: where the walk of each segment starts from and where its end
            goes, two int32 each, -1 for nowhere.
        slabs: of a backward's replay. num_entries, num_exits: rows of the initial and of the final states.
    """

    row_of_segment: Table
    num_rows: tuple[tuple[int, int], tuple[int, int]]
    free_rows: tuple[int, int]
    num_chunks: int
    num_segments: int
    chunks: Table
    partial: Table
    num_partial: int
    strips: tuple[int, ...]
    segments: Table
    items: Table
    counts: tuple[int, ...]
    rows: Table
    slabs: SlabTables
    num_entries: int
    num_exits: int


def rows_index(*, reverse: bool, replay: bool, given: bool, wanted: bool) -> int:
    """Row of `KernelTables.rows` for summaries or replays of a direction, by whether states of documents came in where
    it starts (initial states, or the gradient of final ones), and whether those where it ends are wanted."""
    return 8 * reverse + 4 * given + 2 * wanted + replay


def kernel_tables(plan: Plan, rows: Rows, heads: tuple[int, int], page: Page) -> KernelTables:
    """The tables of a rank, not yet uploaded."""
    count, segments, chunks = len(plan.segments), plan.segments, plan.chunks
    remote, partial = rows.remote[: len(rows.map_of_slot)], partial_chunks(chunks.count)
    items = build_items(plan, remote, heads[1])
    inner = np.add.reduce(segments.around, axis=1, dtype=np.int64).tolist()
    forward, mirror = (total - count + n for total, n in zip(rows.num_states, inner, strict=True))
    shown = np.array((segments.first_chunk, segments.num_chunks, rows.map_of_segment, np.zeros_like(segments.slot)))
    return KernelTables(
        row_of_segment=page.put(rows.state_of_segment[:count]),
        num_rows=((forward, rows.num_states[0]), (mirror, rows.num_states[1])),
        free_rows=free_rows(plan, remote, waits=not items.counts[INDEPENDENT]),
        num_chunks=len(chunks),
        num_segments=count,
        chunks=page.put(packed(np.array((chunks.first_row, chunks.count)).T)),
        partial=page.put(packed(partial)),
        num_partial=len(partial),
        strips=strips_of(partial),
        segments=page.put(packed(shown.T)),
        items=page.put(packed(items.table)),
        counts=tuple(items.counts),
        rows=page.put(_walk_rows(plan, rows)),
        slabs=slab_tables(items.of(REPLAY), heads, page),
        num_entries=len(plan.entry_docs),
        num_exits=len(plan.exit_docs),
    )


def free_rows(plan: Plan, remote: Ints, *, waits: bool) -> tuple[int, int]:
    """The first of neighbouring rows of o that no walk writes while messages are under way, and how many: all of them
    if no fragment is ``remote``, or nothing is walked before (``waits``), else those of the longest remote fragment."""
    if waits or not np.count_nonzero(remote):
        return 0, plan.num_tokens
    own = plan.fragments
    slot = int(np.where(remote, own.length, -1).argmax())
    return int(own.first_row[slot]), int(own.length[slot])


def _walk_rows(plan: Plan, rows: Rows) -> Ints:
    """`KernelTables.rows`."""
    count, around = len(plan.segments), plan.segments.around
    states, offsets = (x.reshape(2, -1) for x in (rows.state_of_segment, rows.offset_of_segment))
    pairs = np.full((TRANSFER_ROWS + 1, count, 2), -1, dtype=np.int32)
    both = pairs[:TRANSFER_ROWS].reshape(2, 2, 2, 2, count, 2)  # reverse, given, wanted, replay, segment, (start, end)
    start, end = both[..., 0], both[..., 1]
    start[:, 1, :, 0] = np.where(around, -1, states)[:, None]
    start[:, 0, :, 1] = np.where(around, states, -1)[:, None]
    start[:, 1, :, 1] = states[:, None]
    end[..., 0, :] = offsets[:, None, None]
    end[:, :, 1, 1] = plan.document_rows[::-1, None]
    pairs[TRANSFER_ROWS, :, 1] = rows.map_of_segment
    return packed(pairs).reshape(TRANSFER_ROWS + 1, count)
