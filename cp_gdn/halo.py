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

from cp_gdn.layout import FragmentTable, Partition
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
    forward = _side(partition, rank, width, _walk(t, adjoint=False))
    adjoint = _side(partition, rank, width, _walk(t, adjoint=True))
    return HaloPlan(width=width, crosses=crosses, forward=forward, adjoint=adjoint)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Walk:
    """The fragment table along one direction: history lies at lower offsets, in the fragments `behind`.

    The adjoint is the same walk over the token's mirrored offset -(offset + 1), with `prev` and `next` exchanged.
    `first_row`: local row, on the fragment's rank, of its first token along the walk; the next one is `step` rows on.
    """

    rank: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    behind: np.ndarray
    ahead: np.ndarray
    first_row: np.ndarray
    step: int


def _walk(t: FragmentTable, *, adjoint: bool) -> _Walk:
    before = np.cumsum(t.length) - t.length
    row = before - before[t.starts[t.rank]]
    offset, behind, ahead, step = t.offset, t.prev, t.next, 1
    if adjoint:
        offset, row, behind, ahead, step = -(t.offset + t.length), row + t.length - 1, t.next, t.prev, -1
    return _Walk(rank=t.rank, offset=offset, length=t.length, behind=behind, ahead=ahead, first_row=row, step=step)


def _side(partition: Partition, rank: int, width: int, walk: _Walk) -> HaloSide:
    # One document of 6, w = 3, rank 0 holds offsets 0 1 | 5, rank 1 holds 2 3 | 4. Forward, rank 1: rows 0 1 of rank 0
    # come as its rows 3 4 (5 is the zero row), its taps are (0 4 3) (1 0 4) (2 1 0), and it sends rows 1 2 (for 5).
    rows = np.arange(*partition.table.starts[rank : rank + 2])
    rows = rows[walk.length[rows] > 0]
    num_tokens = partition.local_tokens(rank)
    holder, source = _history(walk, rows, width)
    far = (holder >= 0) & (walk.rank[holder] != rank)
    wanted, place = _by_rank(walk.rank[holder[far]], source[far], partition)
    source[holder < 0] = num_tokens + len(wanted)
    source[far] = num_tokens + place
    edge_index, edge_value = _edges(walk, rows, source, width)
    sent, _ = _by_rank(*_demand(walk, rows, width), partition)
    stride = partition.num_tokens + 1
    return HaloSide(
        num_tokens=num_tokens,
        step=-walk.step,
        edge_index=edge_index,
        edge_value=edge_value,
        send_rows=sent % stride,
        send_counts=_counts(sent // stride, partition.world_size),
        recv_counts=_counts(wanted // stride, partition.world_size),
    )


def _history(walk: _Walk, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the token d = 1 .. w - 1 before each fragment is: row of the table (or -1), local row there; [F, w - 1]."""
    holder = np.full((len(rows), width - 1), -1, dtype=np.int64)
    source = np.zeros_like(holder)
    current = rows
    for d in range(1, width):
        token = walk.offset[rows] - d
        # One step back is enough: fragments of a chain are not empty, and the token moves by one.
        gone = (current >= 0) & (token < walk.offset[current])
        current = np.where(gone, walk.behind[current], current)
        holder[:, d - 1] = current
        source[:, d - 1] = walk.first_row[current] + walk.step * (token - walk.offset[current])
    return holder, source


def _demand(walk: _Walk, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(rank, own row) of every row that a fragment ahead on another rank needs; a pair may come more than once."""
    needed_by, needed = [rows[:0]], [rows[:0]]
    last = np.arange(width - 1)
    current = rows
    for _ in range(1, width):
        current = np.where(current >= 0, walk.ahead[current], -1)
        gap = walk.offset[current] - walk.offset[rows] - walk.length[rows]
        count = np.minimum(width - 1 - gap, walk.length[rows])
        count[(current < 0) | (walk.rank[current] == walk.rank[rows])] = 0
        fragment, back = np.nonzero(last < count[:, None])
        row = rows[fragment]
        needed_by.append(walk.rank[current[fragment]])
        needed.append(walk.first_row[row] + walk.step * (walk.length[row] - 1 - back))
    return np.concatenate(needed_by), np.concatenate(needed)


def _by_rank(rank: np.ndarray, row: np.ndarray, partition: Partition) -> tuple[np.ndarray, np.ndarray]:
    """The distinct pairs as sorted keys rank * (N + 1) + row, and each pair's place among them.

    Both ends of a message sort it by the sender's rows, so the two lists agree without a word.
    """
    keys, place = np.unique(rank * (partition.num_tokens + 1) + row, return_inverse=True)
    return keys, place.reshape(-1)


def _edges(walk: _Walk, rows: np.ndarray, source: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat entries of the tap table [T, w] that leave their fragment, and their values."""
    index, tap = np.triu_indices(width, 1)  # token i of a fragment leaves it at the taps j > i
    inside = index < walk.length[rows][:, None]
    entry = (walk.first_row[rows][:, None] + walk.step * index) * width + tap
    return entry[inside], source[:, tap - index - 1][inside]


def _counts(rank: np.ndarray, world_size: int) -> tuple[int, ...]:
    return tuple(np.bincount(rank, minlength=world_size).tolist())


def _device_side(side: Any, width: int) -> DeviceSide:
    own, tap = (torch.arange(n, device=side.edge_index.device) for n in (side.num_tokens, width))
    taps = own[:, None] + side.step * tap
    taps.view(-1).scatter_(0, side.edge_index, side.edge_value)
    return DeviceSide(taps=taps, send_rows=side.send_rows, send_counts=side.send_counts, recv_counts=side.recv_counts)
