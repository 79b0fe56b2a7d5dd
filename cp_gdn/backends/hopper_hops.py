"""Hops as `fold` takes them: int32 tables, chain after chain."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cp_gdn.chains import NO_HOPS, Hops
from cp_gdn.fragments import Ints
from cp_gdn.plan import Index


def packed(x: Any) -> Ints:
    """int32 in pairs, as int64; an odd one out gets a zero beside it."""
    flat = np.ascontiguousarray(x, dtype=np.int32).reshape(-1)
    return (np.append(flat, np.int32(0)) if len(flat) % 2 else flat).view(np.int64)


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
    counts = [count for count, _ in hops.steps]
    chain = np.arange(sum(counts))
    writer: dict[int, int] = {}
    dst, src = hops.table[0].tolist(), hops.table[1].tolist()
    at = 0
    for count, starts in hops.steps:
        for i in range(at, at + count):
            if not starts and src[i] in writer:
                chain[i] = chain[writer[src[i]]]
        writer.update((dst[i], i) for i in range(at, at + count))
        at += count
    return chain


def kernel_hops(hops: Hops, rows: Ints | None = None) -> KernelHops:
    """``hops`` as `fold` takes them; ``rows`` renumbers the states."""
    if not hops.steps:
        return NO_KERNEL_HOPS
    table = hops.table if rows is None else np.concatenate((rows[hops.table[:2]], hops.table[2:]))
    starts = np.repeat([starts for _, starts in hops.steps], [count for count, _ in hops.steps]).astype(bool)
    chain = chain_of_hop(hops)
    order = chain.argsort(kind="stable")
    columns = np.array((table[0], table[1], table[2], np.where(starts, -1, table[3])))
    first = np.flatnonzero(np.diff(chain[order], prepend=-1))
    return KernelHops(
        table=table,
        steps=hops.steps,
        hops=packed(columns[:, order].T),
        chains=packed((*first, len(chain))),
        num_chains=len(first),
    )
