"""Which rows the causal convolution of one rank needs from other fragments: its halo, forward and mirrored.

The forward reads up to width - 1 tokens back in the same document, the adjoint reads the pre-activation gradient of up
to width - 1 tokens ahead. Integers and numpy up to `HaloPlan.to`; what is sent depends on the partition alone.
Legend: T local tokens, R rows received from other ranks, F this rank's non-empty fragments, W ranks, w width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from cp_gdn.layout import Partition
from cp_gdn.tables import upload

MAX_WIDTH = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloSide:
    """One direction of the halo on one rank; rows index concat(own [T], halo [R], zero row).

    Tap j of a row is the row of the token j steps away, `row + step * j` inside a fragment; `edge_index` and
    `edge_value` are the flat entries of the tap table [T, w] that leave their fragment (int64). `send_rows` (int64) are
    own rows, by receiving rank, then ascending; the halo holds what came, by sending rank. Counts are rows per rank.
    """

    num_tokens: int
    step: int
    edge_index: np.ndarray
    edge_value: np.ndarray
    send_rows: np.ndarray
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceSide:
    """A `HaloSide` whose tables are tensors. `send_rows`: int64."""

    side: Any
    width: int

    @property
    def send_rows(self) -> torch.Tensor:
        return self.side.send_rows

    @property
    def send_counts(self) -> tuple[int, ...]:
        return self.side.send_counts

    @property
    def recv_counts(self) -> tuple[int, ...]:
        return self.side.recv_counts

    @cached_property
    def taps(self) -> torch.Tensor:
        """int64 [T, w], with the zero row T + R beyond the document; made where it lies when first needed."""
        side = self.side
        own, tap = (torch.arange(n, device=side.edge_index.device) for n in (side.num_tokens, self.width))
        taps = own[:, None] + side.step * tap
        taps.view(-1).scatter_(0, side.edge_index, side.edge_value)
        return taps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Halo:
    """A `HaloPlan` with its tables on a device."""

    width: int
    crosses: bool
    forward: DeviceSide
    adjoint: DeviceSide

    def make(self) -> None:
        """Make the tap tables now."""
        _ = self.forward.taps, self.adjoint.taps


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloPlan:
    """Both directions of one rank's halo. `crosses` (the same on every rank): all take part, otherwise nobody sends."""

    width: int
    crosses: bool
    forward: HaloSide
    adjoint: HaloSide

    def to(self, device: torch.device | str) -> Halo:
        """The halo with its tables on `device`, in one copy."""
        return device_halo(upload(self, torch.device(device)))


def device_halo(moved: HaloPlan) -> Halo:
    """The halo of a plan whose arrays `tables.upload` has replaced by tensors."""
    forward, adjoint = (DeviceSide(side=side, width=moved.width) for side in (moved.forward, moved.adjoint))
    return Halo(width=moved.width, crosses=moved.crosses, forward=forward, adjoint=adjoint)


