"""Which state steps to which: the affine hops of a plan, forward and, mirrored, for the adjoint.

A hop is ``state[dst] = M[map_row] @ state[src] + offset[offset_row]`` (the adjoint: M transposed), or only the offset
where a chain starts. States 0..n-1 are the entry states of this rank's n segments (exit adjoints in the mirror); the
rest is the outbox, what leaves this rank. "Before" and "after" follow the direction: in the mirror the successor comes
before.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.fragments import Ints, Places, runs, unset
from cp_gdn.layout import Partition
from cp_gdn.listing import ChainOrder as ChainOrder
from cp_gdn.listing import chain_order as chain_order
from cp_gdn.plan import NONE, Index, Plan, Segments


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


def hops_by_step(step: Ints, starts: Ints, *columns: Ints) -> Hops:
    """Hops sorted by ``step`` (chain starts of a step first); columns are dst, src, offset_row, map_row."""
    if not len(step):
        return NO_HOPS
    key = 2 * step + ~starts
    counts = np.bincount(key)
    keys = counts.nonzero()[0]
    steps = zip(counts[keys].tolist(), (keys % 2 == 0).tolist(), strict=True)
    return Hops(table=np.array(columns)[:, key.argsort(kind="stable")], steps=tuple(steps))


def hops_by_level(level: Ints, step: Ints, starts: Ints, *columns: Ints) -> dict[int, Hops]:
    """The same for each level that has hops, of ``level`` [hops]."""
    key = 2 * step + ~starts
    span = int(key.max()) + 1
    key = level * span + key
    order = key.argsort(kind="stable")
    table = np.array(columns)[:, order]
    steps: dict[int, list[tuple[int, bool]]] = {}
    first: dict[int, int] = {}
    runs_of_keys, cuts = groups(key[order])
    for run, a, b in zip(runs_of_keys, cuts, cuts[1:], strict=False):
        at, kind = divmod(run, span)
        first.setdefault(at, a)
        steps.setdefault(at, []).append((b - a, kind % 2 == 0))
    ends = [*first.values(), len(level)][1:]
    return {
        at: Hops(table=table[:, a:b], steps=tuple(steps[at])) for (at, a), b in zip(first.items(), ends, strict=True)
    }


def groups(keys: Ints) -> tuple[list[int], list[int]]:
    """Distinct values of sorted ``keys``, and where the run of each begins, then their number in all."""
    first = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    starts = first.nonzero()[0]
    return keys[starts].tolist(), [*starts.tolist(), len(keys)]


def _plain_steps(k: Ints) -> tuple[tuple[int, bool], ...]:
    """Steps of hops that stand in the order of k, none of them a chain start."""
    return tuple((n, False) for n in np.bincount(k).tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Rows of the map buffer, shared by both directions: first the segments' own maps, then the composed ones.

    Attributes:
        segments: the segments with tokens of their document on both sides, ascending; row i is the map of segments[i].
        needed: the same as a mask [n].
        of_segment: [n] row of each segment's map, -1 where none is needed.
        of_slot: [slots] row of each fragment's map: composed if it has several segments, -1 where none is needed.
        compose: hops inside the buffer that fill the composed rows, left to right; they use no offsets.
        size: rows in all.
    """

    segments: Ints
    needed: Ints
    of_segment: Ints
    of_slot: Ints
    compose: Hops
    size: int


