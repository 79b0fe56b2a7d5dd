"""The a2a exchange of kernel contexts: an owner folds on the message itself, and few launches pack and unpack it."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.a2a.exchange import OwnerExchange
from cp_gdn.a2a.routes import MAPS, OwnerDraft, OwnerRoutes, owner_routes
from cp_gdn.backends.hopper_hops import chainwise
from cp_gdn.fragments import Ints, ranges
from cp_gdn.page import Page

OWNED = MAPS + 1
"""Two more lists of `OwnerRoutes.rows`: rows of the message that are maps, in the order of kept maps."""
TRAVELLING, KEPT = 0, 1
"""Kinds of an owner's hops: on a message with the maps, and on one without them, in the mirror only."""


class PackedRoutes(OwnerRoutes):
    """Owner's routes whose hops read rows of the message: of every rank its heads, offsets and, if they travel,
    maps."""

    @property
    def owned_rows(self) -> Tensor:
        """Rows of the message that are maps, in the order of kept maps."""
        return self.list(OWNED + self.reverse)


def kernel_routes(draft: OwnerDraft, page: Page, heads: int) -> tuple[OwnerRoutes, OwnerRoutes]:
    """Routes of a context on the kernels; an owner folds on the message where every rank owns as many of ``heads``."""
    if heads % len(draft.num_rows):
        return owner_routes(draft, page, chainwise)
    rows, offsets, size = _message_rows(draft)
    count, forward = draft.columns.shape[1], int(draft.columns[0].searchsorted(1))
    columns = np.concatenate((draft.columns, draft.columns[:, forward:]), axis=1)
    message = np.arange(0, 3 * size, size).repeat((forward, count - forward, count - forward))
    columns[6] = rows[columns[6] + message]
    columns[7, :count] = rows[columns[7, :count] + message[:count] + offsets]  # kept maps are in their order
    columns[0, count:] += 2 * KEPT
    lists = [*draft.lists, rows[offsets:size], rows[size + offsets : 2 * size]]
    return owner_routes(replace(draft, columns=columns, lists=lists), page, chainwise, PackedRoutes)


def _message_rows(draft: OwnerDraft) -> tuple[Ints, int, int]:
    """Rows of an owner's three messages one after the other: forward, adjoint, and adjoint without the maps that a
    forward has kept. Of each the heads of all ranks and their offsets, as the owner's offset rows count them, then the
    maps. Also how many come before the maps, and how many the first two messages have each."""
    counts = np.zeros((3, 3, len(draft.num_rows)), dtype=np.int64)
    counts[:2, 0], counts[2, 0] = draft.num_heads, draft.num_heads[1]
    counts[:, 1] = counts[:2, 2] = draft.num_rows
    until = np.add.accumulate(counts, axis=1)
    of_rank = until[:, 2]
    first = np.add.accumulate(of_rank, axis=1) - of_rank
    maps, size = int(np.add.reduce(draft.num_rows)), int(np.add.reduce(of_rank[0]))
    return ranges((until - counts + first[:, None]).reshape(-1), counts.reshape(-1)), size - maps, size


class PackedExchange(OwnerExchange):
    """`OwnerExchange` on `PackedRoutes`, where every rank owns as many heads; the same messages."""

    routes: PackedRoutes

    def start(self) -> None:
        """Post the summaries."""
        flow, routes, size = self.flow, self.routes, self.comm.size
        sources = [(flow.states, routes.head_states), (flow.offsets, routes.offset_rows)]
        if flow.kept is None:
            sources.append((flow.maps, routes.map_rows))
        width, counts = self._width(self.comm.rank), [rows.shape[0] for _, rows in sources]
        by_owner = flow.states.new_empty((size, sum(counts), width, *flow.states.shape[2:]))
        for (source, rows), place in zip(sources, by_owner.split(counts, 1), strict=True):
            heads_by_owner = source.unflatten(1, (size, width)).transpose(0, 1)
            torch.index_select(heads_by_owner, 1, rows, out=place)  # into the message, with no copy between
        received = [self._summary_size(r, width) for r in range(size)]
        sent = [self._summary_size(self.comm.rank, width)] * size
        self.pending = self.comm.all_to_all(flow.purpose, by_owner.view(-1), sent, received)

    def wait(self) -> None:
        """As an owner, step through every chain; then take the entry states of this rank's fragments home."""
        flow, routes, width = self.flow, self.routes, self._width(self.comm.rank)
        matrix = flow.states.shape[2:]
        message = self.pending.wait().view(-1, width, *matrix)
        states = message.new_empty((routes.num_states, width, *matrix))
        if flow.kept is None:
            hops = routes.hops.of(TRAVELLING, flow.adjoint)
            affine.run(hops, states, message, message, adjoint=flow.adjoint)
            self.owned_maps = message[routes.owned_rows]
        else:
            affine.run(routes.hops.of(KEPT, flow.adjoint), states, flow.kept, message, adjoint=flow.adjoint)
        del message  # a forward's memory is at its peak here
        mine, each = routes.num_replies[self.comm.rank], width * matrix.numel()
        home, sent = states[: sum(routes.num_replies)].view(-1), [n * each for n in routes.num_replies]
        answer = self.comm.all_to_all(f"{flow.purpose}_HOME", home, sent, [mine * each] * self.comm.size).wait()
        by_owner = answer.view(self.comm.size, mine, width, *matrix).transpose(0, 1)
        flow.states.unflatten(1, (self.comm.size, width))[routes.replies] = by_owner
