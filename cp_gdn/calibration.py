"""What one GPU's kernels cost: the constants of the step model, their file, and their fit to measured rows.

All times are whole nanoseconds, so that every rank predicts the same integers. A file written by `Calibration.save`:

    {"format": "cp_gdn calibration", "version": 3, "device": "NVIDIA H200", "sm_count": 132, "source": "...",
     "times_ns": {"prepare": 500, ...}, "settings": {"decayed_permille": 0, ...}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSION = "cp_gdn calibration", 3
RIDGE = 1e-3
"""Pull of a fit towards the constants it starts from: it settles what the rows leave open and biases the rest by about
its square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Nanoseconds, all per chunk and value head on one SM unless said otherwise.

    A walk takes the larger of two times: `walk_*` per chunk of the SM that walks the most (its chain of products), and
    `stream_*` per chunk of the even share of all SMs (its bytes).

    Attributes:
        prepare, grad: the stages without a chain, per chunk of the even share.
        walk_output, walk_states, walk_adjoint: the walks that emit o, S and Vn, dS and dV. walk_summary: the walk for B
            and M. adjoint_summary: the adjoint walk for the offset alone.
        stream_output, stream_states, stream_adjoint, stream_summary, stream_adjoint_summary: the same walks.
        segment: start and end of what a block walks, a segment or a run of short ones.
        fold_hop: one hop of a fold or of a composition. dropped_hop: one whose map the decay bound has removed.
        launch: one kernel launch. exchange: one message hop. collective: one all-to-all. link_mib: one MiB on the link.
    """

    prepare: int
    walk_output: int
    walk_states: int
    walk_adjoint: int
    walk_summary: int
    adjoint_summary: int
    stream_output: int
    stream_states: int
    stream_adjoint: int
    stream_summary: int
    stream_adjoint_summary: int
    grad: int
    segment: int
    fold_hop: int
    dropped_hop: int
    launch: int
    exchange: int
    collective: int
    link_mib: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is not a time.

    Attributes:
        decayed_permille: share of the heads that may decay so fast that the decay bound removes their maps and most of
            their summaries. A plan is judged twice, with no such head and with this share; 0 plans for gates that never
            decay, alone.
        decayed_chunks: chunks that the walk of such a summary has left.
        max_chunks: most chunks of one segment when a document is split.
        wave_chunks: what is preferred where a rank has more than one wave of those (a block on every SM), if it costs
            little time: a backward holds the tapes of a wave, 80 KiB a chunk and value head, 1,073 MiB of 104 chunks on
            132 SMs.
        fold_blocks: thread blocks of a fold that run at once on one SM.
    """

    decayed_permille: int = 1000
    decayed_chunks: int = 5
    max_chunks: int = 256
    wave_chunks: int = 104
    fold_blocks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The constants of one GPU.

    `device` is looked for in the name that the driver gives; `source` says where the figures come from.
    """

    device: str
    sm_count: int
    source: str
    times: Times
    settings: Settings = Settings()

    def save(self, path: str | Path) -> None:
        data = {"format": FORMAT, "version": VERSION, "device": self.device, "sm_count": self.sm_count}
        data |= {"source": self.source, "times_ns": asdict(self.times), "settings": asdict(self.settings)}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")


H200_MODEL = Calibration(
    device="H200",
    sm_count=132,
    source="cp-gdn bench --calibrate, 2026-11-30, NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, cp_gdn 0.1.0",
    times=Times(
        prepare=979,
        walk_output=1752,
        walk_states=1514,
        walk_adjoint=2217,
        walk_summary=1057,
        adjoint_summary=1817,
        stream_output=1958,
        stream_states=2666,
        stream_adjoint=3002,
        stream_summary=1157,
        stream_adjoint_summary=2076,
        grad=4908,
        segment=2516,
        fold_hop=3135,
        dropped_hop=1977,
        # A kernel with next to nothing to do and the gap before it, in profiles of the same day: the fit's 10013 is off
        # by 79 % of what it was fitted to (root mean square).
        launch=3650,
        # Links are not of this run. Between two H200 over NVLink: 30-90 us whatever the size up to 12 MiB,
        # 64 MiB in 0.14-0.37 ms; 5243 is 200 GB/s.
        exchange=40_000,
        collective=60_000,
        link_mib=5243,
    ),
    settings=Settings(decayed_permille=1000, decayed_chunks=8, max_chunks=256, wave_chunks=104, fold_blocks=1),
)
"""Measured; docs/design.md says how well it predicts and which packs it plans badly."""
KNOWN = (H200_MODEL,)


def calibration_for(device_name: str, sm_count: int | None = None) -> tuple[Calibration, str]:
    """The constants for a GPU by the driver's name, or for "cpu", and a note of what was assumed ("" if nothing).

    Constants are per SM, so a GPU that is not in the table counts as its share of an H200 of 132 SMs.
    """
    if device_name == "cpu":
        return H200_MODEL, f"cpu: planned as one H200 of {H200_MODEL.sm_count} SMs"
    for known in KNOWN:
        if known.device in device_name and sm_count in (None, known.sm_count):
            return known, ""
    sm_count = H200_MODEL.sm_count if sm_count is None else sm_count
    note = (
        f"{device_name} with {sm_count} SMs is not calibrated: H200 constants, {sm_count} of {H200_MODEL.sm_count} SMs"
    )
    return replace(H200_MODEL, device=device_name, sm_count=sm_count), note


# ---- file ------------------------------------------------------------------------------------------------------------


def load_calibration(path: str | Path) -> Calibration:
    """Read what `Calibration.save` wrote. ValueError names the file, the entry, what was got and what was expected."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"calibration {path}: cannot be read ({error.strerror}); write one with cp-gdn bench --calibrate"
        ) from None
    except ValueError as error:
        raise ValueError(f"calibration {path}: not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'calibration {path}: expected an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ValueError(
            f"calibration {path}: got version {data.get('version')!r}, expected {VERSION}; calibrate again"
        )
    for name in ("device", "source"):
        if not isinstance(data.get(name), str):
            raise ValueError(f"calibration {path}: {name}: got {data.get(name)!r}, expected a string")
    return Calibration(
        device=data["device"],
        sm_count=_whole(path, "sm_count", data.get("sm_count"), 1),
        source=data["source"],
        times=Times(**_numbers(path, "times_ns", data.get("times_ns"), Times)),
        settings=Settings(**_numbers(path, "settings", data.get("settings"), Settings)),
    )


