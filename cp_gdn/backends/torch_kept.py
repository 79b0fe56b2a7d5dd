"""The tapes of the torch backend as plain tensors, for a forward that saves them; all in the dtype of states."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cp_gdn.backends.precision import state_dtype
from cp_gdn.backends.torch_chunked import Inputs, States, Tape, to_chunks
from cp_gdn.plan import CHUNK
from cp_gdn.reference import gate_floor

Shapes = dict[str, tuple[int, ...]]


def kept_shapes(chunks: int, heads: int, state: tuple[int, int, int], *, l2norm: bool, bound: bool) -> Shapes:
    """Shapes of what a forward keeps beside entry states and maps, by name, in the order of `kept_tensors`.

    Args:
        chunks: N. heads: H. state: [HV, K, V] as stored. l2norm: normalised inside. bound: a decay cutoff is set.
    """
    value_heads, key_dim, value_dim = state
    per_head, per_row = (chunks, value_heads), (chunks, value_heads, CHUNK)
    shapes: Shapes = dict.fromkeys(("q", "k", "w"), (*per_row, key_dim))
    shapes |= dict.fromkeys(("u", "residual"), (*per_row, value_dim))
    shapes |= dict.fromkeys(("decay", "kk", "nd"), (*per_row, CHUNK))
    shapes |= dict.fromkeys(("beta", "gam", "e"), (*per_row, 1))
    shapes |= {"before": (*per_head, key_dim, value_dim)}
    shapes |= dict.fromkeys(("q_rstd", "k_rstd") if l2norm else (), (chunks, heads, CHUNK, 1))
    return shapes | ({"bound": per_head} if bound else {})


def kept_tensors(tape: Tape, states: States) -> list[Tensor]:
    """What a forward keeps beside entry states and maps."""
    shapes = kept_shapes(0, 0, (0, 0, 0), l2norm=tape.q_rstd is not None, bound=tape.bound is not None)
    return [getattr(states if name in ("before", "residual") else tape, name) for name in shapes]


def from_kept(tensors: Sequence[Tensor], x: Inputs, rows: Tensor, *, bound: bool) -> tuple[Tape, States]:
    """The tape and the states that `kept_tensors` listed; which gates were above their floor is looked up again."""
    shapes = kept_shapes(0, 0, (0, 0, 0), l2norm=x.l2norm, bound=bound)
    found: dict[str, Any] = dict(zip(shapes, tensors, strict=True))
    states = States(before=found.pop("before"), residual=found.pop("residual"))
    found |= dict.fromkeys({"q_rstd", "k_rstd", "bound"} - found.keys())
    dtype = state_dtype(x.q.dtype)
    live = to_chunks(x.g[..., None], rows, dtype, 1) >= gate_floor(dtype)
    return Tape(**found, live=live), states
