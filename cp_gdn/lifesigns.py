"""Signs of life of all processes of a run, so that the one that is gone has a name wherever its loss is noticed.

Most often that is a collective of FSDP, where torch says "connection closed by peer", or waits. So every process writes
to the run's store that it is alive, every 2 s, and that it has ended and why. One that ends by an exception looks
there, and says below the traceback who is gone or who ended first; and each watches the next one, for where nothing is
raised.
"""

import atexit
import logging
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from .process_group import group_store

BEAT = 2.0  # s between two signs: two requests per process
PATIENCE = 7.0  # s without a sign, after which a process counts as gone: three beats, and one for a busy interpreter
ALARM = 20.0  # s without a sign of the next process, after which this one warns
_ALIVE, _ENDED, _LEFT = "alive", "ended", "left"

log = logging.getLogger("cp_gdn")


class LifeSigns:
    """The signs of `rank` among `size` processes in `store`, until `end`. `end` and `findings` do not raise."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        # As a board's: a store's client is locked while another thread waits in it.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._rank, self._keys = rank, [f"cp_gdn/life/{r}" for r in range(size)]
        self._stop = threading.Event()
        self._store.set(self._keys[rank], f"{_ALIVE} 0")
        self._thread = threading.Thread(target=self._run, name=f"cp_gdn life {rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beat, seen, since = 0, "", time.monotonic()
        with suppress(RuntimeError):  # the store's host is gone, which the next message or collective says
            while not self._stop.wait(BEAT):
                beat += 1
                self._store.set(self._keys[self._rank], f"{_ALIVE} {beat}")
                word = self._word((self._rank + 1) % len(self._keys))
                if word != seen or not word.startswith(_ALIVE):
                    seen, since = word, time.monotonic()
                if time.monotonic() - since > ALARM:
                    since = float("inf")  # once
                    # Beside this thread, which must not fall silent meanwhile.
                    threading.Thread(target=self._warn, daemon=True).start()

    def _warn(self) -> None:
        for line in self.findings():
            log.warning("cp_gdn: %s", line)

    def end(self, reason: str = "") -> None:
        """Say that this process ends, by itself or for a reason; only the first time counts."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=2.0)
        with suppress(RuntimeError):
            # Numbered, for clocks of machines differ.
            word = f"{_ENDED} {self._store.add('cp_gdn/ends', 1)} {reason}" if reason else _LEFT
            self._store.set(self._keys[self._rank], word)

    def findings(self, patience: float = PATIENCE) -> list[str]:
        """What others may have to do with trouble here: who gives no sign of life, else who ended first, or left.

        Takes up to `patience` seconds: until all others have given a sign.
        """
        try:
            first, end = self._words(), time.monotonic() + patience
            now = first
            while self._silent(first, now) and time.monotonic() < end:
                time.sleep(0.25)
                now = self._words()
        except RuntimeError as error:
            text = str(error).split("\n", 1)[0]
            return [f"the run's store cannot be reached: its host, rank 0's machine or the launcher, is gone ({text})"]
        silent = self._silent(first, now)
        if silent:
            return [f"{_ranks(silent)} of the run gave no sign of life for {patience:g} s: lost, killed or frozen"]
        ends = sorted((int(word.split(" ", 2)[1]), rank) for rank, word in enumerate(now) if word.startswith(_ENDED))
        if ends and ends[0][1] != self._rank:
            rank = ends[0][1]
            return [f"rank {rank} of the run ended first: {now[rank].split(' ', 2)[2]}"]
        left = [rank for rank, word in enumerate(now) if word == _LEFT]
        return [f"{_ranks(left)} of the run had come to the end of the script"] if left else []

    def _silent(self, first: list[str], now: list[str]) -> list[int]:
        pairs = enumerate(zip(first, now, strict=True))
        return [rank for rank, (a, b) in pairs if rank != self._rank and a == b and a.startswith(_ALIVE)]

    def _words(self) -> list[str]:
        """The latest word of every process, in rank order; empty for one that has not come yet."""
        if self._store.check(self._keys):
            return [word.decode() for word in self._store.multi_get(self._keys)]
        return [self._word(rank) for rank in range(len(self._keys))]

    def _word(self, rank: int) -> str:
        key = self._keys[rank]
        return self._store.get(key).decode() if self._store.check([key]) else ""


_of_this_process: LifeSigns | None = None


def start() -> None:
    """Give signs of life from now on, and explain an exception that ends this process; once in a process."""
    global _of_this_process
    world = dist.group.WORLD
    if _of_this_process is not None or world is None or world.size() == 1:
        return
    signs = _of_this_process = LifeSigns(group_store(world), world.rank(), world.size())
    atexit.register(signs.end)
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        for line in last_words(signs, error):
            print(f"cp_gdn: {line}", file=sys.stderr, flush=True)

    sys.excepthook = explain


def last_words(signs: LifeSigns, error: BaseException) -> list[str]:
    """Tell the others that this process ends by `error`; returns what they may have to do with it."""
    if not isinstance(error, Exception):
        return []  # Ctrl-C and the like
    text = str(error).strip().split("\n", 1)[0]
    signs.end(f"{type(error).__name__}: {text}")
    # What torch and a Comm raise for a lost peer are RuntimeErrors; nobody need wait for the others at another one.
    return signs.findings() if isinstance(error, RuntimeError) else []


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
