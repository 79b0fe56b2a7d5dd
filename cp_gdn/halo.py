"""Which rows the causal convolution of one rank needs from other fragments: its halo, forward and mirrored.

The forward reads up to width - 1 tokens back in the same document, the adjoint reads the pre-activation gradient of up
to width - 1 tokens ahead. Integers and numpy up to `HaloPlan.to`; what is sent depends on the partition alone.
Legend: T local tokens, R rows received from other ranks, F this rank's non-empty fragments, W ranks, w width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cp_gdn.layout import Partition
from cp_gdn.tables import upload

MAX_WIDTH = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceSide:
    """A `HaloSide` on a device: `taps` int64 [T, w] with the zero row T + R beyond the document, `send_rows` int64."""

    taps: torch.Tensor
    send_rows: torch.Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Halo:
    """A `HaloPlan` with its tables on a device."""

    width: int
    crosses: bool
    forward: DeviceSide
    adjoint: DeviceSide


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
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
    """The halo of a plan whose arrays `tables.upload` has replaced by tensors; builds the tap tables where they lie."""
    forward, adjoint = (_device_side(side, moved.width) for side in (moved.forward, moved.adjoint))
    return Halo(width=moved.width, crosses=moved.crosses, forward=forward, adjoint=adjoint)


def build_halo(partition: Partition, rank: int, width: int) -> HaloPlan:
    """Halo of `rank` for a convolution over `width` tokens, 1 to MAX_WIDTH."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"conv: got width {width}, expected 1 to {MAX_WIDTH}")
    t = partition.table
    linked = np.flatnonzero(t.prev >= 0)
    crosses = width > 1 and bool((t.rank[linked] != t.rank[t.prev[linked]]).any())
    own = _own_fragments(partition, rank, width)
    before, after = _near(own, t.prev), _near(own, t.next)
    forward = _side(own, sources=before, targets=after, tail=True)
    adjoint = _side(own, sources=after, targets=before, tail=False)
    return HaloPlan(width=width, crosses=crosses, forward=forward, adjoint=adjoint)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Own:
    """This rank's non-empty fragments [F], and the first local row of each of its slots, empty ones included."""

    partition: Partition
    rank: int
    width: int
    num_tokens: int
    slot_row: np.ndarray
    table_row: np.ndarray
    length: np.ndarray
    first_row: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Near:
    """Pairs of an own fragment (index) and another of its chain (row of the table), `gap` < w - 1 tokens between."""

    own: np.ndarray
    other: np.ndarray
    gap: np.ndarray


def _own_fragments(partition: Partition, rank: int, width: int) -> _Own:
    rows = partition.rows(rank)
    lengths = partition.table.length[rows]
    slot_row = np.cumsum(lengths) - lengths
    live = np.flatnonzero(lengths)
    return _Own(
        partition=partition,
        rank=rank,
        width=width,
        num_tokens=int(lengths.sum()),
        slot_row=slot_row,
        table_row=live + rows.start,
        length=lengths[live],
        first_row=slot_row[live],
    )


def _near(own: _Own, link: np.ndarray) -> _Near:
    """The pairs on the side of the chain that `link` (the table's prev or next) leads to, nearest first."""
    index, other = np.arange(len(own.length)), link[own.table_row]
    gap = np.zeros_like(index)
    found = [(index[:0], index[:0], gap[:0])]
    while len(index):
        close = np.flatnonzero((other >= 0) & (gap < own.width - 1))
        index, other, gap = index[close], other[close], gap[close]
        found.append((index, other, gap))
        gap, other = gap + own.partition.table.length[other], link[other]
    pairs, others, gaps = (np.concatenate(column) for column in zip(*found, strict=True))
    return _Near(own=pairs, other=others, gap=gaps)


def _side(own: _Own, *, sources: _Near, targets: _Near, tail: bool) -> HaloSide:
    """One direction: fragments need the tails of `sources` before them (forward) or the heads of those after them."""
    # One document of 6, w = 3, rank 0 holds offsets 0 1 | 5, rank 1 holds 2 3 | 4. Forward, rank 1: rows 0 1 of rank 0
    # come as its rows 3 4 (5 is the zero row), its taps are (0 4 3) (1 0 4) (2 1 0), and it sends rows 1 2 (for 5).
    source, recv_counts = _sources(own, sources, tail)
    send_rows, send_counts = _sends(own, targets, tail)
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


def _sources(own: _Own, near: _Near, tail: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Row of the token d = 1 .. w - 1 beyond the edge of each own fragment, [F, w - 1], and rows received per rank."""
    t = own.partition.table
    pair, place, away = _reached(near, t.length[near.other], own.width, tail)
    other = near.other[pair]
    row = own.num_tokens + np.empty_like(other)
    far = t.rank[other] != own.rank
    wanted, _, row_of = _in_order(own, t.rank[other[far]], other[far], place[far])
    row[far] = own.num_tokens + row_of
    row[~far] = own.slot_row[t.slot[other[~far]]] + place[~far]
    source = np.full((len(own.length), own.width - 1), own.num_tokens + sum(wanted))
    source[near.own[pair], away] = row
    return source, wanted


def _sends(own: _Own, near: _Near, tail: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Own rows that other ranks need, by receiving rank, and how many each gets."""
    receiver = own.partition.table.rank[near.other]
    pair, place, _ = _reached(near, own.length[near.own] * (receiver != own.rank), own.width, tail)
    mine = near.own[pair]
    counts, first, _ = _in_order(own, receiver[pair], own.table_row[mine], place)
    return (own.first_row[mine] + place)[first], counts


def _reached(near: _Near, length: np.ndarray, width: int, tail: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of one end of each pair that the other end reaches: pair, place in the fragment, steps away - 1."""
    count = np.minimum(width - 1 - near.gap, length)
    pair, step = np.nonzero(np.arange(width - 1) < count[:, None])
    return pair, length[pair] - 1 - step if tail else step, near.gap[pair] + step


def _in_order(
    own: _Own, peer: np.ndarray, table_row: np.ndarray, place: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Distinct (peer, token) ascending, the order both ends of a message use: how many per peer, index of the first of
    each, and the place of every given one among them.
    """
    part = own.partition
    stride = part.num_tokens + 1
    key = peer * stride + part.bounds[part.table.doc[table_row]] + part.table.offset[table_row] + place
    distinct, first, order = np.unique(key, return_index=True, return_inverse=True)
    counts = np.bincount(distinct // stride, minlength=part.world_size)
    return tuple(counts.tolist()), first, order.reshape(-1)


def _edges(own: _Own, source: np.ndarray, tail: bool) -> tuple[np.ndarray, np.ndarray]:
    """Flat entries of the tap table [T, w] that leave their fragment, and their values."""
    # The token `step` away from the edge leaves the fragment at the taps beyond.
    pairs = [(step, tap) for step in range(own.width) for tap in range(step + 1, own.width)]
    step, tap = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    row = own.first_row[:, None] + (step if tail else own.length[:, None] - 1 - step)
    inside = step < own.length[:, None]
    return (row * own.width + tap)[inside], source[:, tap - step - 1][inside]


def _device_side(side: Any, width: int) -> DeviceSide:
    own, tap = (torch.arange(n, device=side.edge_index.device) for n in (side.num_tokens, width))
    taps = own[:, None] + side.step * tap
    taps.view(-1).scatter_(0, side.edge_index, side.edge_value)
    return DeviceSide(taps=taps, send_rows=side.send_rows, send_counts=side.send_counts, recv_counts=side.recv_counts)
