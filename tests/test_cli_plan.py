"""`cp-gdn plan`: its figures against the functions they come from, what it refuses, and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cp_gdn
from cp_gdn.byte_counts import Traffic, comm_bytes, saved_bytes
from cp_gdn.cli import main
from cp_gdn.cli.plan_figure import holders
from cp_gdn.exchange import choose_exchange
from cp_gdn.segments import resolve_segments

BOUNDS = "0,700,700,3000,4096"
PLAN = ["plan", "--cu-seqlens", BOUNDS, "--heads", "1,2", "--head-dims", "16,32", "--conv", "64,4"]
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
FORWARD = ("STATE", "STATE_HOME", "HALO")

FILES = {
    "a word": ("100\n\n200, x3 4\n", "line 3: got 'x3', expected a document's length"),
    "a negative length": ("100 20\n-5\n", "line 2: got '-5', expected a document's length"),
    "a fraction": ("1.5\n", "line 1: got '1.5', expected a document's length"),
    "nothing": (" \n", "holds no length"),
}
ARRAYS = {
    "fractions": (np.array([1.0, 2.0]), "got float64 of shape [2], expected one dimension of integers"),
    "two dimensions": (np.array([[1, 2]]), "got int64 of shape [1, 2], expected one dimension of integers"),
    "no entry": (np.array([], dtype=int), "got int64 of shape [0], expected one dimension of integers"),
    "a negative length": (np.array([5, -3]), "entry 1: got -3, expected a document's length"),
}
BAD_ARGUMENTS = {
    "no pack": (["plan"], "one of the arguments --cu-seqlens --lengths-file is required"),
    "two packs": ([*PLAN, "--lengths-file", "x"], "not allowed with"),
    "a boundary that is no integer": (["plan", "--cu-seqlens", "0,7,x"], "got 'x' in '0,7,x'"),
    "no ranks": ([*PLAN, "--world", "2,0"], "got '2,0', expected numbers of ranks of at least 1"),
    "an unknown dtype": ([*PLAN, "--dtype", "int8"], "got 'int8', expected one of bfloat16"),
}
BAD_PACKS = {
    "decreasing boundaries": (["--cu-seqlens", "0,9,5"], "cu_seqlens: decreases from 9 to 5 at index 2"),
    "an unknown rule": (["--segments", "most"], "segments: got 'most'"),
    "a P vector of another world": (["--segments", "1,2,3"], "segments: got 3 numbers, expected one per rank, 2"),
    "value heads not a multiple": (["--heads", "2,3"], "heads: got (2, 3)"),
    "a convolution too wide": (["--conv", "64,9"], "--conv: got width 9, expected 1 to 8"),
    "a cut off the grid": (["--segments", "grid:1", "--align", "1"], "align=64"),
    "a picture in no folder": (["--png", "nowhere/plan.png"], "--png nowhere/plan.png: cannot be written"),
    "a picture of no kind": (["--png", "plan.pgn"], "--png plan.pgn: Format 'pgn' is not supported"),
}


def planned(capsys: pytest.CaptureFixture[str], *extra: str) -> dict[str, Any]:
    assert main.main([*PLAN, *extra, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def contexts(world: int, layout: str, segments: str) -> list[cp_gdn.Context]:
    """What the ranks really build."""
    align = 64 * int(segments.removeprefix("grid:")) if segments.startswith("grid:") else 1
    part = cp_gdn.partition([int(bound) for bound in BOUNDS.split(",")], world, layout, align=align)
    options: dict[str, Any] = {"heads": (1, 2), "head_dims": (16, 32), "conv": (64, 4), "segments": segments}
    return cp_gdn.twin(world, lambda comm: cp_gdn.build_context(part, comm, **options))


def totals(found: dict[str, Traffic], forward: bool) -> dict[str, int]:
    chosen = [each for purpose, each in found.items() if (purpose in FORWARD) == forward]
    return {"sent": sum(each.sent for each in chosen), "received": sum(each.received for each in chosen)}


@pytest.mark.parametrize("segments", ["auto", "grid:2"])
def test_every_row_says_what_the_ranks_contexts_say(segments: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "--world", "1,2,4", "--segments", segments)["rows"]
    assert [(row["world"], row["layout"]) for row in rows] == [(w, name) for w in (1, 2, 4) for name in LAYOUTS]
    for row in rows:
        ranks = contexts(row["world"], row["layout"], segments)
        tokens = [ctx.num_tokens for ctx in ranks]
        assert row["tokens_per_rank"] == {"min": min(tokens), "max": max(tokens)}
        assert row["p_vector"] == list(ranks[0].segments.p_vector)
        assert (row["exchange"], row["exchange_reason"]) == (ranks[0].choice.kind, ranks[0].choice.reason)
        pieces = [piece for rank in ranks[0].partition.fragments for piece in rank]
        places = [rank for rank, held in enumerate(ranks[0].partition.fragments) for _ in held]
        crossing = [
            piece.next for piece, rank in zip(pieces, places, strict=True) if piece.next and piece.next[0] != rank
        ]
        assert row["crossing_fragments"] == len(crossing)
        kept = [saved_bytes(ctx) for ctx in ranks]
        assert row["saved_bytes"] == {"rank": row["saved_bytes"]["rank"], **max(kept, key=lambda x: sum(x.values()))}
        for name, forward in (("forward_bytes", True), ("backward_bytes", False)):
            sums = [totals(comm_bytes(ranks[0], rank), forward) for rank in range(row["world"])]
            busiest = max(sums, key=lambda each: max(each.values()))
            assert row[name] == {"rank": sums.index(busiest), **busiest}


def test_times_are_of_the_slowest_rank_and_all_messages(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, "--world", "1,4", "--layout", "zigzag", "--exchange", "ring", "--segments", "2")
    one, four = (row["modelled"] for row in result["rows"])
    parts = [
        sum(four[f"{way}_exchange"][kind] for kind in ("message_us", "fold_us")) for way in ("forward", "backward")
    ]
    assert four["step_us"] == pytest.approx(four["compute_us"] + sum(parts) + four["halo_us"])
    assert four["efficiency"] == pytest.approx(result["one_gpu_step_us"] / (4 * four["step_us"]))
    assert one["forward_exchange"] == {"hops": 0, "message_us": 0.0, "fold_us": 0.0}
    assert 0 < four["balance"] <= 1
    assert result["layer"]["dtype"] == "bfloat16"
    assert result["constants"]["network"]["node_size"] == 8
    assert "cp-gdn bench --calibrate" in result["constants"]["calibration"]["source"]


def test_choices_are_those_of_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    row = planned(capsys, "--world", "8", "--layout", "zigzag_per_document", "--heads", "2,16")["rows"][0]
    part = cp_gdn.partition([0, 700, 700, 3000, 4096], 8)
    assert row["p_vector"] == list(resolve_segments("auto", part, 16).p_vector)
    choice = choose_exchange("auto", part, 16, (16, 32), grid=False, itemsize=4)
    assert {"kind": row["exchange"], "reason": row["exchange_reason"]} == asdict(choice)


def test_grid_mode_moves_the_cuts_and_models_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, "--world", "2", "--segments", "grid:3")
    assert (result["pack"]["align"], result["one_gpu_step_us"]) == (192, None)
    assert {row["grid"] for row in result["rows"]} == {3}
    assert [row["modelled"] for row in result["rows"]] == [None] * 3


@pytest.mark.parametrize("text", ["700\n0\n2300\n1096\n", "700, 0,2300 1096", "\ufeff700\r\n0\r\n2300,\r\n1096"])
def test_lengths_come_one_per_line_or_with_spaces_and_commas(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert main.main(["plan", "--lengths-file", str(path), *PLAN[3:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == planned(capsys)


@pytest.mark.parametrize("dtype", ["int32", "uint16", "int64"])
def test_lengths_come_as_a_numpy_array(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([700, 0, 2300, 1096], dtype=dtype))
    assert main.main(["plan", "--lengths-file", str(path), *PLAN[3:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == planned(capsys)


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused_by_line_and_value(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert main.main(["plan", "--lengths-file", str(path)]) == 2
    refused = capsys.readouterr().err
    assert f"--lengths-file {path}" in refused
    assert message in refused


@pytest.mark.parametrize(("array", "message"), ARRAYS.values(), ids=ARRAYS)
def test_a_bad_array_is_refused_by_entry_and_value(
    array: np.ndarray, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, array)
    assert main.main(["plan", "--lengths-file", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_neither_text_nor_an_array_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"none.txt": (None, "cannot be read (No such file or directory)")}
    cases["noise.txt"] = (b"\xff\xfe\x80", "not a text file; a numpy array must be named .npy")
    cases["text.npy"] = (b"1 2 3", "not an array of numbers as numpy.save writes it")
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert main.main(["plan", "--lengths-file", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_arguments_that_cannot_be_read_end_with_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("extra", "message"), BAD_PACKS.values(), ids=BAD_PACKS)
def test_a_plan_that_is_refused_ends_with_status_2(
    extra: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main([*PLAN, "--world", "2", *extra]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_table_shows_each_row_and_says_that_times_are_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*PLAN, "--world", "2,4"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert [line[:2] for line in lines if line[1:2] and line[1] in LAYOUTS] == [[w, n] for w in "24" for n in LAYOUTS]
    assert "MODELLED, not measured" in shown
    assert "4,096 tokens in 4 documents" in shown


@pytest.mark.parametrize("extra", [[], ["--segments", "grid:1"], ["--cu-seqlens", "0,0"], ["--world", "3,40"]])
def test_the_picture_is_written(extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert main.main([*PLAN, *extra, "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    assert str(path) in capsys.readouterr().out.replace("\n", "")


def test_bars_stand_where_the_tokens_are() -> None:
    part = cp_gdn.partition([0, 3, 3, 10], 2, "zigzag")
    rank, doc = holders(part, 10)
    assert rank.tolist() == [0] * 3 + [1] * 5 + [0] * 2
    assert doc.tolist() == [0] * 3 + [2] * 7
