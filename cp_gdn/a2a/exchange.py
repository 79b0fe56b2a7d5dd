"""All-to-all: every fragment's summary to the owner of its heads, entry states back. Two collectives, whatever the
chain's length."""

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.a2a.routes import OwnerRoutes, heads_of
from cp_gdn.comm import Comm
from cp_gdn.flow import Flow


class OwnerExchange:
    """One exchange in flight. ``owned_maps`` holds, after `start` and `wait`, the maps that this rank received as an
    owner."""

    def __init__(self, comm: Comm, routes: OwnerRoutes, flow: Flow) -> None:
        self.comm, self.routes, self.flow = comm, routes, flow
        self.owned_maps: Tensor | None = flow.kept

    def start(self) -> None:
        """Post the summaries."""
        flow, routes, ranks = self.flow, self.routes, range(self.comm.size)
        sources = [flow.states[routes.head_states], flow.offsets[routes.offset_rows]]
        if flow.kept is None:
            sources.append(flow.maps[routes.map_rows])
        pieces = [source[:, self._heads(j)].reshape(-1) for j in ranks for source in sources]
        received = [self._summary_size(r, self._width(self.comm.rank)) for r in ranks]
        sent = [self._summary_size(self.comm.rank, self._width(j)) for j in ranks]
        self.pending = self.comm.all_to_all(flow.purpose, torch.cat(pieces), sent, received)

    def wait(self) -> None:
        """As an owner, step through every chain; then take the entry states of this rank's fragments home."""
        flow, routes, ranks = self.flow, self.routes, range(self.comm.size)
        heads, offsets, maps = self._unpack(self.pending.wait())
        self.owned_maps = maps if flow.kept is None else flow.kept
        states = flow.states.new_zeros((routes.num_states, *offsets.shape[1:]))
        affine.run(
            routes.hops.of(0, flow.adjoint), states, self.owned_maps, torch.cat([heads, offsets]), adjoint=flow.adjoint
        )
        state = flow.states.shape[2] * flow.states.shape[3]
        width, replies = self._width(self.comm.rank), routes.num_replies
        home = states[: sum(replies)].reshape(-1)
        sent = [replies[r] * width * state for r in ranks]
        received = [replies[self.comm.rank] * self._width(j) * state for j in ranks]
        answer = self.comm.all_to_all(f"{flow.purpose}_HOME", home, sent, received).wait()
        for j, piece in zip(ranks, answer.split(received), strict=True):
            if piece.numel():
                row = flow.states.shape[2:]
                flow.states[routes.replies, self._heads(j)] = piece.view(replies[self.comm.rank], self._width(j), *row)

    def _heads(self, rank: int) -> slice:
        return heads_of(rank, self.comm.size, self.flow.states.shape[1])

    def _width(self, rank: int) -> int:
        heads = self._heads(rank)
        return int(heads.stop - heads.start)

    def _summary_size(self, rank: int, width: int) -> int:
        """Elements that ``rank`` ships to an owner of ``width`` heads."""
        k, v = self.flow.states.shape[2:]
        heads, rows = self.routes.num_heads[rank], self.routes.num_rows[rank]
        return width * k * ((heads + rows) * v + (rows * k if self.flow.kept is None else 0))

    def _unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads, offsets and maps of all ranks, each in rank order."""
        width, (k, v) = self._width(self.comm.rank), self.flow.states.shape[2:]
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        start = 0
        for r in range(self.comm.size):
            counts = (self.routes.num_heads[r], self.routes.num_rows[r], self.routes.num_rows[r])
            kinds = 3 if self.flow.kept is None else 2  # kept maps did not travel
            for pieces, count, columns in list(zip(found, counts, (v, v, k), strict=True))[:kinds]:
                size = count * width * k * columns
                pieces.append(message[start : start + size].view(count, width, k, columns))
                start += size
        heads, offsets, maps = found
        return torch.cat(heads), torch.cat(offsets), torch.cat(maps) if maps else message.new_zeros((0, width, k, k))
