"""What a compiler reads of a context: plain numbers, so that one compiled graph serves every pack.

Numbers that differ between packs become symbols in the second compilation. Whatever a call saves leaves its operator in
one dim of at least two numbers, for a compiler makes another graph where a size is 0 or 1.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cp_gdn.backends.choice import BackendChoice
from cp_gdn.options import Options

if TYPE_CHECKING:
    from cp_gdn.context import Context

LEAST = 2


@dataclass(frozen=True, kw_only=True)
class Family:
    """What contexts of one layer share whatever the pack: all that decides which kernels its parts take."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    conv: tuple[int, int] | None
    options: Options
    backend: str
    taken: BackendChoice

    @property
    def asked(self) -> dict[str, Any]:
        """As `Context.asked`."""
        names = ("device", "dtype", "heads", "head_dims", "conv", "options", "backend")
        return {name: getattr(self, name) for name in names}


FAMILIES: dict[str, Family] = {}
"""By name, as many as a program has kinds of layers; a number would become a symbol, which no constant depends on."""
_NAMES: dict[tuple[Any, ...], str] = {}
_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Numbers of one context.

    Attributes:
        handle: of the context. family: its name in `FAMILIES`. holds_initial: initial states are saved.
        final, states, maps, owned, tapes, halo: numbers (tapes: bytes) of what operators return, at least `LEAST`;
            states by whether initial states come in, tapes by l2norm. documents: rows of the final states.
    """

    handle: int
    family: str
    holds_initial: bool
    documents: int
    final: int
    states: tuple[int, int]
    maps: int
    owned: int
    tapes: tuple[int, int]
    halo: int


def traced_of(ctx: "Context") -> Traced:
    """Numbers of a context that is being made."""
    row, options = math.prod(ctx.state_shape), ctx.options
    documents, states = (
        len(ctx.plan.exit_docs),
        [rows_of_states(ctx, initial=initial) * row for initial in (False, True)],
    )
    tapes = [_tape_bytes(ctx, l2norm=l2norm) for l2norm in (False, True)] if options.keeps_tapes else (0, 0)
    halo = 0 if ctx.halo is None or ctx.conv is None else sum(ctx.halo.forward.recv_counts) * ctx.conv[0]
    return Traced(
        handle=ctx.handle,
        family=_name_of(ctx),
        holds_initial=not options.keeps_states,
        documents=documents,
        final=max(LEAST, documents * ctx.heads[1] * math.prod(ctx.head_dims)),
        states=(max(LEAST, states[0]), max(LEAST, states[1])),
        maps=max(LEAST, math.prod(shape_of_maps(ctx))),
        owned=max(LEAST, math.prod(shape_of_owned(ctx))),
        tapes=(max(LEAST, tapes[0]), max(LEAST, tapes[1])),
        halo=max(LEAST, halo),
    )


def rows_of_states(ctx: "Context", *, initial: bool) -> int:
    """Entry states that a call saves."""
    if not ctx.options.keeps_states:
        return 0
    return len(ctx.plan.segments) if ctx.kernels is None else ctx.kernels.saved_rows(initial=initial)


def shape_of_maps(ctx: "Context") -> tuple[int, ...]:
    """Of the maps that a call saves."""
    value_heads, key_dim, _ = ctx.state_shape
    return (ctx.schedule.num_maps * ctx.options.keeps_maps, value_heads, key_dim, key_dim)


def shape_of_owned(ctx: "Context") -> tuple[int, ...]:
    """Of the maps that an owner saves."""
    if ctx.routes.owners is None or not ctx.options.keeps_maps:
        return (0,)
    return tuple(ctx.routes.owners[0].owned_shape(ctx.rank, ctx.world_size, ctx.state_shape))


def shapes_of_tapes(ctx: "Context", *, l2norm: bool) -> list[tuple[int, ...]]:
    """Of the tensors that a saved tape consists of; none where the operator saves none."""
    if not ctx.options.keeps_tapes:
        return []
    return list(ctx.tape_store.kept_shapes(ctx.heads[0], ctx.state_shape, l2norm=l2norm).values())


def flat(x: Tensor | None, like: Tensor) -> Tensor:
    """``x`` in one dim; where it has fewer than `LEAST` numbers, as many zeros of ``like``'s dtype."""
    return like.new_zeros((LEAST,)) if x is None or x.numel() < LEAST else x.reshape(-1)


def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """What `flat` made one dim of."""
    return x[: math.prod(shape)].view(tuple(shape))


def _tape_bytes(ctx: "Context", *, l2norm: bool) -> int:
    return sum(map(math.prod, shapes_of_tapes(ctx, l2norm=l2norm))) * ctx.tape_dtype.itemsize


def _name_of(ctx: "Context") -> str:
    backend = ctx.asked["backend"]
    key = ctx.device, ctx.dtype, ctx.heads, ctx.head_dims, ctx.conv, ctx.options, backend, ctx.taken
    name = _NAMES.get(key)
    if name is None:
        name = _NAMES.setdefault(key, f"family {next(_NUMBERS)}")
    if name not in FAMILIES:
        FAMILIES[name] = Family(
            device=ctx.device,
            dtype=ctx.dtype,
            heads=ctx.heads,
            head_dims=ctx.head_dims,
            conv=ctx.conv,
            options=ctx.options,
            backend=backend,
            taken=ctx.taken,
        )
    return name
