"""Which state steps to which: the affine hops of a plan, forward and, mirrored, for the adjoint.

A hop is ``state[dst] = M[map_row] @ state[src] + offset[offset_row]`` (the adjoint: M transposed), or only the offset
where a chain starts. States 0..n-1 are the entry states of this rank's n segments (exit adjoints in the mirror); the
rest is the outbox, what leaves this rank. "Before" and "after" follow the direction: in the mirror the successor comes
before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cp_gdn.layout import FragmentTable, Partition
from cp_gdn.plan import Index, Ints, Plan, Segments

NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hops:
    """Hops that may be taken at once. ``map_row`` is None where chains start: there the offset alone is the state."""

    dst: Index
    src: Index
    offset_row: Index
    map_row: Index | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOrder:
    """Every non-empty fragment's place in its chain, in one direction; columns over the rows of the fragment table.

    Attributes:
        before, after: rows of the neighbours, -1 at the ends.
        position: fragments before it. level: hops between ranks before it. wave: hops inside its rank since the last
            such hop.
        crosses: whether the chain leaves its first rank at all.
    """

    before: Ints
    after: Ints
    position: Ints
    level: Ints
    wave: Ints
    crosses: Ints


def chain_order(table: FragmentTable, *, reverse: bool = False) -> ChainOrder:
    """Places of all fragments, for the forward direction or its mirror."""
    before, after = (table.next, table.prev) if reverse else (table.prev, table.next)
    size = len(table.doc)
    filled = np.flatnonzero(table.length > 0)
    sign = -1 if reverse else 1
    order = filled[np.lexsort((sign * table.offset[filled], table.doc[filled]))]
    index, start = np.arange(len(order)), before[order] < 0
    hop = ~start & (table.rank[before[order]] != table.rank[order])
    chain_start = np.maximum.accumulate(np.where(start, index, 0))
    hops = np.cumsum(hop)
    level = hops - hops[chain_start] if len(order) else hops
    wave = index - np.maximum.accumulate(np.where(start | hop, index, 0))
    chain = np.cumsum(start) - 1
    last_level = level[np.flatnonzero(np.append(start[1:], True))] if len(order) else level

    def column(values: Ints) -> Ints:
        out = np.zeros(size, dtype=np.int64)
        out[order] = values
        return out

    return ChainOrder(
        before=before,
        after=after,
        position=column(index - chain_start),
        level=column(level),
        wave=column(wave),
        crosses=column(last_level[chain] > 0) > 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Rows of the map buffer, shared by both directions: first the segments' own maps, then the composed ones.

    Attributes:
        segments: the segments with tokens of their document on both sides, ascending; row i is the map of segments[i].
        of_segment: [n] row of each segment's map, -1 where none is needed.
        of_slot: [slots] row of each fragment's map: composed if it has several segments, -1 where none is needed.
        compose: hops inside the buffer that fill the composed rows, left to right.
        size: rows in all.
    """

    segments: Ints
    of_segment: Ints
    of_slot: Ints
    compose: tuple[Hops, ...]
    size: int


def build_maps(segments: Segments, *, grid: bool) -> Maps:
    """The map rows of a plan; nothing is composed in grid mode."""
    both = segments.has_prev & segments.has_next
    ids = np.flatnonzero(both)
    of_segment = np.where(both, np.cumsum(both) - 1, -1)
    first, count = segments.of_slot[:-1], np.diff(segments.of_slot)
    last = np.maximum(segments.of_slot[1:] - 1, 0)
    of_slot = np.full(len(count), -1, dtype=np.int64)
    filled = np.flatnonzero(count > 0)
    whole = filled[segments.has_prev[first[filled]] & segments.has_next[last[filled]]]
    of_slot[whole] = of_segment[first[whole]]
    several = NONE if grid else whole[count[whole] > 1]
    of_slot[several] = len(ids) + np.arange(len(several))
    hops = []
    for k in range(1, int(count[several].max(initial=0))):
        slots = several[count[several] > k]
        src = of_slot[slots] if k > 1 else of_segment[first[slots]]
        hops.append(Hops(dst=of_slot[slots], src=src, offset_row=NONE, map_row=of_segment[first[slots] + k]))
    return Maps(segments=ids, of_segment=of_segment, of_slot=of_slot, compose=tuple(hops), size=len(ids) + len(several))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chains:
    """One direction of a plan: what is summarized, and the hops that turn summaries and messages into states.

    Attributes:
        reverse: whether this is the mirror (adjoint).
        order: places of all fragments. mine: this rank's rows of the table.
        summarized: segments with something after them; row i of the offset buffer is the offset of segments[i].
        compose: hops inside the offset buffer that fill the composed rows. num_offsets: its rows in all.
        num_states: entry states and outbox. exit_state: [slots] state that a fragment's exit goes to, -1 if nothing is
            after it.
        local: hops that need no message: chain starts, and chains that stay on this rank.
        independent, dependent: segments whose entry state needs no message, or does.
        inner_independent, inner_dependent: hops from a fragment's first segment to its others.
    """

    reverse: bool
    order: ChainOrder
    mine: slice
    summarized: Ints
    compose: tuple[Hops, ...]
    num_offsets: int
    num_states: int
    exit_state: Ints
    local: tuple[Hops, ...]
    independent: Ints
    dependent: Ints
    inner_independent: tuple[Hops, ...]
    inner_dependent: tuple[Hops, ...]


