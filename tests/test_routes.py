"""Messages of any pack, a function of the plan alone: both ends agree, no cycle, few batches, nothing for nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_gdn import Comm, twin
from cp_gdn.a2a.routes import heads_of
from cp_gdn.calibration import H200_MODEL
from cp_gdn.comm import Batch, Message
from cp_gdn.exchange import Sizes, choose, choose_exchange
from cp_gdn.flow import Flow
from cp_gdn.layout import Partition, partition
from tests.cases import LAYOUTS, WORLDS, Content, Run, cut
from tests.pack import Share, context_of, make_pack, run_in_twin, step
from tests.plans import Drawn, RankPlan, drawn_plans, plan_all
from tests.test_twin import assert_lists_match

EXAMPLES = settings(max_examples=60, deadline=None)


# ---- ring: what the plan says both ends send and receive -------------------------------------------------------------


def borders(made: RankPlan, part: Partition, reverse: bool) -> Iterator[tuple[str, int, int, int, int]]:
    """(direction, peer, step, document, border) of every state that a rank passes on or takes over."""
    rows = np.arange(len(part.table.doc))[part.rows(made.plan.rank)]
    doc, start = part.table.doc[rows], part.table.offset[rows]
    end = start + part.table.length[rows]
    enters, leaves = (end, start) if reverse else (start, end)
    exits = made.rows.exit_state.reshape(2, -1)[int(reverse)]
    slot_of_exit = {int(s): slot for slot, s in enumerate(exits) if s >= len(made.plan.segments)}
    steps = made.routes.ring.adjoint if reverse else made.routes.ring.forward
    states = made.routes.ring.states
    for number, ring_step in enumerate(steps):
        for parcel in ring_step.receives:
            for slot in made.plan.segments.slot[states[parcel.index][0].tolist()]:
                yield "recv", parcel.peer, number - 1, int(doc[slot]), int(enters[slot])
        for parcel in ring_step.sends:
            for slot in (slot_of_exit[int(s)] for s in states[parcel.index][0]):
                yield "send", parcel.peer, number, int(doc[slot]), int(leaves[slot])


@EXAMPLES
@given(drawn=drawn_plans())
def test_on_every_pair_the_states_sent_are_those_received_in_the_same_order_and_step(drawn: Drawn) -> None:
    made = plan_all(drawn, "ring")
    for reverse in (False, True):
        sent: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for rank, of_rank in enumerate(made):
            for direction, peer, *what in borders(of_rank, drawn.part, reverse):
                assert peer != rank
                pair = (rank, peer) if direction == "send" else (peer, rank)
                (sent if direction == "send" else received)[pair].append(tuple(what))
        assert sent == received
        assert sum(len(states) for states in sent.values()) == len(set(crossings(drawn.part)))


def crossings(part: Partition) -> list[tuple[int, int]]:
    """(document, offset) of every cut between two ranks."""
    t = part.table
    rows = [row for row in range(len(t.doc)) if t.prev[row] >= 0 and t.rank[t.prev[row]] != t.rank[row]]
    return [(int(t.doc[row]), int(t.offset[row])) for row in rows]


# ---- ring: the batches that are really posted ------------------------------------------------------------------------


@dataclass
class Posted:
    """What a rank posted, and a wait that brings zeros."""

    batches: list[tuple[list[int], list[int]]] = field(default_factory=list)
    size: int = 0

    def post(self, batch: Batch) -> Any:
        self.batches.append(([peer for peer, _ in batch.sends], [peer for peer, _ in batch.recvs]))
        return Zeros([torch.zeros(shape, dtype=batch.dtype) for _, shape in batch.recvs])


@dataclass(frozen=True)
class Zeros:
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        return self.tensors


def posted_batches(made: RankPlan, reverse: bool) -> list[tuple[list[int], list[int]]]:
    """(send peers, receive peers) of each batch of the ring exchange itself, run on states of one number."""
    posted = Posted()
    rows = made.rows
    flow = Flow(
        states=torch.zeros(max(rows.num_states[reverse], 1), 1, 1, 1),
        maps=torch.zeros(max(rows.num_maps, 1), 1, 1, 1),
        offsets=torch.zeros(max(rows.num_offsets[reverse], 1), 1, 1, 1),
        adjoint=reverse,
        kept=None,
        purpose="STATE",
    )
    exchange = made.routes.exchange(posted, flow)  # type: ignore[arg-type]
    exchange.start()
    exchange.wait()
    return posted.batches


def finish_all_or_nothing(ranks: list[list[tuple[list[int], list[int]]]]) -> bool:
    """Whether all batches end when each ends as a whole, once every message in it has its other end under way."""
    number: Counter[tuple[int, int, str]] = Counter()
    place: dict[tuple[int, int, str, int], int] = {}
    needs: list[list[list[tuple[int, int, str, int]]]] = []
    for rank, batches in enumerate(ranks):
        needs.append([])
        for index, (sends, receives) in enumerate(batches):
            needs[rank].append([])
            ends = [(rank, peer, "send", "recv") for peer in sends] + [
                (peer, rank, "recv", "send") for peer in receives
            ]
            for source, target, mine, other in ends:
                count = number[source, target, mine]
                number[source, target, mine] += 1
                place[source, target, mine, count] = index
                needs[rank][index].append((source, target, other, count))
    current, moved = [0] * len(ranks), True
    while moved:
        moved = False
        for rank, batches in enumerate(ranks):
            if current[rank] == len(batches):
                continue
            wanted = [(end[0] if end[2] == "send" else end[1], place[end]) for end in needs[rank][current[rank]]]
            if all(current[peer] >= index for peer, index in wanted):
                current[rank], moved = current[rank] + 1, True
    return current == [len(batches) for batches in ranks]


def test_the_simulation_sees_a_cycle() -> None:
    waits_first = [([], [1]), ([1], [])]
    assert not finish_all_or_nothing([waits_first, [([], [0]), ([0], [])]])
    assert finish_all_or_nothing([waits_first, [([0], []), ([], [0])]])
    assert finish_all_or_nothing([[([1], [1])], [([0], [0])]])


@EXAMPLES
@given(drawn=drawn_plans())
def test_batches_that_end_as_a_whole_close_no_cycle(drawn: Drawn) -> None:
    """A receive that waits for something later in its sender's batch hangs with NCCL, not with gloo."""
    made = plan_all(drawn, "ring")
    for reverse in (False, True):
        assert finish_all_or_nothing([posted_batches(of_rank, reverse) for of_rank in made])


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=300),
    world=st.integers(2, 8),
    layout=st.sampled_from(LAYOUTS),
)
def test_batches_are_few_however_many_documents_cross(lengths: list[int], world: int, layout: str) -> None:
    drawn = Drawn(part=cut(lengths, world, layout), p_vector=(1,) * world, grid=0)
    made = plan_all(drawn, "ring")
    for reverse in (False, True):
        ranks = [posted_batches(of_rank, reverse) for of_rank in made]
        assert finish_all_or_nothing(ranks)
        for batches in ranks:
            assert len(batches) <= 2 * world
            assert all(len(set(peers)) == len(peers) for batch in batches for peers in batch)


