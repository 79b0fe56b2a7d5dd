"""The twin: ranks as threads, messages as copies."""

import threading

import pytest
import torch

from cp_gdn.comm import Batch, Comm, CommFailed, PlanDisagreement
from cp_gdn.twin import twin
from tests.dist.round_trips import Trip, pair_count, round_trips, values

CPU = torch.device("cpu")
WORLDS = (1, 2, 3, 5)


def batch(sends=(), recvs=(), purpose="STATE", dtype=torch.float32) -> Batch:
    return Batch(purpose=purpose, sends=tuple(sends), recvs=tuple(recvs), dtype=dtype, device=CPU)


def pieces(rank: int, world: int) -> torch.Tensor:
    """What all_to_all of round_trips must give on a rank, made without a Comm."""
    parts = []
    for peer in range(world):
        counts = [pair_count(peer, target) for target in range(world)]
        whole = values(peer, 3, sum(counts), dtype=torch.float32)
        parts.append(whole.split(counts)[rank])
    return torch.cat(parts)


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_brings_what_the_peers_gave(world: int) -> None:
    for rank, trip in enumerate(twin(world, lambda comm: round_trips(comm, torch.float32))):
        got = trip.tensors
        counts = [(2 * r) % 3 for r in range(world)]
        rows = [values(r, 4, counts[r], 2, dtype=torch.float32) for r in range(world)]
        total = sum(values(r, 5, 3, 4, dtype=torch.float32) for r in range(world))
        assert torch.equal(got["all_to_all"], pieces(rank, world))
        assert torch.equal(got["all_gather"], torch.cat(rows))
        assert got["all_gather_nothing"].shape == (0, 2)
        assert torch.equal(got["all_reduce_sum"], total)
        if world > 1:
            before = (rank - 1) % world
            assert torch.equal(got["state"], values(before, 1, 4, 6, dtype=torch.float32).t())
            assert torch.equal(got["tail"], values(before, 2, 24, dtype=torch.float32))
            assert torch.equal(got["doubled"], 2 * got["tail"])
            assert got["nothing"].shape == (0, 3)


@pytest.mark.parametrize("world", WORLDS)
def test_sent_lists_equal_received_lists_on_every_pair(world: int) -> None:
    assert_lists_match(twin(world, lambda comm: round_trips(comm, torch.bfloat16)))


def assert_lists_match(trips: list[Trip]) -> None:
    def between(rank: int, direction: str, peer: int) -> list[tuple[str, int, torch.dtype]]:
        messages = trips[rank].messages
        return [(m.purpose, m.numel, m.dtype) for m in messages if (m.direction, m.peer) == (direction, peer)]

    for source in range(len(trips)):
        assert between(source, "send", source) == []
        for target in range(len(trips)):
            assert between(source, "send", target) == between(target, "recv", source)


def test_nothing_is_sent_where_nothing_is_to_be_sent() -> None:
    def quiet(comm: Comm) -> list:
        with comm.record() as messages:
            assert comm.post(batch()).wait() == []
            comm.all_gather("ROWS", torch.empty(0, 3), [0, 0])
            comm.all_to_all(
                "SUMMARY", torch.ones(2), [2, 0] if comm.rank == 0 else [0, 2], [2, 0][:: 1 - 2 * comm.rank]
            )
        return messages

    assert twin(2, quiet) == [[], []]


