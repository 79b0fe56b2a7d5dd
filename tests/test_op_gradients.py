"""Gradients asked for in every form, from any thread, under any switch of torch: the same bits on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cp_gdn import Comm, Context, backward, forward
from tests.cases import Run
from tests.pack import GRADIENTS, call, differences, local_gradients, local_inputs, make_context, make_pack, step
from tests.test_op_bits import CONTENT, PACK, RUNS, Tensors, assert_equals_step, every_run, on_ranks


@every_run
def test_a_missing_gradient_of_an_output_is_zero(run: Run) -> None:
    def check(ctx: Context) -> None:
        leaves = {name: x.detach() for name, x in local_inputs(ctx, PACK).items()}
        *_, saved = forward(**leaves, ctx=ctx)
        dout, dfinal = local_gradients(ctx, PACK)
        zeros = torch.zeros_like(dout), torch.zeros_like(dfinal)
        for given, spelled in (
            ((dout, None), (dout, zeros[1])),
            ((None, dfinal), (zeros[0], dfinal)),
            ((None, None), zeros),
        ):
            ours, want = (backward(*gradients, saved, ctx=ctx) for gradients in (given, spelled))
            assert all(torch.equal(getattr(ours, name[1:]), getattr(want, name[1:])) for name in GRADIENTS)
        assert all((getattr(ours, name[1:]) == 0).all() for name in GRADIENTS)

    on_ranks(run, check)


@every_run
def test_only_one_output_may_enter_the_loss(run: Run) -> None:
    """A rank whose loss does not depend on o still enters the backward, through its final states."""

    def check(ctx: Context) -> list[str]:
        dout, dfinal = local_gradients(ctx, PACK)
        wrong = []
        for keep in (0, 1):
            leaves = local_inputs(ctx, PACK)
            outputs, gradients = call(ctx, leaves, PACK), [dout, dfinal]
            ours = torch.autograd.grad(outputs[keep], leaves.values(), gradients[keep], retain_graph=True)
            gradients[1 - keep] = torch.zeros_like(gradients[1 - keep])
            want = torch.autograd.grad(outputs, leaves.values(), gradients)
            wrong += [name for name, a, b in zip(GRADIENTS, ours, want, strict=True) if not torch.equal(a, b)]
        return wrong

    assert on_ranks(run, check) == [[]] * run.world


@every_run
def test_an_expanded_gradient_is_its_copy(run: Run) -> None:
    def check(ctx: Context) -> list[str]:
        leaves = local_inputs(ctx, PACK)
        o, final = call(ctx, leaves, PACK)
        ours = torch.autograd.grad(o.sum() + final.sum(), leaves.values(), retain_graph=True)
        ones = torch.ones_like(o), torch.ones_like(final)
        want = torch.autograd.grad((o, final), leaves.values(), ones)
        return [name for name, a, b in zip(GRADIENTS, ours, want, strict=True) if not torch.equal(a, b)]

    assert on_ranks(run, check) == [[]] * run.world


def test_gradients_of_gradients_are_refused() -> None:
    ctx = make_context(Comm.alone(), RUNS[0], PACK)
    leaves = local_inputs(ctx, PACK)
    (dq,) = torch.autograd.grad(call(ctx, leaves, PACK)[0].square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dq.sum().backward()


# ---- threads, calls in flight, switches of torch ---------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    """Run in a new thread, as autograd's device threads run a backward."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@every_run
def test_the_backward_may_run_in_another_thread(run: Run) -> None:
    def split(ctx: Context) -> Tensors:
        leaves = local_inputs(ctx, PACK)
        o, final = call(ctx, leaves, PACK)
        grads = in_thread(lambda: torch.autograd.grad((o, final), leaves.values(), local_gradients(ctx, PACK)))
        return {"o": o.detach(), "final_state": final.detach(), **dict(zip(GRADIENTS, grads, strict=True))}

    assert_equals_step(run, split)


@every_run
def test_two_layers_may_be_in_flight_and_go_back_in_either_order(run: Run) -> None:
    other = make_pack(replace(CONTENT, gate="model", beta=1.9))

    def check(ctx: Context) -> list[list[str]]:
        want = [step(ctx, pack) for pack in (PACK, other)]
        found = []
        for order in ((0, 1), (1, 0)):
            leaves = [local_inputs(ctx, pack) for pack in (PACK, other)]
            outputs = [call(ctx, mine, pack) for mine, pack in zip(leaves, (PACK, other), strict=True)]
            for i in order:
                grads = torch.autograd.grad(outputs[i], leaves[i].values(), local_gradients(ctx, (PACK, other)[i]))
                found.append([n for n, a in zip(GRADIENTS, grads, strict=True) if not torch.equal(a, want[i][n])])
        return found

    assert on_ranks(run, check) == [[[]] * 4] * run.world


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("world", [1, 4])
def test_the_tf32_switches_change_no_bit_and_are_left_as_they_were(world: int) -> None:
    """Products of maps in reduced precision make an error that grows with length and with the number of ranks."""
    run = Run(world=world, segments=2, dtype=torch.float32)
    want = on_ranks(run, lambda ctx: step(ctx, PACK))
    with matmul_precision("medium"):
        for _ in range(5):
            got = on_ranks(run, lambda ctx: step(ctx, PACK))
            assert [differences(ours, theirs) for ours, theirs in zip(got, want, strict=True)] == [[]] * world
            assert torch.backends.cuda.matmul.allow_tf32
            assert torch.get_float32_matmul_precision() == "medium"


def test_autocast_changes_no_bit() -> None:
    def under_autocast(ctx: Context) -> Tensors:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = step(ctx, PACK)
            assert torch.is_autocast_enabled("cpu")
        return found

    assert_equals_step(RUNS[1], under_autocast)