# ---- a2a -------------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(drawn=drawn_plans())
def test_all_ranks_count_every_ranks_summaries_and_replies_alike(drawn: Drawn) -> None:
    made = plan_all(drawn, "a2a")
    if not crossings(drawn.part):
        assert [of_rank.routes.owners for of_rank in made] == [None] * len(made)
        return
    for direction in (0, 1):
        owners = [of_rank.routes.owners[direction] for of_rank in made if of_rank.routes.owners]
        for counts in ("num_heads", "num_rows", "num_replies", "num_states"):
            assert len({getattr(owner, counts) for owner in owners}) == 1
        for rank, owner in enumerate(owners):
            assert len(owner.head_states) == owner.num_heads[rank]
            assert len(owner.offset_rows) == len(owner.map_rows) == owner.num_rows[rank]
            assert len(owner.replies) == owner.num_replies[rank]
            assert (owner.map_rows >= 0).all()


@given(heads=st.integers(1, 70), world=st.integers(1, 20))
def test_every_value_head_has_one_owner(heads: int, world: int) -> None:
    owned = [heads_of(rank, world, heads) for rank in range(world)]
    assert [h for s in owned for h in range(heads)[s]] == list(range(heads))
    assert max(s.stop - s.start for s in owned) == -(-heads // world)


# ---- messages of real calls ------------------------------------------------------------------------------------------


def shares_of(lengths: tuple[int, ...], run: Run) -> list[Share]:
    return run_in_twin(run, make_pack(Content(pack=lengths, heads=(1, 2), head_dims=(3, 2))))


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple),
    run=st.builds(
        Run,
        world=st.integers(2, 6),
        layout=st.sampled_from((*LAYOUTS, "explicit")),
        exchange=st.sampled_from(("ring", "a2a", "auto")),
        segments=st.sampled_from((1, 2, "grid:1")),
        save_transfer=st.booleans(),
    ),
)
def test_messages_of_a_forward_and_a_backward_are_alike_on_both_ends(lengths: tuple[int, ...], run: Run) -> None:
    """The transport matches by order alone: two tensors of one size to the same peer must not be swapped."""
    shares = shares_of(lengths, run)
    assert_lists_match(shares)
    purposes = {m.purpose for share in shares for m in share.messages}
    assert purposes <= {"STATE", "ADJOINT", "STATE_HOME", "ADJOINT_HOME"}
    assert bool(purposes) == bool(crossings(cut(lengths, run.world, run.layout, run.align)))


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_posted_where_every_document_ends_on_the_edge_of_its_rank(world: int, exchange: str) -> None:
    """Ranks without tokens take part and post nothing either; neighbours on one rank are copies, never messages."""
    lengths = (30, 0) * (world - 1) or (5, 25)
    fragments = [[(2 * rank, 20, 10), (2 * rank, 0, 20)] for rank in range(world - 1)] + [[]]
    part = partition(np.cumsum([0, *lengths]), world, fragments=fragments if world > 1 else [[(0, 0, 5), (1, 0, 25)]])
    assert choose_exchange(exchange, part, 4, (16, 16), grid=False, itemsize=4).kind == "none"
    pack = make_pack(Content(pack=tuple(lengths)))

    def on_rank(comm: Comm) -> list[Message]:
        with comm.record() as messages:
            step(context_of(part, comm, Run(world=world, exchange=exchange), pack), pack)
        return messages

    assert twin(world, on_rank) == [[]] * world


