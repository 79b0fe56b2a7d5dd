"""What the kernels look up, made of a rank's plan before it is uploaded: walk items, rows of states, chains of hops.

Row numbering of the forward's state buffer on the kernels: first the segments with tokens of their document before
them, then the outbox, last the segments that start a document. Without an initial state nobody reads or writes those
last ones, and the buffer ends before them. Tables are int32, packed two by two into the int64 that `tables.upload`
moves.
"""

from dataclasses import dataclass, replace

import numpy as np

from cp_gdn.a2a.routes import OwnerRoutes
from cp_gdn.backends.hopper_exchange import KernelRoutes, PackedRoutes, packed_routes
from cp_gdn.backends.hopper_hops import KernelHops, PackedHops, packed
from cp_gdn.backends.hopper_items import MAP, lone_items, longest_first, run_items
from cp_gdn.backends.hopper_mirror import MirrorTables, mirror_tables
from cp_gdn.backends.hopper_slabs import BLOCKS
from cp_gdn.backends.hopper_strips import partial_chunks, strips_of
from cp_gdn.chains import NO_HOPS
from cp_gdn.exchange import Routes
from cp_gdn.fragments import Ints, unset
from cp_gdn.plan import NO_WALK, NONE, Index, Plan
from cp_gdn.ring.routes import IDLE, Parcel, RingStep
from cp_gdn.schedule import Replay, Schedule, Side

WALKS = ("summary", "transfer", "independent", "dependent")
"""The walks of a forward: for B and M, for M alone, for o of what needs no message and of the rest."""
SUMMARY, TRANSFER, INDEPENDENT, DEPENDENT = range(len(WALKS))
LONGER_THAN_EXCHANGE = 64
"""Chunks: their walk takes 0.11 ms on an H200, an exchange between two some 0.05."""


def _side(side: Side, rows: Ints, hops: PackedHops) -> Side:
    """A side with the hops of the kernels; its walks are in the tables' items and rows."""
    nowhere = Replay(walk=NO_WALK, end_at=NONE, end_row=NONE)
    return Side(
        reverse=side.reverse,
        num_states=side.num_states,
        num_offsets=side.num_offsets,
        start_state=rows[side.start_state],
        start_row=side.start_row,
        summary=NO_WALK,
        summary_row=NONE,
        compose=hops[side.compose],
        local=hops[side.local],
        inner_independent=hops[side.inner_independent],
        inner_dependent=hops[side.inner_dependent],
        independent=nowhere,
        dependent=nowhere,
    )


def kernel_schedule(schedule: Schedule, tables: "KernelTables") -> Schedule:
    """What a kernel context keeps of its schedule: token tables, empty documents, the sides of its tables."""
    return replace(
        schedule,
        transfer=NO_WALK,
        transfer_row=NONE,
        compose_maps=NO_HOPS,
        forward=tables.side,
        adjoint=tables.mirror.side,
    )


# ---- hops and messages -----------------------------------------------------------------------------------------------


def on_messages(routes: Routes, heads: int) -> Routes:
    """The same routes; an a2a owner folds on the message where every rank owns as many of ``heads``."""
    forward, adjoint = routes.forward_owner, routes.adjoint_owner
    if forward is None or adjoint is None or heads % len(forward.num_heads):
        return routes
    # A forward never has maps of another one: `Flow.kept`.
    return replace(
        routes,
        forward_owner=packed_routes(forward, keeps=False),
        adjoint_owner=packed_routes(adjoint, keeps=True),
    )


def packed_hops(schedule: Schedule, routes: Routes, rows: tuple[Ints, Ints]) -> PackedHops:
    """All hops of a rank; ``rows`` renumber the states of the forward and of the adjoint direction."""
    forward, adjoint = schedule.forward, schedule.adjoint
    stepped = [
        [side.local, side.inner_independent, side.inner_dependent, *(step.hops for step in steps)]
        for side, steps in ((forward, routes.forward_steps), (adjoint, routes.adjoint_steps))
    ]
    others = [schedule.compose_maps, forward.compose, adjoint.compose]
    for owner in (routes.forward_owner, routes.adjoint_owner):
        if owner is not None:
            others += [owner.hops, *([owner.kept_hops] if isinstance(owner, PackedRoutes) else [])]
    return PackedHops((stepped[0], rows[0]), (stepped[1], rows[1]), (others, None))


def _parcels(parcels: tuple[Parcel, ...], rows: Ints) -> tuple[Parcel, ...]:
    return tuple([Parcel(peer=x.peer, states=rows[x.states], count=x.count) for x in parcels])


