"""Which exchange a pack takes, by a stated model of bytes and hops, and the exchange objects of a call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_gdn.a2a.exchange import OwnerExchange
from cp_gdn.a2a.routes import OwnerRoutes, build_owner_routes
from cp_gdn.chains import Chains, HopBuilder, chain_order
from cp_gdn.comm import Comm
from cp_gdn.flow import Exchange, Flow
from cp_gdn.layout import Partition
from cp_gdn.ring.exchange import RingExchange
from cp_gdn.ring.routes import RingStep, build_steps

EXCHANGES = ("auto", "ring", "a2a")
HOP_US = 40.0
COLLECTIVE_US = 60.0
BYTES_PER_US = 200_000.0
"""NCCL between two H200s over NVLink: messages of 0.06 to 12 MiB take 30 to 90 us, 64 MiB 140 to 370 us
(docs/design.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The exchange of a pack, the same on every rank, and why. ``none`` where no chain crosses ranks."""

    kind: str
    reason: str


def choose_exchange(
    asked: str, part: Partition, heads: int, head_dims: tuple[int, int], *, grid: bool, itemsize: int
) -> Choice:
    """Resolve ``exchange=``: as asked, or by modelled microseconds of one direction.

    ring: per hop between ranks HOP_US and the states of its busiest pair of ranks; a2a: two collectives and the bytes
        of the busiest
    rank. Grid mode ships every segment's map with a2a and more ranks than heads make an owner's bytes grow, so both
    take ring.
    """
    if asked not in EXCHANGES:
        raise ValueError(f"exchange: got {asked!r}, expected one of {EXCHANGES}")
    order, table, world = chain_order(part.table), part.table, part.world_size
    if not order.crosses.any():
        return Choice(kind="none", reason="no document crosses ranks, nothing is sent")
    if asked != "auto":
        return Choice(kind=asked, reason="asked for")
    if grid:
        return Choice(kind="ring", reason="grid mode: a2a would ship the map of every segment")
    if world > heads:
        return Choice(
            kind="ring", reason=f"{world} ranks are more than {heads} value heads: the bytes of an owner would grow"
        )
    state = heads * head_dims[0] * head_dims[1] * itemsize
    square = heads * head_dims[0] ** 2 * itemsize
    entering = np.flatnonzero(order.crosses & (order.before >= 0) & (table.rank[order.before] != table.rank))
    pair = (order.level[entering] * world + table.rank[order.before[entering]]) * world + table.rank[entering]
    _, first, states = np.unique(pair, return_index=True, return_counts=True)
    busiest = np.zeros(int(order.level[entering].max()) + 1)
    np.maximum.at(busiest, order.level[entering[first]], states)
    ring = (len(busiest) - 1) * HOP_US + busiest.sum() * state / BYTES_PER_US
    middle = order.crosses & (order.before >= 0) & (order.after >= 0)
    sent = np.bincount(table.rank, order.crosses * (2 * state) + middle * square, world)
    a2a = 2 * COLLECTIVE_US + float(sent.max()) / BYTES_PER_US
    kind = "ring" if ring <= a2a else "a2a"
    return Choice(kind=kind, reason=f"modelled us per direction: ring {ring:.0f}, a2a {a2a:.0f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Messages of one rank in both directions, uploaded; which of the fields are used follows from the kind."""

    kind: str
    forward_steps: tuple[RingStep, ...]
    adjoint_steps: tuple[RingStep, ...]
    forward_owner: OwnerRoutes | None
    adjoint_owner: OwnerRoutes | None

    def exchange(self, comm: Comm, flow: Flow) -> Exchange:
        """The exchange object of one direction of one call."""
        if self.kind == "a2a":
            owner = self.adjoint_owner if flow.adjoint else self.forward_owner
            assert owner is not None
            return OwnerExchange(comm, owner, flow)
        return RingExchange(comm, self.adjoint_steps if flow.adjoint else self.forward_steps, flow)


def build_routes(kind: str, part: Partition, builders: Sequence[HopBuilder], chains: Sequence[Chains]) -> Routes:
    """Routes of ``kind`` ("none" has none), forward and mirrored."""
    sides = list(zip(builders, chains, strict=True))
    steps = [build_steps(b, c) if kind == "ring" else () for b, c in sides]
    owners = [build_owner_routes(part, b, c) if kind == "a2a" else None for b, c in sides]
    return Routes(
        kind=kind, forward_steps=steps[0], adjoint_steps=steps[1], forward_owner=owners[0], adjoint_owner=owners[1]
    )