def _numbers(path: str | Path, entry: str, got: Any, kind: type[Times] | type[Settings]) -> dict[str, int]:
    expected = [field.name for field in fields(kind)]
    if not isinstance(got, dict) or set(got) != set(expected):
        names = sorted(got) if isinstance(got, dict) else got
        raise ValueError(f"calibration {path}: {entry}: got {names}, expected exactly {sorted(expected)}")
    least = {"max_chunks": 1, "wave_chunks": 1, "fold_blocks": 1}
    return {name: _whole(path, f"{entry}.{name}", got[name], least.get(name, 0)) for name in expected}


def _whole(path: str | Path, entry: str, got: Any, least: int) -> int:
    if type(got) is not int or got < least:
        raise ValueError(f"calibration {path}: {entry}: got {got!r}, expected an int >= {least}")
    return got


# ---- fit -------------------------------------------------------------------------------------------------------------


def fit(
    base: Calibration, rows: Sequence[tuple[Mapping[str, float], float]], source: str
) -> tuple[Calibration, np.ndarray]:
    """`base` with its times fitted to measured rows.

    Args:
        base: where the fit starts; a constant on which no row bears keeps its value.
        rows: (quantities, measured ns); quantities by the names of `Times`, as `cost_model.quantities` counts them,
            or one kernel's alone. Least squares of relative errors, non-negative.
        source: what was measured, for the file.

    Returns:
        The calibration, and predicted / measured - 1 of every row, float64 [rows].
    """
    names = [field.name for field in fields(Times)]
    start = np.array([max(1, getattr(base.times, name)) for name in names], dtype=np.float64)
    measured = np.array([ns for _, ns in rows], dtype=np.float64)
    unknown = {name for quantities, _ in rows for name in quantities} - set(names)
    if unknown:
        raise ValueError(f"rows: got quantities {sorted(unknown)}, expected names among {names}")
    if not len(rows) or not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError(f"rows: got times {measured.tolist()} ns, expected at least one, each positive")
    design = np.array([[quantities.get(name, 0.0) for name in names] for quantities, _ in rows]) / measured[:, None]
    pulled = np.vstack([design * start, RIDGE * np.eye(len(names))])
    share = _nonnegative_lstsq(pulled, np.concatenate([np.ones(len(rows)), np.full(len(names), RIDGE)]))
    times = {name: round(float(value)) for name, value in zip(names, share * start, strict=True)}
    errors: np.ndarray = design @ np.array(list(times.values())) - 1
    return replace(base, times=Times(**times), source=source), errors


def _nonnegative_lstsq(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |a x - b| (Lawson and Hanson's active set); the columns of `a` are independent."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    while True:
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gradient.max() <= 1e-9:
            return x
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            falling = free & (trial <= 0)
            if not falling.any():
                break
            x += (x[falling] / (x[falling] - trial[falling])).min() * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = trial
