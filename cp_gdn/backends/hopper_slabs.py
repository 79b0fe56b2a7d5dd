"""Slabs of a backward: which items keep their tapes in memory at once, where each tape lies, and the steps of `grad`.

A pair is an item of a walk and a q/k head; pairs are numbered item by item and spread evenly over the waves of blocks
that they need. A slab is a run of pairs, whole waves while they fit `SLAB_BYTES`, and at least one. In a slab the pairs
of an item lie chunk by chunk, heads side by side, which is the order in which `grad` takes them; value heads of a q/k
head are neighbours.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cp_gdn.backends.hopper_hops import packed
from cp_gdn.fragments import Ints
from cp_gdn.hops import run_starts
from cp_gdn.page import Page, Table

SLAB_BYTES = 1 << 30
BLOCKS = 132
"""Blocks of a walk that run at once: one on each SM of an H100 or H200."""
STATE_BYTES, VALUE_BYTES = 128 * 128 * 2, 64 * 128 * 2
CHUNK_BYTES = 2 * STATE_BYTES + VALUE_BYTES
"""Of a chunk and value head: its state, the adjoint after it, Vn."""
NO_STATE, NO_ADJOINT = 1, 2
"""The state before a chunk, or the adjoint after it, is zero: no walk writes it, `grad` reads none."""


@dataclass(frozen=True, kw_only=True)
class Slab:
    """Pairs ``first_pair`` to ``end_pair``, and their steps."""

    first_pair: int
    end_pair: int
    first_step: int
    end_step: int

    @property
    def steps(self) -> int:
        return self.end_step - self.first_step


@dataclass(frozen=True, kw_only=True)
class SlabTables:
    """Slabs of a rank's backward, not yet uploaded.

    Attributes:
        pairs: packed [num_pairs, 4] int32, neighbouring pairs of one item in one slab: first chunk, heads, first head,
            first step.
        places: packed [num_places, 2] int32, of a pair's first chunk in its slab, and from chunk to chunk, in steps.
    """

    slabs: tuple[Slab, ...]
    pairs: Table
    num_pairs: int
    places: Table
    num_places: int

    @property
    def num_steps(self) -> int:
        return self.slabs[-1].end_step if self.slabs else 0


def slab_tables(items: Ints, heads: tuple[int, int], page: Page) -> SlabTables:
    """Slabs of items [n, 4] and (H, HV) heads."""
    query_heads, pairs = heads[0], len(items) * heads[0]
    cuts = slab_cuts(items[:, 1].repeat(query_heads), heads[1] // query_heads)
    starts = np.arange(0, pairs, query_heads)
    if len(cuts) > 2:
        starts = np.concatenate((starts, cuts[:-1]))
        starts.sort()
        starts = starts[run_starts(starts)]
    width = np.concatenate((starts[1:], (pairs,))) - starts
    item = starts // query_heads
    steps = items[item, 1] * width
    ends = steps.cumsum()
    of_slab = np.concatenate(((ends - steps)[starts.searchsorted(cuts[:-1])], ends[-1:]))
    begun = of_slab[cuts.searchsorted(starts, "right") - 1]
    first = (ends - steps - begun - starts).repeat(width) + np.arange(pairs)
    edges = zip(pairwise(cuts.tolist()), pairwise(of_slab.tolist()), strict=True)
    return SlabTables(
        slabs=tuple(Slab(first_pair=a, end_pair=b, first_step=c, end_step=d) for (a, b), (c, d) in edges),
        pairs=page.put(packed(np.array((items[item, 0], width, starts % query_heads, ends - steps)).T)),
        num_pairs=len(starts),
        places=page.put(packed(np.array((first, width.repeat(width))).T)),
        num_places=pairs,
    )


def slab_cuts(chunks: Ints, group: int) -> Ints:
    """Pairs at which slabs begin, and the end; ``chunks`` [pairs]."""
    most = max(1, BLOCKS // group)
    wave = -(-len(chunks) // max(1, -(-len(chunks) // most)))  # even: as many waves, the largest slab is smaller
    cuts, held, waves = [0], 0, np.arange(0, len(chunks), max(1, wave))
    for first, size in zip(waves.tolist(), np.add.reduceat(chunks, waves).tolist(), strict=True):
        if held and (held + size) * group * CHUNK_BYTES > SLAB_BYTES:
            cuts.append(first)
            held = 0
        held += size
    return np.array([*cuts, len(chunks)] if len(chunks) else cuts, dtype=np.int64)
