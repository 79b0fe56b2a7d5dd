"""Which state steps to which: the affine hops of a plan, forward and, mirrored, for the adjoint.

A hop is ``state[dst] = M[map_row] @ state[src] + offset[offset_row]`` (the adjoint: M transposed), or only the offset
where a chain starts. States 0..n-1 are the entry states of this rank's n segments (exit adjoints in the mirror); the
rest is the outbox, what leaves this rank. "Before" and "after" follow the direction: in the mirror the successor comes
before, and a fragment's first segment is its last one.

Both directions are written by the same lines. Arrays [2, n] and [2, F] hold the forward direction, then the mirror, and
are indexed flat, by direction * n + segment and direction * F + slot. Legend: n segments, F fragments (slots) of this
rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cp_gdn.fragments import Ints, runs, unset
from cp_gdn.listing import ChainOrder as ChainOrder
from cp_gdn.listing import chain_order as chain_order
from cp_gdn.plan import Index, Plan

ZERO_ONE = np.arange(2)
SPAN = 1 << 40
"""More than twice the steps of a kind of hops."""

COMPOSE, LOCAL, INNER_INDEPENDENT, INNER_DEPENDENT, COMPOSE_MAPS, LEVEL = range(6)
"""Kinds of hops: see `Chains`. LEVEL + t: exits of what `t` hops between ranks led to."""


@dataclass(frozen=True, kw_only=True)
class Hops:
    """Hops, step after step; those of one step may be taken at once.

    Attributes:
        table: [4, hops]: the states written (dst) and read (src), rows of the buffers (offset_row, map_row).
        steps: per step how many hops it has, and whether chains start there: then the offset alone is the state.
    """

    table: Index
    steps: tuple[tuple[int, bool], ...]


NO_HOPS = Hops(table=np.zeros((4, 0), dtype=np.int64), steps=())


def sorted_hops(columns: Ints) -> dict[int, Hops]:
    """Hops by kind, of columns [7, hops]: kind, step, whether the state before counts, dst, src, offset_row, map_row.

    Chain starts come first in their step.
    """
    kind, step, later = columns[:3]
    if not len(kind):
        return {}
    key = kind * SPAN + 2 * step + later
    order = key.argsort(kind="stable")
    table = columns[3:].take(order, axis=1)
    keys, ends = groups(key[order])
    steps: dict[int, list[tuple[int, bool]]] = {}
    first: dict[int, int] = {}
    for run, begin, end in zip(keys, ends, ends[1:], strict=False):
        of, rest = divmod(run, SPAN)
        if of not in first:
            first[of], steps[of] = begin, []
        steps[of].append((end - begin, rest % 2 == 0))
    cuts = [*first.values(), len(kind)]
    return {
        of: Hops(table=table[:, begin:end], steps=tuple(steps[of]))
        for of, begin, end in zip(first, cuts, cuts[1:], strict=False)
    }


def groups(keys: Ints) -> tuple[list[int], list[int]]:
    """Distinct values of sorted ``keys``, and where the run of each begins, then their number in all."""
    fresh = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    starts = fresh.nonzero()[0]
    return keys[starts].tolist(), [*starts.tolist(), len(keys)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Where the states, offsets and maps of a plan lie in their buffers. -1: there is none.

    Offsets: one per segment with tokens after it, then one composed per fragment of several segments. Maps, shared by
    both directions: one per segment with tokens on both sides, then likewise. Nothing is composed in grid mode.

    Attributes:
        first: [2F] first segment of each fragment (any number if empty).
        map_of_segment, map_of_slot: [n], [F]. num_maps: rows in all.
        offset_of_segment, offset_of_slot: [2n], [2F]. num_offsets: rows in all, of both directions.
        exit_state: [2F] state that a fragment's exit goes to. num_states: entry states and outbox, of both.
        remote: whether a fragment's entry state comes with a message or by way of one, bool [2F].
    """

    first: Ints
    map_of_segment: Ints
    map_of_slot: Ints
    num_maps: int
    offset_of_segment: Ints
    offset_of_slot: Ints
    num_offsets: list[int]
    exit_state: Ints
    num_states: list[int]
    remote: Ints


