"""Hops as `fold` takes them: int32 tables, chain after chain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cp_gdn.chains import NO_HOPS, Hops
from cp_gdn.fragments import Ints
from cp_gdn.plan import NONE, Index


def packed(x: Any) -> Ints:
    """int32 in pairs, as int64; an odd one out gets a zero beside it."""
    flat = np.ascontiguousarray(x, dtype=np.int32).reshape(-1)
    return (np.concatenate((flat, _ODD)) if len(flat) % 2 else flat).view(np.int64)


_ODD = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class KernelHops(Hops):
    """Hops that `fold` takes in one launch; ``table`` is empty.

    Attributes:
        hops: packed [h, 4], dst, src, offset row, map row (-1 where a chain starts), chain after chain, of all lists
            that were packed together.
        chains: packed [c + 1], the first hop of each chain, then h; hops of different chains do not depend on each
            other.
        first_chain, num_chains: those of this list.
    """

    hops: Index
    chains: Index
    first_chain: int
    num_chains: int


NO_KERNEL_HOPS = KernelHops(table=NO_HOPS.table, steps=(), hops=NONE, chains=NONE, first_chain=0, num_chains=0)


class PackedHops:
    """Lists of hops in two tables, which all of them share.

    Args:
        groups: lists of hops, and what renumbers their states, or None.
    """

    def __init__(self, *groups: tuple[Sequence[Hops], Ints | None]) -> None:
        lists = [hops for group, _ in groups for hops in group if hops.steps]
        self._of: dict[int, KernelHops] = {}
        if not lists:
            return
        sizes = np.array([hops.table.shape[1] for hops in lists])
        table = np.concatenate([hops.table for hops in lists], axis=1)
        counts, flags = zip(*[step for hops in lists for step in hops.steps], strict=True)
        is_start = np.array(flags).repeat(counts)
        chain = _chain_of_hop(table[:2], sizes, is_start, max(len(hops.steps) for hops in lists))
        _renumber(table, groups)
        table[3, is_start] = -1
        order = chain.argsort(kind="stable")
        of, fresh = chain[order], np.ones(len(chain) + 1, dtype=bool)
        np.not_equal(of[1:], of[:-1], out=fresh[1:-1])
        first = fresh.nonzero()[0]
        edges = [0, *first.searchsorted(sizes.cumsum()).tolist()]
        rows, chains = packed(table.take(order, axis=1).T), packed(first)
        for hops, a, b in zip(lists, edges, edges[1:], strict=False):
            self._of[id(hops)] = KernelHops(
                table=NO_HOPS.table, steps=hops.steps, hops=rows, chains=chains, first_chain=a, num_chains=b - a
            )

    def __getitem__(self, hops: Hops) -> KernelHops:
        return self._of.get(id(hops), NO_KERNEL_HOPS)


def _renumber(table: Ints, groups: tuple[tuple[Sequence[Hops], Ints | None], ...]) -> None:
    """States of each group's lists, which follow each other in ``table``, by its rows; in place."""
    begin = 0
    for lists, rows in groups:
        end = begin + sum([hops.table.shape[1] for hops in lists if hops.steps])
        if rows is not None and end > begin:
            table[:2, begin:end] = rows[table[:2, begin:end]]
        begin = end


def _chain_of_hop(states: Ints, sizes: Ints, is_start: Ints, steps: int) -> Ints:
    """A number per hop, equal where one hop reads what another one of its list wrote: the first of these hops.

    Args:
        states: [2, h], written and read. sizes: hops of each list. is_start: bool [h], nothing is read.
        steps: most steps of a list.
    """
    written, read = states + np.arange(len(sizes)).repeat(sizes) * (int(states.max()) + 1)
    order, last = written.argsort(kind="stable"), len(written) - 1
    writer = order[np.minimum(written[order].searchsorted(read), last)]
    is_read = (written[writer] == read) & ~is_start
    chain: Ints = np.where(is_read, writer, np.arange(last + 1))
    for _ in range(steps.bit_length()):  # to the writer of the writer's, twice as far every time
        chain = chain[chain]
    return chain
