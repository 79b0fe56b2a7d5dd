"""Lists of affine hops, and the order in which torch takes them: step after step.

A hop is ``state[dst] = M[map_row] @ state[src] + offset[offset_row]`` (the adjoint: M transposed), or only the offset
where a chain starts. Hops of one chain follow each other; those of different chains do not depend on each other.
Whoever makes hops writes them as columns [8, hops]: kind, chain, step in the chain, whether the state before counts,
dst, src, offset_row, map_row. A kind is a list of hops that are taken together, `2 * kind + reverse` in the columns.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from cp_gdn.fragments import Ints, differs
from cp_gdn.page import Page, Table
from cp_gdn.plan import Index

SPAN = 1 << 40
"""More than twice the steps of a kind of hops."""
Steps = tuple[tuple[int, bool], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hops:
    """Hops, step after step; those of one step may be taken at once.

    Attributes:
        table: [4, hops]: the states written (dst) and read (src), rows of the buffers (offset_row, map_row).
        steps: per step how many hops it has, and whether chains start there: then the offset alone is the state.
    """

    table: Index
    steps: Steps


@dataclass(frozen=True, kw_only=True, eq=False)
class HopLists:
    """Lists of hops side by side in one table [4, hops], step after step of kind after kind.

    Attributes:
        keys: of every step its kind * `SPAN` + 2 * step + whether it is none of chain starts, ascending.
        ends: the first column of every step, then the number of columns.
    """

    table: Table
    keys: list[int]
    ends: list[int]

    def of(self, kind: int, reverse: bool = False) -> Hops:
        """The hops of a kind and direction."""
        first, last = (bisect_left(self.keys, (2 * kind + reverse + more) * SPAN) for more in (0, 1))
        ends = self.ends[first : last + 1]
        counts = [b - a for a, b in pairwise(ends)]
        starts = [key % 2 == 0 for key in self.keys[first:last]]
        return Hops(table=self.table.data[:, ends[0] : ends[-1]], steps=tuple(zip(counts, starts, strict=True)))

    @property
    def kinds(self) -> set[int]:
        """2 * kind + reverse of all lists."""
        return {key // SPAN for key in self.keys}


def stepwise(columns: Ints, page: Page) -> HopLists:
    """Hops by kind, then step; chain starts come first in their step."""
    kind, _, step, later = columns[:4]
    key = kind * SPAN + 2 * step + later
    order = key.argsort(kind="stable")
    keys, ends = groups(key[order])
    return HopLists(table=page.put(columns[4:].take(order, axis=1)), keys=keys, ends=ends)


def groups(keys: Ints) -> tuple[list[int], list[int]]:
    """Distinct values of sorted ``keys``, and where the run of each begins, then their number in all."""
    starts = run_starts(keys)
    return keys[starts].tolist(), [*starts.tolist(), len(keys)]


def run_starts(keys: Ints) -> Ints:
    """Where runs of equal neighbours begin."""
    starts: Ints = differs(keys).nonzero()[0]
    return starts
