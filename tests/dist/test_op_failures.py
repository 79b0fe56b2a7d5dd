"""One rank gets something else, raises or dies while all train: every other rank ends in time, and says which and why."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import cp_gdn
from cp_gdn import Comm, CommFailed, Context, Options, PlanDisagreement, build_context, partition
from cp_gdn.backends.torch_backend import TorchBackend
from tests.dist import pool

pytestmark = pytest.mark.dist
WORLD = 3
CULPRIT = 1
TOKENS = 60
TIMEOUT = 6.0  # s, for waits where the default of 25 is not the point
DEADLINE = 30.0  # s after the failure within which every rank must have ended
PATIENCE = 60.0  # s that the launcher gives all of it, other work of the machine included
FITTING: dict[str, Any] = {"heads": (1, 2), "head_dims": (8, 8), "dtype": torch.float32, "conv": (6, 4), "segments": 1}


def make_context(comm: Comm, bounds: tuple[int, ...] = (0, TOKENS), layout: str = "zigzag", **changes: Any) -> Context:
    return build_context(partition(bounds, comm.size, layout), comm, **{**FITTING, **changes})


def inputs(ctx: Context) -> dict[str, Any]:
    t = ctx.num_tokens
    shapes = {"q": (t, 1, 8), "k": (t, 1, 8), "v": (t, 2, 8), "g": (t, 2), "beta": (t, 2)}
    return {name: torch.full(shape, 0.1, requires_grad=True) for name, shape in shapes.items()}


def train(ctx: Context, values: dict[str, Any] | None = None) -> None:
    """A step: the convolution, the op, their backward."""
    rows = torch.ones(ctx.num_tokens, 6, requires_grad=True)
    y = cp_gdn.causal_conv1d(rows, torch.ones(6, 4, requires_grad=True), ctx=ctx)
    o, _ = cp_gdn.chunk_gated_delta_rule(**(inputs(ctx) if values is None else values), ctx=ctx)
    (o.sum() + y.sum()).backward()


# ---- different arguments ---------------------------------------------------------------------------------------------

# Per field of the digest: what the culprit gives, and how the field reads on it and on the others.
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dtype": ({"dtype": torch.float64}, "torch.float64", "torch.float32"),
    "heads": ({"heads": (2, 2)}, "(2, 2)", "(1, 2)"),
    "head_dims": ({"head_dims": (8, 16)}, "(8, 16)", "(8, 8)"),
    "doc_bounds": ({"bounds": (0, 20, TOKENS)}, "0, 20, 60", "0, 60"),
    "layout": ({"layout": "contiguous"}, "contiguous, align=1", "zigzag, align=1"),
    "conv": ({"conv": (6, 3)}, "(6, 3)", "(6, 4)"),
    "segments": ({"segments": 2}, "2, 2, 2", "1, 1, 1"),
    "exchange": ({"exchange": "a2a"}, "a2a", "ring"),
    "options": ({"options": Options(save_transfer=False)}, "save_transfer=False", "save_transfer=True"),
}


def disagree(rank: int, world: int, field: str) -> list[int]:
    """Every value on every rank, nothing sent, and the Comm is as good as new."""
    comm = Comm(timeout=TIMEOUT)
    changes, other, usual = DISAGREEMENTS[field]
    with comm.record() as messages, pytest.raises(PlanDisagreement) as error:
        make_context(comm, **(changes if rank == CULPRIT else {}))
    lines = {line.split(": ", 1)[0].strip(): line for line in str(error.value).splitlines()[1:]}
    for r in range(world):
        expected = other if r == CULPRIT else usual
        assert re.search(rf"rank {r}: [^:]*{re.escape(expected)}", lines[field]), lines[field]
    assert set(lines) <= {field, "fragments", "exchange"}
    assert messages == []
    train(make_context(comm))
    comm.close()
    return [len(lines)]


@pytest.mark.parametrize("field", DISAGREEMENTS)
def test_ranks_that_ask_for_different_things_all_see_every_value_and_may_go_on(field: str) -> None:
    assert len(pool.run(WORLD, disagree, field, timeout=PATIENCE)) == WORLD


# ---- one rank fails --------------------------------------------------------------------------------------------------


class BrokenStageError(RuntimeError):
    pass


def raising(*_: Any) -> Any:
    raise BrokenStageError("out of memory, on purpose")


def dying(*_: Any) -> Any:
    os._exit(9)


def hanging(*_: Any) -> Any:
    time.sleep(27.0)  # s: beyond the default deadline of 25
    raise BrokenStageError("too late")


@contextmanager
def broken(stage: str, how: Callable[..., Any]) -> Iterator[None]:
    with patch.object(TorchBackend, stage, how):
        yield


def other_dtype(ctx: Context) -> None:
    values = inputs(ctx)
    train(ctx, {**values, "v": values["v"].double()})


def other_heads(ctx: Context) -> None:
    values = inputs(ctx)
    train(ctx, {**values, "q": values["q"].repeat(1, 2, 1)})


def other_context(ctx: Context) -> None:
    make_context(ctx.comm, heads=(2, 3))


def other_conv(ctx: Context) -> None:
    cp_gdn.causal_conv1d(torch.ones(ctx.num_tokens, 6), torch.ones(6, 3), ctx=ctx)


def in_stage(stage: str, how: Callable[..., Any]) -> Callable[[Context], None]:
    def run(ctx: Context) -> None:
        with broken(stage, how):
            train(ctx)

    return run


OP = "chunk_gated_delta_rule"

# Per way to fail: what the culprit does in its second step, and the call, the error and the text that the others name.
RAISES: dict[str, tuple[Callable[[Context], None], tuple[str, str, str]]] = {
    "context": (other_context, ("build_context", "ValueError", "heads: got (2, 3), expected the value heads to be a")),
    "dtype": (other_dtype, (OP, "TypeError", "v: got dtype torch.float64, expected torch.float32")),
    "heads": (other_heads, (OP, "ValueError", "q: got shape (20, 2, 8), expected (20, 1, 8)")),
    "conv width": (other_conv, ("causal_conv1d", "ValueError", "weight: got shape (6, 3), expected (6, 4)")),
    "before any message": (in_stage("prepare", raising), (OP, "BrokenStageError", "out of memory, on purpose")),
    "messages under way": (in_stage("replay", raising), (OP, "BrokenStageError", "out of memory, on purpose")),
    "in backward": (in_stage("adjoint_prepare", raising), (f"{OP} backward", "BrokenStageError", "out of memory")),
    "adjoints under way": (in_stage("adjoint_replay", raising), (f"{OP} backward", "BrokenStageError", "out of")),
    "at its end": (in_stage("gradients", raising), (f"{OP} backward", "BrokenStageError", "out of memory")),
}
DIES: dict[str, tuple[Callable[[Context], None], str]] = {
    "before the call": (dying, "ring"),
    "in forward": (in_stage("replay", dying), "a2a"),
    "in backward": (in_stage("adjoint_replay", dying), "ring"),
}
NO_SIGN = "rank 1 gave no sign of life for 3 s: its process ended, was killed or is frozen"


def fail_in_the_second_step(rank: int, world: int, fail: Callable[[Context], None], exchange: str, t: float) -> None:
    """Train until a failure comes; then every later call must be refused with the same reason."""
    comm = Comm(timeout=t)
    ctx = make_context(comm, exchange=exchange)
    train(ctx)
    since = time.monotonic()
    try:
        while True:
            if rank == CULPRIT:
                fail(ctx)
            train(ctx)
            since = time.monotonic()
    except CommFailed as error:
        assert time.monotonic() - since < DEADLINE
        reason = re.escape(str(error))
    for refused in (lambda: train(ctx), lambda: make_context(comm), lambda: cp_gdn.forward(**inputs(ctx), ctx=ctx)):
        with comm.record() as messages, pytest.raises(CommFailed, match=reason):
            refused()
        assert messages == []
    with pytest.raises(CommFailed) as error:
        train(ctx)
    raise error.value


def raise_by_name(rank: int, world: int, name: str, exchange: str) -> None:
    fail_in_the_second_step(rank, world, RAISES[name][0], exchange, TIMEOUT)


def die_by_name(rank: int, world: int, name: str) -> None:
    fail_in_the_second_step(rank, world, *DIES[name], TIMEOUT)


def hang(rank: int, world: int) -> None:
    fail_in_the_second_step(rank, world, in_stage("replay", hanging), "ring", 25.0)


def assert_all_blame(outcomes: list[pool.Outcome], reason: str) -> None:
    """Every rank but the culprit ended with the culprit's number and this reason, in the same words."""
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != CULPRIT]
    assert [outcome.name for outcome in others] == ["CommFailed"] * (len(outcomes) - 1), outcomes
    for outcome in others:
        assert f"by rank {CULPRIT}: {reason}" in outcome.text
        assert outcome.text == others[0].text


