"""Activation checkpointing of two layers in every form: the bits of a run without it, the same messages on both ends.

A recompute sends nothing where the layers' own handles or the caller's carry what the exchange brought, and where the
operator is saved; elsewhere it runs the exchange again, on every rank alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from cp_gdn import Comm, Context, GatedDeltaNet, RecomputeHandle, build_context, chunk_gated_delta_rule, partition, twin
from cp_gdn.comm import Message
from tests.dist import pool
from tests.test_twin import assert_lists_match

BOUNDS = (0, 90, 91, 170)
HIDDEN = 12
SHAPE: dict[str, Any] = {"heads": (1, 2), "head_dims": (16, 16)}

Block = Callable[..., Tensor]
Form = Callable[[Block, Block, Tensor], Tensor]

once_more = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


def save_the_operator(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.cp_gdn.forward.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


TO_THE_END = "each, without early stop"
selective = partial(once_more, context_fn=partial(create_selective_checkpoint_contexts, save_the_operator))


# Per form: what it does, and how often the forward exchange of the first and of the second layer runs in a step.
FORMS: dict[str, tuple[Form, tuple[int, int]]] = {
    "none": (lambda first, second, x: second(first(x)), (1, 1)),
    "each": (lambda first, second, x: once_more(second, once_more(first, x)), (1, 1)),
    TO_THE_END: (lambda first, second, x: once_more(second, once_more(first, x)), (1, 1)),
    "each, reentrant": (lambda first, second, x: reentrant(second, reentrant(first, x)), (2, 2)),
    "both in one": (lambda first, second, x: once_more(lambda h: second(first(h)), x), (1, 1)),
    # an outer recompute makes the inner checkpoint anew, and its frame has no handle yet
    "nested": (lambda first, second, x: once_more(lambda h: second(once_more(first, h)), x), (2, 1)),
    "nested, reentrant": (lambda first, second, x: reentrant(lambda h: second(reentrant(first, h)), x), (3, 2)),
    "only the second": (lambda first, second, x: once_more(second, first(x)), (1, 1)),
    "selective": (lambda first, second, x: selective(second, selective(first, x)), (1, 1)),
    "each, the caller's handles": (lambda first, second, x: handed(once_more, first, second, x), (1, 1)),
    "reentrant, the caller's handles": (lambda first, second, x: handed(reentrant, first, second, x), (1, 1)),
    "nested, the caller's handles": (lambda first, second, x: nested(once_more, first, second, x), (1, 1)),
    "nested, reentrant, the caller's handles": (lambda first, second, x: nested(reentrant, first, second, x), (1, 1)),
}


def handed(how: Callable[..., Tensor], first: Block, second: Block, x: Tensor) -> Tensor:
    return how(second, how(first, x, RecomputeHandle()), RecomputeHandle())


def nested(how: Callable[..., Tensor], first: Block, second: Block, x: Tensor) -> Tensor:
    inner, outer = RecomputeHandle(), RecomputeHandle()
    return how(lambda h: second(how(first, h, inner), outer), x)


class Step:
    """What one rank's step gave: `tensors`, and `messages` of the step."""

    def __init__(self, tensors: list[Tensor], messages: list[Message]) -> None:
        self.tensors, self.messages = tensors, messages


def make_layers() -> tuple[nn.ModuleList, Tensor]:
    """Two layers and the rows of the pack; made once, for the generator is shared by the ranks of a twin."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleList(GatedDeltaNet(HIDDEN, **SHAPE) for _ in range(2)), torch.randn(1, BOUNDS[-1], HIDDEN)


LAYERS, ROWS = make_layers()


def make_context(comm: Comm, conv: tuple[int, int] | None, exchange: str) -> Context:
    part = partition(BOUNDS, comm.size)
    return build_context(part, comm, dtype=torch.float32, segments=2, exchange=exchange, conv=conv, **SHAPE)


def step(comm: Comm, name: str, exchange: str) -> Step:
    """One forward and backward of two layers, each x + layer(x)."""
    layers = deepcopy(LAYERS)
    ctx = make_context(comm, layers[0].conv, exchange)
    x = ROWS[:, ctx.token_ids].requires_grad_()

    def block(index: int, h: Tensor, handle: RecomputeHandle | None = None) -> Tensor:
        return h + layers[index](h, ctx, recompute=handle)

    with comm.record() as messages:
        y = FORMS[name][0](partial(block, 0), partial(block, 1), x)
        (y * y).sum().backward()
    return Step([y.detach(), x.grad, *(p.grad for p in layers.parameters())], messages)


def on_rank(rank: int, world: int, name: str, exchange: str) -> Step:
    comm = Comm()
    try:
        with set_checkpoint_early_stop(name != TO_THE_END):
            return step(comm, name, exchange)
    finally:
        comm.close()


def assert_step(name: str, got: Sequence[Step], plain: Sequence[Step]) -> None:
    """The bits of the plain run, lists of messages alike on both ends, and as many of each purpose as stated."""
    assert_lists_match(got)
    for rank, (ours, theirs) in enumerate(zip(got, plain, strict=True)):
        for index, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=True)):
            assert torch.equal(a, b), (rank, index)
        runs = dict.fromkeys(("STATE", "STATE_HOME"), sum(FORMS[name][1]) / 2)
        if name == "selective":
            runs["HALO"] = 2.0  # the convolution is no operator that the policy saves
        runs.setdefault("HALO", runs["STATE"])
        count, once = (Counter((m.purpose, m.direction) for m in s.messages) for s in (ours, theirs))
        assert count == {(purpose, d): n * runs.get(purpose, 1.0) for (purpose, d), n in once.items()}


@cache
def plain_steps(world: int, exchange: str) -> list[Step]:
    return twin(world, lambda comm: step(comm, "none", exchange))


@pytest.mark.parametrize(("world", "exchange"), [(2, "a2a"), (4, "ring")])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_bits_of_a_run_without_it_and_messages_as_stated(
    name: str, world: int, exchange: str
) -> None:
    with set_checkpoint_early_stop(name != TO_THE_END):
        got = twin(world, lambda comm: step(comm, name, exchange))
    assert_step(name, got, plain_steps(world, exchange))


@pytest.mark.dist
@pytest.mark.parametrize("name", FORMS)
def test_every_form_ends_over_a_process_group_with_the_bits_of_the_twin(name: str) -> None:
    assert_step(name, pool.run(2, on_rank, name, "a2a", timeout=60.0), plain_steps(2, "a2a"))


def only_the_op(comm: Comm) -> list[Tensor]:
    """The gradient of q after each of two steps of a region that ends with the op: its recompute is stopped while the
    op saves its tensors."""
    ctx = make_context(comm, None, "ring")
    q, k, v = (torch.full((ctx.num_tokens, n, 16), 0.25, requires_grad=True) for n in (1, 1, 2))
    g, beta = (torch.full((ctx.num_tokens, 2), x, requires_grad=True) for x in (-0.1, 0.5))
    found = []
    for _ in range(2):
        o = once_more(lambda *tensors: chunk_gated_delta_rule(*tensors, ctx=ctx)[0], q, k, v, g, beta)
        o.sum().backward()
        found.append(q.grad.clone())
    return found


def test_stopping_a_recompute_early_is_not_taken_for_a_failure() -> None:
    for first, both in twin(2, only_the_op):
        assert first.any()
        assert torch.equal(both, 2 * first)
