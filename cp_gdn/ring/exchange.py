"""Ring: receive the entry state, apply the fragment's map, send on. Least bytes; latency grows with the chain."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.comm import Batch, Comm, Pending
from cp_gdn.flow import Flow
from cp_gdn.ring.routes import IDLE, Parcel, RingStep


class RingExchange:
    """One exchange in flight. `start` posts the first messages and returns; `wait` finishes the walk."""

    def __init__(self, comm: Comm, steps: tuple[RingStep, ...], flow: Flow) -> None:
        self.comm, self.steps, self.flow = comm, steps, flow
        self.walk = self._walk()

    def start(self) -> None:
        """Post what can be posted before any message has arrived."""
        next(self.walk, None)

    def wait(self) -> None:
        """Receive, step and send on until every entry state of this rank is known; collect every handle."""
        for _ in self.walk:
            pass

    def _walk(self) -> Iterator[None]:
        sent = []
        for step, following in pairwise((*self.steps, IDLE)):
            receives = following.receives
            if step.is_idle and not receives:
                continue
            affine.run(step.hops, self.flow.states, self.flow.maps, self.flow.offsets, adjoint=self.flow.adjoint)
            if not step.sends and not receives:
                continue
            pending = self._post(step.sends, receives)
            if not receives:
                sent.append(pending)
                continue
            yield
            for parcel, states in zip(receives, pending.wait(), strict=True):
                self.flow.states[parcel.states] = states
        for pending in sent:
            pending.wait()

    def _post(self, sends: tuple[Parcel, ...], receives: tuple[Parcel, ...]) -> Pending[list[Tensor]]:
        states = self.flow.states
        row = states.shape[1:]
        return self.comm.post(
            Batch(
                purpose=self.flow.purpose,
                sends=tuple((p.peer, states[p.states].contiguous()) for p in sends),
                recvs=tuple((p.peer, torch.Size((p.count, *row))) for p in receives),
                dtype=states.dtype,
                device=states.device,
            )
        )
