"""The words for failures: what is raised, who is to blame, and what a rank says it is doing."""

from collections.abc import Sequence
from dataclasses import dataclass


class CommFailed(RuntimeError):
    """A rank of the group failed: `rank` is the culprit (-1: not known), `reason` its own or what was found out."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank that is not known"
        return f"the context-parallel group failed, by {who}: {self.reason}"


class PlanDisagreement(ValueError):
    """The ranks of a group gave different arguments. Raised alike on all before any message; the Comm stays usable."""


class LinkError(RuntimeError):
    """A message that did not come through. `late`: its deadline passed (else the link broke); `peers`: whose it was."""

    def __init__(self, text: str, *, peers: Sequence[int] = (), late: bool = False) -> None:
        super().__init__(text)
        self.peers, self.late = tuple(peers), late


class StoreLost(LinkError):
    """The store of the group cannot be reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Who failed and why."""

    rank: int
    reason: str

    def error(self) -> CommFailed:
        return CommFailed(self.rank, self.reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Answer to a roll call: messages posted to and from each rank so far, and the ranks this one is blocked on."""

    doing: str
    waits: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


class Progress:
    """What a rank has posted and waits for: written by the thread that calls the Comm, read by its monitor."""

    def __init__(self, size: int) -> None:
        self.sent, self.received = [0] * size, [0] * size
        self.waits: tuple[int, ...] = ()
        self.doing = "outside of cp_gdn"
        self.failed: Failure | None = None
        self.raised = False  # the failure has reached the caller

    def enter(self, doing: str, waits: Sequence[int]) -> None:
        self.doing, self.waits = doing, tuple(waits)

    def leave(self) -> None:
        self.doing, self.waits = f"outside of cp_gdn (last in it: {self.doing})", ()

    def meet_all(self, rank: int) -> list[int]:
        """Count an agreement, which is like one message to and from everybody; returns the others."""
        others = [p for p in range(len(self.sent)) if p != rank]
        for p in others:
            self.sent[p] += 1
            self.received[p] += 1
        return others

    def status(self, device_waits: Sequence[int] = ()) -> Status:
        waits = self.waits or tuple(device_waits)
        return Status(doing=self.doing, waits=waits, sent=tuple(self.sent), received=tuple(self.received))