def _ring(steps: tuple[RingStep, ...], rows: Ints, hops: PackedHops) -> tuple[RingStep, ...]:
    def step(x: RingStep) -> RingStep:
        return RingStep(receives=_parcels(x.receives, rows), hops=hops[x.hops], sends=_parcels(x.sends, rows))

    return tuple([x if x is IDLE else step(x) for x in steps])


def _owner(owner: OwnerRoutes | None, rows: Ints, hops: PackedHops) -> OwnerRoutes | None:
    if owner is None:
        return None
    head_states, replies = rows[owner.head_states], rows[owner.replies]
    changed = replace(owner, head_states=head_states, replies=replies, hops=hops[owner.hops])
    return replace(changed, kept_hops=hops[changed.kept_hops]) if isinstance(changed, PackedRoutes) else changed


def kernel_routes(routes: Routes, rows: tuple[Ints, Ints], hops: PackedHops) -> tuple[Routes, Routes]:
    """The routes of the forward and of the adjoint direction with hops for `fold`, states renumbered by ``rows``."""
    forward = KernelRoutes(
        kind=routes.kind,
        forward_steps=_ring(routes.forward_steps, rows[0], hops),
        adjoint_steps=(),
        forward_owner=_owner(routes.forward_owner, rows[0], hops),
        adjoint_owner=None,
    )
    adjoint = KernelRoutes(
        kind=routes.kind,
        forward_steps=(),
        adjoint_steps=_ring(routes.adjoint_steps, rows[1], hops),
        forward_owner=None,
        adjoint_owner=_owner(routes.adjoint_owner, rows[1], hops),
    )
    return forward, adjoint


# ---- walks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelTables:
    """Everything the forward on the kernels looks up.

    Attributes:
        side, routes: the forward's, states renumbered. row_of_segment: [n] row of each segment's entry state.
        num_rows: rows of the state buffer without and with an initial state. compose_maps, num_maps: see `Schedule`.
        free_rows: of o, see the function of that name.
        chunks: packed [N, 2], first row and count. partial, strips: packed `partial_chunks` of these, and `strips_of`.
        segments: packed [n, 4], first chunk, chunks, map row, 0.
        items: packed [m, 4], see `hopper_items`, of all `WALKS` one after the other, each longest first.
        counts: items of each walk. rows: [16, n], by `rows_index`: where the walk of each
            segment starts from and where its end goes, two int32 each, -1 for nowhere.
        empty_entry, empty_exit: see `Schedule`. num_entries, num_exits: rows of the initial and of the final states.
        mirror: what a backward looks up beside all this.
    """

    side: Side
    routes: Routes
    row_of_segment: Index
    num_rows: tuple[int, int]
    compose_maps: KernelHops
    num_maps: int
    free_rows: tuple[int, int]
    num_chunks: int
    num_segments: int
    chunks: Index
    partial: Index
    num_partial: int
    strips: tuple[int, ...]
    segments: Index
    items: Index
    counts: tuple[int, ...]
    rows: Index
    empty_entry: Index
    empty_exit: Index
    num_entries: int
    num_exits: int
    mirror: MirrorTables


def rows_index(walk: int, *, initial: bool, final: bool) -> int:
    """Row of `KernelTables.rows` for a walk, by whether an initial state came in and ends of documents are wanted."""
    return (2 * initial + final) * len(WALKS) + walk


def state_rows(side: Side) -> tuple[Ints, int]:
    """Row of every state of a direction, [num_states], and how many come before those where documents start in it."""
    starts = np.zeros(side.num_states, dtype=bool)
    starts[side.start_state] = True
    return _rank(starts), int((~starts).sum())


def _rank(last: Ints) -> Ints:
    """New places when those of the mask ``last`` move behind the others, order kept."""
    rows = np.empty(len(last), dtype=np.int64)
    rows[np.concatenate(((~last).nonzero()[0], last.nonzero()[0]))] = np.arange(len(last))
    return rows


