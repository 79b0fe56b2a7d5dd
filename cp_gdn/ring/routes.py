"""Ring: the state walks the chain. Which states a rank receives, steps and sends, one step per hop between ranks."""

from dataclasses import dataclass

from cp_gdn.chains import NO_HOPS, Chains, HopBuilder, Hops, groups
from cp_gdn.fragments import Ints
from cp_gdn.plan import Index


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


def build_steps(builder: HopBuilder, chains: Chains) -> tuple[RingStep, ...]:
    """One step per level from 0 to the last in which this rank takes part: level t follows t hops between ranks."""
    places, rank = builder.places, builder.plan.rank
    slots = places.crosses.nonzero()[0]
    before, after = places.before[slots], places.after[slots]
    enters = slots[(before >= 0) & (before != rank)]
    leaves = slots[(after >= 0) & (after != rank)]
    receives = _parcels(builder, places.before[enters], enters, builder.segment(enters, 0))
    sends = _parcels(builder, places.after[leaves], leaves, chains.exit_state[leaves])
    # chain starts were stepped before the exchange began
    hops = builder.exits_by_level(slots[(before >= 0) & (after >= 0)])
    steps = [IDLE] * (max((*receives, *sends, *hops), default=-1) + 1)
    for t in {*receives, *sends, *hops}:
        steps[t] = RingStep(receives=receives.get(t, ()), hops=hops.get(t, NO_HOPS), sends=sends.get(t, ()))
    return tuple(steps)


def _parcels(builder: HopBuilder, peers: Ints, slots: Ints, states: Ints) -> dict[int, tuple[Parcel, ...]]:
    """By level one parcel per peer, ordered by document: a document has one state per level and pair of ranks."""
    world, docs = builder.part.world_size, builder.part.num_docs
    key = builder.places.level[slots] * world + peers
    order = (key * docs + builder.plan.fragments.doc[slots]).argsort(kind="stable")
    states = states[order]
    found, cuts = groups(key[order])
    parcels: dict[int, tuple[Parcel, ...]] = {}
    for pair, a, b in zip(found, cuts, cuts[1:], strict=False):
        level, peer = divmod(pair, world)
        parcels[level] = (*parcels.get(level, ()), Parcel(peer=peer, states=states[a:b], count=b - a))
    return parcels
