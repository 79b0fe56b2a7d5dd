"""What processes of a run write of themselves, and what one that ends by an exception finds of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from cp_gdn import lifesigns
from cp_gdn.failure import CommFailed
from cp_gdn.lifesigns import LifeSigns, last_words

SIZE = 4
SHORT = 0.3  # s; signs come more often than that here


class Lost(HashStore):
    """A store whose host may go away."""

    gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Broken pipe\nException raised from sendBytes")
        return super().check(keys)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LifeSigns]]:
    """The signs of all processes of a run; they have no thread of their own after the test."""
    monkeypatch.setattr(lifesigns, "BEAT", 0.05)
    monkeypatch.setattr(LifeSigns.findings, "__defaults__", (SHORT,))
    store = Lost()
    signs = [LifeSigns(store, rank, SIZE) for rank in range(SIZE)]
    yield signs
    for each in signs:
        each.end()


def freeze(signs: LifeSigns) -> None:
    """What is left of a process that was killed."""
    signs._stop.set()
    signs._thread.join()


def test_where_all_live_there_is_nothing_to_say(run: list[LifeSigns]) -> None:
    assert run[0].findings() == []


@pytest.mark.parametrize(("lost", "said"), [((2,), "rank 2"), ((1, 3), "ranks 1, 3"), ((0,), "rank 0")])
def test_processes_that_give_no_sign_are_named_by_every_other_one(
    run: list[LifeSigns], lost: tuple[int, ...], said: str
) -> None:
    for rank in lost:
        freeze(run[rank])
    others = [signs for rank, signs in enumerate(run) if rank not in lost]
    found = last_words(others[0], RuntimeError("Connection closed by peer"))
    assert found == [f"{said} of the run gave no sign of life for 0.3 s: lost, killed or frozen"]
    assert others[1].findings() == found, "and that is more than that another one ended by it first"


def test_the_first_that_ended_is_named_with_its_reason(run: list[LifeSigns]) -> None:
    assert last_words(run[3], ValueError("a bad label\nin a long text")) == []
    assert last_words(run[1], CommFailed(0, "something that followed")) == [
        "rank 3 of the run ended first: ValueError: a bad label"
    ]
    assert run[0].findings() == ["rank 3 of the run ended first: ValueError: a bad label"]


def test_a_process_does_not_call_itself_the_first(run: list[LifeSigns]) -> None:
    assert last_words(run[2], RuntimeError("out of memory")) == []


def test_a_script_that_came_to_its_end_is_neither_lost_nor_failed(run: list[LifeSigns]) -> None:
    run[1].end()
    run[1].end("too late")
    assert run[0].findings() == ["rank 1 of the run had come to the end of the script"]


def test_a_lost_store_is_said_to_be_lost(run: list[LifeSigns]) -> None:
    run[0]._store.gone = True  # type: ignore[attr-defined]
    assert last_words(run[0], RuntimeError("Connection reset by peer")) == [
        "the run's store cannot be reached: its host, rank 0's machine or the launcher, is gone (Broken pipe)"
    ]


def test_ctrl_c_is_no_failure(run: list[LifeSigns]) -> None:
    assert last_words(run[0], KeyboardInterrupt()) == []
    assert run[1].findings() == []


def test_a_process_warns_of_the_next_one_where_nothing_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, run: list[LifeSigns]
) -> None:
    monkeypatch.setattr(lifesigns, "ALARM", 0.2)
    freeze(run[2])
    with caplog.at_level("WARNING", logger="cp_gdn"):
        run[1]._thread.join(timeout=3.0)
    assert caplog.messages == ["cp_gdn: rank 2 of the run gave no sign of life for 0.3 s: lost, killed or frozen"]
