"""The board: one Comm's corner of the group's store, where failures, roll calls and agreements stand. No CUDA call.

The key `alarm` holds nothing, then a roll call ("roll 2") or a failure as json; the first failure stays. A rank that
fails writes there before it closes anything, so a rank whose wait breaks finds the reason. If there is none (a killed
process), a roll call finds who is gone.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch.distributed import Store  # type: ignore[attr-defined]

from .failure import Failure, LinkError, Status, StoreLost

ROLL_PATIENCE = (
    3.0  # s a rank has to answer a roll call; monitors look every 0.25 s, the rest is for a busy interpreter
)
_ALARM = "alarm"
_ROLL = "roll "


class Board:
    """One Comm's keys in the store. Every method raises StoreLost if the store cannot be reached."""

    def __init__(self, store: Store, rank: int, size: int, *, monitored: bool, host: int = -1) -> None:
        self.rank, self.size, self.monitored = rank, size, monitored
        self.host = host  # the rank that usually hosts the store, -1 if it is not a member
        self._store = store
        self._answered = 0

    def for_thread(self) -> "Board":
        """The same board over a connection of its own: a store's client is locked while another thread waits in it."""
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return Board(store, self.rank, self.size, monitored=self.monitored, host=self.host)

    def read(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise _lost(error) from error

    def write(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise _lost(error) from error

    def failure(self) -> Failure | None:
        """The first failure of the group, if there is one."""
        return _failure(self.read(_ALARM) or "")

    def report(self, failure: Failure) -> Failure:
        """Put the failure on the board unless one is there; returns the one that counts, the first."""
        seen, new = "", json.dumps(asdict(failure))
        while True:
            now = self._swap(seen, new)
            first = _failure(now)
            if first is not None:
                return first
            seen = now  # a roll call: a failure takes its place

    def call_roll(self, own: Status, patience: float = ROLL_PATIENCE) -> dict[int, Status | None] | Failure:
        """What every rank is doing, None for those that do not answer in time; or the failure, if one comes up."""
        seen = self.read(_ALARM) or ""
        if _failure(seen) is None:
            seen = self._swap(seen, f"{_ROLL}{_roll_number(seen) + 1}")  # or the one another rank has just called
        number, end = _roll_number(seen), time.monotonic() + patience
        self.write(f"alive/{number}/{self.rank}", json.dumps(asdict(own)))  # the caller may be the monitor
        keys = [f"alive/{number}/{rank}" for rank in range(self.size)]
        while True:
            answers = [self.read(key) for key in keys]
            failure = self.failure()
            if failure is not None:
                return failure
            if None not in answers or time.monotonic() > end:
                return {rank: _status(answer) for rank, answer in enumerate(answers)}
            time.sleep(0.05)

    def attend(self, status: Status) -> Failure | None:
        """The monitor's look at the board: answer new roll calls, return the failure if there is one."""
        alarm = self.read(_ALARM) or ""
        while self._answered < _roll_number(alarm):  # ranks may call one after the other between two looks
            self._answered += 1
            self.write(f"alive/{self._answered}/{self.rank}", json.dumps(asdict(status)))
        return _failure(alarm)

    def collect(self, key: str, value: str, timeout: float) -> list[str]:
        """Every rank's value, in rank order, on every rank: rank 0 reads all and publishes one list, O(W) in all.

        Raises CommFailed if a failure comes up meanwhile and LinkError with the ranks that did not come in time.
        """
        end, mine = time.monotonic() + timeout, [f"{key}/{rank}" for rank in range(self.size)]
        self.write(mine[self.rank], value)
        if self.rank == 0:
            self._await(mine, mine, end)
            self.write(f"{key}/all", json.dumps([self.read(k) for k in mine]))
        else:
            self._await([f"{key}/all"], mine, end)
        return json.loads(self.read(f"{key}/all") or "[]")

    def forget(self, key: str) -> None:
        """Rank 0 deletes the keys of a collect() that all ranks have left: they must not pile up in the store."""
        try:
            for name in [f"{key}/all", *(f"{key}/{rank}" for rank in range(self.size))] if self.rank == 0 else []:
                self._store.delete_key(name)
        except RuntimeError as error:
            raise _lost(error) from error

    def _await(self, keys: list[str], mine: list[str], end: float) -> None:
        pause = 0.0005
        while True:
            try:
                if self._store.check(keys):
                    return
            except RuntimeError as error:
                raise _lost(error) from error
            failure = self.failure()
            if failure is not None:
                raise failure.error()
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(mine) if self.read(key) is None]
                raise LinkError("the deadline passed", peers=missing or [0], late=True)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _swap(self, seen: str, new: str) -> str:
        try:
            return self._store.compare_set(_ALARM, seen, new).decode()
        except RuntimeError as error:
            raise _lost(error) from error


def diagnose(board: Board, own: Status, error: LinkError, timeout: float) -> Failure:
    """The failure behind a broken or late message: the board's, else a dead rank, else the rank that all wait for."""
    try:
        roll: Mapping[int, Status | None] | Failure | None = board.failure()
        if roll is None:
            roll = board.call_roll(own) if board.monitored else {}
    except StoreLost as lost:
        return Failure(rank=board.host, reason=f"{lost}; rank {board.rank} was {own.doing}: {error}")
    if isinstance(roll, Failure):
        return roll
    dead = [rank for rank, status in roll.items() if status is None]
    if dead:
        return Failure(
            rank=dead[0],
            reason=f"{_ranks(dead)} gave no sign of life for {ROLL_PATIENCE:g} s: its process ended, was killed or is "
            f"frozen, or it has not made its Comm; rank {board.rank} was {own.doing}",
        )
    if not error.late:
        peers = error.peers or (-1,)
        return Failure(rank=peers[0], reason=f"{error}; rank {board.rank} was {own.doing}, and every rank is alive")
    answers = {rank: status for rank, status in roll.items() if status is not None} | {board.rank: own}
    late = late_ranks(board.rank, answers) or list(error.peers) or [-1]
    other = answers[late[0]].doing if late[0] in answers else "not known"
    return Failure(
        rank=late[0],
        reason=f"{_ranks(late)} did not arrive within {timeout:g} s: rank {board.rank} was {own.doing}, rank {late[0]} "
        f"was {other}. If it is only slow, give it more time: Comm(group, timeout=...)",
    )


def late_ranks(me: int, answers: Mapping[int, Status]) -> list[int]:
    """The ranks at the ends of who-waits-for-whom, from `me`: those that keep others waiting and wait for nobody."""

    def holds_up(rank: int) -> list[int]:
        own = answers[rank]
        peers = ((p, answers[p]) for p in own.waits if p in answers)
        return [p for p, s in peers if s.sent[rank] < own.received[p] or s.received[rank] < own.sent[p]]

    seen, front, ends = {me}, [me], set()
    while front:
        rank = front.pop()
        nexts = holds_up(rank)
        if not nexts and rank != me:
            ends.add(rank)
        front += [p for p in nexts if p not in seen]
        seen.update(nexts)
    return sorted(ends) or holds_up(me)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _lost(error: RuntimeError) -> StoreLost:
    text = str(error).split("\n", 1)[0]
    return StoreLost(f"the store of the group is unreachable, its host (world rank 0 or the launcher) is gone: {text}")


def _roll_number(alarm: str) -> int:
    return int(alarm.removeprefix(_ROLL)) if alarm.startswith(_ROLL) else 0


def _failure(alarm: str) -> Failure | None:
    return Failure(**json.loads(alarm)) if alarm.startswith("{") else None


def _status(answer: str | None) -> Status | None:
    if answer is None:
        return None
    fields = json.loads(answer)
    return Status(doing=fields["doing"], **{k: tuple(fields[k]) for k in ("waits", "sent", "received")})