def build_rows(plan: Plan) -> Rows:
    """Number the rows of a plan."""
    segments, places = plan.segments, plan.places
    before, after = segments.around
    first, last = segments.of_slot[:-1], segments.of_slot[1:] - 1
    leaves = places.after >= 0
    of_segment, of_slot, counts = _numbered(
        np.array((after, before, before & after)),
        np.array((*leaves, leaves[0] & leaves[1])),
        np.array((first, last, first)),
        (segments.per_slot > 1) & (not plan.grid),
    )
    firsts = np.concatenate((first, last))
    exit_state, num_states = _exit_states(plan, firsts, leaves)
    return Rows(
        first=firsts,
        map_of_segment=of_segment[2],
        map_of_slot=of_slot[2],
        num_maps=counts[2],
        offset_of_segment=of_segment[:2].reshape(-1),
        offset_of_slot=of_slot[:2].reshape(-1),
        num_offsets=counts[:2],
        exit_state=exit_state,
        num_states=num_states,
        remote=(places.crosses & (places.before >= 0)).reshape(-1),
    )


def _numbered(needed: Ints, whole: Ints, first: Ints, several: Ints) -> tuple[Ints, Ints, list[int]]:
    """Rows in each of d buffers: of the segments that need one, bool [d, n], of the fragments that are passed as a
    whole, bool [d, F], and how many there are. ``first``: a fragment's first segment; ``several``: it has more."""
    numbers = np.add.accumulate(needed, axis=1, dtype=np.int64)
    of_segment = numbers * needed - 1
    slots = whole.reshape(-1).nonzero()[0]
    segment = (first + needed.shape[1] * np.arange(len(needed))[:, None]).reshape(-1)[slots]
    of_slot = unset(*whole.shape)
    of_slot.reshape(-1)[slots] = of_segment.reshape(-1)[segment]
    counts = _last_column(numbers)
    composed = whole & several
    numbers = np.add.accumulate(composed, axis=1, dtype=np.int64)
    more = _last_column(numbers)
    if any(more):
        of_slot = np.where(composed, numbers + (np.array(counts)[:, None] - 1), of_slot)
        counts = [count + n for count, n in zip(counts, more, strict=True)]
    return of_segment, of_slot, counts


def _last_column(numbers: Ints) -> list[int]:
    """How many there are in all, of running counts [d, n]."""
    last: list[int] = numbers[:, -1].tolist() if numbers.shape[1] else [0] * len(numbers)
    return last


