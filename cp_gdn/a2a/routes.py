"""All-to-all: rank j owns heads [j Hg, (j + 1) Hg) of every chain. What each rank ships to the owners, and the hops an
owner takes.

A rank ships, per fragment of a chain that crosses ranks: the exit state where the chain starts (a head), the map and
offset rows where it continues (a middle), nothing where it ends. Every fragment but the first asks for its entry state
back. Order everywhere: rank, then slot, so that both ends cut their messages alike.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import ZERO_ONE, Chains, Hops, Rows, sorted_hops
from cp_gdn.fragments import Ints, runs
from cp_gdn.layout import Partition
from cp_gdn.plan import Index, Plan, chunk_counts, segment_counts


@dataclass(frozen=True, kw_only=True)
class OwnerRoutes:
    """One direction of the a2a exchange of one rank.

    Attributes:
        head_states: states this rank ships as chain starts. offset_rows, map_rows: rows it ships for its middles.
        replies: states that come back, one per fragment that is not the first of its chain.
        num_heads, num_rows, num_replies: [W] the same counts of every rank.
        hops: what an owner does; states are replies first, then scratch; offset rows are heads first, then offsets.
        num_states: rows of the owner's state buffer.
    """

    head_states: Index
    offset_rows: Index
    map_rows: Index
    replies: Index
    num_heads: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_replies: tuple[int, ...]
    hops: Hops
    num_states: int

    def owned_shape(self, rank: int, world_size: int, state: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Shape of the maps that ``rank`` receives as an owner, for states of shape ``state`` (HV, K, V)."""
        heads = heads_of(rank, world_size, state[0])
        return sum(self.num_rows), heads.stop - heads.start, state[1], state[1]