MISUSE = {
    "to oneself": (lambda comm: comm.post(batch(sends=[(0, torch.ones(1))])), ValueError, "peer: got 0"),
    "from oneself": (lambda comm: comm.post(batch(recvs=[(0, (1,))])), ValueError, "peer: got 0"),
    "unknown peer": (lambda comm: comm.post(batch(sends=[(2, torch.ones(1))])), ValueError, "peer: got 2"),
    "other dtype": (lambda comm: comm.post(batch(sends=[(1, torch.ones(1).double())])), ValueError, "torch.float64"),
    "too few counts": (lambda comm: comm.all_to_all("X", torch.ones(1), [1], [1]), ValueError, "expected 2 counts"),
    "counts below 0": (lambda comm: comm.all_to_all("X", torch.ones(1), [2, -1], [1, 0]), ValueError, "0 or more"),
    "counts of more": (
        lambda comm: comm.all_to_all("X", torch.ones(3), [0, 2], [0, 1]),
        ValueError,
        r"expected \(2,\)",
    ),
    "2-D pieces": (lambda comm: comm.all_to_all("X", torch.ones(2, 1), [0, 2], [0, 1]), ValueError, r"expected \(2,\)"),
    "own piece": (lambda comm: comm.all_to_all("X", torch.ones(1), [1, 0], [0, 0]), ValueError, "keeps 1 elements"),
    "other rows": (lambda comm: comm.all_gather("X", torch.ones(2, 1), [1, 1]), ValueError, "expected 1 rows"),
    "no rows": (lambda comm: comm.all_gather("X", torch.tensor(1.0), [1, 1]), ValueError, "expected 1 rows"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_before_any_message(case: str) -> None:
    call, error, text = MISUSE[case]

    def use(comm: Comm) -> None:
        if comm.rank == 0:
            with comm.record() as messages, pytest.raises(error, match=text):
                call(comm)
            assert messages == []

    twin(2, use)


def test_a_pending_is_waited_for_once() -> None:
    def use(comm: Comm) -> None:
        pending = comm.post(batch(sends=[(1 - comm.rank, torch.ones(1))], recvs=[(1 - comm.rank, (1,))]))
        pending.wait()
        with pytest.raises(RuntimeError, match="called twice"):
            pending.wait()

    twin(2, use)


def test_a_closed_comm_refuses_calls() -> None:
    comm = Comm.alone()
    comm.close()
    comm.close()
    with pytest.raises(RuntimeError, match="closed"):
        comm.post(batch())
    with pytest.raises(ValueError, match="timeout: got 0"):
        Comm(timeout=0)


def test_gradients_do_not_reach_into_messages() -> None:
    def use(comm: Comm) -> bool:
        x = torch.ones(2, requires_grad=True)
        got = comm.all_gather("ROWS", x, [2] * comm.size)
        parts = comm.all_to_all("SUMMARY", x, [1, 1], [1, 1]).wait()
        (row,) = comm.post(batch(sends=[(1 - comm.rank, x)], recvs=[(1 - comm.rank, (2,))])).wait()
        return any(y.requires_grad for y in (got, parts, row, comm.all_reduce_sum("SUM", x)))

    assert twin(2, use) == [False, False]


def disagree(comm: Comm) -> list[str]:
    """Three agreements: good, bad, good."""
    comm.agree("context", {"layout": "zigzag", "dtype": "bf16"})
    texts = []
    fields = {"layout": "zigzag" if comm.rank else "contiguous", "dtype": "bf16"} | ({"conv": "4"} if comm.rank else {})
    try:
        comm.agree("context", fields)
    except PlanDisagreement as error:
        texts.append(str(error))
    comm.agree("context", {"layout": "zigzag"})
    comm.all_reduce_sum("SUM", torch.ones(1))
    return texts


DISAGREEMENT = """context: the ranks of this group did not give the same values; nothing was sent.
  layout: rank 0: contiguous, rank 1: zigzag, rank 2: zigzag
  conv: rank 0: (not given), rank 1: 4, rank 2: 4"""


def test_a_disagreement_lists_every_value_on_every_rank_and_leaves_the_comm_usable() -> None:
    assert twin(3, disagree) == [[DISAGREEMENT]] * 3


def test_an_agreement_about_something_else_is_a_disagreement() -> None:
    with pytest.raises(PlanDisagreement, match="call: rank 0: zero, rank 1: one"):
        twin(2, lambda comm: comm.agree(("zero", "one")[comm.rank], {}))


def test_an_exception_ends_the_other_ranks_and_is_raised() -> None:
    seen = {}

    def use(comm: Comm) -> None:
        if comm.rank == 1:
            raise KeyError("on purpose")
        try:
            comm.post(batch(recvs=[(2 - comm.rank, (1,))])).wait()
        except CommFailed as error:
            seen[comm.rank] = (error.rank, error.reason)
            raise

    with pytest.raises(KeyError, match="on purpose"):
        twin(3, use)
    assert seen == dict.fromkeys((0, 2), (1, "twin: KeyError: 'on purpose'"))


LOST = {
    "a message that never comes": (lambda comm: comm.post(batch(recvs=[(1, (1,))])).wait(), "rank 1 did not arrive"),
    "another purpose": (lambda comm: comm.post(batch(recvs=[(1, (2,))], purpose="TAIL")).wait(), "sent .'STATE', 2"),
    "another size": (lambda comm: comm.post(batch(recvs=[(1, (3,))])).wait(), "expected .'STATE', 3"),
}


@pytest.mark.parametrize("case", LOST)
def test_messages_that_do_not_match_are_reported(case: str) -> None:
    call, text = LOST[case]

    def use(comm: Comm) -> None:
        if comm.rank == 0:
            call(comm)
        elif "never" not in case:
            comm.post(batch(sends=[(0, torch.ones(2))])).wait()

    with pytest.raises(CommFailed, match=text):
        twin(2, use, timeout=0.5)


def test_a_message_nobody_took_is_reported() -> None:
    def use(comm: Comm) -> None:
        if comm.rank == 1:
            comm.post(batch(sends=[(0, torch.ones(2))])).wait()

    with pytest.raises(RuntimeError, match="message 0 from rank 1 to rank 0"):
        twin(2, use)


def test_one_rank_alone_is_never_poisoned() -> None:
    comm = Comm.alone()
    with pytest.raises(ValueError, match="bad input"), comm.guard("forward"):
        raise ValueError("bad input")
    comm.fail("for no reason")
    assert torch.equal(comm.all_reduce_sum("SUM", torch.ones(2)), torch.ones(2))


def test_the_twin_leaves_no_thread() -> None:
    twin(3, lambda comm: None)
    assert [t for t in threading.enumerate() if "twin" in t.name or "cp_gdn" in t.name] == []
