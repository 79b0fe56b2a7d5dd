"""The kernels' doubles on the CPU: they read the same tables, token by token, so that everything around the kernels is
tested without a GPU. The backward is autograd through the same tokens, segment by segment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import affine, context, on_kernels
from cp_gdn.backends import hopper, hopper_backward, hopper_walk
from cp_gdn.backends.choice import BackendChoice
from cp_gdn.backends.hopper_hops import KernelHops
from cp_gdn.backends.hopper_prepare import Prepared, prepared_parts
from cp_gdn.backends.hopper_walk import Ends, Items, WalkInputs
from cp_gdn.reference import gated_delta_step
from cp_gdn.workspace import Room
from tests.spread import spread

POISON = 1e6
"""What rows hold that nobody may read: a NaN would hide in a where."""

NAMES = ("q", "k", "v", "g", "beta")


def fold(
    hops: KernelHops, states: Tensor, maps: Tensor, offsets: Tensor | None, *, adjoint: bool, dropped: Any = None
) -> None:
    """Every chain on its own, the last first: they must not depend on each other."""
    if not hops.num_chains:
        return
    table = hops.table.view(torch.int32).view(-1, 4).tolist()
    chains = hops.chains.view(torch.int32)[hops.first_chain :][: hops.num_chains + 1].tolist()
    for first, last in reversed(list(pairwise(chains))):
        for dst, src, offset, row in table[first:last]:
            m = None if row < 0 else maps[row].mT if adjoint else maps[row]
            out = torch.zeros_like(states[dst]) if m is None else m @ states[src]
            states[dst] = out if offsets is None else out + offsets[offset]


def prepare(kernel: Any, queries_keys: tuple[Tensor, Tensor], gates: Any, made: Prepared) -> None:
    """Nothing, for the doubles do not need T."""
    assert made.memory.numel() == prepared_parts(len(queries_keys[0]), made.heads, made.chunks.kinds)[-1]
    made.memory.fill_(255)


def poisoned(room: Room, name: str, take: Any = Room.take) -> Tensor:
    """`Room.take`, scratch memory full of what nobody may read."""
    found: Tensor = take(room, name)
    return found.fill_(POISON) if found.is_floating_point() else found


class Walks:
    """Doubles of all walks and of `grad`; "states" leaves for "replay" what the kernels leave in images."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], Tensor] = {}
        self.values: Tensor | None = None
        self.grads: dict[str, Tensor] = {}

    def summarize(self, kernel: str, x: WalkInputs, work: Items, ends: Ends, found: Any) -> None:
        places = ends.rows.view(torch.int32).view(-1, 2).tolist()
        if found.dropped is not None:
            found.dropped.zero_()
        for (segment, map_row, rows), head, run in pieces(x, work):
            if run < 0:
                found.maps[map_row, head] = self.forward("m", x, (segment, head), rows, torch.eye(128))
                continue
            start, end = places[segment]
            state = ends.start[start, head] if start >= 0 else torch.zeros(128, 128)  # type: ignore[index]
            step = self.forward if kernel == "b" else self.backward
            ends.end[end, head] = step(kernel, x, (segment, head), rows, state)  # type: ignore[index]

    def replay(self, kernel: str, x: WalkInputs, work: Items, ends: Ends, tapes: Any = None) -> None:
        places = ends.rows.view(torch.int32).view(-1, 2).tolist()
        if kernel == "states":
            self.entries, self.values = {}, x.v
        for (segment, _, rows), head, run in pieces(x, work):
            assert run > 0
            start, end = places[segment]
            state = torch.zeros(128, 128)
            if start >= 0:
                assert ends.start is not None
                state = ends.start[start, head]
            if kernel == "states":
                self.entries[segment, head] = state
                continue
            state = (self.forward if kernel == "o" else self.backward)(kernel, x, (segment, head), rows, state)
            if end >= 0:
                assert ends.end is not None
                ends.end[end, head] = state

    def forward(self, kernel: str, x: WalkInputs, item: tuple[int, int], rows: list[int], state: Tensor) -> Tensor:
        head = item[1]
        leaves = leaves_of(x, rows, head, None if kernel == "m" else x.v)
        outputs, state = tokens(leaves, state, x.scale)
        if kernel == "o":
            x.out[rows, head] = outputs.to(x.v.dtype)
        return state

    def backward(self, kernel: str, x: WalkInputs, item: tuple[int, int], rows: list[int], after: Tensor) -> Tensor:
        """x.v is dO; the adjoint before the segment, and in a replay all gradients of its tokens."""
        head, replay = item[1], kernel == "replay"
        with torch.enable_grad():
            leaves = leaves_of(x, rows, head, self.values if replay else None)
            entry = (self.entries[item] if replay else torch.zeros(128, 128)).clone().requires_grad_()
            outputs, end = tokens(leaves, entry, x.scale)
            loss = (outputs * x.v[rows, head].float()).sum() + (end * after).sum()
            *grads, before = torch.autograd.grad(loss, [*leaves.values(), entry], materialize_grads=True)
        if replay:
            dv = x.out
            key_head = head * x.q.shape[1] // x.v.shape[1]
            for name, value in zip(NAMES, grads, strict=True):
                place = key_head if name in ("q", "k") else head
                room = self.grads.setdefault(name, torch.zeros(getattr(x, name).shape))
                room[:, place] += torch.zeros(room[:, place].shape).index_copy(0, torch.tensor(rows), value)
            dv[rows, head] = grads[2].to(dv.dtype)
        return before

    def grad(self, kernel: Any, x: WalkInputs, steps: Tensor, tapes: Any, out: Any) -> None:
        """Those of the tokens and heads walked since the last call; dv is there already."""
        heads, value_heads = x.prepared.heads
        group = value_heads // heads
        for row, count, head, _ in (steps & torch.tensor([-1, -1, 0xFFFF, -1], dtype=torch.int32)).tolist():
            for name in ("q", "k", "g", "beta"):
                own = slice(head, head + 1) if name in ("q", "k") else slice(head * group, (head + 1) * group)
                room = getattr(out, name)
                room[row : row + count, own] = self.grads[name][row : row + count, own].to(room.dtype)
        self.grads = {}


