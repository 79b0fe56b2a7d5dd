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
from cp_gdn.listing import ChainOrder, FragmentTable, chain_orders
from cp_gdn.plan import Index, chunk_counts, segment_counts


@dataclass(frozen=True, kw_only=True, slots=True)
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
class _Shared:
    """What both directions have in common; F rows of the table of all fragments, of which [m] are middles.

    Attributes:
        table, orders: see `listing`.
        middles: rows that are no end of their chain, [m]. shipped: map rows that each of them ships, [m].
        first_row: [F] the first of a middle's rows, -1 elsewhere.
    """

    table: FragmentTable
    orders: tuple[ChainOrder, ChainOrder]
    middles: Ints
    shipped: Ints
    first_row: Ints

    def per_rank(self, rows: Ints, weights: Ints | None = None) -> tuple[int, ...]:
        counted = np.bincount(self.table.rank[rows], weights, len(self.table.starts) - 1)
        return tuple(counted.astype(np.int64).tolist())


def build_owner_routes(
    part: Partition, builders: Sequence[HopBuilder], chains: Sequence[Chains]
) -> tuple[OwnerRoutes | None, OwnerRoutes | None]:
    """Routes of both directions; None when no chain of the pack crosses ranks."""
    if not part.crosses:
        return None, None
    table, grid = part.table, builders[0].plan.grid
    orders = chain_orders(table)
    middles = (orders[0].crosses & (table.prev >= 0) & (table.next >= 0)).nonzero()[0]
    shipped = np.ones(len(middles), dtype=np.int64)  # one composed map, or in grid mode one per segment
    if grid:
        shipped = segment_counts(chunk_counts(table.offset[middles], table.length[middles]), 0, grid)
    first_row = np.full(len(table.doc), -1, dtype=np.int64)
    first_row[middles] = shipped.cumsum() - shipped
    shared = _Shared(
        table=table,
        orders=orders,
        middles=middles,
        shipped=shipped,
        first_row=first_row,
    )
    forward, adjoint = (_routes(shared, b, c) for b, c in zip(builders, chains, strict=True))
    return forward, adjoint


def _routes(shared: _Shared, builder: HopBuilder, chains: Chains) -> OwnerRoutes:
    order, places = shared.orders[builder.reverse], builder.places
    first = order.before < 0
    heads, asks = (order.crosses & first).nonzero()[0], (order.crosses & ~first).nonzero()[0]
    hops, num_states = _owner_hops(shared, builder, heads, asks)
    follows = places.before >= 0
    my_heads, my_asks = (places.crosses & ~follows).nonzero()[0], (places.crosses & follows).nonzero()[0]
    offset_rows, map_rows = _rows_of_middles(builder, my_asks[places.after[my_asks] >= 0])
    return OwnerRoutes(
        head_states=chains.exit_state[my_heads],
        offset_rows=offset_rows,
        map_rows=map_rows,
        replies=builder.segment(my_asks, 0),
        num_heads=shared.per_rank(heads),
        num_rows=shared.per_rank(shared.middles, shared.shipped),
        num_replies=shared.per_rank(asks),
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


def _owner_hops(shared: _Shared, builder: HopBuilder, heads: Ints, asks: Ints) -> tuple[Hops, int]:
    """Entry states of all chains, position after position, row by row where a fragment ships several."""
    order = shared.orders[builder.reverse]
    head_row, reply = np.full((2, len(order.before)), -1, dtype=np.int64)
    head_row[heads], reply[asks] = np.arange(len(heads)), np.arange(len(asks))
    source, position = order.before[asks], order.position[asks]
    starts = position == 1  # the fragment before is a chain start, whose exit state came as a head
    entry, row = reply[source], shared.first_row[source]
    offset_row = np.where(starts, head_row[source], len(heads) + row)
    if not builder.plan.grid:
        return hops_by_step(position, starts, reply[asks], entry, offset_row, row), len(asks)
    shipped = np.ones(len(order.before), dtype=np.int64)
    shipped[shared.middles] = shared.shipped
    passed = shipped[source]
    passing = len(asks) + (passed > 1).cumsum() - 1  # scratch between the rows of one fragment
    ask, k = runs(passed)
    hops = hops_by_step(
        position[ask] * (int(passed.max()) + 1) + k,
        starts[ask],
        np.where(k + 1 == passed[ask], reply[asks][ask], passing[ask]),
        np.where(k > 0, passing[ask], entry[ask]),
        offset_row[ask] + k,
        row[ask] + (passed[ask] - 1 - k if builder.reverse else k),
    )
    return hops, len(asks) + int(np.count_nonzero(passed > 1))