def build_maps(segments: Segments, *, grid: bool) -> Maps:
    """The map rows of a plan; nothing is composed in grid mode."""
    needed = segments.has_prev & segments.has_next
    ids = needed.nonzero()[0]
    of_segment = np.where(needed, needed.cumsum() - 1, -1)
    first, count = segments.of_slot[:-1], segments.per_slot
    of_slot = unset(len(count))
    filled = count.nonzero()[0]
    inside = segments.has_prev[first[filled]] & segments.has_next[segments.of_slot[1:][filled] - 1]
    whole = filled[inside]
    of_slot[whole] = of_segment[first[whole]]
    several = NONE if grid else whole[count[whole] > 1]
    of_slot[several] = len(ids) + np.arange(len(several))
    compose = NO_HOPS
    if len(several):
        composed = np.zeros(len(count), dtype=bool)
        composed[several] = True
        k, slots = (x[composed[segments.joints[1]]] for x in segments.joints)
        src = np.where(k > 0, of_slot[slots], of_segment[first[slots]])
        rows = of_segment[first[slots] + k + 1]
        compose = Hops(table=np.array((of_slot[slots], src, rows, rows)), steps=_plain_steps(k))
    return Maps(
        segments=ids,
        needed=needed,
        of_segment=of_segment,
        of_slot=of_slot,
        compose=compose,
        size=len(ids) + len(several),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chains:
    """One direction of a plan: what is summarized, and the hops that turn summaries and messages into states.

    Attributes:
        reverse: whether this is the mirror (adjoint).
        summarized: segments with something after them; row i of the offset buffer is the offset of segments[i].
        row_of_segment: [n] that row, -1 without one.
        compose: hops inside the offset buffer that fill the composed rows. num_offsets: its rows in all.
        num_states: entry states and outbox. exit_state: [slots] state that a fragment's exit goes to, -1 if nothing is
            after it.
        local: hops that need no message: chain starts, and chains that stay on this rank.
        independent: whether the entry state of a segment needs no message, bool [n].
        inner_independent, inner_dependent: hops from a fragment's first segment to its others.
    """

    reverse: bool
    summarized: Ints
    row_of_segment: Ints
    compose: Hops
    num_offsets: int
    num_states: int
    exit_state: Ints
    local: Hops
    independent: Ints
    inner_independent: Hops
    inner_dependent: Hops


class HopBuilder:
    """Writes the hops of one direction; knows the rows, no messages."""

    def __init__(self, part: Partition, plan: Plan, maps: Maps, *, reverse: bool) -> None:
        self.part, self.plan, self.maps, self.reverse = part, plan, maps, reverse
        self.segments, self.count = plan.segments, plan.segments.per_slot
        self.places: Places = plan.places[reverse]
        has_after = self.segments.has_prev if reverse else self.segments.has_next
        self.summarized = has_after.nonzero()[0]
        self.row_of_segment = np.where(has_after, has_after.cumsum() - 1, -1)
        self.has_after_slot = self.places.after >= 0
        self.row_of_slot = unset(len(self.count))
        leaving = self.has_after_slot.nonzero()[0]
        self.row_of_slot[leaving] = self.row_of_segment[self.segment(leaving, 0)]
        self.several = NONE if plan.grid else leaving[self.count[leaving] > 1]
        self.row_of_slot[self.several] = len(self.summarized) + np.arange(len(self.several))
        self.exit_state = self._exit_states(leaving)

    @property
    def mine(self) -> slice:
        """This rank's rows of the table of all fragments."""
        return self.part.rows(self.plan.rank)

    def segment(self, slots: Ints, k: int | Ints) -> Ints:
        """The k-th segment, in this direction, of each fragment."""
        return self.segments.of_slot[slots + 1] - 1 - k if self.reverse else self.segments.of_slot[slots] + k

    def _exit_states(self, leaving: Ints) -> Ints:
        """A successor on the same rank is entered directly, any other through the outbox."""
        out = unset(len(self.count))
        far = self.places.after[leaving] != self.plan.rank
        out[leaving] = len(self.segments) + far.cumsum() - 1
        near = leaving[~far]
        out[near] = self.segment(self.places.after_slot[near], 0)
        self.num_states = len(self.segments) + int(np.count_nonzero(far))
        return out

    def compose(self) -> Hops:
        """Offsets of fragments with several segments, in the order in which a state would pass them."""
        if not len(self.several):
            return NO_HOPS
        k, slots = self._joints(self.has_after_slot)
        ids, dst = self.segment(slots, k + 1), self.row_of_slot[slots]
        src = np.where(k > 0, dst, self.row_of_segment[self.segment(slots, 0)])
        columns = dst, src, self.row_of_segment[ids], self.maps.of_segment[ids]
        return Hops(table=np.array(columns), steps=_plain_steps(k))

    def _joints(self, chosen: Ints) -> tuple[Ints, Ints]:
        """`Segments.joints` of the fragments of a mask."""
        k, slots = self.segments.joints
        keep = chosen[slots]
        return k[keep], slots[keep]

    def exits(self, slots: Ints, wave: Ints) -> Hops:
        """Each fragment's exit from its entry, wave after wave: through its composed map, or in grid mode through every
        segment's own.
        """
        return hops_by_step(*self._exits(slots, wave)[1:]) if len(slots) else NO_HOPS

    def exits_by_level(self, slots: Ints) -> dict[int, Hops]:
        """The exits of each level that has some."""
        if not len(slots):
            return {}
        owner, *hops = self._exits(slots, self.places.wave[slots])
        return hops_by_level(self.places.level[slots[owner]], *hops)

    def _exits(self, slots: Ints, wave: Ints) -> tuple[Ints, ...]:
        """Index of the fragment, step, chain start and columns of each hop."""
        starts = self.places.before[slots] < 0
        if not self.plan.grid:
            entry, rows = self.segment(slots, 0), self.row_of_slot[slots]
            return np.arange(len(slots)), wave, starts, self.exit_state[slots], entry, rows, self.maps.of_slot[slots]
        count = self.count[slots]
        owner, k = runs(count)
        ids, last = self.segment(slots[owner], k), k + 1 == count[owner]
        following = self.segment(slots[owner], np.minimum(k + 1, count[owner] - 1))
        dst = np.where(last, self.exit_state[slots[owner]], following)
        step = wave[owner] * (int(count.max()) + 1) + k
        return owner, step, starts[owner] & (k == 0), dst, ids, self.row_of_segment[ids], self.maps.of_segment[ids]

    def inner(self, chosen: Ints) -> Hops:
        """From the entry of each fragment of a mask to the entries of its later segments."""
        k, slots = self._joints(chosen)
        if not len(k):
            return NO_HOPS
        ids = self.segment(slots, k)
        dst = ids - 1 if self.reverse else ids + 1
        table = np.array((dst, ids, self.row_of_segment[ids], self.maps.of_segment[ids]))
        starts = (self.places.before[slots] < 0) & (k == 0)
        num_starts = int(np.count_nonzero(starts))
        if not num_starts:
            return Hops(table=table, steps=_plain_steps(k))
        order = np.concatenate((starts.nonzero()[0], (~starts).nonzero()[0]))
        first, *later = np.bincount(k).tolist()
        steps = (num_starts, True), (first - num_starts, False), *((n, False) for n in later)
        return Hops(table=table[:, order], steps=tuple(step for step in steps if step[0]))


def build_chains(builder: HopBuilder, *, exchange_steps_segments: bool) -> Chains:
    """One direction of a plan.

    Args:
        builder: the direction's hop builder.
        exchange_steps_segments: the exchange leaves the entry states of all segments it passes behind (ring in grid
            mode).
    """
    places, segments, filled = builder.places, builder.segments, builder.count > 0
    remote = places.crosses & (places.position > 0)
    local, leaves = filled & ~remote, builder.has_after_slot
    with_exit = (local & leaves).nonzero()[0]
    inner_local, inner_remote = local, remote
    if builder.plan.grid:
        inner_local = local & ~leaves
        inner_remote = remote & ~leaves if exchange_steps_segments else remote
    return Chains(
        reverse=builder.reverse,
        summarized=builder.summarized,
        row_of_segment=builder.row_of_segment,
        compose=builder.compose(),
        num_offsets=len(builder.summarized) + len(builder.several),
        num_states=builder.num_states,
        exit_state=builder.exit_state,
        local=builder.exits(with_exit, places.position[with_exit]),
        independent=local[segments.slot],
        inner_independent=builder.inner(inner_local),
        inner_dependent=builder.inner(inner_remote),
    )
