"""The kernels' doubles on the CPU: they read the same tables, token by token, so that everything around the kernels is
tested without a GPU. The backward is autograd through the same tokens, segment by segment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import affine, context, on_kernels
from cp_gdn.backends import hopper, hopper_backward
from cp_gdn.backends.choice import BackendChoice
from cp_gdn.backends.hopper_hops import KernelHops
from cp_gdn.backends.hopper_walk import Ends, WalkInputs
from cp_gdn.reference import gated_delta_step

POISON = 1e6
"""What rows hold that nobody may read: a NaN would hide in a where."""

NAMES = ("q", "k", "v", "g", "beta")


def fold(
    hops: KernelHops, states: Tensor, maps: Tensor, offsets: Tensor | None, *, adjoint: bool, dropped: Any = None
) -> None:
    """Every chain on its own, the last first: they must not depend on each other."""
    if not hops.num_chains:
        return
    table = hops.hops.view(torch.int32).view(-1, 4).tolist()
    chains = hops.chains.view(torch.int32)[: hops.num_chains + 1].tolist()
    for first, last in reversed(list(pairwise(chains))):
        for dst, src, offset, row in table[first:last]:
            m = None if row < 0 else maps[row].mT if adjoint else maps[row]
            out = torch.zeros_like(states[dst]) if m is None else m @ states[src]
            states[dst] = out if offsets is None else out + offsets[offset]


def prepare(kernel: Any, q: Tensor, *tensors: Tensor) -> Any:
    return SimpleNamespace(bound=torch.zeros(1), rstd=None)


def limits(kernel: Any, bound: Tensor, segments: Tensor, found: Sequence[Tensor], cutoff: float) -> None:
    for each in found:
        each.zero_()


class Walks:
    """Doubles of all walks and of `grad`; "states" leaves for "replay" what the kernels leave in images."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], Tensor] = {}
        self.values: Tensor | None = None
        self.grads: dict[str, Tensor] = {}

    def walk(self, kernel: str, x: WalkInputs, tables: tuple[Tensor, Tensor], ends: Ends, *out: Any) -> None:
        runs, items = (table.tolist() for table in tables)
        places = ends.rows.view(torch.int32).view(-1, 2).tolist()
        if kernel == "states":
            self.entries, self.values = {}, x.v
        for first, count, head, segment in items:
            start, end = places[segment]
            state = torch.eye(128) if kernel == "m" else torch.zeros(128, 128)
            if start >= 0:
                assert ends.start is not None
                state = ends.start[start, head]
            rows = [t for row, n in runs[first : first + count] for t in range(row, row + n)]
            if kernel == "states":
                self.entries[segment, head] = state
                continue
            step = self.forward if kernel in ("b", "m", "o") else self.backward
            state = step(kernel, x, (segment, head), rows, state, out[0])
            if end >= 0:
                assert ends.end is not None
                ends.end[end, head] = state

    def forward(
        self, kernel: str, x: WalkInputs, item: tuple[int, int], rows: list[int], state: Tensor, o: Tensor | None
    ) -> Tensor:
        head = item[1]
        leaves = leaves_of(x, rows, head, None if kernel == "m" else x.v)
        outputs, state = tokens(leaves, state, x.scale)
        if o is not None:
            o[rows, head] = outputs.to(o.dtype)
        return state

    def backward(
        self, kernel: str, x: WalkInputs, item: tuple[int, int], rows: list[int], after: Tensor, dv: Tensor | None
    ) -> Tensor:
        """x.v is dO; the adjoint before the segment, and in a replay all gradients of its tokens."""
        head, replay = item[1], kernel == "replay"
        with torch.enable_grad():
            leaves = leaves_of(x, rows, head, self.values if replay else None)
            entry = (self.entries[item] if replay else torch.zeros(128, 128)).clone().requires_grad_()
            outputs, end = tokens(leaves, entry, x.scale)
            loss = (outputs * x.v[rows, head].float()).sum() + (end * after).sum()
            *grads, before = torch.autograd.grad(loss, [*leaves.values(), entry], materialize_grads=True)
        if replay:
            assert dv is not None
            key_head = head * x.q.shape[1] // x.v.shape[1]
            for name, value in zip(NAMES, grads, strict=True):
                place = key_head if name in ("q", "k") else head
                room = self.grads.setdefault(name, torch.zeros(getattr(x, name).shape))
                room[:, place] += torch.zeros(room[:, place].shape).index_copy(0, torch.tensor(rows), value)
            dv[rows, head] = grads[2].to(dv.dtype)
        return before

    def grad(self, kernel: Any, x: WalkInputs, chunks: Tensor, tapes: Any, adjoints: Tensor, out: Any) -> None:
        """Those of the tokens walked since the last call; dv is there already."""
        rows = torch.zeros(len(x.g), dtype=torch.bool)
        for row, count in chunks.tolist()[tapes.first_chunk : tapes.first_chunk + len(tapes.states)]:
            rows[row : row + count] = True
        for name in ("q", "k", "g", "beta"):
            room = getattr(out, name)
            room[rows] = self.grads[name][rows].to(room.dtype)
        self.grads = {}


def leaves_of(x: WalkInputs, rows: list[int], head: int, values: Tensor | None) -> dict[str, Tensor]:
    """fp32 rows of one value head; v zero without ``values``."""
    key_head = head * x.q.shape[1] // x.v.shape[1]
    v = x.v.new_zeros(len(rows), 128) if values is None else values[rows, head]
    found = (x.q[rows, key_head], x.k[rows, key_head], v, x.g[rows, head], x.beta[rows, head])
    return {name: t.float().clone().requires_grad_() for name, t in zip(NAMES, found, strict=True)}


def tokens(leaves: dict[str, Tensor], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o and the state after the rows."""
    outputs, state = [], state[None]
    for q, k, v, g, beta in zip(*leaves.values(), strict=True):
        state = gated_delta_step(state, k[None], v[None], g[None], beta[None])
        outputs.append(scale * state[0].mT @ q)
    return torch.stack(outputs), state[0]


@contextmanager
def doubles() -> Iterator[None]:
    """Every context on the CPU takes the "kernels" inside."""
    kernels = SimpleNamespace(prepare=(None, None), limits=None, walks=("b", "m", "o"))
    backward = SimpleNamespace(states="states", summary="summary", replay="replay", grad=(None, None))
    walks: dict[int, Walks] = {}

    def of_thread() -> Walks:  # ranks of a twin are threads
        return walks.setdefault(threading.get_ident(), Walks())

    new = hopper.HopperBackend.new_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "prepare", prepare)
        patch.setattr(hopper, "limits", limits)
        for module in (hopper, hopper_backward):
            patch.setattr(module, "walk_rows", lambda *args: of_thread().walk(*args, *(None,) * (6 - len(args))))
        patch.setattr(hopper_backward, "grad", lambda *args: of_thread().grad(*args))
        patch.setattr(hopper, "load_kernels", lambda index, group: kernels)
        patch.setattr(hopper_backward.BackwardKernels, "load", lambda group: backward)
        patch.setattr(affine, "fold", fold)
        for module in (on_kernels, hopper_backward):
            patch.setattr(module, "on_device", lambda index: nullcontext())
        patch.setattr(context, "choose_backend", lambda asked, comm: BackendChoice(kind="hopper", reason="a test"))
        patch.setattr(hopper.HopperBackend, "new_states", lambda self, rows: new(self, rows).fill_(POISON))
        yield
