"""Which rows the causal convolution of one rank needs from other fragments: its halo, forward and mirrored.

The forward reads up to width - 1 tokens back in the same document, the adjoint reads the pre-activation gradient of up
to width - 1 tokens ahead. What is sent depends on the partition alone.

Both directions are written by the same lines: row 0 of arrays [2, ..] is the front of every fragment, row 1 its back.
The forward receives across the front what its taps read there, and sends across the back what others read of it; the
adjoint the other way round. Legend: T local tokens, R rows received from other ranks, F this rank's non-empty
fragments, W ranks, w width, w (w - 1) / 2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

from cp_gdn.fragments import Ints, differs
from cp_gdn.layout import Partition
from cp_gdn.page import Lists, Page, Table

MAX_WIDTH = 8
_SIDES = np.arange(2)[:, None, None]
_OUTWARD = 2 * _SIDES - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class HaloSide:
    """One direction of the halo on one rank; rows index concat(own [T], halo [R], zero row).

    Tap j of a row is the row of the token j steps away: ``row + j`` (the adjoint) or ``row - j`` inside a fragment.
    What the two directions have in tables, they share.

    Attributes:
        edges: [4, ..] flat entries of the tap table [T, w] that leave their fragment, forward and adjoint, and their
            values likewise.
        sends: [1, ..] own rows that others need, a list per direction: by receiving rank, then ascending tokens.
        send_counts, recv_counts: rows per rank; the halo holds what came, by sending rank.
    """

    reverse: bool
    num_tokens: int
    width: int
    edges: Table
    sends: Lists
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    @property
    def send_rows(self) -> torch.Tensor:
        rows: torch.Tensor = self.sends[self.reverse][0]
        return rows

    @cached_property
    def taps(self) -> torch.Tensor:
        """int64 [T, w], with the zero row T + R beyond the document; made where it lies when first needed."""
        index, value = self.edges.data[self.reverse :: 2]
        own, tap = (torch.arange(n, device=index.device) for n in (self.num_tokens, self.width))
        taps = own[:, None] + (tap if self.reverse else -tap)
        taps.view(-1).scatter_(0, index, value)
        return taps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Halo:
    """Both directions of one rank's halo. `crosses` (the same on every rank): all take part, otherwise nobody sends."""

    crosses: bool
    forward: HaloSide
    adjoint: HaloSide

    def make(self) -> None:
        """Make the tap tables now."""
        _ = self.forward.taps, self.adjoint.taps


def build_halo(part: Partition, rank: int, width: int, page: Page) -> Halo:
    """Halo of ``rank`` for a convolution over ``width`` tokens, 1 to MAX_WIDTH, with its tables on ``page``."""
    # One document of 6, w = 3, rank 0 holds offsets 0 1 | 5, rank 1 holds 2 3 | 4. Forward, rank 1: rows 0 1 of rank 0
    # come as its rows 3 4 (5 is the zero row), its taps are (0 4 3) (1 0 4) (2 1 0), and it sends rows 1 2 (for 5).
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"conv: got width {width}, expected 1 to {MAX_WIDTH}")
    borders, (step, tap) = _borders(part, rank, width), _pairs(width)
    source, rows, counts = _messages(part, rank, borders, (step, tap))
    inside = (step < borders.length[:, None]).reshape(-1).nonzero()[0]
    entry = (borders.row[..., None] - _OUTWARD * step) * width + tap
    edges = (x.reshape(2, -1).take(inside, axis=1) for x in (entry, source.take(tap - step - 1, axis=2)))
    sends = page.put_lists(rows[None], [sum(counts[2]), sum(counts[3])])
    table, num_tokens = page.put(np.concatenate([*edges])), borders.num_tokens
    forward, adjoint = (
        HaloSide(
            reverse=i > 0,
            num_tokens=num_tokens,
            width=width,
            edges=table,
            sends=sends,
            send_counts=tuple(counts[2 + i]),
            recv_counts=tuple(counts[i]),
        )
        for i in (0, 1)
    )
    return Halo(crosses=width > 1 and part.crosses, forward=forward, adjoint=adjoint)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Borders:
    """Both ends of this rank's non-empty fragments.

    Attributes:
        length: [F]. row, token: the first and the last one, local and global, [2, F].
        beyond: the token j + 1 beyond each end, [2, F, w - 1]. owner: rank that holds it, -1 where its document ends.
    """

    num_tokens: int
    length: Ints
    row: Ints
    token: Ints
    beyond: Ints
    owner: Ints


