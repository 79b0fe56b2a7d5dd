"""Plan packs for up to 1,024 ranks: bytes, hops, fold time and modelled efficiency of ring and a2a, as JSON and a plot.

Nothing is timed and nothing is sent: bytes and hops are exact, every time is modelled from the constants of
`cp_gdn.network_model.Network` (nodes of 8 ranks) and of the calibration of an H200.
Run: python bench/scaling.py [--worlds 1,2,...,1024] [--out FILE.json] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cp_gdn
from cp_gdn.byte_counts import busiest
from cp_gdn.calibration import H200_MODEL
from cp_gdn.forecast import Forecast, LayerSpec, forecast
from cp_gdn.layout import partition
from cp_gdn.network_model import Network

WORLDS = tuple(2**i for i in range(11))
LAYOUTS = ("contiguous", "zigzag_per_document")
EXCHANGES = ("ring", "a2a")
PER_RANK = 65_536
"""Tokens per rank of the packs that grow with the ranks."""
LONG = 1 << 20
"""Tokens of a document in the pack of many."""
FIXED = 1 << 22
"""Tokens of the pack that does not grow."""
HEADS = (16, 48)
CONV = (10_240, 4)
"""Channels of q, k and v of these heads, and the usual width."""
ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"contiguous": "#222222", "zigzag_per_document": "#1b7f79"}
STYLES = {"ring": "-", "a2a": "--"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """`documents` equal documents of `length` tokens; `name` says how the pack grows."""

    name: str
    documents: int
    length: int

    @property
    def bounds(self) -> list[int]:
        return list(range(0, (self.documents + 1) * self.length, self.length))


def packs(world: int) -> Iterator[Pack]:
    tokens = PER_RANK * world
    yield Pack(name="one document, 65,536 tokens per rank", documents=1, length=tokens)
    documents = max(1, tokens // LONG)
    yield Pack(name="documents of 1,048,576 tokens, 65,536 per rank", documents=documents, length=tokens // documents)
    yield Pack(name="one document of 4,194,304 tokens", documents=1, length=FIXED)


def one_gpu_us(pack: Pack) -> float:
    """Modelled step of the uncut pack on one GPU, whether or not it would fit."""
    return _plan(pack, 1, "contiguous", "auto").time.step_us


def rows(worlds: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One row per pack, world size, layout and exchange."""
    for world in worlds:
        for pack in packs(world):
            one = one_gpu_us(pack)
            for layout in LAYOUTS:
                auto = _plan(pack, world, layout, "auto")
                if auto.choice.kind == "none":
                    yield _row(pack, auto, auto, "none", one)
                    continue
                for exchange in EXCHANGES:
                    planned = auto if auto.choice.kind == exchange else _plan(pack, world, layout, exchange)
                    yield _row(pack, planned, auto, exchange, one)


def _plan(pack: Pack, world: int, layout: str, exchange: str) -> Forecast:
    spec = LayerSpec(heads=HEADS, conv=CONV, exchange=exchange)
    return forecast(partition(pack.bounds, world, layout), spec, Network(), H200_MODEL)


def _row(pack: Pack, planned: Forecast, auto: Forecast, exchange: str, one: float) -> dict[str, Any]:
    time, world = planned.time, planned.layer.world_size
    bytes_of = {f"{name}_bytes": max(_both(planned, name == "fwd")) for name in ("fwd", "bwd")}
    return {
        "pack": pack.name,
        "shape": f"{pack.documents}x{pack.length}",
        "heads": ",".join(map(str, HEADS)),
        "layout": planned.layer.partition.layout,
        "exchange": exchange,
        "world": world,
        "auto": auto.choice.kind,
        "auto_reason": auto.choice.reason,
        "p_min": min(planned.layer.p_vector),
        "p_max": max(planned.layer.p_vector),
        **bytes_of,
        "saved_mib": round(int(np.sum(list(planned.kept.values()), axis=0).max()) / 2**20, 1),
        "hops": time.forward.hops,
        "modelled_message_us": round(time.forward.message_us + time.backward.message_us, 1),
        "modelled_fold_us": round(time.forward.fold_us + time.backward.fold_us, 1),
        "modelled_halo_us": round(time.halo_us, 1),
        "modelled_compute_us": round(max(time.compute_us), 1),
        "modelled_step_ms": round(time.step_us / 1000, 3),
        "modelled_efficiency_pct": round(100 * one / (world * time.step_us), 1),
    }


