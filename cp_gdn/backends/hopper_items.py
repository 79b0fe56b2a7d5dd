"""Items of the walks: what one block of a walk does, before `spread` gives every value head its own.

An item is four int32: first chunk, chunks, head and run, segment. Head and run are the halves of one number; run counts
the segments that a block walks one after the other, or is `MAP`.
"""

import numpy as np

from cp_gdn.fragments import Ints
from cp_gdn.plan import Segments

RUN_CHUNKS = 24
"""Segments shorter than this share a block until they have as many chunks: it fills its pipeline once for all."""
MAP = -1
_RUN = 1 << 16


def lone_items(segments: Segments, ids: Ints, run: int) -> Ints:
    """[n, 4], an item per segment."""
    columns = np.array((segments.first_chunk[ids], segments.num_chunks[ids], ids, ids))
    columns[2] = run * _RUN
    return columns.T


def longest_first(items: Ints) -> Ints:
    """The items, those of many chunks first: a block that starts last is a short one."""
    return items[(-items[:, 1]).argsort(kind="stable")]


def run_items(segments: Segments, ids: Ints) -> Ints:
    """[m, 4], runs of neighbouring segments, longest first; one of `RUN_CHUNKS` or more is alone."""
    if not len(ids):
        return lone_items(segments, ids, 1)
    ids = np.sort(ids)
    chunks = segments.num_chunks[ids]
    is_long = chunks >= RUN_CHUNKS
    if is_long.all():
        return longest_first(lone_items(segments, ids, 1))
    starts = np.ones(len(ids), dtype=bool)
    starts[1:] = (ids[1:] - ids[:-1] != 1) | is_long[1:] | is_long[:-1]
    before = chunks.cumsum() - chunks
    filled = (before - np.maximum.accumulate(before * starts)) // RUN_CHUNKS
    starts[1:] |= filled[1:] > filled[:-1]
    first = starts.nonzero()[0]
    items = lone_items(segments, ids[first], 1)
    if len(first) < len(ids):
        items[:, 1] = np.add.reduceat(chunks, first)
        items[:, 2] = (np.concatenate((first[1:], (len(ids),))) - first) * _RUN
    return longest_first(items)