def _borders(part: Partition, rank: int, width: int) -> _Borders:
    own = part.of_rank(rank)
    filled = own.length.nonzero()[0]
    doc, offset, length, row = (x[filled] for x in (own.doc, own.offset, own.length, own.first_row))
    ends = np.array((offset, offset + length - 1))
    beyond = ends[..., None] + _OUTWARD * np.arange(1, width)
    held = ((beyond >= 0) & (beyond < own.size[filled, None])).nonzero()
    owner = np.full_like(beyond, -1)
    owner[held], start = part.cuts.owner_of(doc[held[1]], beyond[held]), part.bounds[doc]
    return _Borders(
        num_tokens=own.num_tokens,
        length=length,
        row=np.array((row, row + length - 1)),
        token=start + ends,
        beyond=start[:, None] + beyond,
        owner=owner,
    )


def _messages(
    part: Partition, rank: int, borders: _Borders, pairs: tuple[Ints, Ints]
) -> tuple[Ints, Ints, list[list[int]]]:
    """Row of the token j + 1 beyond each end, [2, F, w - 1]; own rows to send, forward then adjoint; rows received
    forward and adjoint, sent forward and adjoint, of each rank [4, W]."""
    world, owner, beyond, (step, tap) = part.world_size, borders.owner, borders.beyond, pairs
    far = (owner >= 0) & (owner != rank)
    # The token `step` inside an end is needed by the token `tap` away from it, which is beyond that end.
    sent = far.take(tap - step - 1, axis=2) & (step < borders.length[:, None])
    wanted, sent = far.nonzero(), sent.nonzero()
    outward, needing = (2 * sent[0] - 1) * step[sent[2]], owner[sent[0], sent[1], (tap - step - 1)[sent[2]]]
    # Kinds of rows: 0 and 1 are received by the forward and by the adjoint, 2 and 3 are sent by them.
    peers = np.concatenate((wanted[0] * world + owner[wanted], (3 - sent[0]) * world + needing))
    tokens = np.concatenate((beyond[wanted], borders.token[sent[:2]] - outward))
    first, place = _distinct(peers * (part.num_tokens + 1) + tokens)
    counts = np.bincount(peers[first], minlength=4 * world).reshape(4, world)
    received, num_wanted = np.add.reduce(counts, axis=1)[:2], len(wanted[0])
    source = np.empty_like(owner)
    source[:] = borders.num_tokens + received[:, None, None]  # the zero row
    source[wanted] = borders.num_tokens + place[:num_wanted] - received[0] * wanted[0]
    near = (owner == rank).nonzero()
    if len(near[0]):
        source[near] = _local_rows(borders, beyond[near])
    rows = borders.row[sent[:2]] - outward
    return source, rows[first[int(received[0] + received[1]) :] - num_wanted], counts.tolist()


def _distinct(keys: Ints) -> tuple[Ints, Ints]:
    """Distinct keys, ascending: index of one of each, and the place of every given one among them."""
    order = keys.argsort()
    fresh = differs(keys[order])
    place = np.empty_like(order)
    place[order] = np.add.accumulate(fresh, dtype=np.int64) - 1
    return order[fresh], place


def _local_rows(borders: _Borders, token: Ints) -> Ints:
    """Local rows of global tokens that this rank holds."""
    start = borders.token[0]
    order = start.argsort(kind="stable")
    fragment = order[start[order].searchsorted(token, "right") - 1]
    rows: Ints = borders.row[0][fragment] + token - start[fragment]
    return rows


@cache
def _pairs(width: int) -> tuple[Ints, Ints]:
    """(step, tap) such that the tap of the token `step` inside an end leaves the fragment, [w (w - 1) / 2] each."""
    step, tap = np.triu_indices(width, 1)
    return step, tap
