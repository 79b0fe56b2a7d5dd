"""Items of the walks: what one block of a walk does, before and after they are spread over value heads.

An item is four int32: first chunk, chunks, head and run, segment. Head and run are the halves of one number; run counts
the segments that a block walks one after the other, or is `MAP`.
"""

import numpy as np
import torch
from torch import Tensor

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


def items_of_heads(items: Tensor, value_heads: int) -> Tensor:
    """[n * HV, 4] int32 of uploaded items: heads of an item side by side."""
    # reshaped first: an empty table may have a stride that a view of another dtype does not take
    base = items.reshape(-1).contiguous().view(torch.int32).view(-1, 1, 4)
    heads = torch.zeros((value_heads, 4), dtype=torch.int32, device=items.device)
    heads[:, 2] = torch.arange(value_heads, dtype=torch.int32, device=items.device)
    return (base + heads).flatten(0, 1)
