"""All-to-all: rank j owns heads [j Hg, (j + 1) Hg) of every chain. What each rank ships to the owners, and the hops an
owner takes.

A rank ships, per fragment of a chain that crosses ranks: the exit state where the chain starts (a head), the map and
offset rows where it continues (a middle), nothing where it ends. Every fragment but the first asks for its entry state
back. Order everywhere: rank, then slot, so that both ends cut their messages alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cp_gdn.chains import ZERO_ONE, Rows
from cp_gdn.fragments import Ints, runs, stable_order
from cp_gdn.hops import HopLists
from cp_gdn.layout import Partition
from cp_gdn.page import Lists, Page
from cp_gdn.plan import Plan, chunk_counts, segment_counts

HEADS, REPLIES, OFFSETS, MAPS = 0, 2, 4, 6
"""Lists of `OwnerRoutes.rows`; of the first three one per direction."""


@dataclass(frozen=True, kw_only=True)
class OwnerRoutes:
    """One direction of the a2a exchange of one rank; what is in tables it shares with the other one.

    Attributes:
        reverse: whether this is the adjoint's.
        rows: [1, ..] states and rows in lists, see the properties.
        num_heads, num_rows, num_replies: [W] how many every rank ships and gets back.
        hops: what an owner does, as kind 0; states are replies first, then scratch; offset rows are heads first, then
            offsets.
        num_states: rows of the owner's state buffer.
    """

    reverse: bool
    rows: Lists
    num_heads: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_replies: tuple[int, ...]
    hops: HopLists
    num_states: int

    @property
    def head_states(self) -> Tensor:
        """States that this rank ships as chain starts."""
        return self.list(HEADS + self.reverse)

    @property
    def replies(self) -> Tensor:
        """States that come back, one per fragment that is not the first of its chain."""
        return self.list(REPLIES + self.reverse)

    @property
    def offset_rows(self) -> Tensor:
        """Offsets that this rank ships for its middles, in the order in which a state passes them."""
        return self.list(OFFSETS + self.reverse)

    @property
    def map_rows(self) -> Tensor:
        """Their maps, always in forward order."""
        return self.list(MAPS)

    def list(self, i: int) -> Tensor:
        """One list of `rows`."""
        found: Tensor = self.rows[i][0]
        return found

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
        chain: a number of a fragment's chain, [C]. is_first: whether it is its chain's first, bool [2, C]. position:
            how many are before it, [2, C].
        shipped: map rows that a fragment ships, 0 at the ends of a chain, [C].
        head, reply: how many first ones and others are before it by rank, then slot, [2, C]. row: map rows, [C].
        num_heads, num_replies, num_rows: how many each rank has of them, [2, W], [2, W] and [W].
    """

    chain: Ints
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
    chains, world = part.cuts.chain_list(), part.world_size
    index = chains.crosses.nonzero()[0]
    rank, first, last = chains.rank[index], chains.ends[0][index], chains.ends[1][index]
    is_first = np.array((index == first, index == last))
    shipped = ~(is_first[0] | is_first[1]) * 1  # one composed map, or in grid mode one per segment
    if grid:
        shipped *= segment_counts(chunk_counts(chains.offset[index], chains.length[index]), 0, grid)
    by_rank = stable_order(rank, world) if chains.row is None else chains.row[index].argsort(kind="stable")
    place = np.empty_like(by_rank)
    place[by_rank] = np.arange(len(by_rank))
    counted = np.zeros((3, len(index) + 1), dtype=np.int64)
    ordered = np.array((is_first[0], is_first[1], shipped)).take(by_rank, axis=1)
    np.add.accumulate(ordered, axis=1, out=counted[:, 1:])
    before, cuts = counted.take(place, axis=1), rank[by_rank].searchsorted(np.arange(world + 1))
    num_heads, num_replies, num_rows = _per_rank(counted, cuts)
    return _Walk(
        chain=first,
        is_first=is_first,
        position=np.array((index - first, last - index)),
        shipped=shipped,
        head=before[:2],
        reply=place - before[:2],
        row=before[2],
        num_heads=num_heads,
        num_replies=num_replies,
        num_rows=num_rows,
    )


def _per_rank(counted: Ints, cuts: Ints) -> tuple[Ints, Ints, Ints]:
    """`num_heads`, `num_replies` and `num_rows` of a `_Walk`, of running counts by rank and where each rank begins."""
    until = counted.take(cuts, axis=1)
    each = until[:, 1:] - until[:, :-1]
    return each[:2], cuts[1:] - cuts[:-1] - each[:2], each[2]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnerDraft:
    """What routes of both directions are made of.

    Attributes:
        num_heads, num_replies: [2, W]. num_rows: [W]. num_states: see `OwnerRoutes`.
        columns: what an owner does, see `hops`; the direction is the kind, forward first.
        lists: those of `OwnerRoutes.rows`.
    """

    num_heads: Ints
    num_replies: Ints
    num_rows: Ints
    num_states: int
    columns: Ints
    lists: list[Ints]


