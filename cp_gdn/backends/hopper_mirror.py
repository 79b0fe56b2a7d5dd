"""What the backward on the kernels looks up: the adjoint side of `hopper_tables`, and slabs of tapes.

Row numbering of the adjoint state buffer mirrors the forward's: segments with tokens of their document behind them, the
outbox, then the segments that end a document, for which there is room only where a gradient of the final states came
in.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.backends.hopper_hops import packed
from cp_gdn.backends.hopper_items import lone_items, longest_first, run_items
from cp_gdn.backends.hopper_slabs import SlabTables, slab_tables
from cp_gdn.exchange import Routes
from cp_gdn.fragments import Ints
from cp_gdn.plan import Index, Plan
from cp_gdn.schedule import Schedule, Side


@dataclass(frozen=True, kw_only=True)
class MirrorTables:
    """Everything the backward on the kernels looks up beside the forward's tables.

    Attributes:
        side, routes: the adjoint's, states renumbered. num_rows: rows of the state buffer without and with a gradient
            of the final states.
        items: packed [m, 4], see `hopper_items`: of the summaries, then of the replay, longest first.
        counts: items of each of them. slabs: of the replay.
        rows: [8, n], by `mirror_index`: where the walk of each segment starts from and where its end goes, two int32
            each, -1 for nowhere.
    """

    side: Side
    routes: Routes
    num_rows: tuple[int, int]
    items: Index
    counts: tuple[int, ...]
    slabs: SlabTables
    rows: Index


def mirror_index(*, replay: bool, final: bool, initial: bool) -> int:
    """Row of `MirrorTables.rows` for summaries or the replay, by whether a gradient of the final states came in and
    one of the initial states is wanted."""
    return 4 * replay + 2 * final + initial


def mirror_tables(
    plan: Plan, schedule: Schedule, adjoint: tuple[Side, Routes], row: Ints, heads: tuple[int, int]
) -> MirrorTables:
    """The tables of a rank, not yet uploaded; ``adjoint``: side and routes with hops for `fold`, states renumbered by
    ``row`` [num_states]."""
    side, segments = schedule.adjoint, plan.segments
    replayed = run_items(segments, np.arange(len(segments)))
    items = [longest_first(lone_items(segments, side.summary.segments, 0)), replayed]
    return MirrorTables(
        side=adjoint[0],
        routes=adjoint[1],
        num_rows=(len(row) - len(side.start_state), len(row)),
        items=packed(np.concatenate(items)),
        counts=tuple(map(len, items)),
        slabs=slab_tables(replayed, heads),
        rows=_rows(side, row[: len(segments)]),
    )


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