def build_halo(partition: Partition, rank: int, width: int) -> HaloPlan:
    """Halo of `rank` for a convolution over `width` tokens, 1 to MAX_WIDTH."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"conv: got width {width}, expected 1 to {MAX_WIDTH}")
    own = _own_fragments(partition, rank, width)
    crosses = width > 1 and partition.crosses
    return HaloPlan(width=width, crosses=crosses, forward=_side(own, tail=True), adjoint=_side(own, tail=False))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Own:
    """This rank's non-empty fragments [F] in slot order, `ends` their first offset beyond. `first_row`: of each the
    local row."""

    partition: Partition
    rank: int
    width: int
    num_tokens: int
    doc: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    size: np.ndarray
    first_row: np.ndarray

    def local_rows(self, token: np.ndarray) -> np.ndarray:
        """Local rows of global tokens that this rank holds."""
        start = self.partition.bounds[self.doc] + self.offset
        order = start.argsort(kind="stable")
        fragment = order[start[order].searchsorted(token, "right") - 1]
        rows: np.ndarray = self.first_row[fragment] + token - start[fragment]
        return rows


def _own_fragments(partition: Partition, rank: int, width: int) -> _Own:
    own = partition.of_rank(rank)
    live = own.length.nonzero()[0]
    return _Own(
        partition=partition,
        rank=rank,
        width=width,
        num_tokens=int(own.length.sum()),
        doc=own.doc[live],
        offset=own.offset[live],
        length=own.length[live],
        size=own.size[live],
        first_row=(own.length.cumsum() - own.length)[live],
    )


def _side(own: _Own, *, tail: bool) -> HaloSide:
    """One direction: fragments need the tails of those before them (forward) or the heads of those after them."""
    # One document of 6, w = 3, rank 0 holds offsets 0 1 | 5, rank 1 holds 2 3 | 4. Forward, rank 1: rows 0 1 of rank 0
    # come as its rows 3 4 (5 is the zero row), its taps are (0 4 3) (1 0 4) (2 1 0), and it sends rows 1 2 (for 5).
    source, recv_counts = _sources(own, tail)
    send_rows, send_counts = _sends(own, tail)
    edge_index, edge_value = _edges(own, source, tail)
    return HaloSide(
        num_tokens=own.num_tokens,
        step=-1 if tail else 1,
        edge_index=edge_index,
        edge_value=edge_value,
        send_rows=send_rows,
        send_counts=send_counts,
        recv_counts=recv_counts,
    )


def _sources(own: _Own, tail: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Row of the token d = 1 .. w - 1 beyond the edge of each own fragment, [F, w - 1], and rows received per rank."""
    part, away = own.partition, np.arange(1, own.width)
    offset = (own.offset[:, None] - away) if tail else (own.offset + own.length - 1)[:, None] + away
    fragment, step = ((offset >= 0) & (offset < own.size[:, None])).nonzero()
    doc, offset = own.doc[fragment], offset[fragment, step]
    owner, token = part.cuts.owner_of(doc, offset), part.bounds[doc] + offset
    near = owner == own.rank
    far = ~near
    wanted, _, place = _in_order(part, owner[far], token[far])
    row = np.empty_like(token)
    row[far] = own.num_tokens + place
    row[near] = own.local_rows(token[near])
    source = np.full((len(own.doc), own.width - 1), own.num_tokens + sum(wanted))
    source[fragment, step] = row
    return source, wanted


def _sends(own: _Own, tail: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Own rows that other ranks need, by receiving rank, and how many each gets."""
    part = own.partition
    step, tap = _pairs(own.width)
    # The token `step` inside the edge is needed by the token `tap` away from it, which is beyond the edge.
    place = own.length[:, None] - 1 - step if tail else np.broadcast_to(step, (len(own.doc), len(step)))
    needing = own.offset[:, None] + (place + tap if tail else place - tap)
    inside = (step < own.length[:, None]) & (needing >= 0) & (needing < own.size[:, None])
    fragment, pair = inside.nonzero()
    doc, place = own.doc[fragment], place[fragment, pair]
    owner = part.cuts.owner_of(doc, needing[fragment, pair])
    far = owner != own.rank
    row = (own.first_row[fragment] + place)[far]
    counts, first, _ = _in_order(part, owner[far], (part.bounds[doc] + own.offset[fragment] + place)[far])
    return row[first], counts


def _in_order(part: Partition, peer: np.ndarray, token: np.ndarray) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Distinct (peer, token) ascending, the order both ends of a message use: how many per peer, index of the first of
    each, and the place of every given one among them.
    """
    key = peer * (part.num_tokens + 1) + token
    order = key.argsort(kind="stable")
    fresh = np.ones(len(key), dtype=bool)
    np.not_equal(key[order[1:]], key[order[:-1]], out=fresh[1:])
    place = np.empty_like(order)
    place[order] = fresh.cumsum() - 1
    first = order[fresh]
    return tuple(np.bincount(peer[first], minlength=part.world_size).tolist()), first, place


@cache
def _pairs(width: int) -> tuple[np.ndarray, np.ndarray]:
    """(step, tap) such that the tap of the token `step` inside an edge leaves the fragment, [w (w - 1) / 2] each."""
    step, tap = np.triu_indices(width, 1)
    return step, tap


def _edges(own: _Own, source: np.ndarray, tail: bool) -> tuple[np.ndarray, np.ndarray]:
    """Flat entries of the tap table [T, w] that leave their fragment, and their values."""
    step, tap = _pairs(own.width)
    row = own.first_row[:, None] + (step if tail else own.length[:, None] - 1 - step)
    inside = step < own.length[:, None]
    return (row * own.width + tap)[inside], source[:, tap - step - 1][inside]
