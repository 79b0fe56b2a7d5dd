"""Items of the walks: what one block of a walk does, before `spread` gives every value head its own.

An item is four int32: first chunk, chunks, head and run, segment. Head and run are the halves of one number; run counts
the segments that a block walks one after the other, or is `MAP`. A block that starts last should be a short one, so
that the items of a walk come longest first.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.backends.hopper_slabs import BLOCKS
from cp_gdn.fragments import Ints
from cp_gdn.plan import Plan, Segments

RUN_CHUNKS = 24
"""Segments shorter than this share a block until they have as many chunks: it fills its pipeline once for all."""
LONGER_THAN_EXCHANGE = 64
"""Chunks: their walk takes 0.11 ms on an H200, an exchange between two some 0.05."""
MAP = -1
_RUN = 1 << 16

SUMMARY, TRANSFER, INDEPENDENT, DEPENDENT, ADJOINT_SUMMARY, REPLAY = range(6)
"""The walks: of a forward for B and M, for M alone, for o of what needs no message and of the rest; of a backward for
Bt, and of all segments for states and for adjoints."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Items of all walks, one walk after the other, [m, 4]; ``counts``: of each walk."""

    table: Ints
    counts: list[int]

    def of(self, walk: int) -> Ints:
        """Those of one walk."""
        first = sum(self.counts[:walk])
        return self.table[first : first + self.counts[walk]]


def build_items(plan: Plan, remote: Ints, value_heads: int) -> Items:
    """``remote``: whether a fragment waits for a message, bool [F]."""
    segments = plan.segments
    summary, transfer, adjoint_summary = _summaries(segments)
    replay = run_items(segments)
    first, rest = _apart(segments, remote[segments.slot], replay)
    if _fit_one_wave(first, rest, value_heads):
        first, rest = first[:, :0], replay
    walks = (summary, transfer, first, rest, adjoint_summary, replay)
    return Items(table=items_of(segments, np.concatenate(walks, axis=1)), counts=[x.shape[1] for x in walks])


def _summaries(segments: Segments) -> list[Ints]:
    """Items for B and M, for M alone and for Bt, [3, ..] each: segment, chunks, run."""
    (before, after), ids = segments.around, segments.longest_first
    wanted = np.array((after, before & after, before)).take(ids, axis=1)
    both = wanted[:2].T.reshape(-1).nonzero()[0]  # B and M of a segment are neighbours
    places = both // 2, wanted[1].nonzero()[0], wanted[2].nonzero()[0]
    place, first, second = np.concatenate(places), len(both), len(both) + len(places[1])
    found = np.array((place, place, place))
    found[0] = ids[place]
    found[1], found[2, second:] = segments.num_chunks[found[0]], 0
    found[2, :first], found[2, first:second] = both % 2 * MAP, MAP
    return [found[:, :first], found[:, first:second], found[:, second:]]


def items_of(segments: Segments, runs: Ints) -> Ints:
    """[m, 4] of [3, m]: first segment, chunks, run."""
    segment, chunks, run = runs
    items: Ints = np.array((segments.first_chunk[segment], chunks, run * _RUN, segment), dtype=np.int32).T
    return items


def run_items(segments: Segments, apart: Ints | None = None) -> Ints:
    """[3, m] of runs of neighbouring segments, longest first: the first one, chunks, how many there are; one of
    `RUN_CHUNKS` or more is alone. ``apart``: bool [n - 1], whether a run must end between two neighbours."""
    counts, ids = segments.num_chunks, segments.longest_first
    is_long = counts >= RUN_CHUNKS
    if np.count_nonzero(is_long) == len(counts):
        return np.array((ids, counts[ids], np.ones_like(ids)))
    starts, before = np.ones(len(counts), dtype=bool), segments.first_chunk
    starts[1:] = is_long[1:] | is_long[:-1]
    if apart is not None:
        starts[1:] |= apart
    filled = (before - np.maximum.accumulate(before * starts)) // RUN_CHUNKS
    starts[1:] |= filled[1:] > filled[:-1]
    edges = np.concatenate((starts.nonzero()[0], (len(counts),)))
    first = edges[:-1]
    chunks = np.add.reduceat(counts, first)
    found = np.array((first, chunks, edges[1:] - first))
    return found.take((-chunks).argsort(kind="stable"), axis=1)


def _apart(segments: Segments, dependent: Ints, replay: Ints) -> tuple[Ints, Ints]:
    """Runs of segments that need no message, and of the others. ``replay``: runs of both."""
    waiting = np.count_nonzero(dependent)
    if not waiting:
        return replay, replay[:, :0]
    if waiting == len(dependent):
        return replay[:, :0], replay
    runs = run_items(segments, dependent[1:] != dependent[:-1])
    waits = dependent[runs[0]]
    return runs[:, ~waits], runs[:, waits]


def _fit_one_wave(independent: Ints, dependent: Ints, value_heads: int) -> bool:
    """Whether both replays are better run at once: their blocks fit the GPU together, and the first alone would take
    longer than the exchange that it hides."""
    count = independent.shape[1] + dependent.shape[1]
    if not (independent.shape[1] and dependent.shape[1]) or count * value_heads > BLOCKS:
        return False
    return bool(independent[1, 0] >= LONGER_THAN_EXCHANGE)
