"""What an exchange works on, and the protocol both exchanges keep: messages apart from mathematics."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """One direction of one call.

    Attributes:
        states: [n, HV, K, V]; entry states (exit adjoints) of the segments, then the outbox; filled in place.
        maps: [m, HV, K, K]. offsets: [b, HV, K, V], B forward and Bt in the mirror.
        adjoint: whether maps are applied transposed.
        kept: maps that an owner kept from the forward (a2a with ``save_transfer``), None where they travel.
        purpose: what the messages are called in the log.
    """

    states: Tensor
    maps: Tensor
    offsets: Tensor
    adjoint: bool
    kept: Tensor | None
    purpose: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What a forward exchange brought, for a recompute: the entry state of every segment [n, HV, K, V], and the maps of
    the heads that this rank owns (a2a with ``save_transfer``), else None."""

    states: Tensor
    owned: Tensor | None


class Exchange(Protocol):
    """Fragment summaries in, entry states out (exit adjoints in the mirror), written into ``flow.states``."""

    def start(self) -> None:
        """Post what can be posted; returns at once."""

    def wait(self) -> None:
        """Finish: every entry state of this rank's fragments is known."""
