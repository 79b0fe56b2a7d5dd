"""Hops as `fold` takes them: int32 tables, chain after chain."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cp_gdn.fragments import Ints
from cp_gdn.hops import HopLists, Hops, groups, run_starts
from cp_gdn.page import Page, Table
from cp_gdn.plan import NONE, Index


def packed(x: Any) -> Ints:
    """int32 in pairs, as int64; an odd one out gets a zero beside it."""
    flat = np.ascontiguousarray(x, dtype=np.int32).reshape(-1)
    return (np.concatenate((flat, _ODD)) if len(flat) % 2 else flat).view(np.int64)


_ODD = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelHops(Hops):
    """Hops that `fold` takes in one launch.

    Attributes:
        table: packed [h, 4], dst, src, offset row, map row (-1 where a chain starts), chain after chain, of all lists.
        chains: packed [c + 1], the first hop of each chain, then h.
        first_chain, num_chains: those of this list.
    """

    chains: Index
    first_chain: int
    num_chains: int


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelHopLists(HopLists):
    """Lists of hops in two tables, which all of them share: see `KernelHops`. `keys`: 2 * kind + reverse of every list,
    `ends`: its first chain, then the number of chains."""

    chains: Table
    made: dict[int, KernelHops] = field(default_factory=dict, init=False, repr=False)

    @property
    def kinds(self) -> set[int]:
        return set(self.keys)

    def of(self, kind: int, reverse: bool = False) -> KernelHops:
        """The hops of a kind and direction."""
        found = self.made.get(2 * kind + reverse)
        return self._make(2 * kind + reverse) if found is None else found

    def _make(self, number: int) -> KernelHops:
        i = bisect_left(self.keys, number)
        first, end = self.ends[i : i + 2] if number in self.keys[i : i + 1] else (0, 0)
        table, chains = self.table.data, self.chains.data
        self.made[number] = KernelHops(table=table, steps=(), chains=chains, first_chain=first, num_chains=end - first)
        return self.made[number]


def chainwise(columns: Ints, page: Page) -> KernelHopLists:
    """Hops by kind, then chain, then step; see `hops` for the columns."""
    if not columns.shape[1]:
        return KernelHopLists(table=page.put(NONE), keys=[], ends=[0], chains=page.put(NONE))
    kind, chain, step = columns[:3]
    span = int(chain.max()) + 1
    chain = kind * span + chain
    # NOTE: one key, for whoever makes hops makes them nearly in order, which one stable sort sees.
    order = (chain * (int(step.max()) + 1) + step).argsort(kind="stable")
    chain, ordered = chain[order], columns[3:].take(order, axis=1)
    first = run_starts(chain)
    keys, ends = groups(chain[first] // span)
    ordered[-1][ordered[0] == 0] = -1
    table, chains = page.put(packed(ordered[1:].T)), page.put(packed(np.concatenate((first, (len(order),)))))
    return KernelHopLists(table=table, keys=keys, ends=ends, chains=chains)
