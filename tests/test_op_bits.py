"""Promises on bits: repeats, both exchanges, both entries, packed or not. Every tensor of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_gdn import Comm, Context, backward, chunk_gated_delta_rule, forward, packed_qkv_views, twin
from cp_gdn.library import arguments, forward_op
from tests.cases import LAYOUTS, Content, Run, name_of, pairs
from tests.pack import (
    GRADIENTS,
    Pack,
    assert_same_bits,
    call,
    differences,
    local_gradients,
    local_inputs,
    make_context,
    make_pack,
    run_in_twin,
    step,
)

Tensors = dict[str, Tensor]
CONTENT = Content(pack="long", heads=(2, 6), gate="slow")
PACK = make_pack(CONTENT)
SMALL = Content(pack=(9, 1, 5), heads=(1, 2), head_dims=(8, 16))
RUNS = [
    Run(world=world, layout=layout, exchange=exchange, segments=2, save_transfer=keep, dtype=torch.float32)
    for world, layout, exchange, keep in (
        (1, "contiguous", "ring", True),
        (3, "zigzag_per_document", "ring", True),
        (3, "zigzag_per_document", "a2a", True),
        (2, "zigzag", "ring", False),
        (4, "zigzag", "a2a", False),
    )
]
every_run = pytest.mark.parametrize("run", RUNS, ids=name_of)


def on_ranks(run: Run, work: Callable[[Context], Any], pack: Pack = PACK) -> list[Any]:
    """What ``work`` returns on every rank of a twin."""
    return twin(run.world, lambda comm: work(make_context(comm, run, pack)))


def assert_equals_step(run: Run, work: Callable[[Context], Tensors], pack: Pack = PACK) -> None:
    """``work`` gives the bits of a plain step on every rank."""

    def both(ctx: Context) -> list[str]:
        return differences(work(ctx), step(ctx, pack))

    assert on_ranks(run, both, pack) == [[]] * run.world


# ---- 1 and 2: repeats, exchanges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_50_repeats_give_the_same_bits(exchange: str) -> None:
    pack, run = make_pack(SMALL), Run(world=2, exchange=exchange, dtype=torch.float32)

    def repeats(ctx: Context) -> list[list[str]]:
        first = step(ctx, pack)
        return [differences(step(ctx, pack), first) for _ in range(50)]

    assert on_ranks(run, repeats, pack) == [[[]] * 50] * 2


EXCHANGED = {
    "pack": ("ragged", "long", "five tokens", "several chunks"),
    "layout": (*LAYOUTS, "explicit"),
    "world": (2, 3, 4, 8),
    "segments": (1, 2, "vector", "grid:1"),
    "heads": ((2, 4), (1, 1), (2, 6)),
    "head_dims": ((24, 40), (5, 7)),
    "inputs": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize(("content", "run"), pairs(EXCHANGED), ids=name_of)
def test_ring_and_a2a_with_maps_saved_or_made_again_are_one(content: Content, run: Run) -> None:
    pack, run = make_pack(content), replace(run, dtype=content.inputs)
    want = run_in_twin(run, pack)
    for exchange, keep in (("ring", False), ("a2a", True), ("a2a", False)):
        assert_same_bits(run_in_twin(replace(run, exchange=exchange, save_transfer=keep), pack), want)


# ---- 3: entries and gradients ----------------------------------------------------------------------------------------


@every_run
def test_the_explicit_forward_and_backward_are_the_autograd_ones_and_can_be_repeated(run: Run) -> None:
    def explicit(ctx: Context) -> Tensors:
        leaves = {name: x.detach() for name, x in local_inputs(ctx, PACK).items()}
        o, final, saved = forward(**leaves, ctx=ctx, output_final_state=True)
        first, again = (backward(*local_gradients(ctx, PACK), saved, ctx=ctx) for _ in range(2))
        for name in GRADIENTS:
            assert torch.equal(getattr(first, name[1:]), getattr(again, name[1:]))
        return {"o": o, "final_state": final, **{name: getattr(first, name[1:]) for name in GRADIENTS}}

    assert_equals_step(run, explicit)


@every_run
def test_strided_views_of_packed_rows_are_taken_as_they_are(run: Run) -> None:
    def packed(ctx: Context) -> Tensors:
        leaves = local_inputs(ctx, PACK)
        rows = torch.cat([leaves[name].detach().flatten(1) for name in "qkv"], 1).requires_grad_()
        gates = torch.stack([leaves["g"].detach(), leaves["beta"].detach()], -1).requires_grad_()
        q, k, v = packed_qkv_views(rows, ctx.heads, ctx.head_dims)
        initial = leaves["initial_state"]
        strided = {"q": q, "k": k, "v": v, "g": gates[..., 0], "beta": gates[..., 1], "initial_state": initial}
        assert not any(strided[name].is_contiguous() for name in ("q", "k", "v", "g") if ctx.num_tokens)
        outputs = call(ctx, strided, PACK)
        dout, dfinal = local_gradients(ctx, PACK)
        turned = dout.mT.contiguous().mT, dfinal.mT.contiguous().mT
        drows, dgates, dinitial = torch.autograd.grad(outputs, [rows, gates, initial], turned)
        dq, dk, dv = packed_qkv_views(drows, ctx.heads, ctx.head_dims)
        grads = (dq, dk, dv, dgates[..., 0], dgates[..., 1], dinitial)
        return {
            "o": outputs[0].detach(),
            "final_state": outputs[1].detach(),
            **dict(zip(GRADIENTS, grads, strict=True)),
        }

    assert_equals_step(run, packed)


@every_run
def test_a_graph_that_is_kept_may_be_run_backward_twice(run: Run) -> None:
    def twice(ctx: Context) -> Tensors:
        leaves = local_inputs(ctx, PACK)
        outputs, found = call(ctx, leaves, PACK), []
        for keep in (True, False):
            grads = torch.autograd.grad(outputs, leaves.values(), local_gradients(ctx, PACK), retain_graph=keep)
            found.append(dict(zip(GRADIENTS, grads, strict=True)))
        assert differences(*found) == []
        return {"o": outputs[0].detach(), "final_state": outputs[1].detach(), **found[1]}

    assert_equals_step(run, twice)


@every_run
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_outputs_have_the_same_bits_and_nothing_is_saved(mode: Callable[[], Any], run: Run) -> None:
    def outputs(ctx: Context) -> Tensors:
        with mode():
            o, final = call(ctx, local_inputs(ctx, PACK), PACK)
        assert (o.grad_fn, final.grad_fn, ctx.last_call["saved"]) == (None, None, "nothing")
        want = step(ctx, PACK)
        return {"o": o, "final_state": final, **{name: want[name] for name in GRADIENTS}}

    assert_equals_step(run, outputs)


class LookingOn(TorchDispatchMode):
    """Sees the operators of a call and passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@every_run
def test_the_library_entry_gives_the_bits_of_the_eager_one(run: Run) -> None:
    def through_library(ctx: Context) -> Tensors:
        with LookingOn() as mode:
            found = step(ctx, PACK)
        assert {"cp_gdn.forward.default", "cp_gdn.backward.default"} <= set(mode.seen)
        return found

    assert_equals_step(run, through_library)
    without = make_pack(replace(CONTENT, initial=False))
    on_ranks(run, lambda ctx: through_library(ctx), without)


def test_the_operator_keeps_torchs_rules_and_compiles_whole() -> None:
    ctx = make_context(Comm.alone(), Run(dtype=torch.float32, segments=3), PACK)
    leaves = local_inputs(ctx, PACK)
    torch.library.opcheck(forward_op, arguments(ctx, [*leaves.values()], 0.2, False))

    def fn(**tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(**tensors, ctx=ctx, output_final_state=True)

    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    for ours, want in zip(compiled(**leaves), fn(**leaves), strict=True):
        assert torch.equal(ours, want)
