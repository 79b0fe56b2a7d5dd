"""The table of a GPU's constants: its file, what is assumed for other devices, and the fit to measured rows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cp_gdn.calibration import H200_MODEL, Settings, _nonnegative_lstsq, calibration_for, fit, load_calibration
from cp_gdn.cost_model import quantities, step_ns

TRUTH = replace(
    H200_MODEL,
    times=replace(H200_MODEL.times, walk_output=1600, stream_states=3100, grad=5200, segment=2200, fold_hop=1500),
)


def measured_steps() -> list[tuple[dict[str, float], float]]:
    """Steps of a device with the times `TRUTH`, and each stage alone."""
    shapes = [([(1024, 1, 0)], 48), ([(128, 0, 0)] * 8, 48), ([(4094, 0, 0)], 6), ([(40, 1, 1), (300, 0, 1)], 16)]
    steps = [(table, p, heads) for table, heads in shapes for p in (1, 2, 5, 11, 22)]
    rows = [(quantities(t, p, heads, TRUTH), step_ns(t, p, heads, TRUTH)) for t, p, heads in steps]
    return rows + [({name: 200}, 200 * ns) for name, ns in asdict(TRUTH.times).items()]


def test_a_file_gives_back_the_calibration_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    saved = replace(TRUTH, source="test", settings=Settings(decayed_permille=250, decayed_chunks=12))
    saved.save(path)
    assert load_calibration(path) == saved


def spoiled(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {"format": "cp_gdn calibration", "version": 3, "device": "X", "sm_count": 7, "source": "y"}
    good |= {"times_ns": asdict(H200_MODEL.times), "settings": asdict(H200_MODEL.settings)}
    for key, value in changes.items():
        entry, _, name = key.partition("__")
        if name:
            good[entry] = {**good[entry], name: value}
        else:
            good[entry] = value
    return good


REFUSED = [
    (spoiled(format="other"), 'expected an object with "format": "cp_gdn calibration"'),
    ([], "expected an object"),
    (spoiled(version=2), "got version 2, expected 3; calibrate again"),
    (spoiled(device=3), "device: got 3, expected a string"),
    (spoiled(sm_count=0), "sm_count: got 0, expected an int >= 1"),
    (spoiled(times_ns=[1]), "times_ns: got .*expected exactly"),
    (spoiled(times_ns__walk=3), "times_ns: got .*'walk'.*expected exactly"),
    (spoiled(times_ns__grad=-1), r"times_ns\.grad: got -1, expected an int >= 0"),
    (spoiled(times_ns__grad=1.5), r"times_ns\.grad: got 1\.5, expected an int >= 0"),
    (spoiled(settings__max_chunks=0), r"settings\.max_chunks: got 0, expected an int >= 1"),
    (spoiled(settings__wave_chunks=0), r"settings\.wave_chunks: got 0, expected an int >= 1"),
]


@pytest.mark.parametrize(("data", "text"), REFUSED)
def test_a_file_that_is_no_calibration_is_refused_by_entry(data: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"bad\.json: .*{text}"):
        load_calibration(path)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot be read .*cp-gdn bench --calibrate"):
        load_calibration(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format":')
    with pytest.raises(ValueError, match=r"half\.json: not JSON"):
        load_calibration(tmp_path / "half.json")


def test_a_known_gpu_gets_its_constants_and_any_other_those_of_an_h200_with_a_note() -> None:
    assert calibration_for("NVIDIA H200", 132) == (H200_MODEL, "")
    model, note = calibration_for("cpu")
    assert (model.sm_count, note) == (132, "cpu: planned as one H200 of 132 SMs")
    other, note = calibration_for("NVIDIA Z1", 66)
    assert (other.device, other.sm_count, other.times) == ("NVIDIA Z1", 66, H200_MODEL.times)
    assert "NVIDIA Z1 with 66 SMs is not calibrated: H200 constants, 66 of 132 SMs" in note
    part, note = calibration_for("NVIDIA H200 MIG 1g.18gb", 16)
    assert part.sm_count == 16
    assert note


def test_a_fit_finds_the_times_behind_the_rows() -> None:
    fitted, errors = fit(H200_MODEL, measured_steps(), "synthetic")
    assert fitted.source == "synthetic"
    for name, ns in asdict(TRUTH.times).items():
        assert abs(getattr(fitted.times, name) - ns) <= 1 + 0.001 * ns, name
    assert np.abs(errors).max() < 1e-3


def test_a_fit_leaves_alone_what_no_row_bears_on_and_never_goes_below_zero() -> None:
    rows = [({"grad": n, "launch": 1}, 3000 * n - 900) for n in (1, 2, 5, 100)]
    fitted, _ = fit(H200_MODEL, rows, "one stage")
    assert fitted.times.launch == 0
    assert 2000 < fitted.times.grad < 3000
    assert replace(fitted.times, grad=0, launch=0) == replace(H200_MODEL.times, grad=0, launch=0)


def test_the_least_squares_are_the_best_of_all_choices_of_free_columns() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = rng.normal(size=(7, 4)), rng.normal(size=7)
        found = _nonnegative_lstsq(a, b)
        assert (found >= 0).all()
        best = np.inf
        for free in (list(free) for n in range(5) for free in combinations(range(4), n)):
            x = np.zeros(4)
            x[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.sum((a @ x - b) ** 2)))
        assert np.sum((a @ found - b) ** 2) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([({"walk": 1}, 5.0)], r"rows: got quantities \['walk'\], expected names among"),
        ([({"grad": 1}, 0.0)], "rows: got times .* each positive"),
        ([({"grad": 1}, float("nan"))], "rows: got times"),
        ([], "rows: got times .* at least one"),
    ],
)
def test_rows_that_cannot_be_fitted_are_refused(rows: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fit(H200_MODEL, rows, "nothing")
