"""Models as users change them before they train: low-rank adapters, bf16, torch.compile; against one process."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.dist import pool
from tests.dist.accelerate_models import (
    by_buffers,
    compiled,
    gate_dtypes,
    one_graph,
    token_losses,
    token_losses_alone,
)
from tests.dist.accelerate_world import together
from tests.dist.hybrid_models import ADAPTED, Case, Run, alone
from tests.dist.test_accelerate import LIMIT, assert_same, error

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

slow = pytest.mark.skipif(os.environ.get("CP_GDN_SLOW_TESTS") != "1", reason="slow; launch/test_versions runs it")
ADAPTERS = [
    Case(adapters=True, rows=2),
    pytest.param(Case(family="qwen3_5", adapters=True, rows=0, checkpointing="fsdp"), marks=slow),
]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("case", ADAPTERS, ids=lambda case: case.family)
def test_low_rank_adapters_train_as_on_one_process_and_keep_their_names(case: Case) -> None:
    (want,) = pool.run(1, alone, case, timeout=180)
    adapted = {name.split(".")[-4] for name in want.grads}
    assert adapted == set(ADAPTED[case.family])
    assert all(".lora_A." in name or ".lora_B." in name for name in want.grads)
    assert all(grad.abs().max() > 0 for grad in want.grads.values())
    for (got,) in pool.run(2, together, [case], timeout=180):
        assert got.keys == want.keys
        assert got.losses == pytest.approx(want.losses, rel=LIMIT)
        assert_same(got.grads, want.grads)
        assert_same(got.weights, want.weights)


# ---- tokens ----------------------------------------------------------------------------------------------------------

PACKED = [Case(rows=0, layout=layout) for layout in ("contiguous", "zigzag", "zigzag_per_document")]


@pytest.mark.parametrize("world", [2, 4])
def test_every_token_of_every_layout_has_the_label_and_the_loss_it_has_on_one_process(world: int) -> None:
    ((labels, losses),) = pool.run(1, token_losses_alone, PACKED[0], timeout=180)
    of_ranks = pool.run(world, token_losses, [replace(case, cp=world) for case in PACKED], timeout=180)
    for of_case in zip(*of_ranks, strict=True):
        place, got_labels, got_losses, gathered = (torch.cat(parts) for parts in zip(*of_case, strict=True))
        order = place.argsort()
        assert torch.equal(place[order], torch.arange(len(labels)))
        assert torch.equal(got_labels[order], labels)
        torch.testing.assert_close(got_losses[order], losses, rtol=1e-4, atol=1e-6)
        assert torch.equal(gathered, got_losses[order].expand(world, -1))


@pytest.mark.parametrize("cp", [1, 2])
def test_a_loop_that_knows_accelerate_only_has_the_loss_of_one_process(cp: int) -> None:
    (want,) = pool.run(1, alone, Case(), timeout=180)
    assert pool.run(cp, by_buffers, Case(cp=cp), timeout=180) == [pytest.approx(want.losses[0], rel=LIMIT)] * cp


# ---- bf16 ------------------------------------------------------------------------------------------------------------


@cache
def in_bf16(cp: int) -> Run:
    ((run,), *_) = pool.run(cp, together, [Case(cp=cp, precision="bf16")], timeout=180)
    return run


def test_bf16_on_two_ranks_trains_as_bf16_on_one() -> None:
    got, want = in_bf16(2), in_bf16(1)
    assert got.losses == pytest.approx(want.losses, rel=1e-2)
    assert max(error(got.grads[name], want.grads[name]) for name in want.grads) < 0.1
    for run in (got, want):
        assert {x.dtype for x in (*run.grads.values(), *run.weights.values())} == {torch.float32}


def test_in_bf16_a_layer_gets_its_gates_rounded_and_the_optimizer_keeps_them_in_fp32() -> None:
    wide = {torch.float32}
    expected = {"forward": {torch.bfloat16}, "weight": wide, "gradient": wide, "adam": wide}
    for world in (1, 2):
        for seen in pool.run(world, gate_dtypes, Case(cp=world, precision="bf16"), timeout=180):
            assert seen == expected


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "world"), [("qwen3_5", 1), pytest.param("qwen3_next", 2, marks=slow)])
def test_a_compiled_model_of_recurrent_layers_is_one_graph_and_trains_with_the_same_bits(
    family: str, world: int
) -> None:
    assert pool.run(world, one_graph, family, timeout=180) == [([], Counter())] * world


def test_a_compiled_hybrid_model_breaks_its_graph_at_softmax_attention_and_fsdps_hooks_only() -> None:
    for differing, breaks, late in pool.run(2, compiled, Case(), timeout=180):
        assert differing == []
        assert late == 0
        others = [reason for reason in breaks if "<function attention_forward " not in reason]
        assert all("function `disable`" in reason for reason in others), breaks
        assert len(others) < len(breaks)
