"""`spread` on the CPU, entry by entry in plain Python: the double of the kernel, and what it is compared with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cp_gdn.backends.hopper_items import ADJOINT_SUMMARY
from cp_gdn.backends.hopper_slabs import NO_ADJOINT, NO_STATE, SlabTables
from cp_gdn.backends.hopper_spread import Spread
from cp_gdn.backends.hopper_tables import KernelTables, rows_index
from cp_gdn.page import Table
from cp_gdn.plan import CHUNK

Row = list[int]


def rows_of(packed: Any, width: int, count: int) -> list[Row]:
    """The int32 rows of a table."""
    packed = packed.data if isinstance(packed, Table) else packed
    found: list[Row] = (
        torch.as_tensor(packed).reshape(-1).contiguous().view(torch.int32)[: width * count].view(-1, width).tolist()
    )
    return found


def table(rows: list[Row], width: int, device: Any = "cpu") -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, width)


def items_of_heads(items: list[Row], value_heads: int) -> list[Row]:
    """Heads of an item side by side."""
    return [
        [first, chunks, packed + head, segment]
        for first, chunks, packed, segment in items
        for head in range(value_heads)
    ]


def places_of_heads(slabs: SlabTables, group: int) -> list[Row]:
    pairs = rows_of(slabs.places, 2, slabs.num_places)
    return [[first * group + member, stride * group] for first, stride in pairs for member in range(group)]


def steps_of(slabs: SlabTables, chunks: list[Row], flags: dict[int, int]) -> list[Row]:
    """``chunks``: first row and count. ``flags``: of the chunks that have some."""
    pairs, found = rows_of(slabs.pairs, 4, slabs.num_pairs), []
    ends = [*(first for *_, first in pairs), slabs.num_steps]
    for (chunk, width, head, _), (begin, end) in zip(pairs, pairwise(ends), strict=True):
        for i in range(end - begin):
            at = chunk + i // width
            found.append([*chunks[at], head + i % width + (flags.get(at, 0) << 16), at])
    return found


def ranks_of(counts: list[int]) -> list[Row]:
    """The number of each strip of 16 rows among those of its kind."""
    found, seen = [], [0] * (CHUNK // 16)
    for n in counts:
        found.append(seen)
        seen = [rank + (n > 16 * kind) for kind, rank in enumerate(seen)]
    return found


def flags_of(tables: KernelTables) -> dict[int, int]:
    """What is zero at chunks where documents start and end."""
    index = [rows_index(reverse=reverse, replay=True, given=False, wanted=False) for reverse in (False, True)]
    entries, exits = (rows_of(tables.rows.data[i], 2, tables.num_segments) for i in index)
    flags: dict[int, int] = {}
    for (first, count, *_), (start, _), (after, _) in zip(
        rows_of(tables.segments, 4, tables.num_segments), entries, exits, strict=True
    ):
        flags[first] = flags.get(first, 0) | NO_STATE * (start < 0)
        flags[first + count - 1] = flags.get(first + count - 1, 0) | NO_ADJOINT * (after < 0)
    return flags


def spread(kernel: object, tables: KernelTables, heads: tuple[int, int]) -> Spread:
    """`hopper_spread.spread`."""
    slabs, group, device = tables.slabs, heads[1] // heads[0], tables.items.data.device
    chunks = rows_of(tables.chunks, 2, tables.num_chunks)
    items, of_forward = rows_of(tables.items, 4, sum(tables.counts)), sum(tables.counts[:ADJOINT_SUMMARY])
    return Spread(
        items=table(items_of_heads(items[:of_forward], heads[1]), 4, device),
        mirrored=table(items_of_heads(items[of_forward:], heads[1]), 4, device),
        steps=table(steps_of(slabs, chunks, flags_of(tables)), 4, device),
        ranks=table(ranks_of([count for _, count in chunks]), 4, device),
        places=table(places_of_heads(slabs, group), 2, device),
    )
