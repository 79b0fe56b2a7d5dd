"""Constants of a GPU from timed kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_gdn.calibration import H200_MODEL, Calibration, fit
from cp_gdn.cli.bench_measure import Sample
from cp_gdn.cost_model import WALKS, RankModel, walk_quantities

ROUNDS = 5
"""Fits in a row: which of a walk's two times is the larger follows from the fit before."""
SUMMARIES = ("summaries", "adjoint_offsets")
"""Walks that the decay bound cuts."""
MOST_CHUNKS = 16
"""Largest `decayed_chunks` that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A calibration, and predicted / measured - 1 of its samples by kernel."""

    calibration: Calibration
    errors: dict[str, list[float]]


def calibrated(samples: Sequence[Sample], device: tuple[str, int], source: str) -> Fitted:
    """Fit the constants of a ``device`` (name, SM count); those of messages keep what they were, for one GPU sends
    none."""
    base = replace(H200_MODEL, device=device[0], sm_count=device[1])
    kept = [sample for sample in samples if sample.gate == "slow" or sample.kernel in ("folds", "launch")]
    found = base
    for _ in range(ROUNDS):
        found, errors = fit(base, [(counted(sample, found), sample.ns) for sample in kept], source)
    decayed = [sample for sample in samples if sample.gate == "model" and sample.kernel in SUMMARIES]
    by_kernel: dict[str, list[float]] = {}
    for sample, error in zip(kept, errors.tolist(), strict=True):
        by_kernel.setdefault(sample.kernel, []).append(error)
    if decayed:
        chunks = min(range(1, MOST_CHUNKS + 1), key=lambda n: sum(e * e for e in decayed_errors(decayed, found, n)))
        found = replace(found, settings=replace(found.settings, decayed_chunks=chunks))
        by_kernel["decayed summaries"] = list(decayed_errors(decayed, found, chunks))
    return Fitted(calibration=found, errors=by_kernel)


def counted(sample: Sample, calibration: Calibration) -> dict[str, float]:
    """How often a sample spends each of `Times`."""
    model = RankModel(sample.rows, sample.heads, calibration, np.array([sample.p]))
    if sample.kernel == "launch":
        return {"launch": 1}
    if sample.kernel == "folds":
        return {"fold_hop" if sample.gate == "slow" else "dropped_hop": model.hops.item(0)}
    if sample.kernel in ("prepare", "grad"):
        return {sample.kernel: model.share}
    return walk_quantities(model, sample.kernel)


def decayed_errors(samples: Iterable[Sample], calibration: Calibration, chunks: int) -> Iterable[float]:
    """Predicted / measured - 1 of summaries of which the decay bound leaves ``chunks``."""
    calibration = replace(calibration, settings=replace(calibration.settings, decayed_chunks=chunks))
    for sample in samples:
        model = RankModel(sample.rows, sample.heads, calibration, np.array([sample.p]))
        starts = model.starts.item(WALKS[sample.kernel][2], 0) * calibration.times.segment
        yield (starts + model.walk_ns(sample.kernel, decayed=True).item(0)) / sample.ns - 1
