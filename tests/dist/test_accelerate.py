"""Hybrid models through `accelerator.prepare` and FSDP2 on several ranks, against one process."""

from __future__ import annotations

import importlib.metadata
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version
from torch import Tensor

from tests.dist import pool
from tests.dist.accelerate_refusals import REFUSALS, refused, without_enable
from tests.dist.accelerate_scripts import held_out_loss, scripts
from tests.dist.accelerate_trainer import packed_alone, predicted, trained
from tests.dist.accelerate_world import disabled, together
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
    "one rank": Case(cp=1, accumulate=3),
    "one rank on our layers": Case(family="olmo_hybrid", cp=1, rows=3, padded=True, options={"on_one_rank": True}),
    "one rank on our layers, packed": Case(cp=1, rows=0, checkpointing="fsdp", options={"on_one_rank": True}),
    "experts": Case(family="qwen3_5_moe", rows=3, checkpointing="model"),
    "four ranks, rows": Case(rows=3, cp=4, checkpointing="fsdp"),
    "four ranks, packed, accumulated": Case(family="qwen3_5", rows=0, cp=4, accumulate=3),
}
LIMIT = 1e-5
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@cache
def trained_together(world: int) -> list[dict[str, Run]]:
    """All cases of this many ranks, in one go: what each rank has."""
    names = [name for name, case in CASES.items() if case.world == world]
    runs = pool.run(world, together, [CASES[name] for name in names], timeout=300)
    return [dict(zip(names, of_rank, strict=True)) for of_rank in runs]


@cache
def trained_alone(name: str) -> Run:
    case = CASES[name]
    (run,) = pool.run(1, alone, case, timeout=180)
    return run


def older(package: str, version: str) -> bool:
    return Version(importlib.metadata.version(package)) < Version(version)


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
    assert first.count("cp_gdn: 3 GDN + 1 SDPA layers, cp=2 (zigzag), exchange=auto, backend=auto") == 1
    chosen = [line for line in first if line.startswith("cp_gdn: heads (2, 4) of (16, 16) in torch.float32")]
    assert len(chosen) == 1
    assert "backend=torch (auto: dtype torch.float32: the kernels take torch.bfloat16)" in chosen[0]
    assert any(line.startswith("cp_gdn: options: layout=zigzag (argument), attention=auto") for line in first)
    assert sum("softmax attention by gather (torch's SDPA" in line for line in first) == 1
    assert not any("layers, cp=" in line or "backend=" in line or "softmax" in line for line in second)


@cache
def all_refused() -> list[list[tuple[str, str]]]:
    return pool.run(2, refused, timeout=300)


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[function.__name__ for function, _, _ in REFUSALS])
def test_what_cannot_be_is_refused_on_every_rank_by_a_message(number: int) -> None:
    function, kind, text = REFUSALS[number]
    if function is without_enable and older("accelerate", "1.15"):
        pytest.skip("Accelerate trains these models wrongly before 1.15, and says nothing")
    for name, said in (of_rank[number] for of_rank in all_refused()):
        assert name == kind, said
        assert re.search(text, said, re.DOTALL), said


def test_after_disable_whole_batches_train_as_before_and_nothing_is_left_behind() -> None:
    want = trained_alone("a row").losses[0]
    for loss, clean in pool.run(2, disabled):
        assert loss == pytest.approx(want, rel=LIMIT)
        assert clean


# ---- Trainer and scripts ---------------------------------------------------------------------------------------------


def test_trainer_trains_and_evaluates_as_on_one_process(tmp_path: Path) -> None:
    (want,) = pool.run(1, trained, str(tmp_path), False, timeout=180)
    for got in pool.run(2, trained, str(tmp_path), False, timeout=180):
        assert got["losses"] == pytest.approx(want["losses"], rel=LIMIT)
        assert got["evaluated"] == pytest.approx(want["evaluated"], rel=LIMIT)
        assert_same(got["weights"], want["weights"])


before_5_16 = pytest.mark.skipif(
    older("transformers", "5.16"), reason="Trainer does not split rows in an evaluation before 5.16"
)


@before_5_16
@pytest.mark.parametrize(("world", "dp", "count"), [(2, 1, 11), (4, 2, 12)])
def test_trainer_predicts_whole_rows_each_once_and_in_order(world: int, dp: int, count: int, tmp_path: Path) -> None:
    ((want, want_bare),) = pool.run(1, predicted, str(tmp_path), 1, count, timeout=180)
    for got, bare in pool.run(world, predicted, str(tmp_path), dp, count, timeout=180):
        np.testing.assert_array_equal(got.label_ids, want.label_ids)
        np.testing.assert_allclose(got.predictions, want.predictions, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(bare.predictions, want_bare.predictions, rtol=1e-3, atol=1e-5)
        if dp == 1:  # else Trainer averages batches of all ranks by their tokens, and of one rank by their number
            assert got.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"], rel=LIMIT)


def test_trainer_keeps_packed_documents_apart(tmp_path: Path) -> None:
    first, second = pool.run(2, trained, str(tmp_path), True, timeout=180)
    (want,) = pool.run(1, packed_alone, first["seen"], timeout=180)
    for got in (first, second):
        assert got["losses"] == pytest.approx(want.losses, rel=LIMIT)
        assert_same(got["weights"], want.weights)


def test_a_script_that_knows_nothing_of_us_trains_under_run_with_options_from_the_environment(tmp_path: Path) -> None:
    script, out = Path(__file__).with_name("script_of_somebody.py"), tmp_path / "losses.json"
    call = [str(script), str(out)]
    first, _ = pool.run(2, scripts, Case(), [call], {"CP_GDN_EXCHANGE": "a2a"}, timeout=180)
    assert json.loads(out.read_text()) == pytest.approx(trained_alone("a row").losses, rel=LIMIT)
    assert any("exchange=a2a (CP_GDN_EXCHANGE)" in line for line in first)


SMALL = ["--hidden", "64", "--layers", "4", "--head-dim", "16", "--length", "128", "--steps", "2"]


def metrics(folder: Path) -> dict[str, float]:
    """The last value of each metric that an example logged."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {name: value for line in lines for name, value in json.loads(line).items()}


def test_what_the_loop_example_saved_on_four_ranks_goes_on_with_another_split_and_loads_on_one(tmp_path: Path) -> None:
    call = [str(EXAMPLES / "finetune_hf.py"), *SMALL, "--rows", "2"]
    pool.run(4, scripts, Case(cp=4), [[*call, "--save-every", "2", "--out", str(tmp_path / "four")]], {}, timeout=300)
    again = [*call, "--resume", str(tmp_path / "four" / "step-2"), "--out", str(tmp_path / "two")]
    pool.run(2, scripts, Case(dp=2, cp=1), [again], {}, timeout=180)
    (alone_loss,) = pool.run(1, held_out_loss, call[1:], str(tmp_path / "four" / "model"), timeout=180)
    saved = metrics(tmp_path / "four")["eval_loss"]
    assert saved == pytest.approx(metrics(tmp_path / "two")["eval_loss"], rel=LIMIT)
    assert saved == pytest.approx(alone_loss, rel=LIMIT)


@before_5_16
def test_the_trainer_example_trains_packed_rows_on_two_ranks(tmp_path: Path) -> None:
    call = [str(EXAMPLES / "finetune_trainer.py"), *SMALL, "--packed", "--out", str(tmp_path)]
    pool.run(2, scripts, Case(), [call], {}, timeout=180)
    assert metrics(tmp_path)["eval_loss"] < 5.5
