"""The a2a exchange of kernel contexts: an owner folds on the message itself, and few launches pack and unpack it."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from cp_gdn import affine
from cp_gdn.a2a.exchange import OwnerExchange
from cp_gdn.a2a.routes import OwnerRoutes
from cp_gdn.chains import NO_HOPS, Hops
from cp_gdn.comm import Comm
from cp_gdn.exchange import Routes
from cp_gdn.flow import Exchange, Flow
from cp_gdn.fragments import Ints, ranges
from cp_gdn.plan import Index


@dataclass(frozen=True, kw_only=True)
class PackedRoutes(OwnerRoutes):
    """Owner's routes whose hops read rows of the message: of every rank its heads, offsets and, if they travel, maps.

    Attributes:
        hops: where the maps travel. kept_hops: where the owner has them.
        owned_rows: rows of the message that are maps, in the order of kept maps.
    """

    kept_hops: Hops
    owned_rows: Index


def packed_routes(owner: OwnerRoutes, *, keeps: bool) -> PackedRoutes:
    """The same routes with hops on the message, not yet as `fold` takes them. ``keeps``: an owner may have maps."""
    own = {name: getattr(owner, name) for name in _FIELDS}
    offsets, maps = _message_rows(owner, maps=True)
    own["hops"] = _on_rows(owner.hops, offsets, maps)
    kept = NO_HOPS
    if keeps:
        kept = _on_rows(owner.hops, _message_rows(owner, maps=False)[0], np.arange(len(maps)))
    return PackedRoutes(**own, kept_hops=kept, owned_rows=maps)


_FIELDS = tuple(field.name for field in fields(OwnerRoutes))


def _message_rows(owner: OwnerRoutes, *, maps: bool) -> tuple[Ints, Ints]:
    """Rows of the heads and offsets (in the order of the owner's offset rows), and of the maps of all ranks."""
    heads, rows = np.array((owner.num_heads, owner.num_rows))
    size = heads + rows * (1 + maps)
    first = size.cumsum() - size
    starts = np.concatenate((first, first + heads, first + heads + rows))
    found, offsets = ranges(starts, np.concatenate((heads, rows, rows))), sum(owner.num_heads) + sum(owner.num_rows)
    return found[:offsets], found[offsets:]


def _on_rows(hops: Hops, offsets: Ints, maps: Ints) -> Hops:
    table = hops.table.copy()
    table[2] = offsets[table[2]]
    if len(maps):  # where a chain starts the map row means nothing
        table[3] = maps.take(table[3], mode="clip")
    return Hops(table=table, steps=hops.steps)


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
            affine.run(routes.hops, states, message, message, adjoint=flow.adjoint)
            self.owned_maps = message[routes.owned_rows]
        else:
            affine.run(routes.kept_hops, states, flow.kept, message, adjoint=flow.adjoint)
        del message  # a forward's memory is at its peak here
        mine, each = routes.num_replies[self.comm.rank], width * matrix.numel()
        home, sent = states[: sum(routes.num_replies)].view(-1), [n * each for n in routes.num_replies]
        answer = self.comm.all_to_all(f"{flow.purpose}_HOME", home, sent, [mine * each] * self.comm.size).wait()
        by_owner = answer.view(self.comm.size, mine, width, *matrix).transpose(0, 1)
        flow.states.unflatten(1, (self.comm.size, width))[routes.replies] = by_owner


@dataclass(frozen=True, kw_only=True)
class KernelRoutes(Routes):
    """Routes of a kernel context."""

    def exchange(self, comm: Comm, flow: Flow) -> Exchange:
        owner = self.adjoint_owner if flow.adjoint else self.forward_owner
        if isinstance(owner, PackedRoutes):
            return PackedExchange(comm, owner, flow)
        return super().exchange(comm, flow)
