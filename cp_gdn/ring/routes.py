"""Ring: the state walks the chain. Which states a rank receives, steps and sends, one step per hop between ranks."""

from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import NO_HOPS, Chains, Hops, Rows, groups
from cp_gdn.layout import Partition
from cp_gdn.plan import Index, Plan


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """States that travel together between this rank and ``peer``, in an order that both sides derive from the plan."""

    peer: int
    states: Index
    count: int


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """What is received (posted as one batch with the sends of the step before), the hops it allows, what is sent
    then."""

    receives: tuple[Parcel, ...]
    hops: Hops
    sends: tuple[Parcel, ...]

    @property
    def is_idle(self) -> bool:
        return not (self.receives or self.sends or self.hops.steps)


IDLE = RingStep(receives=(), hops=NO_HOPS, sends=())


def build_steps(part: Partition, plan: Plan, chains: Chains) -> tuple[tuple[RingStep, ...], tuple[RingStep, ...]]:
    """Forward and mirrored, one step per level from 0 to the last in which this rank takes part: level t follows t hops
    between ranks."""
    parcels = _parcels(part, plan, chains.rows)
    forward, mirror = (_steps(parcels[i], parcels[2 + i], chains.levels(i > 0)) for i in (0, 1))
    return forward, mirror


Parcels = dict[int, tuple[Parcel, ...]]
"""Parcels by level."""


def _steps(receives: Parcels, sends: Parcels, hops: dict[int, Hops]) -> tuple[RingStep, ...]:
    levels = {*receives, *sends, *hops}
    steps = [IDLE] * (max(levels, default=-1) + 1)
    for t in levels:
        steps[t] = RingStep(receives=receives.get(t, ()), hops=hops.get(t, NO_HOPS), sends=sends.get(t, ()))
    return tuple(steps)


def _parcels(part: Partition, plan: Plan, rows: Rows) -> tuple[Parcels, ...]:
    """What is received forward and mirrored, then what is sent: one parcel per level and peer, ordered by document, of
    which there is one state per level and pair of ranks."""
    places, num_slots, num_docs, world = plan.places, len(rows.map_of_slot), part.num_docs, part.world_size
    before, after, level = (x.reshape(-1) for x in (places.before, places.after, places.level))
    enters, leaves = (((peer >= 0) & (peer != plan.rank)).nonzero()[0] for peer in (before, after))
    slots = np.concatenate((enters, leaves))
    mirror = slots >= num_slots
    kind = mirror * 1
    kind[len(enters) :] += 2
    peers = np.concatenate((before[enters], after[leaves]))
    states = np.concatenate((rows.first[enters], rows.exit_state[leaves]))
    key = (level[slots] * 4 + kind) * world + peers
    order = (key * num_docs + plan.fragments.doc[slots - num_slots * mirror]).argsort(kind="stable")
    states = states[order]
    found, cuts = groups(key[order])
    parcels: tuple[Parcels, ...] = ({}, {}, {}, {})
    for pair, a, b in zip(found, cuts, cuts[1:], strict=False):
        of_level, peer = divmod(pair, world)
        t, i = divmod(of_level, 4)
        parcels[i][t] = (*parcels[i].get(t, ()), Parcel(peer=peer, states=states[a:b], count=b - a))
    return parcels
