"""How `plan` prints its rows: a table with what its columns mean and what the times are modelled from, or JSON."""

import dataclasses
import json
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_gdn.byte_counts import busiest
from cp_gdn.cli.plan_rows import PackPlan, most_saved, row_facts, short_vector
from cp_gdn.forecast import Forecast

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 150
"""Columns where the output is not a terminal."""
COLUMNS = (
    "W",
    "layout",
    "tokens\nper rank",
    "P",
    "cross",
    "exchange: why\n(us per direction)",
    "forward\nbytes",
    "backward\nbytes",
    "saved: inputs\n+ rest",
    "step\nms",
    "effi-\nciency",
    "bal-\nance",
)
LEFT = (1, 5)


def print_json(planned: PackPlan) -> None:
    print(json.dumps(as_json(planned), indent=1))


def as_json(planned: PackPlan) -> dict[str, Any]:
    spec = dataclasses.asdict(planned.spec) | {"dtype": str(planned.spec.dtype).removeprefix("torch.")}
    return {
        "pack": {"documents": len(planned.bounds) - 1, "tokens": planned.tokens, "align": planned.align},
        "layer": spec,
        "constants": {
            "network": dataclasses.asdict(planned.network),
            "calibration": dataclasses.asdict(planned.calibration),
            "note": planned.note,
        },
        "one_gpu_step_us": planned.one_gpu_us,
        "rows": [row_facts(planned, row) for row in planned.rows],
    }


def print_table(planned: PackPlan, png: Path | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(_title(planned), highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if column in LEFT else "right", no_wrap="exchange" not in name)
    for row, following in zip_longest(planned.rows, planned.rows[1:]):
        ends = following is None or following.layer.world_size != row.layer.world_size
        table.add_row(*_cells(planned, row), end_section=ends)
    console.print(table)
    _print_legend(planned, console)
    if png:
        console.print(f"drawn in {png.resolve()}", highlight=False, markup=False, soft_wrap=True)


def _title(planned: PackPlan) -> str:
    spec = planned.spec
    conv = f", convolution {spec.conv[0]} x {spec.conv[1]}" if spec.conv else ""
    return (
        f"{planned.tokens:,} tokens in {len(planned.bounds) - 1:,} documents; heads {spec.heads}, head dims "
        f"{spec.head_dims}{conv}, {str(spec.dtype).removeprefix('torch.')}, segments {spec.segments}, "
        f"exchange {spec.exchange}, align {planned.align}"
    )


def _cells(planned: PackPlan, row: Forecast) -> list[str]:
    low, high = int(row.tokens.min()), int(row.tokens.max())
    kept = most_saved(row)[1]
    efficiency = planned.efficiency(row)
    return [
        str(row.layer.world_size),
        row.layer.partition.layout,
        f"{low:,}" if low == high else f"{low:,}\n{high:,}",
        short_vector(row),
        f"{row.crossing:,}",
        _exchange(row),
        *(_size(max(dataclasses.astuple(busiest(row.traffic, forward=way)[1]))) for way in (True, False)),
        f"{_size(kept['inputs'])} + {_size(sum(kept.values()) - kept['inputs'])}",
        "-" if row.time is None else f"{row.time.step_us / 1000:.2f}",
        "-" if efficiency is None else f"{efficiency:.0%}",
        "-" if row.time is None else f"{row.time.balance:.2f}",
    ]


def _exchange(row: Forecast) -> str:
    kind, reason = row.choice.kind, row.choice.reason.removeprefix("modelled us per direction: ")
    return kind if kind == "none" else f"{kind}: {reason}"


def _size(count: int) -> str:
    """Bytes with a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def _print_legend(planned: PackPlan, console: "Console") -> None:
    network, calibration = planned.network, planned.calibration
    lines = [
        "tokens per rank: least, most. P: segments per fragment (P x ranks). cross: fragments whose state goes on to "
        "another rank. exchange: the choice's own model takes all ranks as near.",
        "bytes: exact, one layer. forward, backward: what the busiest rank sends or receives, whichever is more. "
        "saved: what the rank that keeps most holds for its backward.",
        "step, efficiency, balance: MODELLED, not measured. step: one layer, forward and backward, the slowest rank's "
        "compute and then all messages, nothing overlapping. efficiency: against the uncut pack on one GPU. balance: "
        "mean over slowest compute.",
        f"constants: {calibration.device}, {calibration.sm_count} SMs, {calibration.source} ({planned.note}); network: "
        f"nodes of {network.node_size}, {network.near_bytes_per_us / 1000:.0f} GB/s and {network.near_hop_us:.0f} us "
        f"per hop inside, {network.far_bytes_per_us / 1000:.0f} GB/s and {network.far_hop_us:.0f} us between.",
    ]
    if planned.one_gpu_us is None:
        lines.append("no times in grid mode: the step model does not know it.")
    for line in lines:
        console.print(line, highlight=False, markup=False, style="dim")
