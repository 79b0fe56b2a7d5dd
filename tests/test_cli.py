"""The command line: what it refuses, the shape of its JSON, its exit statuses; worlds of two."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cp_gdn.cli import demo, demo_data, demo_report, main, verify, verify_compare, verify_world
from cp_gdn.cli.verify_case import TENSORS, Case

VERIFY = ["verify", "--cu-seqlens", "0,37,88,128", "--heads", "1,2", "--head-dims", "16,16"]

BAD_ARGUMENTS = {
    "no command": ([], "COMMAND"),
    "an unknown command": (["train"], "invalid choice"),
    "no boundaries": (["verify"], "--cu-seqlens"),
    "boundaries that are no integers": (["verify", "--cu-seqlens", "0,a"], "'0,a'"),
    "one number of heads": ([*VERIFY, "--heads", "4"], "'4'"),
    "no heads": ([*VERIFY, "--heads", "0,4"], "'0,4'"),
    "no ranks": ([*VERIFY, "--world", "0"], "'0'"),
    "an unknown layout": ([*VERIFY, "--layout", "striped"], "striped"),
    "an unknown device": ([*VERIFY, "--device", "tpu"], "tpu"),
    "an unknown backend": ([*VERIFY, "--backend", "triton"], "triton"),
    "an unknown gate": ([*VERIFY, "--gate", "open"], "open"),
    "segments that are neither": ([*VERIFY, "--segments", "grid"], "'grid'"),
    "a grid of nothing": ([*VERIFY, "--segments", "grid:0"], "'grid:0'"),
    "no steps": (["demo", "--steps", "0"], "'0'"),
}

BAD_CASES = {
    "boundaries that do not start at zero": (["--cu-seqlens", "5,37"], "cu_seqlens"),
    "decreasing boundaries": (["--cu-seqlens", "0,37,20"], "cu_seqlens"),
    "value heads not a multiple": (["--heads", "2,3"], "heads"),
    "a cut off the grid": (["--segments", "grid:1", "--align", "1"], "align=64"),
}


@pytest.mark.parametrize(("argv", "text"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_arguments_that_cannot_be_read_end_with_status_2(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("extra", "text"), BAD_CASES.values(), ids=BAD_CASES)
def test_a_pack_that_cannot_be_planned_ends_with_status_2_before_any_process_starts(
    extra: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_world, "run_processes", lambda case: pytest.fail("started processes"))
    assert main.main([*VERIFY, *extra]) == 2
    assert text in capsys.readouterr().err


def test_demo_on_cuda_without_a_gpu_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main.main(["demo", "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    assert "--device: got cuda" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.dist
@pytest.mark.parametrize(("segments", "kind"), [("1", "tolerance"), ("grid:1", "bits")])
def test_verify_agrees_over_two_processes_and_prints_json(
    segments: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*VERIFY, "--segments", segments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is True
    assert printed["case"]["align"] == (64 if kind == "bits" else 1)
    assert printed["backend"] == "torch"
    assert [row["tensor"] for row in printed["rows"]] == list(TENSORS)
    for row in printed["rows"]:
        assert list(row["checks"]) == ["ring = twin", "a2a = twin", "ring = a2a", "one rank"]
        assert row["checks"]["one rank"]["kind"] == kind
        assert all(check["kind"] == "bits" for name, check in row["checks"].items() if name != "one rank")


def test_verify_ends_with_status_1_and_says_where_when_one_bit_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(case: Case) -> verify_world.WorldResults:
        results = verify_world.run_twin(case)
        value = results["ring"][1].tensors["dk"]
        value[0, 3, 0, 5] = torch.nextafter(value[0, 3, 0, 5], value.new_tensor(9.0))
        return results

    monkeypatch.setattr(verify_world, "run_processes", spoiled)
    assert main.main(VERIFY) == 1
    shown = capsys.readouterr().out
    assert "cpu, backend=torch (auto: " in shown
    assert "bits differ" in shown
    assert "dk, ring = twin: rank 1, index [3, 0, 5]" in shown
    assert "dk, a2a = twin" not in shown


def test_verify_reports_a_rank_that_raises_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(case: Case) -> verify_world.WorldResults:
        raise verify_world.WorldFailed("rank 1 raised: out of luck")

    monkeypatch.setattr(verify_world, "run_processes", failing)
    assert main.main([*VERIFY, "--json"]) == 1
    assert "out of luck" in capsys.readouterr().err


def test_the_worst_head_decides_not_the_average() -> None:
    want = torch.ones(10, 3, 4)
    got = want.clone()
    got[:, 1] += 1e-3
    assert verify_compare.worst_error(got, want) == pytest.approx(1e-3, rel=1e-3)
    got[0, 0, 0] = float("nan")
    assert verify_compare.worst_error(got, want) == float("inf")


def test_packs_are_the_same_for_a_seed_full_and_of_real_text() -> None:
    first, again = (list(itertools.islice(demo_data.packs(7, 512), 5)) for _ in range(2))
    other = next(demo_data.packs(8, 512))
    assert all(
        torch.equal(a.tokens, b.tokens) and a.cu_seqlens == b.cu_seqlens for a, b in zip(first, again, strict=True)
    )
    assert not torch.equal(first[0].tokens, other.tokens)
    for pack in first:
        assert pack.tokens.shape == (512,)
        assert (pack.cu_seqlens[0], pack.cu_seqlens[-1]) == (0, 512)
        assert list(pack.cu_seqlens) == sorted(set(pack.cu_seqlens))
    assert any(b"import" in bytes(pack.tokens.tolist()) for pack in first)


@pytest.mark.dist
def test_demo_trains_on_two_ranks_and_on_one_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "NUM_TOKENS", 256)
    monkeypatch.setattr(demo, "LOSS_GOAL", 0.99)
    out = tmp_path / "out"
    assert main.main(["demo", "--world", "2", "--steps", "6", "--device", "cpu", "--out", str(out)]) == 0
    rows = [[json.loads(line) for line in (out / f"loss-world{w}.jsonl").read_text().splitlines()] for w in (2, 1)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(6))
    assert all(abs(a["loss"] - b["loss"]) < 1e-3 for a, b in zip(*rows, strict=True))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "largest difference" in shown
    assert shown.count("rank: backend=torch (auto: ") + shown.count("ranks: backend=torch (auto: ") == 2
    assert str(out.name) in shown


@pytest.mark.parametrize(("last", "status"), [(3.4, 0), (3.6, 1), (float("nan"), 1)])
def test_demo_ends_with_status_1_unless_the_loss_falls(last: float, status: int) -> None:
    assert demo._verdict({"2 ranks": [{"loss": 5.0}, {"loss": last}]}) == status


def test_the_table_shows_the_first_and_the_last_step() -> None:
    assert demo_report._spread(1) == [0]
    assert demo_report._spread(3) == [0, 1, 2]
    spread = demo_report._spread(100)
    assert (spread[0], spread[-1], len(spread)) == (0, 99, demo_report.TABLE_ROWS)


def test_the_module_prints_its_help_without_the_optional_packages() -> None:
    hide = "import runpy, sys; sys.modules['rich'] = sys.modules['matplotlib'] = None; sys.argv = ['cp-gdn', '--help']"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}; runpy.run_module('cp_gdn', run_name='__main__')"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


def test_every_argument_of_verify_reaches_the_case() -> None:
    options = [
        "--layout=zigzag",
        "--world=3",
        "--segments=grid:2",
        "--backend=torch",
        "--dtype=fp64",
        "--gate=none",
        "--seed=5",
    ]
    case = verify.make_case(main.build_parser().parse_args([*VERIFY, *options]))
    assert dataclasses.asdict(case) == {
        "cu_seqlens": (0, 37, 88, 128),
        "layout": "zigzag",
        "world": 3,
        "align": 128,
        "heads": (1, 2),
        "head_dims": (16, 16),
        "segments": "grid:2",
        "device": "cpu",
        "backend": "torch",
        "dtype": "fp64",
        "gate": "none",
        "seed": 5,
    }


def test_demo_shows_the_end_of_the_log_and_ends_with_status_1_when_a_rank_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'import sys; print(\'{"step": 0, "loss": 5.0, "tokens_per_s": 1.0}\'); sys.exit(\'rank 1: out of luck\')'
    monkeypatch.setattr(demo, "_command", lambda each: [sys.executable, "-c", script])
    assert main.main(["demo", "--steps", "1", "--device", "cpu", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "rank 1: out of luck" in shown
    assert "the run on 2 ranks failed" in shown