# ---- auto ------------------------------------------------------------------------------------------------------------


def choice(part: Partition, asked: str = "auto", heads: int = 16, dim: int = 128, grid: bool = False) -> Any:
    return choose_exchange(asked, part, heads, (dim, dim), grid=grid, itemsize=4)


def test_auto_takes_the_ring_for_short_chains_and_a2a_for_long_ones() -> None:
    assert choice(partition([0, 4096], 2, "contiguous")).kind == "ring"
    assert choice(partition([0, 4096], 8, "zigzag"), heads=8, dim=16).kind == "a2a"
    assert "modelled us per direction" in choice(partition([0, 4096], 2, "contiguous")).reason


def test_auto_takes_the_ring_in_grid_mode() -> None:
    found = choice(partition([0, 4096], 8, "zigzag", align=64), grid=True)
    assert (found.kind, found.reason[:9]) == ("ring", "grid mode")


def test_auto_counts_what_the_few_owners_receive_where_ranks_outnumber_heads() -> None:
    """Eight ranks, and states and maps of the same bytes in all: two heads have two owners, each for all fragments."""
    kinds = {}
    for documents in (1, 32):
        part = partition(range_of_documents(documents), 8)
        for heads in (8, 2):
            sizes = Sizes(heads=heads, state=1 << 19, square=1 << 19)
            kinds[documents, heads] = choose("auto", part, sizes, H200_MODEL.times, grid=False).kind
    assert kinds == {(1, 8): "a2a", (1, 2): "a2a", (32, 8): "a2a", (32, 2): "ring"}


def test_auto_takes_the_ring_where_the_summaries_would_fill_the_memory_of_an_owner() -> None:
    part, free = partition([0, 4096], 64, "zigzag"), replace(H200_MODEL.times, link_mib=0)
    found = {}
    for mib in (8, 256):
        sizes = Sizes(heads=4, state=mib << 20, square=mib << 20)
        found[mib] = choose("auto", part, sizes, free, grid=False).kind
    assert found == {8: "a2a", 256: "ring"}


def range_of_documents(count: int) -> list[int]:
    return list(range(0, 4096 * count + 1, 4096))


def test_an_exchange_that_is_asked_for_is_taken_and_an_unknown_one_is_refused() -> None:
    long = partition([0, 4096], 8, "zigzag")
    assert [choice(long, asked).kind for asked in ("ring", "a2a")] == ["ring", "a2a"]
    with pytest.raises(ValueError, match=r"exchange: got 'gather', expected one of \('auto', 'ring', 'a2a'\)"):
        choice(long, "gather")
