"""The one table of cases: packs, gates, write strengths, heads, dims, dtypes, worlds, layouts, and a choice of them.

A case is a `Content`, what is computed, and a `Run`, how it is spread over ranks. `covering` picks rows of a table so
that every two values of every two columns meet; the full product would be half a million runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_gdn.layout import Partition, partition
from tests import token_cases

PACKS = {
    **{name: token_cases.PACKS[name] for name in ("ragged", "long", "five tokens", "empty documents", "no tokens")},
    "several chunks": (70, 0, 170),
    "on the grid": (64, 1, 0, 128),
    "300 documents": (2, 3) * 150,
}
WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
HEADS = ((1, 1), (2, 4), (2, 6))
HEAD_DIMS = ((16, 16), (24, 40), (5, 7), (48, 8))
BETAS = ("sigmoid", 0.0, 1.0, 1.9, 2.0)
SEGMENTS = (1, 2, "vector", "grid:1", "auto")
PIECE = 13
"""Tokens per fragment of the explicit layout here."""


def _model(noise: Tensor) -> Tensor:
    return -F.softplus(noise - 3)


def _one_token(value: float, at: float, others: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gates(noise: Tensor) -> Tensor:
        g, index = others(noise), int(at * len(noise))
        g[index : index + 1] = value
        return g

    return gates


def _constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda noise: torch.full_like(noise, value)


def _heads_apart(noise: Tensor) -> Tensor:
    return _model(noise) * 10.0 ** (1 - 2 * (torch.arange(noise.shape[1]) % 3))


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _constant(0.0),
    "slow": _constant(-1e-3),
    "model": _model,
    "strong": _constant(-20.0),
    "A = 16": lambda noise: -16 * F.softplus(0.5 * noise + 1),
    "one -inf": _one_token(-float("inf"), 0.5, _model),
    "one reset": _one_token(-1e4, 0.3, _constant(-1e-3)),
    "heads apart": _heads_apart,
}
"""From N(0, 1) noise [T, HV] to raw log gates."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is computed. `inputs` is the dtype that q, k, v and the gradients of o are representable in."""

    pack: str | tuple[int, ...] = "long"
    gate: str = "model"
    beta: str | float = "sigmoid"
    heads: tuple[int, int] = (2, 4)
    head_dims: tuple[int, int] = (24, 40)
    l2norm: bool = False
    initial: bool = True
    inputs: torch.dtype = torch.float32

    @property
    def lengths(self) -> tuple[int, ...]:
        return PACKS[self.pack] if isinstance(self.pack, str) else self.pack


@dataclass(frozen=True, kw_only=True)
class Run:
    """How it is run. `segments`: as for `build_context`, or "vector": another P on every rank."""

    world: int = 1
    layout: str = "zigzag_per_document"
    exchange: str = "ring"
    segments: int | str = 1
    save_transfer: bool = True
    decay_cutoff: float | str | None = "default"
    dtype: torch.dtype = torch.float64

    @property
    def align(self) -> int:
        grid = str(self.segments).startswith("grid:")
        return 64 * int(str(self.segments).removeprefix("grid:")) if grid else 1


def cut(lengths: Sequence[int], world: int, layout: str, align: int = 1) -> Partition:
    """The named layout. "explicit": pieces of a few tokens, neighbours often on one rank, slots in falling order."""
    bounds = [0, *np.cumsum(lengths).tolist()]
    if layout != "explicit":
        return partition(bounds, world, layout, align=align)
    step = max(PIECE, align)
    pieces = [(d, a, min(step, n - a)) for d, n in enumerate(lengths) for a in range(0, n, step)]
    owner = [(i * i // 2) % world for i in range(len(pieces))]
    fragments = [[p for p, r in zip(pieces, owner, strict=True) if r == rank][::-1] for rank in range(world)]
    return partition(bounds, world, fragments=fragments, align=align)


def covering(table: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows in which every two values of every two columns meet; greedy, the same every time."""
    open_pairs = {
        ((a, i), (b, j)): None
        for a, b in combinations(table, 2)
        for i in range(len(table[a]))
        for j in range(len(table[b]))
    }
    rows = []
    while open_pairs:
        chosen = dict(next(iter(open_pairs)))
        for column in table:
            if column not in chosen:
                size, turn = len(table[column]), len(rows)  # among equals, each in its turn
                gains = [_gain(chosen, (column, (turn + i) % size), open_pairs) for i in range(size)]
                chosen[column] = (turn + gains.index(max(gains))) % size
        row = [(column, chosen[column]) for column in table]
        for pair in combinations(row, 2):
            open_pairs.pop(pair, None)
        rows.append({column: table[column][i] for column, i in row})
    return rows


def _gain(chosen: Mapping[str, int], item: tuple[str, int], open_pairs: Mapping[Any, Any]) -> int:
    return sum((old, item) in open_pairs or (item, old) in open_pairs for old in chosen.items())


def pairs(table: Mapping[str, Sequence[Any]]) -> list[tuple[Content, Run]]:
    """`covering` rows as cases."""
    of_content, of_run = ({field.name for field in fields(kind)} for kind in (Content, Run))
    return [
        (
            Content(**{name: value for name, value in row.items() if name in of_content}),
            Run(**{name: value for name, value in row.items() if name in of_run}),
        )
        for row in covering(table)
    ]


def name_of(case: object) -> str:
    """What differs from the defaults, for pytest."""
    if not isinstance(case, (Content, Run)):
        return ""
    values = [(f.default, getattr(case, f.name), f.name) for f in fields(case)]
    return ",".join(f"{name}={value}".replace("torch.", "") for default, value, name in values if value != default)


TABLE: dict[str, Sequence[Any]] = {
    "pack": [name for name in PACKS if name not in ("no tokens", "300 documents")],
    "gate": list(GATES),
    "beta": BETAS,
    "heads": HEADS,
    "head_dims": HEAD_DIMS,
    "l2norm": (False, True),
    "initial": (True, False),
    "world": WORLDS,
    "layout": (*LAYOUTS, "explicit"),
    "exchange": ("ring", "a2a"),
    "segments": SEGMENTS,
    "save_transfer": (True, False),
    "dtype": (torch.float64, torch.float32),
}
CASES = pairs(TABLE)