def _both(planned: Forecast, forward: bool) -> tuple[int, int]:
    traffic = busiest(planned.traffic, forward=forward)[1]
    return traffic.sent, traffic.received


def document(found: list[dict[str, Any]]) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": "none: modelled for H200",
        "versions": {"cp_gdn": cp_gdn.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "modelled": True,
        "constants": {"network": asdict(Network()), "calibration": asdict(H200_MODEL)},
        "rows": found,
    }


def print_table(found: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["pack"] for row in found):
        print(f"\n{name}; modelled, not measured; * is what auto takes")
        print("layout               world  exchange  fwd MiB  bwd MiB   hops  message us  fold us  step ms  efficiency")
        for row in (row for row in found if row["pack"] == name):
            mark = "*" if row["auto"] == row["exchange"] else " "
            mib = f"{row['fwd_bytes'] / 2**20:8.1f} {row['bwd_bytes'] / 2**20:8.1f}"
            times = f"{row['modelled_message_us']:11.0f} {row['modelled_fold_us']:8.0f} {row['modelled_step_ms']:8.2f}"
            left = f"{row['layout']:20} {row['world']:5}  {row['exchange']:4}{mark}   "
            print(f"{left}{mib} {row['hops']:6} {times} {row['modelled_efficiency_pct']:10.1f}%")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Efficiency above, bytes of the busiest rank below, a column per pack."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["pack"] for row in found))
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(names), sharex=True, sharey="row")
    for column, name in enumerate(names):
        chosen = [row for row in found if row["pack"] == name]
        above, below = grid[0][column], grid[1][column]
        above.set_title(name, fontsize=10)
        _curves(above, chosen, lambda row: row["modelled_efficiency_pct"])
        _curves(below, [row for row in chosen if row["world"] > 1], lambda row: row["fwd_bytes"] / 2**20)
        below.set(xlabel="ranks", yscale="log")
    grid[0][0].set_ylabel("modelled efficiency (%)")
    grid[1][0].set_ylabel("forward, busiest rank (MiB)")
    grid[0][0].legend(fontsize=8)
    figure.suptitle("MODELLED, not measured; heads 16,48; nodes of 8 ranks. Filled: what exchange=auto takes")
    figure.savefig(path, dpi=80)


def _curves(axes: Any, chosen: list[dict[str, Any]], value: Any) -> None:
    for layout in LAYOUTS:
        for exchange in EXCHANGES:
            curve = [row for row in chosen if row["layout"] == layout and row["exchange"] in (exchange, "none")]
            style = {"color": COLOURS[layout], "linestyle": STYLES[exchange]}
            x, y = [row["world"] for row in curve], [value(row) for row in curve]
            axes.plot(x, y, label=f"{layout}, {exchange}", **style)
            for a, b, row in zip(x, y, curve, strict=True):
                full = row["auto"] == row["exchange"]
                axes.plot(a, b, "o", ms=5, color=COLOURS[layout], mfc=COLOURS[layout] if full else "white")
    axes.set_xscale("log", base=2)
    axes.set_xticks(WORLDS[::2], [str(world) for world in WORLDS[::2]])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="default: bench/results/scaling-modelled-DATE.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "scaling.png", help="default: docs/scaling.png")
    args = parser.parse_args()
    found = list(rows(tuple(int(world) for world in args.worlds.split(","))))
    result = document(found)
    out = args.out or ROOT / "bench" / "results" / f"scaling-modelled-{result['date']}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print_table(found)
    draw(found, args.plot)
    print(f"\nwrote {out} and {args.plot}")


if __name__ == "__main__":
    main()
