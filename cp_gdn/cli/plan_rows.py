"""The rows of `cp-gdn plan`: forecasts of one pack per world size and layout, and what is said of each."""

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from cp_gdn.byte_counts import busiest
from cp_gdn.calibration import Calibration, calibration_for
from cp_gdn.forecast import Forecast, LayerSpec, StepTime, forecast
from cp_gdn.layout import partition
from cp_gdn.network_model import Network

SHOWN_RUNS = 2
"""Runs of equal numbers of a P vector that a table shows."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackPlan:
    """All rows of a pack, by world size, then layout. `one_gpu_us`: modelled step of the uncut pack; None in grid mode.

    `note`: what was assumed about the device.
    """

    bounds: tuple[int, ...]
    worlds: tuple[int, ...]
    layouts: tuple[str, ...]
    align: int
    spec: LayerSpec
    network: Network
    calibration: Calibration
    note: str
    one_gpu_us: float | None
    rows: tuple[Forecast, ...]

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    def efficiency(self, row: Forecast) -> float | None:
        """Modelled time of the uncut pack on one GPU, over ranks times the row's."""
        if row.time is None or self.one_gpu_us is None or not row.time.step_us:
            return None
        return self.one_gpu_us / (row.layer.world_size * row.time.step_us)


def plan_pack(
    bounds: Sequence[int], worlds: Sequence[int], layouts: Sequence[str], align: int, spec: LayerSpec
) -> PackPlan:
    """Forecasts of the pack with boundaries `bounds`; ValueError and TypeError as from `partition` and
    `build_context`."""
    network, (calibration, note) = Network(), calibration_for("cpu")
    # A P vector fits one world size only, so one GPU then counts at the P of rank 0.
    alone = spec if isinstance(spec.segments, (int, str)) else dataclasses.replace(spec, segments=spec.segments[0])

    def plan(world: int, layout: str, asked: LayerSpec = spec) -> Forecast:
        return forecast(partition(bounds, world, layout, align=align), asked, network, calibration)

    one = plan(1, "contiguous", alone).time
    return PackPlan(
        bounds=tuple(bounds),
        worlds=tuple(worlds),
        layouts=tuple(layouts),
        align=align,
        spec=spec,
        network=network,
        calibration=calibration,
        note=note,
        one_gpu_us=None if one is None else one.step_us,
        rows=tuple(plan(world, layout) for world in worlds for layout in layouts),
    )


def short_vector(row: Forecast) -> str:
    """The P vector in few characters: "4", "4 x3, 2 x1", "grid:8"."""
    if row.segments.grid:
        return f"grid:{row.segments.grid}"
    runs = [(p, len(list(group))) for p, group in groupby(row.segments.p_vector)]
    if len(runs) == 1:
        return str(runs[0][0])
    shown = ", ".join(f"{p} x{count}" for p, count in runs[:SHOWN_RUNS])
    if len(runs) <= SHOWN_RUNS:
        return shown
    return f"{min(row.segments.p_vector)} to {max(row.segments.p_vector)}"


def most_saved(row: Forecast) -> tuple[int, dict[str, int]]:
    """The rank that keeps most for its backward, and what."""
    rank = int(np.sum(list(row.kept.values()), axis=0).argmax())
    return rank, {name: int(each[rank]) for name, each in row.kept.items()}


def row_facts(planned: PackPlan, row: Forecast) -> dict[str, Any]:
    """A row as JSON; times are modelled microseconds, None in grid mode."""
    rank, kept = most_saved(row)
    return {
        "world": row.layer.world_size,
        "layout": row.layer.partition.layout,
        "tokens_per_rank": {"min": int(row.tokens.min()), "max": int(row.tokens.max())},
        "p_vector": list(row.segments.p_vector),
        "grid": row.segments.grid,
        "segments_rule": row.segments.rule,
        "crossing_fragments": row.crossing,
        "exchange": row.choice.kind,
        "exchange_reason": row.choice.reason,
        "forward_bytes": _direction(row, forward=True),
        "backward_bytes": _direction(row, forward=False),
        "saved_bytes": {"rank": rank, **kept},
        "modelled": None if row.time is None else _times(planned, row, row.time),
    }


def _direction(row: Forecast, *, forward: bool) -> dict[str, int]:
    rank, traffic = busiest(row.traffic, forward=forward)
    return {"rank": rank, **dataclasses.asdict(traffic)}


def _times(planned: PackPlan, row: Forecast, time: StepTime) -> dict[str, Any]:
    return {
        "step_us": time.step_us,
        "compute_us": max(time.compute_us),
        "forward_exchange": dataclasses.asdict(time.forward),
        "backward_exchange": dataclasses.asdict(time.backward),
        "halo_us": time.halo_us,
        "balance": time.balance,
        "efficiency": planned.efficiency(row),
    }
