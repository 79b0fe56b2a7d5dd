"""Ring: the state walks the chain. Which states a rank receives, steps and sends, one step per hop between ranks."""

from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import LEVEL, Rows
from cp_gdn.fragments import Ints
from cp_gdn.hops import HopLists, groups
from cp_gdn.layout import Partition
from cp_gdn.page import Lists, Page
from cp_gdn.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """States that travel together between this rank and ``peer``, in an order that both sides derive from the plan:
    list ``index`` of `RingRoutes.states`, ``count`` of them."""

    peer: int
    index: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """What is received (posted as one batch with the sends of the step before), the kind of hops it allows (None: no
    hops), what is sent then."""

    receives: tuple[Parcel, ...]
    kind: int | None
    sends: tuple[Parcel, ...]

    @property
    def is_idle(self) -> bool:
        return not (self.receives or self.sends) and self.kind is None


IDLE = RingStep(receives=(), kind=None, sends=())


@dataclass(frozen=True, kw_only=True)
class RingRoutes:
    """A rank's part in the ring: steps of both directions, and the states that travel, [1, ..] in lists; None where
    there are no steps."""

    forward: tuple[RingStep, ...]
    adjoint: tuple[RingStep, ...]
    states: Lists | None


NO_RING = RingRoutes(forward=(), adjoint=(), states=None)


def build_ring(part: Partition, plan: Plan, rows: Rows, hops: HopLists, page: Page) -> RingRoutes:
    """One step per level from 0 to the last in which this rank takes part: level t follows t hops between ranks."""
    parcels, states, cuts = _parcels(part, plan, rows)
    levels: tuple[set[int], set[int]] = (set(), set())
    for kind in hops.kinds:
        if kind >= 2 * LEVEL:
            levels[kind % 2].add(kind // 2 - LEVEL)
    forward, adjoint = (_steps(parcels[i], parcels[2 + i], levels[i]) for i in (0, 1))
    return RingRoutes(forward=forward, adjoint=adjoint, states=Lists(table=page.put(states), cuts=tuple(cuts)))


Parcels = dict[int, tuple[Parcel, ...]]
"""Parcels by level."""


def _steps(receives: Parcels, sends: Parcels, hops: set[int]) -> tuple[RingStep, ...]:
    levels = hops.union(receives, sends)
    steps = [IDLE] * (max(levels, default=-1) + 1)
    for t in levels:
        kind = LEVEL + t if t in hops else None
        steps[t] = RingStep(receives=receives.get(t, ()), kind=kind, sends=sends.get(t, ()))
    return tuple(steps)


def _parcels(part: Partition, plan: Plan, rows: Rows) -> tuple[tuple[Parcels, ...], Ints, list[int]]:
    """What is received forward and mirrored, then what is sent: one parcel per level and peer, ordered by document, of
    which there is one state per level and pair of ranks; the states [1, ..] and where each parcel begins."""
    places, num_slots, num_docs, world = plan.places, len(rows.map_of_slot), part.num_docs, part.world_size
    before, after, level = (x.reshape(-1) for x in (places.before, places.after, places.level))
    enters, leaves = (((peer >= 0) & (peer != plan.rank)).nonzero()[0] for peer in (before, after))
    slots = np.concatenate((enters, leaves))
    mirror = slots >= num_slots
    kind = mirror * 1
    kind[len(enters) :] += 2
    peers = np.concatenate((before[enters], after[leaves]))
    states = np.concatenate((rows.entry_state(enters), rows.exit_state[leaves]))
    key = (level[slots] * 4 + kind) * world + peers
    order = (key * num_docs + plan.fragments.doc[slots - num_slots * mirror]).argsort(kind="stable")
    found, cuts = groups(key[order])
    parcels: tuple[Parcels, ...] = ({}, {}, {}, {})
    for index, pair in enumerate(found):
        of_level, peer = divmod(pair, world)
        t, i = divmod(of_level, 4)
        parcel = Parcel(peer=peer, index=index, count=cuts[index + 1] - cuts[index])
        parcels[i][t] = (*parcels[i].get(t, ()), parcel)
    return parcels, states[order][None], cuts
