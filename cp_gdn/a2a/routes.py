"""All-to-all: rank j owns heads [j Hg, (j + 1) Hg) of every chain. What each rank ships to the owners, and the hops an
owner takes.

A rank ships, per fragment of a chain that crosses ranks: the exit state where the chain starts (a head), the map and
offset rows where it continues (a middle), nothing where it ends. Every fragment but the first asks for its entry state
back. Order everywhere: rank, then slot, so that both ends cut their messages alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import Chains, HopBuilder, Hops, hops_by_step
from cp_gdn.fragments import Ints, runs
from cp_gdn.layout import Partition
from cp_gdn.plan import Index, chunk_counts, segment_counts


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
    """All chains that cross ranks, as an owner walks them: fragments chain after chain, [F].

    Attributes:
        world_size: W. rank: of each fragment. by_rank: their indices by rank, then slot.
        ends: by direction whether a fragment is its chain's first, bool. position: by direction how many are before it.
        shipped: map rows that a fragment ships, 0 at the ends of a chain. first_row: the first of them among all.
        num_rows: [W] how many each rank ships.
    """

    world_size: int
    rank: Ints
    by_rank: Ints
    ends: tuple[Ints, Ints]
    position: tuple[Ints, Ints]
    shipped: Ints
    first_row: Ints
    num_rows: tuple[int, ...]

    def numbered(self, chosen: Ints) -> Ints:
        """How many of the chosen (a mask) are before each fragment, by rank, then slot."""
        return _before(self.by_rank, chosen)

    def per_rank(self, chosen: Ints) -> tuple[int, ...]:
        return tuple(np.bincount(self.rank[chosen], minlength=self.world_size).tolist())


def _walk(part: Partition, grid: int) -> _Walk:
    listed = part.cuts.chain_list()
    keep = (part.cuts.levels > 0)[listed.doc]
    rank, doc = listed.rank[keep], listed.doc[keep]
    ordered = keep[listed.by_rank]
    by_rank = (keep.cumsum() - 1)[listed.by_rank[ordered]]
    edge = np.ones(len(doc) + 1, dtype=bool)
    np.not_equal(doc[1:], doc[:-1], out=edge[1:-1])
    start, end, index = edge[:-1], edge[1:], np.arange(len(doc))
    chain = start.cumsum() - 1
    shipped = (~(start | end)).astype(np.int64)  # one composed map, or in grid mode one per segment
    if grid:
        shipped *= segment_counts(chunk_counts(listed.offset[keep], listed.length[keep]), 0, grid)
    rows = np.bincount(rank, shipped, part.world_size).astype(np.int64)
    return _Walk(
        world_size=part.world_size,
        rank=rank,
        by_rank=by_rank,
        ends=(start, end),
        position=(index - start.nonzero()[0][chain], end.nonzero()[0][chain] - index),
        shipped=shipped,
        first_row=_before(by_rank, shipped),
        num_rows=tuple(rows.tolist()),
    )


def _before(order: Ints, weights: Ints) -> Ints:
    """Sum of the ``weights`` that are before each in ``order``."""
    sums = np.empty(len(weights), dtype=np.int64)
    ordered = weights[order]
    sums[order] = ordered.cumsum() - ordered
    return sums


def build_owner_routes(
    part: Partition, builders: Sequence[HopBuilder], chains: Sequence[Chains]
) -> tuple[OwnerRoutes | None, OwnerRoutes | None]:
    """Routes of both directions; None when no chain of the pack crosses ranks."""
    if not part.crosses:
        return None, None
    walk = _walk(part, builders[0].plan.grid)
    forward, adjoint = (_routes(walk, b, c) for b, c in zip(builders, chains, strict=True))
    return forward, adjoint


def _routes(walk: _Walk, builder: HopBuilder, chains: Chains) -> OwnerRoutes:
    places, first = builder.places, walk.ends[builder.reverse]
    hops, num_states = _owner_hops(walk, builder)
    follows = places.before >= 0
    my_heads, my_asks = (places.crosses & ~follows).nonzero()[0], (places.crosses & follows).nonzero()[0]
    offset_rows, map_rows = _rows_of_middles(builder, my_asks[places.after[my_asks] >= 0])
    return OwnerRoutes(
        head_states=chains.exit_state[my_heads],
        offset_rows=offset_rows,
        map_rows=map_rows,
        replies=builder.segment(my_asks, 0),
        num_heads=walk.per_rank(first),
        num_rows=walk.num_rows,
        num_replies=walk.per_rank(~first),
        hops=hops,
        num_states=num_states,
    )


def _rows_of_middles(builder: HopBuilder, slots: Ints) -> tuple[Ints, Ints]:
    """Offset and map rows of this rank's middles, in the order in which a state passes them; maps always in forward
    order."""
    if not builder.plan.grid:
        return builder.row_of_slot[slots], builder.maps.of_slot[slots]
    owner, k = runs(builder.count[slots])
    owner = slots[owner]
    passed = builder.segment(owner, k)
    forward = builder.segments.of_slot[owner] + k
    return builder.row_of_segment[passed], builder.maps.of_segment[forward]


def _owner_hops(walk: _Walk, builder: HopBuilder) -> tuple[Hops, int]:
    """Entry states of all chains, position after position, row by row where a fragment ships several."""
    first = walk.ends[builder.reverse]
    head, reply = walk.numbered(first), walk.numbered(~first)
    asks = (~first).nonzero()[0]
    source, position = asks + (1 if builder.reverse else -1), walk.position[builder.reverse][asks]
    starts = first[source]  # the fragment before is a chain start, whose exit state came as a head
    num_heads = len(first) - len(asks)
    dst, src, row = reply[asks], reply[source], walk.first_row[source]
    offset_row = np.where(starts, head[source], num_heads + row)
    if not builder.plan.grid:
        return hops_by_step(position, starts, dst, src, offset_row, row), len(asks)
    passed = np.maximum(walk.shipped[source], 1)
    passing = len(asks) + (passed > 1).cumsum() - 1  # scratch between the rows of one fragment
    ask, k = runs(passed)
    hops = hops_by_step(
        position[ask] * (int(passed.max()) + 1) + k,
        starts[ask],
        np.where(k + 1 == passed[ask], dst[ask], passing[ask]),
        np.where(k > 0, passing[ask], src[ask]),
        offset_row[ask] + k,
        row[ask] + (passed[ask] - 1 - k if builder.reverse else k),
    )
    return hops, len(asks) + int(np.count_nonzero(passed > 1))