def pieces(x: WalkInputs, work: Items) -> Iterator[tuple[tuple[int, int, list[int]], int, int]]:
    """Segment, row of its map and token rows, value head, run: of every segment of every item."""
    segments, runs = work.segments.view(torch.int32).view(-1, 4).tolist(), x.prepared.chunks.rows.tolist()
    for first, count, packed, segment in work.items.tolist():
        run, head = packed >> 16, packed & 0xFFFF
        seen = 0
        for each in range(segment, segment + max(run, 1)):
            chunk, chunks, map_row, _ = segments[each]
            assert chunk == first + seen
            seen += chunks
            yield (each, map_row, [t for a, n in runs[chunk : chunk + chunks] for t in range(a, a + n)]), head, run
        assert seen == count


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
    kernels = SimpleNamespace(spread=None, prepare=(None, None), summary="b", output="o")
    backward = SimpleNamespace(states="states", summary="summary", replay="replay", grad=(None, None))
    walks: dict[int, Walks] = {}

    def of_thread() -> Walks:  # ranks of a twin are threads
        return walks.setdefault(threading.get_ident(), Walks())

    new = hopper.HopperBackend.new_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "spread", spread)
        patch.setattr(hopper, "prepare", prepare)
        for module in (hopper, hopper_walk):  # the backward calls the second
            patch.setattr(module, "summarize", lambda *args: of_thread().summarize(*args))
            patch.setattr(module, "replay", lambda *args: of_thread().replay(*args))
        patch.setattr(WalkInputs, "__post_init__", lambda self: None)
        patch.setattr(hopper_backward, "grad", lambda *args: of_thread().grad(*args))
        patch.setattr(hopper, "load_kernels", lambda index, group: kernels)
        patch.setattr(hopper_backward.BackwardKernels, "load", lambda group: backward)
        patch.setattr(affine, "fold", fold)
        for module in (on_kernels, hopper, hopper_backward):
            patch.setattr(module, "on_device", lambda index: nullcontext())
        patch.setattr(context, "choose_backend", lambda asked, comm: BackendChoice(kind="hopper", reason="a test"))
        patch.setattr(hopper.HopperBackend, "new_states", lambda self, rows: new(self, rows).fill_(POISON))
        patch.setattr(Room, "take", poisoned)
        yield
