"""Which state steps to which: the affine hops of a plan, forward and, mirrored, for the adjoint.

A hop is ``state[dst] = M[map_row] @ state[src] + offset[offset_row]`` (the adjoint: M transposed), or only the offset
where a chain starts. States 0..n-1 are the entry states of this rank's n segments (exit adjoints in the mirror); the
rest is the outbox, what leaves this rank. "Before" and "after" follow the direction: in the mirror the successor comes
before.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.layout import FragmentTable, Partition
from cp_gdn.plan import Index, Ints, Plan, Segments, runs

NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hops:
    """Hops, step after step; those of one step may be taken at once.

    Attributes:
        dst, src: states written and read. offset_row, map_row: rows of the buffers.
        steps: per step how many hops it has, and whether chains start there: then the offset alone is the state.
    """

    dst: Index
    src: Index
    offset_row: Index
    map_row: Index
    steps: tuple[tuple[int, bool], ...]


def hops_by_step(step: Ints, starts: Ints, *columns: Ints) -> Hops:
    """Hops sorted by ``step`` (chain starts of a step first); columns are dst, src, offset_row, map_row."""
    key = 2 * step + ~starts
    order = np.argsort(key, kind="stable")
    dst, src, offset_row, map_row = (column[order] for column in columns)
    keys, counts = np.unique(key, return_counts=True)
    steps = tuple((count, key % 2 == 0) for key, count in zip(keys.tolist(), counts.tolist(), strict=True))
    return Hops(dst=dst, src=src, offset_row=offset_row, map_row=map_row, steps=steps)


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
        compose: hops inside the buffer that fill the composed rows, left to right; they use no offsets.
        size: rows in all.
    """

    segments: Ints
    of_segment: Ints
    of_slot: Ints
    compose: Hops
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
    owner, k = runs(count[several] - 1)
    slots = several[owner]
    src = np.where(k > 0, of_slot[slots], of_segment[first[slots]])
    rows = of_segment[first[slots] + k + 1]
    compose = hops_by_step(k, np.zeros(len(k), dtype=bool), of_slot[slots], src, rows, rows)
    return Maps(segments=ids, of_segment=of_segment, of_slot=of_slot, compose=compose, size=len(ids) + len(several))


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
    compose: Hops
    num_offsets: int
    num_states: int
    exit_state: Ints
    local: Hops
    independent: Ints
    dependent: Ints
    inner_independent: Hops
    inner_dependent: Hops


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

    def compose(self) -> Hops:
        """Offsets of fragments with several segments, in the order in which a state would pass them."""
        owner, k = runs(self.count[self.several] - 1)
        slots = self.several[owner]
        ids, dst = self.segment(slots, k + 1), self.row_of_slot[slots]
        src = np.where(k > 0, dst, self.row_of_segment[self.segment(slots, 0)])
        never = np.zeros(len(k), dtype=bool)
        return hops_by_step(k, never, dst, src, self.row_of_segment[ids], self.maps.of_segment[ids])

    def exits(self, slots: Ints, wave: Ints) -> Hops:
        """Each fragment's exit from its entry, wave after wave: through its composed map, or in grid mode through every
        segment's own.
        """
        starts = self.order.before[self.mine][slots] < 0
        if not self.plan.grid:
            entry, rows = self.segment(slots, 0), self.row_of_slot[slots]
            return hops_by_step(wave, starts, self.exit_state[slots], entry, rows, self.maps.of_slot[slots])
        count = self.count[slots]
        owner, k = runs(count)
        ids, last = self.segment(slots[owner], k), k + 1 == count[owner]
        following = self.segment(slots[owner], np.minimum(k + 1, count[owner] - 1))
        dst = np.where(last, self.exit_state[slots[owner]], following)
        step = wave[owner] * (int(count.max(initial=0)) + 1) + k
        return self._through(step, starts[owner] & (k == 0), dst, ids)

    def inner(self, slots: Ints) -> Hops:
        """From the entry of each fragment to the entries of its later segments."""
        owner, k = runs(np.maximum(self.count[slots] - 1, 0))
        slots = slots[owner]
        starts = (self.order.before[self.mine][slots] < 0) & (k == 0)
        return self._through(k, starts, self.segment(slots, k + 1), self.segment(slots, k))

    def _through(self, step: Ints, starts: Ints, dst: Ints, ids: Ints) -> Hops:
        """Hops through the segments' own maps, from the entry state of each."""
        return hops_by_step(step, starts, dst, ids, self.row_of_segment[ids], self.maps.of_segment[ids])


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
        compose=builder.compose(),
        num_offsets=len(builder.summarized) + len(builder.several),
        num_states=builder.num_states,
        exit_state=builder.exit_state,
        local=builder.exits(with_exit, position[with_exit]),
        independent=np.flatnonzero(independent),
        dependent=np.flatnonzero(~independent),
        inner_independent=builder.inner(inner_local),
        inner_dependent=builder.inner(inner_remote),
    )