def kernel_tables(plan: Plan, schedule: Schedule, routes: Routes, heads: tuple[int, int]) -> KernelTables:
    """The tables of a rank, not yet uploaded."""
    count = len(plan.segments)
    rows, first_rows = state_rows(schedule.forward)
    mirrored, _ = state_rows(schedule.adjoint)
    routes = on_messages(routes, heads[1])
    hops = packed_hops(schedule, routes, (rows, mirrored))
    forward_routes, adjoint_routes = kernel_routes(routes, (rows, mirrored), hops)
    adjoint = (_side(schedule.adjoint, mirrored, hops), adjoint_routes)
    items, partial = _items(plan, schedule, heads[1]), partial_chunks(plan.chunks.count)
    return KernelTables(
        side=_side(schedule.forward, rows, hops),
        routes=forward_routes,
        row_of_segment=rows[:count],
        num_rows=(first_rows, len(rows)),
        compose_maps=hops[schedule.compose_maps],
        num_maps=schedule.num_maps,
        free_rows=free_rows(plan, schedule.forward, waits=not len(items[INDEPENDENT])),
        num_chunks=len(plan.chunks),
        num_segments=count,
        chunks=packed(np.array((plan.chunks.first_row, plan.chunks.count), dtype=np.int32).T),
        partial=packed(partial),
        num_partial=len(partial),
        strips=strips_of(partial),
        segments=packed(_segment_rows(plan, schedule)),
        items=packed(np.concatenate(items)),
        counts=tuple(map(len, items)),
        rows=_walk_rows(schedule, rows[:count]),
        empty_entry=schedule.empty_entry,
        empty_exit=schedule.empty_exit,
        num_entries=len(plan.entry_docs),
        num_exits=len(plan.exit_docs),
        mirror=mirror_tables(plan, schedule, adjoint, mirrored, heads),
    )


def for_kernels(
    plan: Plan, schedule: Schedule, routes: Routes, heads: tuple[int, int]
) -> tuple[Schedule, Routes, KernelTables]:
    """What a kernel context has for its schedule and routes (those of its forward), and the tables; not yet
    uploaded."""
    tables = kernel_tables(plan, schedule, routes, heads)
    return kernel_schedule(schedule, tables), tables.routes, tables


def _segment_rows(plan: Plan, schedule: Schedule) -> Ints:
    segments, map_row = plan.segments, unset(len(plan.segments))
    map_row[schedule.transfer.segments] = schedule.transfer_row
    return np.array((segments.first_chunk, segments.num_chunks, map_row, np.zeros_like(map_row)), dtype=np.int32).T


def _items(plan: Plan, schedule: Schedule, value_heads: int) -> list[Ints]:
    """Of each of `WALKS`."""
    segments, side = plan.segments, schedule.forward
    maps = longest_first(lone_items(segments, schedule.transfer.segments, MAP))
    offsets = lone_items(segments, side.summary.segments, 0)
    first, rest = (run_items(segments, part.walk.segments) for part in (side.independent, side.dependent))
    if _fit_one_wave(first, rest, value_heads):
        every = np.concatenate((side.independent.walk.segments, side.dependent.walk.segments))
        first, rest = first[:0], run_items(segments, every)
    return [longest_first(np.concatenate((offsets, maps))), maps, first, rest]


def free_rows(plan: Plan, side: Side, *, waits: bool) -> tuple[int, int]:
    """The first of neighbouring rows of o that no walk writes while messages are under way, and how many: all of them
    if nothing depends on a message, or nothing is walked before (``waits``), else those of the longest fragment that
    depends on one."""
    dependent = side.dependent.walk.segments
    if waits or not len(dependent):
        return 0, plan.num_tokens
    slots, lengths = plan.segments.slot[dependent], plan.fragments.length
    slot = slots[lengths[slots].argmax()]
    return int(lengths[:slot].sum()), int(lengths[slot])


def _fit_one_wave(independent: Ints, dependent: Ints, value_heads: int) -> bool:
    """Whether both replays are better run at once: their blocks fit the GPU together, and the first alone would take
    longer than the exchange that it hides."""
    count = len(independent) + len(dependent)
    long = len(independent) > 0 and independent[0, 1] >= LONGER_THAN_EXCHANGE
    return bool(long and len(dependent) > 0 and count * value_heads <= BLOCKS)


def _walk_rows(schedule: Schedule, row: Ints) -> Ints:
    """`KernelTables.rows`."""
    side, first = schedule.forward, schedule.forward.start_state
    pairs = np.full((2, 2, len(WALKS), len(row), 2), -1, dtype=np.int32)  # initial, final, walk, segment, (start, end)
    start, end = pairs[..., 0], pairs[..., 1]
    start[1, :, 0, first] = row[first][:, None]
    start[:, :, 2:] = row
    start[0, :, 2:, first] = -1
    end[:, :, 0, side.summary.segments] = side.summary_row
    end[:, :, 1, schedule.transfer.segments] = schedule.transfer_row
    for part in (side.independent, side.dependent):
        end[:, 1, 2:, part.walk.segments[part.end_at]] = part.end_row[:, None, None]
    return packed(pairs).reshape(4 * len(WALKS), len(row))
