"""Who owns which tokens: a pack of documents cut into fragments over the ranks of a context-parallel group.

Pure integers and numpy; nothing here knows a process group or a device. Every rank builds the same table of every
rank's fragments, so that messages and shapes are functions of (pack, layout, world size) alone.
Legend of array shapes: D documents, W ranks, F fragments of all ranks, T tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from cp_gdn.layout_checks import (
    check_cut_points,
    check_doc_bounds,
    check_int,
    check_layout,
    check_tiling,
    check_triples,
)

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "explicit")
_DEFAULT_LAYOUT = "zigzag_per_document"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A run of one document's tokens on one rank; `prev` and `next` are (rank, slot) in the document's chain."""

    doc: int
    offset: int
    length: int
    prev: tuple[int, int] | None
    next: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FragmentTable:
    """Every fragment of every rank, ordered by rank, then slot: int64 columns [F].

    `prev` and `next` are rows of this table: the neighbouring non-empty fragment of the chain, -1 where there is none
    and for empty fragments. Rows `starts[r]:starts[r + 1]` belong to rank r; `starts` is [W + 1].
    """

    rank: np.ndarray
    slot: np.ndarray
    doc: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    prev: np.ndarray
    next: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A pack cut over `world_size` ranks. `doc_bounds` are the global boundaries of the documents (D + 1 ints)."""

    doc_bounds: tuple[int, ...]
    world_size: int
    layout: str
    align: int
    table: FragmentTable

    @property
    def num_docs(self) -> int:
        return len(self.doc_bounds) - 1

    @property
    def num_tokens(self) -> int:
        return self.doc_bounds[-1]

    @cached_property
    def fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """The table as objects, [rank][slot]."""
        t = self.table
        place = [*zip(t.rank.tolist(), t.slot.tolist(), strict=True), None]  # row -1 reads the None at the end
        columns = (column.tolist() for column in (t.doc, t.offset, t.length, t.prev, t.next))
        rows = [
            Fragment(doc=doc, offset=offset, length=length, prev=place[before], next=place[after])
            for doc, offset, length, before, after in zip(*columns, strict=True)
        ]
        bounds = t.starts.tolist()
        return tuple(tuple(rows[a:b]) for a, b in pairwise(bounds))

    def local_tokens(self, rank: int) -> int:
        """Number of tokens T that `rank` holds."""
        return int(self.table.length[self.rows(rank)].sum())

    def token_ids(self, rank: int) -> np.ndarray:
        """Global token index of each local row, int64 [T]; rows are the fragments' tokens in slot order."""
        rows = self.rows(rank)
        return _runs(self._first_tokens[rows], self.table.length[rows])

    def positions(self, rank: int) -> np.ndarray:
        """Offset of each local row inside its document, int64 [T]."""
        rows = self.rows(rank)
        return _runs(self.table.offset[rows], self.table.length[rows])

    @cached_property
    def bounds(self) -> np.ndarray:
        """`doc_bounds` as int64 [D + 1]."""
        return np.asarray(self.doc_bounds, dtype=np.int64)

    @cached_property
    def rank_order(self) -> np.ndarray:
        """Global token index of every rank's rows, one rank after the other, int64 [N]."""
        return _runs(self._first_tokens, self.table.length)

    @cached_property
    def gather_rows(self) -> np.ndarray:
        """Where each global token lies in `rank_order`, int64 [N]."""
        rows = np.empty_like(self.rank_order)
        rows[self.rank_order] = np.arange(len(rows))
        return rows

    @cached_property
    def _first_tokens(self) -> np.ndarray:
        """Global index of each fragment's first token, int64 [F]."""
        return self.bounds[self.table.doc] + self.table.offset

    def rows(self, rank: int) -> slice:
        """Rows of the table that belong to `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: got {rank}, expected 0 <= rank < world_size = {self.world_size}")
        return slice(int(self.table.starts[rank]), int(self.table.starts[rank + 1]))


def partition(
    cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor,
    world_size: int,
    layout: str = _DEFAULT_LAYOUT,
    cut_points: Sequence[Sequence[int]] | np.ndarray | None = None,
    align: int = 1,
    *,
    fragments: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Partition:
    """Cut the pack with the global boundaries `cu_seqlens` over `world_size` ranks.

    `cut_points` (only zigzag_per_document): per document 2W + 1 offsets from 0 to its length, never decreasing.
    `fragments` (the explicit layout): per rank a list of (doc, offset, length); slots keep the caller's order.
    `align`: a cut inside a document moves down to a multiple of it, counted from the document's first token.
    Errors are TypeError for a wrong type or dtype, ValueError for a wrong value, and name the argument.
    """
    bounds = check_doc_bounds(cu_seqlens)
    world_size, align = check_int("world_size", world_size), check_int("align", align)
    layout = check_layout(layout, LAYOUTS, cut_points is not None, fragments is not None)
    if fragments is not None:
        table = _explicit(bounds, world_size, align, fragments)
    elif layout == "zigzag_per_document":
        cuts = _per_document_cuts(bounds, world_size, align, cut_points)
        table = _zigzag_per_document(cuts, world_size)
    else:
        table = _global_order(bounds, world_size, layout, align)
    doc_bounds = tuple(bounds.tolist())
    return Partition(doc_bounds=doc_bounds, world_size=world_size, layout=layout, align=align, table=table)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _global_order(bounds: np.ndarray, world_size: int, layout: str, align: int) -> FragmentTable:
    """The layouts that cut the global token order: contiguous (W parts) and zigzag (2W parts)."""
    # contiguous, lengths 4 and 2, W = 2:  tokens 0 1 2 3 | 4 5  ->  ranks 0 0 0 1 | 1 1
    # zigzag,     lengths 4 and 2, W = 2:  parts  0 0 1 1 | 2 3  ->  ranks 0 0 1 1 | 1 0
    parts = world_size if layout == "contiguous" else 2 * world_size
    cuts = _even_cuts(bounds[-1], parts)
    doc_start = bounds[np.searchsorted(bounds, cuts, side="right") - 1]
    cuts = doc_start + (cuts - doc_start) // align * align  # a cut on a document's border is its own start: stays
    points = np.unique(np.concatenate((cuts, bounds)))
    left = points[:-1]
    doc = np.searchsorted(bounds, left, side="right") - 1
    part = np.searchsorted(cuts, left, side="right") - 1
    rank = part if layout == "contiguous" else np.minimum(part, parts - 1 - part)
    return _from_chain_order(rank, doc, left - bounds[doc], np.diff(points), world_size)


def _per_document_cuts(
    bounds: np.ndarray, world_size: int, align: int, cut_points: Sequence[Sequence[int]] | np.ndarray | None
) -> np.ndarray:
    """Cut offsets [D, 2W + 1] inside the documents."""
    lengths = np.diff(bounds)[:, None]
    if cut_points is None:
        cuts = _even_cuts(lengths, 2 * world_size)
    else:
        cuts = check_cut_points(cut_points, lengths, world_size)
    return np.where(cuts == lengths, cuts, cuts // align * align)  # the document's own border never moves


def _zigzag_per_document(cuts: np.ndarray, world_size: int) -> FragmentTable:
    # one document of 6, W = 2: cuts 0 2 4 5 6, offsets 0 1 | 2 3 | 4 | 5  ->  ranks 0 0 | 1 1 | 1 | 0
    num_docs, pieces = len(cuts), 2 * world_size
    piece = np.tile(np.arange(pieces), num_docs)
    doc = np.repeat(np.arange(num_docs), pieces)
    rank = np.minimum(piece, pieces - 1 - piece)
    return _from_chain_order(rank, doc, cuts[:, :-1].ravel(), np.diff(cuts, axis=1).ravel(), world_size)


def _explicit(
    bounds: np.ndarray, world_size: int, align: int, fragments: Sequence[Sequence[Sequence[int]]]
) -> FragmentTable:
    # one document of 6, W = 2, fragments [[(0, 4, 2), (0, 0, 1)], [(0, 1, 3)]]:
    # offsets 0 | 1 2 3 | 4 5  ->  ranks 0 | 1 1 1 | 0 0; local rows of rank 0 are offsets 4 5 0
    rank, triples = check_triples(fragments, world_size)
    doc, offset, length = triples.T
    order = np.lexsort((offset, doc))
    check_tiling(bounds, rank[order], triples[order])
    doc_length = np.diff(bounds)[doc]
    start, end = (np.where(cut == doc_length, cut, cut // align * align) for cut in (offset, offset + length))
    return _linked(rank, doc, start, end - start, order, world_size)


def _from_chain_order(
    rank: np.ndarray, doc: np.ndarray, offset: np.ndarray, length: np.ndarray, world_size: int
) -> FragmentTable:
    """The table of fragments given by document, then offset; a rank's slots keep that order."""
    key = rank.astype(np.uint16) if world_size <= 1 << 16 else rank  # 16-bit keys are sorted by radix
    rows = np.argsort(key, kind="stable")
    chain = np.empty_like(rows)
    chain[rows] = np.arange(len(rows))
    return _linked(rank[rows], doc[rows], offset[rows], length[rows], chain, world_size)


