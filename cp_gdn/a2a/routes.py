"""All-to-all: rank j owns heads [j Hg, (j + 1) Hg) of every chain. What each rank ships to the owners, and the hops an
owner takes.

A rank ships, per fragment of a chain that crosses ranks: the exit state where the chain starts (a head), the map and
offset rows where it continues (a middle), nothing where it ends. Every fragment but the first asks for its entry state
back. Order everywhere: rank, then slot, so that both ends cut their messages alike.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import Chains, HopBuilder, Hops, hops_by_step
from cp_gdn.fragments import Ints, runs
from cp_gdn.listing import ChainOrder, FragmentTable, chain_order
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


def build_owner_routes(builder: HopBuilder, chains: Chains) -> OwnerRoutes | None:
    """Routes of one direction; None when no chain of the pack crosses ranks."""
    part, rank = builder.part, builder.plan.rank
    if not part.crosses:
        return None
    order, table = chain_order(part.table, reverse=builder.reverse), part.table
    crosses = order.crosses
    first, last = order.before < 0, order.after < 0
    heads, middles, asks = (rows.nonzero()[0] for rows in (crosses & first, crosses & ~first & ~last, crosses & ~first))
    counts = _row_counts(builder, table, middles)
    hops, num_states = _owner_hops(order, heads, middles, asks, counts, builder.reverse)
    mine = part.rows(rank)
    my_crosses, my_first = crosses[mine], first[mine]
    my_heads, my_asks = (my_crosses & my_first).nonzero()[0], (my_crosses & ~my_first).nonzero()[0]
    offset_rows, map_rows = _rows_of_middles(builder, (my_crosses & ~my_first & ~last[mine]).nonzero()[0])

    def per_rank(rows: Ints, weights: Ints | None = None) -> tuple[int, ...]:
        counted = np.bincount(table.rank[rows], weights, part.world_size)
        return tuple(counted.astype(np.int64).tolist())

    return OwnerRoutes(
        head_states=chains.exit_state[my_heads],
        offset_rows=offset_rows,
        map_rows=map_rows,
        replies=builder.segment(my_asks, 0),
        num_heads=per_rank(heads),
        num_rows=per_rank(middles, counts),
        num_replies=per_rank(asks),
        hops=hops,
        num_states=num_states,
    )


def _row_counts(builder: HopBuilder, table: FragmentTable, rows: Ints) -> Ints:
    """Map rows that each fragment ships: one composed map, or in grid mode one per segment."""
    if not builder.plan.grid:
        return np.ones(len(rows), dtype=np.int64)
    return segment_counts(chunk_counts(table.offset[rows], table.length[rows]), 0, builder.plan.grid)


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


def _owner_hops(
    order: ChainOrder, heads: Ints, middles: Ints, asks: Ints, counts: Ints, reverse: bool
) -> tuple[Hops, int]:
    """Entry states of all chains, position after position, row by row where a fragment ships several."""
    head_row, first_row, row_count, reply = (np.full(len(order.before), -1, dtype=np.int64) for _ in range(4))
    head_row[heads], reply[asks] = np.arange(len(heads)), np.arange(len(asks))
    first_row[middles], row_count[middles] = np.cumsum(counts) - counts, counts
    source, position = order.before[asks], order.position[asks]
    starts = position == 1  # the fragment before is a chain start, whose exit state came as a head
    passed = np.where(starts, 1, row_count[source])
    passing = np.where(
        passed > 1, len(asks) + np.cumsum(passed > 1) - 1, -1
    )  # scratch between the rows of one fragment
    ask, k = runs(passed)
    row, last = first_row[source][ask], k + 1 == passed[ask]
    hops = hops_by_step(
        position[ask] * (int(passed.max()) + 1) + k,
        starts[ask],
        np.where(last, reply[asks][ask], passing[ask]),
        np.where(k > 0, passing[ask], reply[source][ask]),
        np.where(starts[ask], head_row[source][ask], len(heads) + row + k),
        row + (passed[ask] - 1 - k if reverse else k),
    )
    return hops, len(asks) + int((passed > 1).sum())
