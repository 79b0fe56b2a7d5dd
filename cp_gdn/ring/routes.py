"""Ring: the state walks the chain. Which states a rank receives, steps and sends, one step per hop between ranks."""

from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import NO_HOPS, Chains, HopBuilder, Hops
from cp_gdn.fragments import Ints
from cp_gdn.plan import Index


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """States that travel together between this rank and ``peer``, in an order that both sides derive from the plan."""

    peer: int
    states: Index
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
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


def build_steps(builder: HopBuilder, chains: Chains) -> tuple[RingStep, ...]:
    """One step per level from 0 to the last in which this rank takes part: level t follows t hops between ranks."""
    places, rank = builder.places, builder.plan.rank
    slots = places.crosses.nonzero()[0]
    level, before, after = places.level[slots], places.before[slots], places.after[slots]
    steps = [IDLE] * (int(level.max(initial=-1)) + 1)
    for t in np.flatnonzero(np.bincount(level)).tolist():
        here = level == t
        enters = slots[here & (before >= 0) & (before != rank)]
        leaves = slots[here & (after >= 0) & (after != rank)]
        passes = slots[here & (before >= 0) & (after >= 0)]  # chain starts were stepped before the exchange began
        steps[t] = RingStep(
            receives=_parcels(builder, places.before[enters], enters, builder.segment(enters, 0)),
            hops=builder.exits(passes, places.wave[passes]),
            sends=_parcels(builder, places.after[leaves], leaves, chains.exit_state[leaves]),
        )
    return tuple(steps)


def _parcels(builder: HopBuilder, peers: Ints, slots: Ints, states: Ints) -> tuple[Parcel, ...]:
    """One parcel per peer, ordered by document: a document has one state per level and pair of ranks."""
    if not len(peers):
        return ()
    order = (peers * len(builder.part.doc_bounds) + builder.plan.fragments.doc[slots]).argsort(kind="stable")
    states, peers = states[order], peers[order]
    cuts = (np.flatnonzero(peers[1:] != peers[:-1]) + 1).tolist()
    edges = zip([0, *cuts], [*cuts, len(peers)], strict=True)
    return tuple(Parcel(peer=int(peers[a]), states=states[a:b], count=b - a) for a, b in edges)
