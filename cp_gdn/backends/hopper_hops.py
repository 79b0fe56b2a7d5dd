"""Hops as `fold` takes them: int32 tables, chain after chain."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cp_gdn.chains import NO_HOPS, Hops
from cp_gdn.fragments import Ints, unset
from cp_gdn.plan import Index


def packed(x: Any) -> Ints:
    """int32 in pairs, as int64; an odd one out gets a zero beside it."""
    flat = np.ascontiguousarray(x, dtype=np.int32).reshape(-1)
    return (np.append(flat, np.int32(0)) if len(flat) % 2 else flat).view(np.int64)


WIDE = 16
"""Hops per step from which arrays are faster than a loop over hops."""


@dataclass(frozen=True, kw_only=True)
class KernelHops(Hops):
    """Hops that `fold` takes in one launch.

    Attributes:
        hops: packed [h, 4], dst, src, offset row, map row (-1 where a chain starts), chain after chain.
        chains: packed [num_chains + 1], the first hop of each; hops of different chains do not depend on each other.
    """

    hops: Index
    chains: Index
    num_chains: int


NO_KERNEL_HOPS = KernelHops(table=NO_HOPS.table, steps=(), hops=NO_HOPS.table[0], chains=NO_HOPS.table[0], num_chains=0)


def chain_of_hop(hops: Hops) -> Ints:
    """A number per hop, equal where one hop reads what another wrote."""
    chain = np.arange(hops.table.shape[1])
    if len(chain) < WIDE * len(hops.steps):
        return np.array(_chain_of_few(hops), dtype=np.int64)
    dst, src = hops.table[:2]
    written = unset(1 + int(hops.table[:2].max()))  # chain of the last hop that wrote each state
    at = 0
    for count, starts in hops.steps:
        here = slice(at, at + count)
        if not starts:
            before = written[src[here]]
            chain[here] = np.where(before >= 0, before, chain[here])
        written[dst[here]] = chain[here]
        at += count
    return chain


def _chain_of_few(hops: Hops) -> list[int]:
    """The same, faster where steps have few hops."""
    dst, src = hops.table[:2].tolist()
    chain: list[int] = []
    written: dict[int, int] = {}
    for count, starts in hops.steps:
        at = len(chain)
        for i in range(at, at + count):
            chain.append(i if starts else written.get(src[i], i))
        written.update(zip(dst[at : at + count], chain[at:], strict=True))
    return chain


def kernel_hops(hops: Hops, rows: Ints | None = None) -> KernelHops:
    """``hops`` as `fold` takes them; ``rows`` renumbers the states."""
    if not hops.steps:
        return NO_KERNEL_HOPS
    table = hops.table if rows is None else np.concatenate((rows[hops.table[:2]], hops.table[2:]))
    counts, starts = np.array(hops.steps, dtype=np.int64).T
    chain = chain_of_hop(hops)
    order = chain.argsort(kind="stable")
    columns = table.copy()
    columns[3, starts.repeat(counts) > 0] = -1
    of, fresh = chain[order], np.ones(len(chain) + 1, dtype=bool)
    np.not_equal(of[1:], of[:-1], out=fresh[1:-1])
    chains = fresh.nonzero()[0]  # the first hop of each, then their number
    return KernelHops(
        table=table,
        steps=hops.steps,
        hops=packed(columns.T[order]),
        chains=packed(chains),
        num_chains=len(chains) - 1,
    )