def draft_owner(part: Partition, plan: Plan, rows: Rows) -> OwnerDraft:
    """All that follows from the plan, whoever takes the hops; some chain crosses ranks."""
    walk = _walk(part, plan.grid)
    columns, num_states = _owner_hops(walk, plan.grid)
    return OwnerDraft(
        num_heads=walk.num_heads,
        num_replies=walk.num_replies,
        num_rows=walk.num_rows,
        num_states=num_states,
        columns=columns,
        lists=[*_shipped(plan, rows)],
    )


def owner_routes(
    draft: OwnerDraft,
    page: Page,
    arrange: Callable[[Ints, Page], HopLists],
    kind: type[OwnerRoutes] = OwnerRoutes,
) -> tuple[OwnerRoutes, OwnerRoutes]:
    """Routes of both directions. ``arrange``: puts hops in the order in which they are taken."""
    rows = page.put_lists(np.concatenate(draft.lists)[None], [len(x) for x in draft.lists])
    hops, num_rows = arrange(draft.columns, page), tuple(draft.num_rows.tolist())
    forward, adjoint = (
        kind(
            reverse=i > 0,
            rows=rows,
            num_heads=tuple(draft.num_heads[i].tolist()),
            num_rows=num_rows,
            num_replies=tuple(draft.num_replies[i].tolist()),
            hops=hops,
            num_states=draft.num_states,
        )
        for i in (0, 1)
    )
    return forward, adjoint


def _shipped(plan: Plan, rows: Rows) -> Iterator[Ints]:
    """What this rank ships and asks for: the lists of `OwnerRoutes.rows`."""
    places, num_slots = plan.places, len(rows.map_of_slot)
    crosses, asks = np.concatenate((places.crosses, places.crosses)), rows.remote
    heads, asked = (crosses & ~asks).nonzero()[0], asks.nonzero()[0]
    for x, slots in ((rows.exit_state[heads], heads), (rows.entry_state(asked), asked)):
        cut = int(slots.searchsorted(num_slots))
        yield x[:cut]
        yield x[cut:]
    middles = (asks[:num_slots] & (places.after[0] >= 0)).nonzero()[0]  # those of the mirror are the same
    yield from _rows_of_middles(plan, rows, middles)


def _rows_of_middles(plan: Plan, rows: Rows, slots: Ints) -> tuple[Ints, Ints, Ints]:
    """Offset rows of this rank's middles, in the order in which a state passes them, forward and mirrored, and map
    rows, in forward order."""
    num_slots, num_segments = len(rows.map_of_slot), len(plan.segments)
    if not plan.grid:
        return rows.offset_of_slot[slots], rows.offset_of_slot[slots + num_slots], rows.map_of_slot[slots]
    owner, k = runs(plan.segments.per_slot[slots])
    forward, mirrored = rows.first[slots[owner]] + k, rows.first[slots[owner] + num_slots] - k
    offsets = rows.offset_of_segment
    return offsets[forward], offsets[mirrored + num_segments], rows.map_of_segment[forward]


def _owner_hops(walk: _Walk, grid: int) -> tuple[Ints, int]:
    """Entry states of all chains, position after position, row by row where a fragment ships several: see `hops`, the
    direction as their kind; and how many states there are."""
    size, later = len(walk.row), (~walk.is_first[0]).nonzero()[0]
    num_asks, num_heads = len(later), size - len(later)
    # A fragment asks for what comes of the one before it: in the mirror the two change places.
    asks, source = np.concatenate((later, later - 1)), np.concatenate((later - 1, later))
    mirror = ZERO_ONE.repeat(num_asks)
    of_ask, of_source = asks + size * mirror, source + size * mirror
    position, dst = (x.reshape(-1)[of_ask] for x in (walk.position, walk.reply))
    is_first, head, src = (x.reshape(-1)[of_source] for x in (walk.is_first, walk.head, walk.reply))
    row, chain = walk.row[source], walk.chain[source]
    offset_row = np.where(is_first, head, num_heads + row)  # a first one's exit state came as a head
    if not grid:
        return np.array((mirror, chain, position, 1 - is_first, dst, src, offset_row, row)), num_asks
    passed = np.maximum(walk.shipped[source], 1)
    passing = num_asks - 1 + (passed > 1).cumsum()  # scratch between the rows of one fragment
    passing -= mirror * (passed[:num_asks] > 1).sum()
    ask, k = runs(passed)
    columns = mirror, chain, position, is_first, dst, src, offset_row, row, passed, passing
    mirror, chain, position, is_first, dst, src, offset_row, row, passed, passing = (x[ask] for x in columns)
    step = position * (int(passed.max()) + 1) + k
    dst, src = np.where(k + 1 == passed, dst, passing), np.where(k > 0, passing, src)
    row = row + np.where(mirror > 0, passed - 1 - k, k)
    found = np.array((mirror, chain, step, ~is_first, dst, src, offset_row + k, row))
    return found, num_asks + int(np.count_nonzero(walk.shipped > 1))
