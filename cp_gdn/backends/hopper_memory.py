"""Scratch memory of the kernels: every buffer of a forward and of a backward by name, shape and lifetime."""

from dataclasses import dataclass

import torch

from cp_gdn.backends.hopper_walk import slab_bytes
from cp_gdn.workspace import Buffer, Wanted, placed

STATE_ROWS = 256
"""Rows of o, bf16, that take as much memory as a state, fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySizes:
    """What the buffers of a context depend on.

    Attributes:
        prepared: bytes, see `prepared_parts`; a tape is just that.
        places: chunks and value heads of the largest slab.
        states, adjoints: rows without and with states of documents. offsets, adjoint_offsets, maps: rows.
        free_rows: of o, see `hopper_tables.free_rows`. alone: nothing is summarized. cutoff: the decay bound marks maps
            that are zero.
        keeps_states, keeps_maps: they are saved, and no scratch.
    """

    value_heads: int
    prepared: int
    places: int
    states: tuple[int, int]
    adjoints: tuple[int, int]
    offsets: int
    adjoint_offsets: int
    maps: int
    free_rows: int
    alone: bool
    cutoff: bool
    keeps_states: bool
    keeps_maps: bool

    @property
    def output_lends(self) -> bool:
        """Whether a forward's offsets fit where o is not yet written."""
        return self.offsets * STATE_ROWS <= self.free_rows

    @property
    def slab_lends(self) -> bool:
        """Whether offsets of adjoints fit where a slab will have its adjoints."""
        return self.adjoint_offsets * self.value_heads * 2 <= self.places  # a state of fp32 is two of bf16

    def row(self, count: int) -> tuple[int, ...]:
        return (count, self.value_heads, 128, 128)


def buffers_of(sizes: MemorySizes, phase: str, *, kept: bool, document_states: bool) -> tuple[Buffer, ...]:
    """Buffers of "forward" or "backward"; ``kept``: of one with a tape. ``document_states``: initial or final states of
    documents take part."""
    wanted: list[Wanted] = []
    if not kept:
        wanted.append(("prepared", (sizes.prepared,), torch.uint8, ("prepare", "replay")))
    forward = phase == "forward"
    if not sizes.keeps_states:
        wanted.append(("states", sizes.row(sizes.states[document_states]), torch.float32, ("summarize", "replay")))
    if not sizes.alone:
        if forward or not (sizes.keeps_states and sizes.keeps_maps):
            wanted += _of_maps(sizes)
        if not sizes.output_lends if forward else not sizes.keeps_states:
            wanted.append(("offsets", sizes.row(sizes.offsets), torch.float32, ("summarize", "exchange")))
    if not forward:
        wanted += _of_adjoints(sizes, document_states=document_states)
    return placed(wanted)


def _of_maps(sizes: MemorySizes) -> list[Wanted]:
    found: list[Wanted] = []
    if not sizes.keeps_maps:
        found.append(("maps", sizes.row(sizes.maps), torch.float32, ("summarize", "fold")))
    if sizes.cutoff:
        found.append(("dropped", (sizes.maps, sizes.value_heads), torch.int32, ("summarize", "fold")))
    return found


def _of_adjoints(sizes: MemorySizes, *, document_states: bool) -> list[Wanted]:
    rows, life = sizes.row(sizes.adjoints[document_states]), ("adjoint summarize", "adjoint replay")
    found: list[Wanted] = [("adjoints", rows, torch.float32, life)]
    if sizes.cutoff and not sizes.alone:
        found.append(("adjoint dropped", (sizes.maps, sizes.value_heads), torch.int32, ("adjoint summarize", life[1])))
    if not (sizes.alone or sizes.slab_lends):
        offsets = sizes.row(sizes.adjoint_offsets)
        found.append(("adjoint offsets", offsets, torch.float32, ("adjoint summarize", "adjoint exchange")))
    found.append(("slab", (slab_bytes(sizes.places),), torch.uint8, ("adjoint summarize", "gradients")))
    return found
