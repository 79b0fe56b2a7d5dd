"""What a forward hands to its backward, and how a forward can run."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cp_gdn.a2a.exchange import OwnerExchange
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.flow import Carried, Exchange
from cp_gdn.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Tapes:
    """What a forward keeps for a backward, in the form of whoever made it (`Context.tape_store`).

    Attributes:
        tape: of the chunks, so that they are not run again: a `Tape`, on the kernels bytes (`hopper_prepare.Prepared`).
        states: `States` of the chunks; None on the kernels, which run them again: they are larger than all the rest.
    """

    tape: Any
    states: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How a forward runs beyond its arguments; none of it changes a bit of what is read.

    Attributes:
        tapes: keep them. output: write o; False leaves it and the final states undefined.
        carried: what the original forward of a recompute brought: no message is sent.
        workspace: the caller's memory. final: give final states; without it the kernels write none and give no rows.
    """

    tapes: bool = False
    output: bool = True
    final: bool = True
    carried: Carried | None = None
    workspace: Workspace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a backward needs of its forward.

    Attributes:
        inputs: the call's tensors, without the leading 1.
        states: [n, HV, K, V], the entry state of every segment (padded head dims); None with ``boundary="recompute"``.
        maps: [m, HV, K, K], segment and composed maps; None without ``save_transfer``.
        owned: maps that this rank received as an owner (a2a with ``save_transfer``), else None.
        has_initial: whether an initial state came in.
        initial: that state, where the backward runs the forward again, else None.
        tapes: None where the backward runs chunks and states again.
    """

    inputs: Inputs
    states: Tensor | None
    maps: Tensor | None
    owned: Tensor | None
    has_initial: bool
    initial: Tensor | None = None
    tapes: Tapes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputGradients:
    """Gradients of a call: q, k, v, g, beta in their shapes and dtypes; initial_state [entry_docs, HV, K, V], None if
    none came in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None


def owned_maps(exchange: Exchange | None, carried: Carried | None) -> Tensor | None:
    """Maps that this rank received as an owner."""
    if carried is not None:
        return carried.owned
    return exchange.owned_maps if isinstance(exchange, OwnerExchange) else None
