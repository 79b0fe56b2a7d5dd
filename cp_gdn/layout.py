"""Who owns which tokens: a pack of documents cut into fragments over the ranks of a context-parallel group.

Pure integers and numpy; nothing here knows a process group or a device. Every rank can tell what every other holds, so
that messages and shapes are functions of (pack, layout, world size) alone.
Legend of array shapes: D documents, W ranks, T tokens of one rank, N tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from cp_gdn.cuts import GlobalCuts
from cp_gdn.document_cuts import DocumentCuts
from cp_gdn.fragments import RankFragments, ranges
from cp_gdn.layout_checks import (
    check_cut_points,
    check_doc_bounds,
    check_int,
    check_layout,
    check_tiling,
    check_triples,
)
from cp_gdn.listing import FragmentTable, ListedCuts, linked_table, zigzag_table

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "explicit")
_DEFAULT_LAYOUT = "zigzag_per_document"
KEPT_RANKS = 16
"""Ranks whose fragments a partition remembers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A run of one document's tokens on one rank; `prev` and `next` are (rank, slot) in the document's chain."""

    doc: int
    offset: int
    length: int
    prev: tuple[int, int] | None
    next: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A pack cut over `world_size` ranks. `doc_bounds` are the global boundaries of the documents (D + 1 ints); `cuts`
    knows each rank's fragments, so that nobody has to list those of all ranks.
    """

    doc_bounds: tuple[int, ...]
    world_size: int
    layout: str
    align: int
    cuts: GlobalCuts | DocumentCuts | ListedCuts
    _known: dict[int, RankFragments] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_docs(self) -> int:
        return len(self.doc_bounds) - 1

    @property
    def num_tokens(self) -> int:
        return self.doc_bounds[-1]

    def of_rank(self, rank: int) -> RankFragments:
        """The fragments of one rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: got {rank}, expected 0 <= rank < world_size = {self.world_size}")
        if rank not in self._known:
            if len(self._known) >= KEPT_RANKS:
                self._known.clear()
            self._known[rank] = self.cuts.fragments(rank)
        return self._known[rank]

    def local_tokens(self, rank: int) -> int:
        """Number of tokens T that `rank` holds."""
        return self.of_rank(rank).num_tokens

    def token_ids(self, rank: int) -> np.ndarray:
        """Global token index of each local row, int64 [T]; rows are the fragments' tokens in slot order."""
        own = self.of_rank(rank)
        return ranges(self.bounds[own.doc] + own.offset, own.length)

    def positions(self, rank: int) -> np.ndarray:
        """Offset of each local row inside its document, int64 [T]."""
        own = self.of_rank(rank)
        return ranges(own.offset, own.length)

    @cached_property
    def crosses(self) -> bool:
        """Whether any chain leaves its first rank."""
        return self.cuts.crosses

    @property
    def bounds(self) -> np.ndarray:
        """`doc_bounds` as int64 [D + 1]."""
        return self.cuts.bounds

    # ---- every rank at once ----

    @cached_property
    def table(self) -> FragmentTable:
        """Every fragment of every rank; where the layout has 2W pieces per document, 2 W D rows."""
        return self.cuts.table

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

    def rows(self, rank: int) -> slice:
        """Rows of the table that belong to `rank`."""
        return slice(int(self.table.starts[rank]), int(self.table.starts[rank + 1]))

    @cached_property
    def rank_order(self) -> np.ndarray:
        """Global token index of every rank's rows, one rank after the other, int64 [N]."""
        return ranges(self.bounds[self.table.doc] + self.table.offset, self.table.length)

    @cached_property
    def gather_rows(self) -> np.ndarray:
        """Where each global token lies in `rank_order`, int64 [N]."""
        rows = np.empty_like(self.rank_order)
        rows[self.rank_order] = np.arange(len(rows))
        return rows


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
    cuts: GlobalCuts | DocumentCuts | ListedCuts
    if fragments is not None:
        cuts = ListedCuts(bounds=bounds, table=_explicit(bounds, world_size, align, fragments))
    elif cut_points is not None:
        cuts = ListedCuts(bounds=bounds, table=_at_cut_points(bounds, world_size, align, cut_points))
    elif layout == "zigzag_per_document":
        cuts = DocumentCuts(bounds=bounds, world_size=world_size, mirrored=True, align=align)
    else:
        cuts = _global_order(bounds, world_size, layout == "zigzag", align)
    doc_bounds = tuple(bounds.tolist())
    return Partition(doc_bounds=doc_bounds, world_size=world_size, layout=layout, align=align, cuts=cuts)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _global_order(bounds: np.ndarray, world_size: int, mirrored: bool, align: int) -> GlobalCuts:
    """The layouts that cut the global token order: contiguous (W parts) and zigzag (2W parts)."""
    # contiguous, lengths 4 and 2, W = 2:  tokens 0 1 2 3 | 4 5  ->  ranks 0 0 0 1 | 1 1
    # zigzag,     lengths 4 and 2, W = 2:  parts  0 0 1 1 | 2 3  ->  ranks 0 0 1 1 | 1 0
    parts = 2 * world_size if mirrored else world_size
    index = np.arange(parts + 1)
    cuts = index * (bounds[-1] // parts) + np.minimum(index, bounds[-1] % parts)
    if align > 1:
        doc_start = bounds[bounds.searchsorted(cuts, "right") - 1]
        cuts = doc_start + (cuts - doc_start) // align * align  # a cut on a document's border is its own start: stays
    return GlobalCuts(bounds=bounds, world_size=world_size, mirrored=mirrored, cuts=cuts)


def _at_cut_points(
    bounds: np.ndarray, world_size: int, align: int, cut_points: Sequence[Sequence[int]] | np.ndarray
) -> FragmentTable:
    """zigzag_per_document at the caller's offsets."""
    # one document of 6, W = 2: cuts 0 2 4 5 6, offsets 0 1 | 2 3 | 4 | 5  ->  ranks 0 0 | 1 1 | 1 | 0
    lengths = np.diff(bounds)[:, None]
    cuts = check_cut_points(cut_points, lengths, world_size)
    return zigzag_table(np.where(cuts == lengths, cuts, cuts // align * align))  # a document's own border never moves


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
    return linked_table(rank, (doc, start, end - start), order, world_size)