def _exit_states(plan: Plan, first: Ints, leaves: Ints) -> tuple[Ints, list[int]]:
    """A successor on the same rank is entered directly, any other through the outbox."""
    places, num_segments = plan.places, len(plan.segments)
    near = places.after == plan.rank
    far = leaves & ~near
    outbox = np.add.accumulate(far, axis=1, dtype=np.int64)
    exit_state = ((outbox + num_segments) * far - 1).ravel()
    slots = near.ravel().nonzero()[0]
    if len(slots):
        num_slots = len(plan.fragments.doc)
        exit_state[slots] = first[places.after_slot.ravel()[slots] + num_slots * (slots >= num_slots)]
    return exit_state, [num_segments + n for n in _last_column(outbox)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """The hops that turn summaries and messages into states; `of` gives those of one kind and direction.

    COMPOSE: inside the offset buffer, to fill the composed rows. COMPOSE_MAPS: the same of maps, forward only.
    LOCAL: exits that need no message: chain starts, and chains that stay on this rank.
    INNER_INDEPENDENT, INNER_DEPENDENT: from a fragment's first segment to its others, where the first needs no message,
        and where it does.
    LEVEL + t: exits behind messages, where this rank steps them itself (ring): those of level t.
    """

    rows: Rows
    hops: dict[int, Hops]

    def of(self, kind: int, reverse: bool = False) -> Hops:
        return self.hops.get(2 * kind + reverse, NO_HOPS)

    def levels(self, reverse: bool) -> dict[int, Hops]:
        """Hops of LEVEL + t by t."""
        return {
            kind // 2 - LEVEL: hops for kind, hops in self.hops.items() if kind >= 2 * LEVEL and kind % 2 == reverse
        }


def build_chains(plan: Plan, *, steps_on: bool) -> Chains:
    """The hops of a plan. ``steps_on``: this rank steps the states of its messages on (ring)."""
    rows = build_rows(plan)
    families = [*_inside_fragments(plan, rows, steps_on), _exits(plan, rows, steps_on)]
    return Chains(rows=rows, hops=sorted_hops(np.concatenate(families, axis=1)))


def _inside_fragments(plan: Plan, rows: Rows, steps_on: bool) -> Iterator[Ints]:
    """Inner hops, and compositions, which pass the same joints (k, k + 1) of each fragment in the same order."""
    k, slot = plan.segments.joints
    if not len(k):
        return
    size, num_segments, num_slots = len(k), len(plan.segments), len(rows.map_of_slot)
    mirror, k, both = ZERO_ONE.repeat(size), np.concatenate((k, k)), np.concatenate((slot, slot + num_slots))
    sign, flat = 1 - 2 * mirror, num_segments * mirror
    here = rows.first[both] + sign * k
    there = here + sign
    offset, offset_there = rows.offset_of_segment[here + flat], rows.offset_of_segment[there + flat]
    maps, maps_there = rows.map_of_segment[here], rows.map_of_segment[there]
    remote, leaves = rows.remote[both], plan.places.after.reshape(-1)[both] >= 0
    later = (plan.places.before.reshape(-1)[both] >= 0) | (k > 0)
    inner = np.array((2 * (INNER_INDEPENDENT + remote) + mirror, k, later, there, here, offset, maps))
    if plan.grid:  # exits pass every segment
        yield inner[:, ~leaves | (remote & (not steps_on))]
        return
    yield inner
    whole, always = rows.offset_of_slot[both], np.ones_like(k)
    source = np.where(k > 0, whole, offset)
    yield np.array((mirror + 2 * COMPOSE, k, always, whole, source, offset_there, maps_there))[:, leaves]
    k, maps, maps_there, kind = k[:size], maps[:size], maps_there[:size], np.full(size, 2 * COMPOSE_MAPS)
    whole = rows.map_of_slot[slot]
    source, inside = np.where(k > 0, whole, maps), leaves[:size] & leaves[size:]
    yield np.array((kind, k, always[:size], whole, source, maps_there, maps_there))[:, inside]


def _exits(plan: Plan, rows: Rows, steps_on: bool) -> Ints:
    """Each fragment's exit from its entry: through its composed map, or in grid mode through every segment's own."""
    places, num_slots = plan.places, len(rows.map_of_slot)
    leaves = places.after.reshape(-1) >= 0
    both = (leaves if steps_on else leaves & ~rows.remote).nonzero()[0]
    mirror = both >= num_slots
    slot = both - num_slots * mirror
    kind, step = mirror + 2 * LOCAL, places.position.reshape(-1)[both]
    if steps_on:
        remote, level, wave = rows.remote[both], places.level.reshape(-1)[both], places.wave.reshape(-1)[both]
        kind, step = kind + 2 * remote * (LEVEL - LOCAL + level), np.where(remote, wave, step)
    later, src, dst = places.before.reshape(-1)[both] >= 0, rows.first[both], rows.exit_state[both]
    if not plan.grid:
        return np.array((kind, step, later, dst, src, rows.offset_of_slot[both], rows.map_of_slot[slot]))
    count = plan.segments.per_slot[slot]
    owner, k = runs(count)
    kind, step, later, dst, src, mirror, last = (x[owner] for x in (kind, step, later, dst, src, mirror, count - 1))
    sign = 1 - 2 * mirror
    src = src + sign * k
    step = step * (int(count.max(initial=0)) + 1) + k
    dst = np.where(k == last, dst, src + sign)
    offset = rows.offset_of_segment[src + len(plan.segments) * mirror]
    return np.array((kind, step, later | (k > 0), dst, src, offset, rows.map_of_segment[src]))
