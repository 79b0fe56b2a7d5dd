"""Draw strong scaling from a file of bench/cp_records.py: milliseconds and efficiency of a whole pack against ranks.

python bench/cp_plot.py FILE.json [--out FILE.png]   by default beside the file
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
KINDS = {"fwd": "forward", "step": "forward and backward"}
EFFICIENCY = {"fwd": "fwd_efficiency_pct", "step": "efficiency_pct"}
STYLES = {"ring": "-", "a2a": "--", "none": ":"}
COLOURS = ("#222222", "#1b7f79", "#b5541c", "#5b4b9a", "#7f7f1b", "#a03060", "#3060a0")


def packs_of(rows: Rows) -> dict[str, Rows]:
    """Rows by pack and kind of gates."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(f"{row['shape']}, gates: {row['gate']}", []).append(row)
    return found


def curve(rows: Rows, kind: str, exchange: str) -> dict[int, tuple[float, float]]:
    """By ranks the milliseconds and the efficiency, one GPU first if the pack fits on it; the best rule of each."""
    one = rows[0].get(f"one_gpu_{kind}_queued_ms")
    found = {} if one is None else {1: (one, 100.0)}
    for row in rows:
        if row["exchange"] == exchange:
            here = row[f"{kind}_queued_ms"], row.get(EFFICIENCY[kind], float("nan"))
            found[row["world"]] = min(here, found.get(row["world"], here))
    return dict(sorted(found.items()))


def draw(made: dict[str, Any], path: Path) -> None:
    """Milliseconds above, efficiency below; a column for forwards and one for steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    worlds = sorted({1, *(row["world"] for row in made["rows"])})
    for column, (kind, title) in enumerate(KINDS.items()):
        above, below = grid[0][column], grid[1][column]
        for colour, (name, rows) in zip(COLOURS, packs_of(made["rows"]).items(), strict=False):
            for exchange in dict.fromkeys(row["exchange"] for row in rows):
                points = curve(rows, kind, exchange)
                style = {"color": colour, "linestyle": STYLES[exchange], "marker": "o", "markersize": 4}
                above.plot(list(points), [ms for ms, _ in points.values()], label=f"{name}; {exchange}", **style)
                below.plot(list(points), [share for _, share in points.values()], **style)
        above.set_title(title)
        above.set_yscale("log")
        below.set(xlabel="ranks", xscale="log")
        below.set_xticks(worlds, [str(world) for world in worlds])
        below.xaxis.minorticks_off()
        for axes in (above, below):
            axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("slowest rank (ms)")
    grid[1][0].set(ylabel="efficiency against one GPU (%)", ylim=(0, None))
    grid[0][1].legend(fontsize=7, handlelength=4)
    heads = " and ".join(dict.fromkeys(row["heads"] for row in made["rows"]))
    figure.suptitle(f"One pack over more ranks: {made['device']}, heads {heads}, {made['commit']}, {made['date']}")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.file.read_text()), args.out or args.file.with_suffix(".png"))


if __name__ == "__main__":
    main()
