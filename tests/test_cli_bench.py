"""`cp-gdn bench --calibrate` without a GPU: kernels by their order, constants from samples, the file, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cp_gdn.calibration import H200_MODEL, Calibration, load_calibration
from cp_gdn.cli import bench_measure
from cp_gdn.cli.bench_fit import SUMMARIES, calibrated, counted
from cp_gdn.cli.bench_measure import CASES, Case, Launched, Sample, grouped, named
from cp_gdn.cli.main import main
from cp_gdn.cost_model import WALKS, RankModel
from cp_gdn.layout import partition
from cp_gdn.makespan import rank_rows, table_rows
from cp_gdn.plan import build_plan

TRUTH = replace(
    H200_MODEL,
    times=replace(
        H200_MODEL.times, walk_output=1500, stream_states=3000, grad=5000, segment=2900, dropped_hop=1200, launch=4000
    ),
    settings=replace(H200_MODEL.settings, decayed_chunks=3),
)
WHOLE = ("output", "states", "adjoint")
KERNELS = ("prepare", "grad", "folds", "launch", *WHOLE, *SUMMARIES)


def samples_of(case: Case, truth: Calibration) -> Iterator[Sample]:
    """What a device with the constants ``truth`` would give."""
    rows = rank_rows(partition([0, *np.cumsum(case.lengths).tolist()], 1, "contiguous"), 0)
    for gate in ("model", "slow"):
        for p in case.p:
            for kernel in KERNELS:
                sample = Sample(kernel=kernel, rows=rows, p=p, heads=case.heads[1], gate=gate, ns=1.0)
                model = RankModel(rows, case.heads[1], truth, np.array([p]))
                ns = float(sum(getattr(truth.times, name) * n for name, n in counted(sample, truth).items()))
                if kernel in SUMMARIES and gate == "model":
                    starts = model.starts.item(WALKS[kernel][2], 0)
                    ns = starts * truth.times.segment + model.walk_ns(kernel, decayed=True).item(0)
                if ns:
                    yield replace(sample, ns=ns)


def test_a_fit_finds_the_device_behind_the_samples() -> None:
    samples = [sample for case in CASES for sample in samples_of(case, TRUTH)]
    found = calibrated(samples, ("NVIDIA Z9", 132), "a test")
    assert (found.calibration.device, found.calibration.source) == ("NVIDIA Z9", "a test")
    for name, ns in asdict(TRUTH.times).items():
        assert abs(getattr(found.calibration.times, name) - ns) <= 2 + 0.005 * ns, name
    assert found.calibration.settings == TRUTH.settings
    assert {*found.errors} == {*KERNELS, "decayed summaries"}
    assert max(abs(error) for errors in found.errors.values() for error in errors) < 0.01


def test_the_command_writes_what_the_planner_loads_and_prints_every_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = SimpleNamespace(name="NVIDIA Z9", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(bench_measure, "measured", lambda case, *_: samples_of(case, TRUTH))
    path = tmp_path / "z9.json"
    assert main(["bench", "--calibrate", str(path)]) == 0
    saved, printed = load_calibration(path), capsys.readouterr().out
    assert (saved.device, saved.sm_count) == ("NVIDIA Z9", 132)
    assert saved.source.startswith("cp-gdn bench --calibrate, 20")
    assert "NVIDIA Z9, torch " in saved.source
    for name, value in asdict(saved.times).items():
        assert any(line.split()[:2] == [name, str(value)] for line in printed.splitlines()), name
    assert f"wrote {path}" in printed


def test_without_a_gpu_or_without_the_kernels_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--calibrate", str(path)]) == 2
    assert "--device: got 'cuda', expected a CUDA GPU of this machine" in capsys.readouterr().err

    def refused(*_: Any) -> Iterator[Sample]:
        raise RuntimeError('backend="hopper": this GPU is sm_80')
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_measure, "measured", refused)
    assert main(["bench", "--calibrate", str(path)]) == 2
    assert "this GPU is sm_80" in capsys.readouterr().err
    assert not path.exists()


def test_kernels_are_told_apart_by_their_order() -> None:
    part = partition([0, 640, 1280], 1, "contiguous")
    before = Launched(names=["prepare", "walk", "walk", "fold", "walk"], ns=[1, 30, 40, 5, 60], gaps=[9])
    names = ["prepare", "adjoint", "fold", "walk", "adjoint", "grad", "walk", "adjoint", "grad"]  # two slabs
    after = Launched(names=names, ns=[3, 70, 8, 90, 100, 110, 120, 130, 140], gaps=[8, 1, 7])
    found = named(build_plan(part, 0, p_vector=3).segments, before, after)
    assert found == {
        "prepare": 2,
        "grad": 250,
        "summaries": 70,
        "output": 60,
        "states": 210,
        "adjoint": 230,
        "adjoint_offsets": 70,
        "folds": 13,
        "launch": 3 + 1,
    }
    whole = Launched(names=["prepare", "walk"], ns=[1, 2], gaps=[1])
    mirror = Launched(names=["prepare", "walk", "adjoint", "grad"], ns=[3, 4, 5, 6], gaps=[1])
    segments = build_plan(part, 0, p_vector=1).segments
    assert named(segments, whole, mirror) == {"prepare": 2, "grad": 6, "output": 2, "states": 4, "adjoint": 5}
    with pytest.raises(RuntimeError, match=r"got 1 walks in a forward .* of 6 segments, expected at least 2"):
        named(build_plan(part, 0, p_vector=3).segments, whole, mirror)


def test_a_profile_is_cut_where_a_call_prepares() -> None:
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, time_range=span)

    events = [event("fill", 0, 1), event("prepare", 2, 4), event("walk", 5, 9), event("prepare", 20, 21)]
    first, second = grouped(events)
    assert (first.names, first.ns, first.gaps) == (["prepare", "walk"], [2000, 4000], [1000])
    assert (second.names, second.ns, second.gaps) == (["prepare"], [1000], [])


def test_every_sample_counts_what_the_model_counts() -> None:
    rows = table_rows([(100, 0)])
    sample = Sample(kernel="folds", rows=rows, p=2, heads=4, gate="model", ns=1.0)
    assert counted(sample, H200_MODEL) == {"dropped_hop": 2}
    assert counted(replace(sample, gate="slow"), H200_MODEL) == {"fold_hop": 2}
    assert counted(replace(sample, kernel="prepare"), H200_MODEL) == {"prepare": 4}
    assert counted(replace(sample, kernel="launch"), H200_MODEL) == {"launch": 1}
    assert counted(replace(sample, kernel="summaries"), H200_MODEL)["walk_summary"] == 50
    assert counted(replace(sample, kernel="summaries", p=4), H200_MODEL)["walk_summary"] == 25  # B and M at once