def _linked(
    rank: np.ndarray, doc: np.ndarray, offset: np.ndarray, length: np.ndarray, chain: np.ndarray, world_size: int
) -> FragmentTable:
    """Link neighbours of a chain. `chain`: row numbers [F] ordered by document, then offset."""
    live = chain[length[chain] > 0]
    before, after = live[:-1], live[1:]
    same = doc[before] == doc[after]
    prev, following = np.full((2, len(rank)), -1, dtype=np.int64)
    prev[after[same]] = before[same]
    following[before[same]] = after[same]
    starts = np.searchsorted(rank, np.arange(world_size + 1))
    slot = np.arange(len(rank)) - starts[rank]
    return FragmentTable(
        rank=rank, slot=slot, doc=doc, offset=offset, length=length, prev=prev, next=following, starts=starts
    )


def _even_cuts(n: np.ndarray, parts: int) -> np.ndarray:
    """Borders of near-equal parts: the first n mod parts hold one token more. n [] or [D, 1] -> [.., parts + 1]."""
    index = np.arange(parts + 1)
    cuts: np.ndarray = index * (n // parts) + np.minimum(index, n % parts)
    return cuts


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges [start, start + length), int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    ids: np.ndarray = np.repeat(starts - ends + lengths, lengths) + np.arange(total)
    return ids
