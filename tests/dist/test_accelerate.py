"""Hybrid models through `accelerator.prepare` and FSDP2 on several ranks, against one process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from tests.dist import pool
from tests.dist.accelerate_refusals import REFUSALS, refused
from tests.dist.accelerate_trainer import trained
from tests.dist.accelerate_world import together
from tests.dist.hybrid_models import Case, Run, alone

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

CASES = {
    "a row": Case(),
    "rows, accumulated, checkpointed by fsdp": Case(family="qwen3_5", rows=3, accumulate=3, checkpointing="fsdp"),
    "padded rows": Case(rows=3, padded=True),
    "one rank trains nothing": Case(labels="one rank"),
    "nobody trains anything": Case(family="qwen3_5", labels="none"),
    "packed, checkpointed by the model": Case(rows=0, checkpointing="model"),
    "packed zigzag": Case(family="qwen3_5", rows=0, layout="zigzag"),
    "contiguous": Case(layout="contiguous", options={"exchange": "a2a"}),
    "data parallel rows": Case(rows=3, dp=2, accumulate=3),
    "data parallel, packed": Case(family="qwen3_5", rows=0, dp=2, checkpointing="fsdp"),
    "four ranks, rows": Case(rows=3, cp=4, checkpointing="fsdp"),
    "four ranks, packed, accumulated": Case(family="qwen3_5", rows=0, cp=4, accumulate=3),
}
LIMIT = 1e-5


@cache
def trained_together(world: int) -> list[dict[str, Run]]:
    """All cases of this many ranks, in one go: what each rank has."""
    names = [name for name, case in CASES.items() if case.world == world]
    runs = pool.run(world, together, [CASES[name] for name in names], timeout=150)
    return [dict(zip(names, of_rank, strict=True)) for of_rank in runs]


@cache
def trained_alone(name: str) -> Run:
    case = CASES[name]
    ((run,),) = pool.run(1, alone, [case], timeout=60)
    return run


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got - want).norm()) / max(float(want.norm()), 1e-12)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    errors = {name: error(got[name], want[name]) for name in want}
    assert max(errors.values()) < LIMIT, sorted(errors.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_of_every_rank_are_those_of_one_process(name: str) -> None:
    ranks = trained_together(CASES[name].world)
    want = trained_alone(name)
    for got in (of_rank[name] for of_rank in ranks):
        assert got.losses == pytest.approx(want.losses, rel=LIMIT)
        assert got.norms == pytest.approx(want.norms, rel=LIMIT)
        assert got.evaluated == pytest.approx(want.evaluated * 2, rel=LIMIT)
        assert_same(got.grads, want.grads)
        assert_same(got.weights, want.weights)


def test_rank_0_logs_what_was_taken_over_and_why_attention_runs_as_it_does() -> None:
    first, second = (of_rank["packed zigzag"].lines for of_rank in trained_together(2))
    assert first.count("cp_gdn: 3 GDN + 1 SDPA layers, cp=2 (zigzag), exchange=auto, backend=torch") == 1
    assert any(line.startswith("cp_gdn: options: layout=zigzag (argument), attention=auto") for line in first)
    assert sum("softmax attention by gather (torch's SDPA" in line for line in first) == 1
    assert not any("layers, cp=" in line or "softmax attention" in line for line in second)


@cache
def all_refused() -> list[list[tuple[str, str]]]:
    return pool.run(2, refused, timeout=150)


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[function.__name__ for function, _, _ in REFUSALS])
def test_what_cannot_be_is_refused_on_some_rank_by_a_message_and_on_none_by_a_hang(number: int) -> None:
    _, kind, text = REFUSALS[number]
    errors = [of_rank[number] for of_rank in all_refused()]
    assert any(name == kind and re.search(text, said, re.DOTALL) for name, said in errors), errors
    assert {name for name, _ in errors} <= {kind, "CommFailed"}, errors


def test_trainer_trains_and_evaluates_as_on_one_process(tmp_path: Path) -> None:
    (want,) = pool.run(1, trained, str(tmp_path))
    for got in pool.run(2, trained, str(tmp_path)):
        assert got["losses"] == pytest.approx(want["losses"], rel=LIMIT)
        assert got["evaluated"] == pytest.approx(want["evaluated"], rel=LIMIT)
        assert_same(got["weights"], want["weights"])
