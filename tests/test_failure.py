"""The parts of the failure protocol that need no process group: the board, who is to blame, the monitor."""

import pickle
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

import cp_gdn.monitor
from cp_gdn.board import Board, diagnose, late_ranks
from cp_gdn.failure import CommFailed, Failure, LinkError, Progress, Status, StoreLost
from cp_gdn.monitor import Monitor
from cp_gdn.transport import CopyTransport, CopyWorld, Stuck

IDLE = Status(doing="idle", waits=(), sent=(0, 0), received=(0, 0))


def boards(size: int, store: Any = None) -> list[Board]:
    store = store or HashStore()
    return [Board(store, rank, size, monitored=True) for rank in range(size)]


def test_the_first_failure_stays_also_over_a_roll_call() -> None:
    first, second = boards(2)
    assert first.failure() is None
    assert first.call_roll(IDLE, patience=0.0) == {0: IDLE, 1: None}
    assert second.report(Failure(rank=1, reason="one")) == Failure(rank=1, reason="one")
    assert first.report(Failure(rank=0, reason="zero")) == Failure(rank=1, reason="one")
    assert first.call_roll(IDLE) == Failure(rank=1, reason="one")


def test_each_roll_call_wants_new_answers() -> None:
    first, second = boards(2)
    for _ in range(2):
        assert first.call_roll(IDLE, patience=0.0) == {0: IDLE, 1: None}
        assert second.attend(IDLE) is None
    answer = threading.Timer(0.1, lambda: second.attend(IDLE))
    answer.start()
    assert first.call_roll(IDLE, patience=5.0) == {0: IDLE, 1: IDLE}


def test_roll_calls_in_quick_succession_are_all_answered() -> None:
    first, second, third = boards(3)
    assert first.call_roll(IDLE, patience=0.0) == {0: IDLE, 1: None, 2: None}
    assert second.call_roll(IDLE, patience=0.0) == {0: None, 1: IDLE, 2: None}
    third.attend(IDLE)
    assert [third.read(f"alive/{number}/2") is not None for number in (1, 2)] == [True, True]


def waiting(waits: tuple[int, ...], sent: tuple[int, ...], received: tuple[int, ...]) -> Status:
    return Status(doing="waiting", waits=waits, sent=sent, received=received)


BLAME = {
    "the peer": ({0: waiting((1,), (0, 0), (0, 1)), 1: IDLE}, [1]),
    "the end of a chain": (
        {
            0: waiting((1,), (0, 0, 0), (0, 1, 0)),
            1: waiting((2,), (0, 0, 0), (0, 0, 1)),
            2: waiting((), (0, 0, 0), (0, 0, 0)),
        },
        [2],
    ),
    "a receiver that has not posted": ({0: waiting((1,), (0, 1), (0, 0)), 1: IDLE}, [1]),
    "not one that has sent": (
        {
            0: waiting((1, 2), (0, 0, 0), (0, 1, 1)),
            1: waiting((), (1, 0, 0), (0, 0, 0)),
            2: waiting((), (0, 0, 0), (0, 0, 0)),
        },
        [2],
    ),
    "all of a circle": ({0: waiting((1,), (0, 0), (0, 1)), 1: waiting((0,), (0, 0), (1, 0))}, [1]),
    "nobody that is not known": ({0: waiting((1,), (0, 0), (0, 1))}, []),
}


@pytest.mark.parametrize("case", BLAME)
def test_blame_follows_who_waits_for_whom(case: str) -> None:
    answers, expected = BLAME[case]
    assert late_ranks(0, answers) == expected


def test_a_broken_link_between_living_ranks_says_so() -> None:
    first, second = boards(2)
    answer = threading.Timer(0.1, lambda: second.attend(IDLE))
    answer.start()
    failure = diagnose(first, IDLE, LinkError("connection reset", peers=(1,)), timeout=1.0)
    assert failure.rank == 1
    assert "connection reset" in failure.reason
    assert "every rank is alive" in failure.reason


def test_a_lost_store_is_named() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    board = Board(client, 1, 2, monitored=True, host=0)
    board.write("key", "value")
    assert board.read("key") == "value"
    del server
    time.sleep(0.5)  # s, for the server's end to arrive
    with pytest.raises(StoreLost, match=r"its host .* is gone"):
        board.read("key")
    failure = diagnose(board, IDLE, LinkError("connection closed", peers=(0,)), timeout=1.0)
    assert failure.rank == 0
    assert "unreachable" in failure.reason


def test_collecting_gives_everyones_value_to_all() -> None:
    got: dict[int, list[str]] = {}

    def collect(board: Board) -> None:
        got[board.rank] = board.collect("key", f"value {board.rank}", 5.0)

    threads = [threading.Thread(target=collect, args=(board,)) for board in boards(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {rank: ["value 0", "value 1", "value 2"] for rank in range(3)}


def test_collecting_names_the_ranks_that_did_not_come() -> None:
    first, second, _ = boards(3)
    second.write("key/1", "value 1")
    with pytest.raises(LinkError) as error:
        first.collect("key", "value 0", timeout=0.1)
    assert (error.value.late, error.value.peers) == (True, (2,))


class DeviceLink(CopyTransport):
    """A transport whose device has been waiting for `seconds`, as one over NCCL would say."""

    kind = "nccl"

    def __init__(self, seconds: float) -> None:
        super().__init__(CopyWorld(2), 0)
        self.seconds, self.aborted = seconds, threading.Event()

    def stuck(self) -> Stuck | None:
        return Stuck(doing="in 'STATE' on the device", peers=(1,), seconds=self.seconds) if self.seconds else None

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> "threading.Event":
    """Set when the monitor would end the process."""
    event = threading.Event()
    monkeypatch.setattr(cp_gdn.monitor.os, "_exit", lambda code: event.set())
    monkeypatch.setattr(cp_gdn.monitor, "LAST_CALL", 1.0)
    return event


def test_a_device_that_waits_too_long_is_aborted_and_the_process_ended(ended: Any, capsys: Any) -> None:
    first, second = boards(2)
    link, progress = DeviceLink(seconds=30.0), Progress(2)
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.1):
            second.attend(IDLE)

    threading.Thread(target=answer, daemon=True).start()
    progress.received[1] = 1  # one message more than rank 1 has sent
    monitor = Monitor(first, link, progress, timeout=25.0)
    assert link.aborted.wait(10.0)
    assert ended.wait(10.0)
    stop.set()
    monitor.stop()
    assert progress.failed is not None
    assert progress.failed.rank == 1
    assert "did not arrive within 25 s" in progress.failed.reason
    assert "did not arrive within 25 s" in capsys.readouterr().err


def test_a_failure_that_was_raised_does_not_end_the_process(ended: Any) -> None:
    first, second = boards(2)
    link, progress = DeviceLink(seconds=0.0), Progress(2)
    monitor = Monitor(first, link, progress, timeout=25.0)
    second.report(Failure(rank=1, reason="on purpose"))
    assert link.aborted.wait(10.0)
    progress.raised = True
    assert not ended.wait(2.0)
    monitor.stop()
    assert progress.failed == Failure(rank=1, reason="on purpose")


def test_a_failure_keeps_its_words_through_pickle_and_text() -> None:
    error = pickle.loads(pickle.dumps(CommFailed(2, "no memory")))
    assert (error.rank, error.reason) == (2, "no memory")
    assert str(error) == "the context-parallel group failed, by rank 2: no memory"
    assert "not known" in str(CommFailed(-1, "lost"))
