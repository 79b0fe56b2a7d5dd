"""Host side of ``kernels/spread.cu``: tables with an entry per value head, step or strip, made on the device from those
that were uploaded."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn.backends.hopper_items import ADJOINT_SUMMARY
from cp_gdn.backends.hopper_tables import KernelTables, rows_index
from cp_gdn.backends.launch import Kernel, load

SPREAD_THREADS = 256
_PARAMS = struct.Struct("<14Q10i")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """int32 tables of one context.

    Attributes:
        items, mirrored: [n * HV, 4] of the forward's and the adjoint's walks, see `hopper_items`; heads of an item side
            by side.
        steps: [steps, 4], first row and count of a chunk, q/k head and flags (16 bits each), chunk. The flags,
            `hopper_slabs.NO_STATE` and `NO_ADJOINT`, hold in calls without states of documents.
        ranks: [chunks, 4], see `hopper_strips.Chunks`.
        places: [pairs * group, 2], of a value head's first chunk in its slab, and from chunk to chunk.
    """

    items: Tensor
    mirrored: Tensor
    steps: Tensor
    ranks: Tensor
    places: Tensor


def load_spread() -> Kernel:
    """`spread` on torch's current device."""
    return load("spread", {}, SPREAD_THREADS, 0)


def spread(kernel: Kernel, tables: KernelTables, heads: tuple[int, int]) -> Spread:
    """The tables of a context of (H, HV) heads, whose uploaded ``tables`` are on torch's current device."""
    slabs, value_heads, group = tables.slabs, heads[1], heads[1] // heads[0]
    of_forward = sum(tables.counts[:ADJOINT_SUMMARY])
    counts = (of_forward, sum(tables.counts) - of_forward, slabs.num_places, slabs.num_pairs, slabs.num_steps)
    found = _empty(
        {
            "items": (counts[0] * value_heads, 4),
            "mirrored": (counts[1] * value_heads, 4),
            "steps": (slabs.num_steps, 4),
            "ranks": (tables.num_chunks, 4),
            "places": (slabs.num_places * group, 2),
        },
        tables.items.data.device,
    )
    longest = max(x.shape[0] for x in found.values())
    if longest:
        index = [rows_index(reverse=reverse, replay=True, given=False, wanted=False) for reverse in (False, True)]
        entries, exits = (tables.rows.data[i] for i in index)
        items, others = tables.items.data, (slabs.places, slabs.pairs, tables.partial, tables.chunks, tables.segments)
        read = (items, items[2 * of_forward :], *(table.data for table in others), entries, exits)
        pointers = [x.data_ptr() for x in (*read, *found.values())]
        sizes = (*counts, tables.num_chunks, tables.num_partial, tables.num_segments, value_heads, group)
        kernel.launch((-(-longest // SPREAD_THREADS),), _PARAMS.pack(*pointers, *sizes))
    return Spread(**found)


def _empty(shapes: dict[str, tuple[int, int]], device: torch.device) -> dict[str, Tensor]:
    """int32 tables in one piece of memory; rows of 16 bytes come before shorter ones."""
    sizes = [rows * width for rows, width in shapes.values()]
    pieces = torch.empty(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes)
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