def heads_of(rank: int, world_size: int, num_value_heads: int) -> slice:
    """The value heads that ``rank`` owns; empty for the last ranks when there are more ranks than heads."""
    per_rank = -(-num_value_heads // world_size)
    return slice(min(rank * per_rank, num_value_heads), min((rank + 1) * per_rank, num_value_heads))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Walk:
    """All chains that cross ranks, as an owner walks them: C fragments, chain after chain; row 0 of an array [2, ..] is
    the forward direction, row 1 the mirror.

    Attributes:
        is_first: whether a fragment is its chain's first, bool [2, C]. position: how many are before it, [2, C].
        shipped: map rows that a fragment ships, 0 at the ends of a chain, [C].
        head, reply: how many first ones and others are before it by rank, then slot, [2, C]. row: map rows, [C].
        num_heads, num_replies, num_rows: how many each rank has of them, [2, W], [2, W] and [W].
    """

    is_first: Ints
    position: Ints
    shipped: Ints
    head: Ints
    reply: Ints
    row: Ints
    num_heads: Ints
    num_replies: Ints
    num_rows: Ints


def _walk(part: Partition, grid: int) -> _Walk:
    listed, world = part.cuts.chain_list().of_documents(part.cuts.levels > 0), part.world_size
    rank, index = listed.rank, np.arange(len(listed.rank))
    edge = np.ones(len(rank) + 1, dtype=bool)
    np.not_equal(listed.doc[1:], listed.doc[:-1], out=edge[1:-1])
    starts = edge.nonzero()[0]  # of the chains, then C
    chain = edge[:-1].cumsum() - 1
    is_first = np.array((edge[:-1], edge[1:]))
    shipped = ~(edge[:-1] | edge[1:]) * 1  # one composed map, or in grid mode one per segment
    if grid:
        shipped *= segment_counts(chunk_counts(listed.offset, listed.length), 0, grid)
    ordered = np.array((*is_first, shipped)).take(listed.by_rank, axis=1)
    place = np.empty_like(index)
    place[listed.by_rank] = index
    before = (np.add.accumulate(ordered, axis=1) - ordered).take(place, axis=1)
    num_heads = np.array([np.bincount(rank[each], minlength=world) for each in is_first])
    return _Walk(
        is_first=is_first,
        position=np.array((index - starts[chain], starts[chain + 1] - 1 - index)),
        shipped=shipped,
        head=before[:2],
        reply=place - before[:2],
        row=before[2],
        num_heads=num_heads,
        num_replies=np.bincount(rank, minlength=world) - num_heads,
        num_rows=np.bincount(rank, shipped, world).astype(np.int64),
    )


def build_owner_routes(
    part: Partition, plan: Plan, chains: Chains
) -> tuple[OwnerRoutes, OwnerRoutes] | tuple[None, None]:
    """Routes of both directions; None when no chain of the pack crosses ranks."""
    if not part.crosses:
        return None, None
    walk = _walk(part, plan.grid)
    columns, num_states = _owner_hops(walk, plan.grid)
    hops, shipped = sorted_hops(columns), _shipped(plan, chains.rows)
    num_rows = tuple(walk.num_rows.tolist())
    forward, adjoint = (
        OwnerRoutes(
            **shipped[i],
            num_heads=tuple(walk.num_heads[i].tolist()),
            num_rows=num_rows,
            num_replies=tuple(walk.num_replies[i].tolist()),
            hops=hops[i],
            num_states=num_states,
        )
        for i in (0, 1)
    )
    return forward, adjoint


def _shipped(plan: Plan, rows: Rows) -> tuple[dict[str, Ints], dict[str, Ints]]:
    """What this rank ships and asks for, as fields of `OwnerRoutes`, forward and mirrored."""
    places, num_slots = plan.places, len(rows.map_of_slot)
    asks = rows.remote.reshape(2, num_slots)
    heads, middles = places.crosses & ~asks, asks & (places.after >= 0)
    forward, mirror = (
        {
            "head_states": rows.exit_state[heads[i].nonzero()[0] + i * num_slots],
            "replies": rows.first[asks[i].nonzero()[0] + i * num_slots],
            **_rows_of_middles(plan, rows, middles[i].nonzero()[0], i),
        }
        for i in (0, 1)
    )
    return forward, mirror


def _rows_of_middles(plan: Plan, rows: Rows, slots: Ints, direction: int) -> dict[str, Ints]:
    """Offset and map rows of this rank's middles, in the order in which a state passes them; maps always in forward
    order."""
    both = slots + direction * len(rows.map_of_slot)
    if not plan.grid:
        return {"offset_rows": rows.offset_of_slot[both], "map_rows": rows.map_of_slot[slots]}
    owner, k = runs(plan.segments.per_slot[slots])
    passed = rows.first[both[owner]] + (1 - 2 * direction) * k
    forward = rows.first[slots[owner]] + k
    offsets = rows.offset_of_segment[passed + direction * len(plan.segments)]
    return {"offset_rows": offsets, "map_rows": rows.map_of_segment[forward]}


def _owner_hops(walk: _Walk, grid: int) -> tuple[Ints, int]:
    """Entry states of all chains, position after position, row by row where a fragment ships several: columns for
    `sorted_hops`, the direction as their kind; and how many states there are."""
    size, later = len(walk.row), (~walk.is_first[0]).nonzero()[0]
    num_asks, num_heads = len(later), size - len(later)
    # A fragment asks for what comes of the one before it: in the mirror the two change places.
    asks, source = np.concatenate((later, later - 1)), np.concatenate((later - 1, later))
    mirror = ZERO_ONE.repeat(num_asks)
    of_ask, of_source = asks + size * mirror, source + size * mirror
    position, dst = (x.reshape(-1)[of_ask] for x in (walk.position, walk.reply))
    is_first, head, src = (x.reshape(-1)[of_source] for x in (walk.is_first, walk.head, walk.reply))
    row = walk.row[source]
    offset_row = np.where(is_first, head, num_heads + row)  # a first one's exit state came as a head
    if not grid:
        return np.array((mirror, position, ~is_first, dst, src, offset_row, row)), num_asks
    passed = np.maximum(walk.shipped[source], 1)
    passing = num_asks - 1 + (passed > 1).cumsum()  # scratch between the rows of one fragment
    passing -= mirror * (passed[:num_asks] > 1).sum()
    ask, k = runs(passed)
    mirror, position, is_first, dst, src, offset_row, row, passed, passing = (
        x[ask] for x in (mirror, position, is_first, dst, src, offset_row, row, passed, passing)
    )
    step = position * (int(passed.max()) + 1) + k
    dst, src = np.where(k + 1 == passed, dst, passing), np.where(k > 0, passing, src)
    row = row + np.where(mirror > 0, passed - 1 - k, k)
    columns = np.array((mirror, step, ~is_first, dst, src, offset_row + k, row))
    return columns, num_asks + int(np.count_nonzero(walk.shipped > 1))
