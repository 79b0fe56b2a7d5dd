"""Ring: receive the entry state, apply the fragment's map, send on. Least bytes; latency grows with the chain."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.comm import Batch, Comm, Pending
from cp_gdn.flow import Flow
from cp_gdn.hops import HopLists
from cp_gdn.ring.routes import IDLE, Parcel, RingRoutes


class RingExchange:
    """One exchange in flight. `start` posts the first messages and returns; `wait` finishes the walk."""

    def __init__(self, comm: Comm, routes: RingRoutes, hops: HopLists, flow: Flow) -> None:
        self.comm, self.routes, self.hops, self.flow = comm, routes, hops, flow
        self.walk = self._walk()

    def start(self) -> None:
        """Post what can be posted before any message has arrived."""
        next(self.walk, None)

    def wait(self) -> None:
        """Receive, step and send on until every entry state of this rank is known; collect every handle."""
        for _ in self.walk:
            pass

    def _walk(self) -> Iterator[None]:
        sent, flow = [], self.flow
        steps = self.routes.adjoint if flow.adjoint else self.routes.forward
        for step, following in pairwise((*steps, IDLE)):
            receives = following.receives
            if step.is_idle and not receives:
                continue
            if step.kind is not None:
                hops = self.hops.of(step.kind, flow.adjoint)
                affine.run(hops, flow.states, flow.maps, flow.offsets, adjoint=flow.adjoint)
            if not step.sends and not receives:
                continue
            pending = self._post(step.sends, receives)
            if not receives:
                sent.append(pending)
                continue
            yield
            for parcel, states in zip(receives, pending.wait(), strict=True):
                flow.states[self._states(parcel)] = states
        for pending in sent:
            pending.wait()

    def _post(self, sends: tuple[Parcel, ...], receives: tuple[Parcel, ...]) -> Pending[list[Tensor]]:
        states = self.flow.states
        row = states.shape[1:]
        return self.comm.post(
            Batch(
                purpose=self.flow.purpose,
                sends=tuple((p.peer, states[self._states(p)].contiguous()) for p in sends),
                recvs=tuple((p.peer, torch.Size((p.count, *row))) for p in receives),
                dtype=states.dtype,
                device=states.device,
            )
        )

    def _states(self, parcel: Parcel) -> Tensor:
        assert self.routes.states is not None
        states: Tensor = self.routes.states[parcel.index][0]
        return states
