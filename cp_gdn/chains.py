"""Which state steps to which: the affine hops of a plan, forward and, mirrored, for the adjoint.

States are the entry states of this rank's n segments (exit adjoints in the mirror) and the outbox, what leaves this
rank. "Before" and "after" follow the direction: in the mirror the successor comes before, and a fragment's first
segment is its last one. See `hops` for the columns in which hops are written.

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
from cp_gdn.plan import Plan

ZERO_ONE = np.arange(2)
_BUFFERS = np.arange(3)[:, None]

COMPOSE, LOCAL, INNER_INDEPENDENT, INNER_DEPENDENT, COMPOSE_MAPS, LEVEL = range(6)
"""Kinds of hops.

COMPOSE: inside the offset buffer, to fill the composed rows. COMPOSE_MAPS: the same of maps, forward only.
LOCAL: exits that need no message: chain starts, and chains that stay on this rank.
INNER_INDEPENDENT, INNER_DEPENDENT: from a fragment's first segment to its others, where the first needs no message, and
    where it does.
LEVEL + t: exits behind messages, where this rank steps them itself (ring): those that `t` hops between ranks led to.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Where the states, offsets and maps of a plan lie in their buffers. -1: there is none.

    Offsets: one per segment with tokens after it, then one composed per fragment of several segments. Maps, shared by
    both directions: one per segment with tokens on both sides, then likewise. Nothing is composed in grid mode.

    Attributes:
        first: [2F] first segment of each fragment (any number if empty).
        map_of_segment, map_of_slot: [n], [F]. num_maps: rows in all.
        offset_of_segment, offset_of_slot: [2n], [2F]. num_offsets: rows in all, of both directions.
        state_of_segment: [2n] entry state. exit_state: [2F] state that a fragment's exit goes to. num_states: of both.
        remote: whether a fragment's entry state comes with a message or by way of one, bool [2F].
    """

    first: Ints
    map_of_segment: Ints
    map_of_slot: Ints
    num_maps: int
    offset_of_segment: Ints
    offset_of_slot: Ints
    num_offsets: list[int]
    state_of_segment: Ints
    exit_state: Ints
    num_states: list[int]
    remote: Ints

    def entry_state(self, slots: Ints) -> Ints:
        """State of the first segment of fragments, by direction * F + slot."""
        num_segments, num_slots = len(self.map_of_segment), len(self.map_of_slot)
        states: Ints = self.state_of_segment[self.first[slots] + num_segments * (slots >= num_slots)]
        return states


def build_rows(plan: Plan, *, starts_last: bool = False) -> Rows:
    """Number the rows of a plan. ``starts_last``: states of segments that start their document come behind the outbox,
    so that a buffer without them is the same buffer cut short; else segments are their own states."""
    segments, places = plan.segments, plan.places
    before, after = segments.around
    first, last = segments.of_slot[:-1], segments.of_slot[1:] - 1
    leaves, firsts = places.after >= 0, np.concatenate((first, last))
    needed = np.array((after, before, before & after))
    numbers = np.add.accumulate(needed, axis=1, dtype=np.int64)
    of_segment = numbers * needed - 1
    of_slot, counts = _rows_of_slots(
        (of_segment, _last_column(numbers)),
        np.array((*leaves, leaves[0] & leaves[1])),
        np.array((first, last, first)),
        (segments.per_slot > 1) & (not plan.grid),
    )
    states, exit_state, num_states = _states(plan, firsts, leaves, numbers[1::-1] if starts_last else None)
    return Rows(
        first=firsts,
        map_of_segment=of_segment[2],
        map_of_slot=of_slot[2],
        num_maps=counts[2],
        offset_of_segment=of_segment[:2].reshape(-1),
        offset_of_slot=of_slot[:2].reshape(-1),
        num_offsets=counts[:2],
        state_of_segment=states,
        exit_state=exit_state,
        num_states=num_states,
        remote=(places.crosses & (places.before >= 0)).reshape(-1),
    )


def _rows_of_slots(
    of_segments: tuple[Ints, list[int]], whole: Ints, first: Ints, several: Ints
) -> tuple[Ints, list[int]]:
    """Rows in each of d buffers of the fragments that are passed as a ``whole``, bool [d, F], and how many rows there
    are. ``of_segments``: rows of segments, [d, n], and their numbers; ``first``: a fragment's first segment [d, F];
    ``several``: it has more, so that they are composed."""
    of_segment, counts = of_segments
    size = of_segment.shape[1]
    if size:
        of_slot = of_segment.reshape(-1).take(first + size * _BUFFERS, mode="clip")
        of_slot[~whole] = -1
    else:
        of_slot = unset(*whole.shape)
    if not np.count_nonzero(several):
        return of_slot, counts
    composed = whole & several
    numbers = np.add.accumulate(composed, axis=1, dtype=np.int64)
    of_slot = np.where(composed, numbers + (np.array(counts)[:, None] - 1), of_slot)
    return of_slot, [count + more for count, more in zip(counts, _last_column(numbers), strict=True)]


def _last_column(numbers: Ints) -> list[int]:
    """How many there are in all, of running counts [d, n]."""
    last: list[int] = numbers[:, -1].tolist() if numbers.shape[1] else [0] * len(numbers)
    return last


def _states(plan: Plan, firsts: Ints, leaves: Ints, before: Ints | None) -> tuple[Ints, Ints, list[int]]:
    """`state_of_segment`, `exit_state`, `num_states`. A successor on the same rank is entered directly, any other
    through the outbox. ``before``: running counts [2, n] of segments with tokens before them, whose states then come
    first; None: segments are their own states."""
    places, size = plan.places, len(plan.segments)
    inside: Ints | int = size  # states before the outbox
    near = places.after == plan.rank
    far = leaves & ~near
    outbox = np.add.accumulate(far, axis=1, dtype=np.int64)
    sent, own = _last_column(outbox), np.arange(size)
    if before is None:
        of_segment = np.concatenate((own, own))
    else:
        inside = np.array(_last_column(before))[:, None]
        started = own - before + (inside + np.array(sent)[:, None])
        of_segment = np.where(plan.segments.around, before - 1, started).reshape(-1)
    exit_state = ((outbox + inside) * far - 1).reshape(-1)
    slots = near.reshape(-1).nonzero()[0]
    if len(slots):
        mirror = slots >= near.shape[1]
        if places.after_slot is None:
            into = firsts[slots + 1 - 2 * mirror]
        else:
            into = firsts[places.after_slot.reshape(-1)[slots] + near.shape[1] * mirror]
        exit_state[slots] = of_segment[into + size * mirror]
    return of_segment, exit_state, [size + n for n in sent]


def hop_columns(plan: Plan, rows: Rows, *, steps_on: bool) -> Ints:
    """The hops of a plan. ``steps_on``: this rank steps the states of its messages on (ring)."""
    families = [*_inside_fragments(plan, rows, steps_on), _exits(plan, rows, steps_on)]
    return np.concatenate(families, axis=1) if len(families) > 1 else families[0]


def _inside_fragments(plan: Plan, rows: Rows, steps_on: bool) -> Iterator[Ints]:
    """Inner hops, and compositions, which pass the same joints (k, k + 1) of each fragment in the same order."""
    k, slot = plan.segments.joints
    if not len(k):
        return
    size, num_segments, num_slots = len(k), len(plan.segments), len(rows.map_of_slot)
    mirror, k, both = ZERO_ONE.repeat(size), np.concatenate((k, k)), np.concatenate((slot, slot + num_slots))
    sign, flat = 1 - 2 * mirror, num_segments * mirror
    here = rows.first[both] + sign * k
    there, of_here = here + sign, here + flat
    of_there = there + flat
    offset, offset_there = rows.offset_of_segment[np.array((of_here, of_there))]
    src, dst = rows.state_of_segment[np.array((of_here, of_there))]
    maps, maps_there = rows.map_of_segment[np.array((here, there))]
    remote, leaves = rows.remote[both], plan.places.after.reshape(-1)[both] >= 0
    later = ((plan.places.before.reshape(-1)[both] >= 0) | (k > 0)) * 1
    inner = np.array((2 * (INNER_INDEPENDENT + remote) + mirror, both, k, later, dst, src, offset, maps))
    if plan.grid:  # exits pass every segment
        yield inner[:, ~leaves | (remote & (not steps_on))]
        return
    yield inner
    whole, always = rows.offset_of_slot[both], np.ones_like(k)
    source = np.where(k > 0, whole, offset)
    yield np.array((mirror + 2 * COMPOSE, both, k, always, whole, source, offset_there, maps_there)).take(
        leaves.nonzero()[0], axis=1
    )
    k, maps, maps_there, kind = k[:size], maps[:size], maps_there[:size], np.full(size, 2 * COMPOSE_MAPS)
    whole = rows.map_of_slot[slot]
    source, inside = np.where(k > 0, whole, maps), leaves[:size] & leaves[size:]
    yield np.array((kind, slot, k, always[:size], whole, source, maps_there, maps_there)).take(
        inside.nonzero()[0], axis=1
    )


def _exits(plan: Plan, rows: Rows, steps_on: bool) -> Ints:
    """Each fragment's exit from its entry: through its composed map, or in grid mode through every segment's own."""
    places, num_slots = plan.places, len(rows.map_of_slot)
    leaves = places.after.reshape(-1) >= 0
    both = (leaves if steps_on else leaves & ~rows.remote).nonzero()[0]
    mirror = both >= num_slots
    slot = both - num_slots * mirror
    kind, step, doc = mirror + 2 * LOCAL, places.position.reshape(-1)[both], plan.fragments.doc[slot]
    if steps_on:
        remote, level, wave = rows.remote[both], places.level.reshape(-1)[both], places.wave.reshape(-1)[both]
        kind, step = kind + 2 * remote * (LEVEL - LOCAL + level), np.where(remote, wave, step)
    later, dst = (places.before.reshape(-1)[both] >= 0) * 1, rows.exit_state[both]
    if not plan.grid:
        src, offset, maps = rows.entry_state(both), rows.offset_of_slot[both], rows.map_of_slot[slot]
        return np.array((kind, doc, step, later, dst, src, offset, maps))
    count = plan.segments.per_slot[slot]
    owner, k = runs(count)
    here, flat = rows.first[both], len(plan.segments) * mirror
    columns = kind, doc, step, later, dst, mirror, here, flat, count - 1
    kind, doc, step, later, dst, mirror, here, flat, last = (x[owner] for x in columns)
    sign = 1 - 2 * mirror
    here = here + sign * k
    step = step * (int(count.max(initial=0)) + 1) + k
    inside = k < last
    dst = np.where(inside, rows.state_of_segment[here + flat + sign * inside], dst)
    src, offset = rows.state_of_segment[here + flat], rows.offset_of_segment[here + flat]
    return np.array((kind, doc, step, later | (k > 0), dst, src, offset, rows.map_of_segment[here]))