@pytest.mark.parametrize(("name", "exchange"), [(name, ("ring", "a2a")[i % 2]) for i, name in enumerate(RAISES)])
def test_when_one_rank_raises_the_others_name_it_and_its_reason(name: str, exchange: str) -> None:
    outcomes = pool.run_failing(WORLD, raise_by_name, name, exchange, deadline=PATIENCE)
    call, error, text = RAISES[name][1]
    assert outcomes[CULPRIT].name == error, outcomes[CULPRIT]
    assert outcomes[CULPRIT].text.startswith(text)
    assert_all_blame(outcomes, f"{call}: {error}: {text}")


@pytest.mark.parametrize("name", DIES)
def test_when_one_rank_is_killed_the_others_name_it(name: str) -> None:
    outcomes = pool.run_failing(WORLD, die_by_name, name, deadline=PATIENCE)
    assert outcomes[CULPRIT].name == "killed"
    assert_all_blame(outcomes, NO_SIGN)


def test_when_one_rank_hangs_the_others_end_by_the_default_deadline_and_name_it() -> None:
    outcomes = pool.run_failing(WORLD, hang, deadline=PATIENCE)
    assert outcomes[CULPRIT].name == "BrokenStageError"
    assert_all_blame(outcomes, "rank 1 did not arrive within 25 s")
