"""Ring: the state walks the chain. Which states a rank receives, steps and sends, one step per hop between ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import Chains, HopBuilder, Hops
from cp_gdn.plan import Index, Ints


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


def build_steps(builder: HopBuilder, chains: Chains) -> tuple[RingStep, ...]:
    """One step per level from 0 to the last in which this rank takes part: level t follows t hops between ranks."""
    order, mine = builder.order, chains.mine
    slots = np.flatnonzero((builder.count > 0) & order.crosses[mine])
    level, wave = order.level[mine], order.wave[mine]
    before, after = order.before[mine], order.after[mine]
    enters = slots[(level[slots] > 0) & (wave[slots] == 0)]
    leaves = slots[after[slots] >= 0]
    leaves = leaves[builder.rank_of[after[leaves]] != builder.plan.rank]
    steps = []
    for t in range(int(level[slots].max(initial=-1)) + 1):
        received, sent = enters[level[enters] == t], leaves[level[leaves] == t]
        steps.append(
            RingStep(
                receives=tuple(_parcels(builder, before[received], received, builder.segment(received, 0))),
                hops=_hops(builder, slots[level[slots] == t], wave),
                sends=tuple(_parcels(builder, after[sent], sent, chains.exit_state[sent])),
            )
        )
    return tuple(steps)


def _hops(builder: HopBuilder, slots: Ints, wave: Ints) -> Hops:
    """Exits of a level, wave by wave; chain starts were stepped before the exchange began."""
    passing = builder.has_after_slot[slots] & (builder.order.before[builder.mine][slots] >= 0)
    return builder.exits(slots[passing], wave[slots[passing]])


def _parcels(builder: HopBuilder, neighbours: Ints, slots: Ints, states: Ints) -> Iterator[Parcel]:
    """One parcel per peer, ordered by document: a document has one state per level and pair of ranks."""
    peers = builder.rank_of[neighbours]
    order = np.argsort(builder.doc_of[neighbours], kind="stable")
    for peer in np.unique(peers):
        chosen = states[order[peers[order] == peer]]
        yield Parcel(peer=int(peer), states=chosen, count=len(chosen))
