"""How long a list of jobs keeps the SMs busy, and the rank tables that jobs are made from.

Exact integers; nothing here knows a device. Example: three jobs of 5 and four of 2 on two machines, longest first:
5 and 5, then 5 onto the first (loads 10, 5), then 2 2 2 onto the second (10, 11), 2 onto the first: the makespan is 12.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cp_gdn.fragments import CHUNK
from cp_gdn.layout import Partition

Row = tuple[int, int, int, int]
"""(NC, crosses out, crosses in, how many fragments are like this)."""


class Rows(tuple[Row, ...]):
    """A rank's fragments in canonical form, so that equal contents are equal: rows merged, the most chunks first."""

    __slots__ = ()


LONG = 1 << 31
"""Longer than any job, and short enough for its multiples."""
SMALL = 64
"""Rows up to which plain Python merges a table faster than numpy."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankTable:
    """A rank's fragments as a multiset: `count[i]` fragments of `nc[i]` chunks, all arrays of one length.

    `crosses`: a later non-empty fragment of the document exists; `crosses_in`: an earlier one does (None: like
    `crosses`).
    """

    nc: np.ndarray
    crosses: np.ndarray
    count: np.ndarray
    crosses_in: np.ndarray | None = None


Table = Rows | RankTable | Sequence[Sequence[int]] | np.ndarray
"""What a rule takes per rank: a multiset, or per fragment (NC, crosses_out) or (NC, crosses_out, crosses_in)."""


def table_rows(table: Table) -> Rows:
    """The table in canonical form."""
    if isinstance(table, Rows):
        return table
    if isinstance(table, RankTable):
        crosses_in = table.crosses if table.crosses_in is None else table.crosses_in
        columns = [table.nc, table.crosses, crosses_in, table.count]
    elif isinstance(table, np.ndarray):
        columns = [table[:, 0], table[:, 1], table[:, -1], np.ones(len(table), dtype=np.int64)]
    else:
        return _canonical((row[0], row[1], row[-1], count) for row, count in Counter(map(tuple, table)).items())
    if len(columns[0]) <= SMALL:
        return _canonical(zip(*(column.tolist() for column in columns), strict=True))
    keys, inverse = np.unique(columns[0] * 4 + (columns[1] != 0) * 2 + (columns[2] != 0), return_inverse=True)
    counts = np.bincount(inverse, weights=columns[3], minlength=len(keys)).astype(np.int64)  # exact below 2**53
    return _canonical(zip(*(column.tolist() for column in (keys // 4, keys // 2 % 2, keys % 2, counts)), strict=True))


def _canonical(rows: Iterable[tuple[int, ...]]) -> Rows:
    merged: dict[tuple[int, int, int], int] = {}
    for nc, crosses, crosses_in, count in rows:
        key = int(nc), int(crosses != 0), int(crosses_in != 0)
        merged[key] = merged.get(key, 0) + count
    if merged and min(merged)[0] < 0:
        raise ValueError(f"tables: got a fragment of {min(merged)[0]} chunks, expected at least 0")
    return Rows(sorted(((*key, count) for key, count in merged.items() if count), reverse=True))


def rank_tables(part: Partition, *, grid: str = "document") -> list[Rows]:
    """One table per rank; see `rank_rows`."""
    return [rank_rows(part, rank, grid=grid) for rank in range(part.world_size)]


def rank_rows(part: Partition, rank: int, *, grid: str = "document") -> Rows:
    """The table of one rank.

    Args:
        part: the partition. rank: whose fragments.
        grid: where chunks are counted from: "document" (what is run) or "fragment" (what the rules of the seed count:
            ceil(length / 64)).
    """
    if grid not in ("document", "fragment"):
        raise ValueError(f'grid: got {grid!r}, expected "document" or "fragment"')
    own = part.of_rank(rank)
    nc = own.num_chunks if grid == "document" else -(-own.length // CHUNK)
    keys = nc * 4 + own.around[1] * 2 + own.around[0]
    if len(keys) <= SMALL:
        counted = sorted(Counter(keys.tolist()).items())
    else:
        counted = list(zip(*(column.tolist() for column in np.unique(keys, return_counts=True)), strict=True))
    return Rows((key >> 2, key >> 1 & 1, key & 1, count) for key, count in reversed(counted))


# ---- longest first, each job to the least loaded machine -------------------------------------------------------------


def lpt_makespan(jobs: Iterable[tuple[int, int]], machines: int) -> int:
    """The largest load. `jobs`: (length, count) in any order; work grows with the distinct lengths alone."""
    merged: dict[int, int] = {}
    for length, count in jobs:
        if length and count:
            merged[length] = merged.get(length, 0) + count
    order = sorted(merged, reverse=True)
    loads: list[tuple[int, int]] = []
    idle = machines
    for i, length in enumerate(order):
        count = merged[length]
        if count > idle:
            return _poured_all(sorted([(0, idle), *loads] if idle else loads), order[i:], merged)
        loads.append((length, count))
        idle -= count
    return order[0] if order else 0


def _poured_all(loads: list[tuple[int, int]], order: list[int], counts: dict[int, int]) -> int:
    machines = sum(count for _, count in loads)
    total = sum(load * count for load, count in loads) + sum(length * counts[length] for length in order)
    for length in order:
        if total + length * machines <= loads[-1][0] * machines:
            break  # the least loaded machine is at the average at most: no job reaches beyond the largest load any more
        loads = _pour(loads, length, counts[length])
    return loads[-1][0]


def _pour(loads: list[tuple[int, int]], length: int, count: int) -> list[tuple[int, int]]:
    """`loads`: (load, machines) ascending; the same after `count` more jobs of one length."""
    while count:
        low = loads[0][0]
        active = reach = 0
        for load, machines in loads:
            if load >= low + length:
                break
            active, reach = active + machines, reach + 1
        if count < active:
            return _poured(loads, length, count)
        # All machines below low + length take a job each before one of them takes a second: whole rounds at once.
        rounds = count // active
        if reach < len(loads):
            rounds = min(rounds, (loads[reach][0] - low) // length)
        count -= rounds * active
        loads = sorted([(load + rounds * length, machines) for load, machines in loads[:reach]] + loads[reach:])
    return loads


def _poured(loads: list[tuple[int, int]], length: int, count: int) -> list[tuple[int, int]]:
    """One job each for the `count` least loaded machines."""
    fed: list[tuple[int, int]] = []
    for i, (load, machines) in enumerate(loads):
        if machines > count:
            rest = [(load, machines - count), *loads[i + 1 :]]
            return sorted([*fed, (load + length, count), *rest]) if count else sorted(fed + rest)
        fed.append((load + length, machines))
        count -= machines
    return fed


def makespan_bound(lengths: np.ndarray, counts: np.ndarray, machines: int) -> np.ndarray:
    """A lower bound of `lpt_makespan` over the last axis [..., J], J > 0; tight when the longest come first.

    Of the first k jobs some machine holds at least ceil(k / machines), none shorter than the shortest of the k.
    """
    even = np.add.reduce(lengths * counts, axis=-1)
    held = np.add.accumulate(counts, axis=-1)
    shortest = np.minimum.accumulate(np.where(counts > 0, lengths, LONG), axis=-1)
    shortest *= ceil_div(held, machines)
    bound: np.ndarray = np.maximum(ceil_div(even, machines), np.maximum.reduce(shortest, axis=-1))
    return bound


def ceil_div(a: Any, b: Any) -> np.ndarray:
    """Of arrays, or an array and a number."""
    quotient: np.ndarray = (a + (b - 1)) // b
    return quotient
