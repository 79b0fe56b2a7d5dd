"""Buffers of a call: none is read again after it, none lives on after it, and none is lost in a failing one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cp_gdn import Comm, CommFailed, Context, partition, twin
from cp_gdn.backends.torch_backend import TorchBackend
from tests.dist import pool
from tests.dist.test_op_messages import Tensors, make_context, mix, rows_of
from tests.pack import differences

pytestmark = pytest.mark.dist
WORLD = 3
STEPS = 50


class Buffers:
    """What passed through the transport of a Comm: tensors since the last `spoil`, weak references to all ever."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.received: list[Tensor] = []
        self.history: list[Tensor] = []
        self.ever: list[weakref.ref[Tensor]] = []

    def spoil(self, *, history: bool) -> None:
        """Overwrite with NaN; history rows of a convolution are its own until the backward."""
        spoiled = [*self.sent, *self.received, *(self.history if history else ())]
        for x in spoiled:
            x.fill_(float("nan"))
        self.sent, self.received = [], []
        if history:
            self.history = []

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.ever)


@contextmanager
def collected(comm: Comm, buffers: Buffers) -> Iterator[None]:
    real = comm._link.exchange

    def exchange(purpose: str, sends: Any, recvs: Any) -> Any:
        buffers.sent += [x for _, x in sends]
        kept = buffers.history if purpose == "HALO" else buffers.received
        kept += [x for _, x in recvs]
        buffers.ever += [weakref.ref(x) for _, x in (*sends, *recvs)]
        return real(purpose, sends, recvs)

    with patch.object(comm._link, "exchange", exchange):
        yield


def context(comm: Comm, exchange: str) -> Context:
    return make_context(comm, partition([0, 110, 120], comm.size, "zigzag"), exchange, torch.float32)


def step(ctx: Context, buffers: Buffers | None = None) -> Tensors:
    leaves = {name: x.requires_grad_() for name, x in rows_of(ctx).items()}
    o = mix(ctx, leaves)
    if buffers is not None:
        buffers.spoil(history=False)
    grads = torch.autograd.grad((o * o).sum(), list(leaves.values()))
    if buffers is not None:
        buffers.spoil(history=True)
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


def many_steps(rank: int, world: int, exchange: str) -> tuple[Tensors, list[int], int]:
    """The first step, the steps that differ from it, and how many messages there were."""
    comm, buffers = Comm(), Buffers()
    ctx = context(comm, exchange)
    with collected(comm, buffers):
        first = step(ctx, buffers)
        others = [i for i in range(1, STEPS) if differences(step(ctx, buffers), first)]
    comm.close()
    return first, others, len(buffers.ever)


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_50_steps_have_the_same_bits_when_every_buffer_is_overwritten_after_each_call(exchange: str) -> None:
    expected = twin(WORLD, lambda comm: step(context(comm, exchange)))
    for rank, (first, others, messages) in enumerate(pool.run(WORLD, many_steps, exchange)):
        assert differences(first, expected[rank]) == []
        assert others == []
        assert messages > 0
        assert messages % STEPS == 0


def count_tensors() -> int:
    gc.collect()
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


def what_lives_on(rank: int, world: int, exchange: str) -> dict[str, int]:
    comm, buffers = Comm(), Buffers()
    ctx = context(comm, exchange)
    step(ctx)  # what is made once, is made
    before, lives = count_tensors(), {}
    with collected(comm, buffers):
        leaves = {name: x.requires_grad_() for name, x in rows_of(ctx).items()}
        output = weakref.ref(o := mix(ctx, leaves))
        buffers.spoil(history=True)
        del leaves, o
        lives["of a graph that is gone"] = buffers.alive() + (output() is not None)
        step(ctx, buffers)
        lives["of a step"] = buffers.alive()
    lives["other tensors"] = count_tensors() - before
    comm.close()
    return lives


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_no_tensor_of_a_call_lives_on_when_its_graph_is_gone(exchange: str) -> None:
    for lives in pool.run(WORLD, what_lives_on, exchange):
        assert lives == {"of a graph that is gone": 0, "of a step": 0, "other tensors": 0}


def raising(*_: Any) -> Any:
    raise MemoryError("on purpose")


def fail_under_way(rank: int, world: int, exchange: str, stage: str) -> tuple[int, int]:
    """An exception while messages are under way: how many there were, and how many tensors of them live on."""
    comm, buffers = Comm(timeout=10.0), Buffers()
    ctx = context(comm, exchange)
    with collected(comm, buffers), patch.object(TorchBackend, stage, raising):
        with pytest.raises((MemoryError, CommFailed)):
            step(ctx)
        buffers.sent, buffers.received, buffers.history = [], [], []
        return len(buffers.ever), buffers.alive()


@pytest.mark.parametrize("stage", ["replay", "adjoint_replay"])
@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_an_exception_between_sending_and_waiting_keeps_no_tensor(exchange: str, stage: str) -> None:
    outcomes = pool.run_failing(WORLD, fail_under_way, exchange, stage, deadline=60.0)
    assert [outcome.name for outcome in outcomes] == ["returned"] * WORLD, outcomes
    posted, alive = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert alive == (0,) * WORLD
    assert max(posted) > 0