class HopBuilder:
    """Writes the hops of one direction; knows the rows, no messages."""

    def __init__(self, part: Partition, plan: Plan, maps: Maps, *, reverse: bool) -> None:
        self.plan, self.maps, self.reverse = plan, maps, reverse
        self.segments = plan.segments
        self.mine = part.rows(plan.rank)
        self.order = chain_order(part.table, reverse=reverse)
        self.rank_of, self.doc_of = part.table.rank, part.table.doc
        self.count = np.diff(self.segments.of_slot)
        has_after = self.segments.has_prev if reverse else self.segments.has_next
        self.summarized = np.flatnonzero(has_after)
        self.row_of_segment = np.where(has_after, np.cumsum(has_after) - 1, -1)
        self.has_after_slot = (self.order.after[self.mine] >= 0) & (self.count > 0)
        several = np.flatnonzero(self.has_after_slot & (self.count > 1)) if not plan.grid else NONE
        self.several = several
        self.row_of_slot = np.full(len(self.count), -1, dtype=np.int64)
        single = np.flatnonzero(self.has_after_slot & (self.count == 1))
        self.row_of_slot[single] = self.row_of_segment[self.segment(single, 0)]
        self.row_of_slot[several] = len(self.summarized) + np.arange(len(several))
        self.exit_state = self._exit_states()

    def segment(self, slots: Ints, k: int | Ints) -> Ints:
        """The k-th segment, in this direction, of each fragment."""
        return self.segments.of_slot[slots + 1] - 1 - k if self.reverse else self.segments.of_slot[slots] + k

    def _exit_states(self) -> Ints:
        """A successor on the same rank is entered directly, any other through the outbox."""
        after = self.order.after[self.mine]
        out = np.full(len(self.count), -1, dtype=np.int64)
        slots = np.flatnonzero(self.has_after_slot)
        here = self.rank_of[after[slots]] == self.plan.rank
        near, far = slots[here], slots[~here]
        out[near] = self.segment(after[near] - self.mine.start, 0)
        out[far] = len(self.segments) + np.arange(len(far))
        return out

    @property
    def num_states(self) -> int:
        return max(len(self.segments), int(self.exit_state.max(initial=-1)) + 1)

    def compose(self) -> Iterator[Hops]:
        """Offsets of fragments with several segments, in the order in which a state would pass them."""
        for k in range(1, int(self.count[self.several].max(initial=0))):
            slots = self.several[self.count[self.several] > k]
            ids, dst = self.segment(slots, k), self.row_of_slot[slots]
            src = dst if k > 1 else self.row_of_segment[self.segment(slots, 0)]
            yield Hops(dst=dst, src=src, offset_row=self.row_of_segment[ids], map_row=self.maps.of_segment[ids])

    def exits(self, slots: Ints, *, starts: bool) -> Iterator[Hops]:
        """Each fragment's exit from its entry: through its composed map, or in grid mode through every segment's
        own."""
        if not len(slots):
            return
        if not self.plan.grid:
            maps = None if starts else self.maps.of_slot[slots]
            yield Hops(
                dst=self.exit_state[slots], src=self.segment(slots, 0), offset_row=self.row_of_slot[slots], map_row=maps
            )
            return
        for k in range(int(self.count[slots].max())):
            some = slots[self.count[slots] > k]
            last = self.count[some] == k + 1
            following = self.segment(some, np.minimum(k + 1, self.count[some] - 1))
            yield self._step(some, k, np.where(last, self.exit_state[some], following), starts=starts and k == 0)

    def inner(self, slots: Ints) -> Iterator[Hops]:
        """From the entry of each fragment to the entries of its later segments."""
        starts = self.order.before[self.mine] < 0
        for k in range(int(self.count[slots].max(initial=0)) - 1):
            some = slots[self.count[slots] > k + 1]
            groups = ((some[starts[some]], True), (some[~starts[some]], False)) if k == 0 else ((some, False),)
            for group, first in groups:
                if len(group):
                    yield self._step(group, k, self.segment(group, k + 1), starts=first)

    def _step(self, slots: Ints, k: int, dst: Ints, *, starts: bool) -> Hops:
        ids = self.segment(slots, k)
        rows = None if starts else self.maps.of_segment[ids]
        return Hops(dst=dst, src=ids, offset_row=self.row_of_segment[ids], map_row=rows)


def build_chains(builder: HopBuilder, *, exchange_steps_segments: bool) -> Chains:
    """One direction of a plan.

    Args:
        builder: the direction's hop builder.
        exchange_steps_segments: the exchange leaves the entry states of all segments it passes behind (ring in grid
            mode).
    """
    order, mine, segments = builder.order, builder.mine, builder.segments
    slots = np.flatnonzero(builder.count > 0)
    crosses, position = order.crosses[mine], order.position[mine]
    local_slots = slots[~crosses[slots] | (position[slots] == 0)]
    remote_slots = slots[crosses[slots] & (position[slots] > 0)]
    with_exit = local_slots[builder.has_after_slot[local_slots]]
    local = [
        hop
        for p in range(int(position[with_exit].max(initial=-1)) + 1)
        for hop in builder.exits(with_exit[position[with_exit] == p], starts=p == 0)
    ]
    grid = bool(builder.plan.grid)
    stepped = np.flatnonzero(builder.has_after_slot)
    inner_local = np.setdiff1d(local_slots, stepped) if grid else local_slots
    inner_remote = np.setdiff1d(remote_slots, stepped) if grid and exchange_steps_segments else remote_slots
    independent = np.isin(segments.slot, local_slots)
    return Chains(
        reverse=builder.reverse,
        order=order,
        mine=mine,
        summarized=builder.summarized,
        compose=tuple(builder.compose()),
        num_offsets=len(builder.summarized) + len(builder.several),
        num_states=builder.num_states,
        exit_state=builder.exit_state,
        local=tuple(local),
        independent=np.flatnonzero(independent),
        dependent=np.flatnonzero(~independent),
        inner_independent=tuple(builder.inner(inner_local)),
        inner_dependent=tuple(builder.inner(inner_remote)),
    )
