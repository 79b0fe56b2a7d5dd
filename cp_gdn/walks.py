"""Which segments torch walks side by side, and their chunks step by step. The kernels have items: `hopper_items`.

A walk takes its segments together, chunk after chunk, the longest first, so that those that still walk are the first
ones of the state at every step.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import Rows
from cp_gdn.fragments import Ints, runs
from cp_gdn.page import Lists, Page
from cp_gdn.plan import Index, Plan, active_counts

SUMMARY, INDEPENDENT, DEPENDENT, TRANSFER = range(4)
"""Walks: for B (Bt in the mirror); from known states, of what needs no message, and of the rest; for M, forward only.
Walk w of a direction is list 2 * w + reverse."""
_EVERY = np.arange(2 * TRANSFER + 2)
"""Every list, and their number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """Segments that are walked side by side.

    Attributes:
        segments: [n] segments of this rank. rows: [n] where their result goes: offset or map row.
        chunks: [m] their chunks, step by step: all first chunks (last ones in the mirror), then all second ones, ...
        active: segments still walking at each step; its sum is m.
        ends: [2, e] of a walk from known states: which of the segments end their document, and the rows of the caller's
            tensor that the states there go to.
    """

    segments: Index
    rows: Index
    chunks: Index
    active: tuple[int, ...]
    ends: Index


@dataclass(frozen=True, kw_only=True, eq=False)
class Walks:
    """All walks of a rank in three tables: segments and rows [2, ..], chunks [1, ..], ends [2, ..].

    ``lengths``: chunks of every listed segment."""

    segments: Lists
    lengths: list[int]
    chunks: Lists
    ends: Lists

    def of(self, walk: int, reverse: bool = False) -> Walk:
        """One walk."""
        i = 2 * walk + reverse
        segments, rows = self.segments[i]
        first, last = self.segments.cuts[i : i + 2]
        active = tuple(active_counts(np.array(self.lengths[first:last], dtype=np.int64)).tolist())
        return Walk(segments=segments, rows=rows, chunks=self.chunks[i][0], active=active, ends=self.ends[i])


def build_walks(plan: Plan, rows: Rows, page: Page) -> Walks:
    """The walks of ``plan``."""
    before, after = plan.segments.around
    dependent, ids = rows.remote.reshape(2, -1).take(plan.segments.slot, axis=1), plan.segments.longest_first
    chosen = np.array((after, before, *~dependent, *dependent, before & after)).take(ids, axis=1)
    walk, place = chosen.nonzero()
    segments, starts = ids[place], walk.searchsorted(_EVERY)
    offsets, ends = rows.offset_of_segment.reshape(2, -1), plan.document_rows[::-1]
    row = np.array((*offsets, *ends, *ends, rows.map_of_segment))[walk, segments]
    replays = slice(starts[2 * INDEPENDENT], starts[2 * TRANSFER])
    at = (row[replays] >= 0).nonzero()[0] + replays.start
    of_end = walk[at]
    return Walks(
        segments=Lists(table=page.put(np.array((segments, row))), cuts=tuple(starts.tolist())),
        lengths=plan.segments.num_chunks[segments].tolist(),
        chunks=page.put_lists(*_chunks(plan, chosen)),
        ends=Lists(
            table=page.put(np.array((at - starts[of_end], row[at]))), cuts=tuple(of_end.searchsorted(_EVERY).tolist())
        ),
    )


def _chunks(plan: Plan, chosen: Ints) -> tuple[Ints, list[int]]:
    """Chunks of all walks, [1, ..], and how many each has. ``chosen``: of the segments, longest first, those of each
    walk, bool [walks, n]."""
    ids = plan.segments.longest_first
    first, count = plan.segments.first_chunk[ids], plan.segments.num_chunks[ids]
    step, place = runs(active_counts(count))
    forward = first[place] + step
    both = forward, (2 * first + count - 1)[place] - forward
    chunks = [both[i % 2][mask] for i, mask in enumerate(chosen.take(place, axis=1))]
    return np.concatenate(chunks)[None], [len(x) for x in chunks]
