"""The picture of `cp-gdn plan`: who holds what under each layout, and modelled step time against ranks."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cp_gdn.cli.plan_rows import PackPlan
from cp_gdn.layout import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 16
"""Ranks up to which bars stay readable: of the asked world sizes the largest such one is drawn."""
PIXELS = 2000
"""Token positions that are looked up along a row of bars."""
NAMED_SHARE = 0.04
"""Share of the pack from which a document's number has room above its bars."""
STYLES = {
    "contiguous": {"marker": "o", "linestyle": "-", "color": "#222222"},
    "zigzag": {"marker": "s", "linestyle": "--", "color": "#b8336a"},
    "zigzag_per_document": {"marker": "^", "linestyle": "-.", "color": "#1b7f79"},
}
COLOURS = 10
"""Documents take the colours of matplotlib's tab10 in turn."""


def write_figure(planned: PackPlan, path: Path) -> None:
    """Draw and save; OSError and ValueError as matplotlib raises them for a path."""
    # NOTE: a Figure of its own draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    world = max([w for w in planned.worlds if w <= MOST_ROWS], default=planned.worlds[0])
    parts = [row.layer.partition for row in planned.rows if row.layer.world_size == world]
    bars = 0.9 + min(world, MOST_ROWS) * 0.13
    figure = Figure(figsize=(11, bars * len(parts) + 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    *rows, below = figure.subplots(len(parts) + 1, 1, height_ratios=[*[bars] * len(parts), 3.4])
    for axes, part in zip(rows, parts, strict=True):
        _draw_holders(axes, part)
    _name_documents(rows[0], parts[0])
    rows[-1].set_xlabel("position in the pack (tokens)")
    title = f"{planned.tokens:,} tokens in {len(planned.bounds) - 1:,} documents: who holds what on {world} ranks"
    figure.suptitle(f"{title} (a colour is a document)")
    _draw_times(below, planned)
    figure.savefig(path, dpi=180)


def _draw_holders(axes: "Axes", part: Partition) -> None:
    """A row per rank, along it the pack's tokens: the rank's own in their document's colour."""
    from matplotlib import colormaps

    axes.set_title(part.layout, loc="left", fontsize=10)
    axes.set_ylabel("rank")
    axes.set_ylim(part.world_size - 0.5, -0.5)
    axes.set_yticks(range(0, part.world_size, -(-part.world_size // 8)))
    if not part.num_tokens:
        axes.text(0.5, 0.5, "no tokens", transform=axes.transAxes, ha="center", va="center")
        return
    image = np.ones((part.world_size, PIXELS, 3))
    rank, doc = holders(part, PIXELS)
    image[rank, np.arange(PIXELS)] = colormaps["tab10"](doc % COLOURS)[:, :3]
    extent = (0, part.num_tokens, part.world_size - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    for border in np.arange(part.world_size - 1) + 0.5:
        axes.axhline(border, color="0.85", linewidth=0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _name_documents(axes: "Axes", part: Partition) -> None:
    axes.set_title(part.layout, loc="left", fontsize=10, pad=16)
    style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.3"}
    for index, (start, end) in enumerate(pairwise(part.doc_bounds)):
        if end - start >= max(1, NAMED_SHARE * part.num_tokens):
            axes.text((start + end) / 2, 1.02, f"doc {index}", transform=axes.get_xaxis_transform(), **style)


def holders(part: Partition, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank and document of the tokens at the middles of `pixels` even steps through the pack, int64 [pixels] each."""
    table = part.table
    live = np.flatnonzero(table.length > 0)
    start = part.bounds[table.doc[live]] + table.offset[live]
    order = np.argsort(start)
    token = (2 * np.arange(pixels) + 1) * part.num_tokens // (2 * pixels)
    row = live[order][np.searchsorted(start[order], token, side="right") - 1]
    return table.rank[row], table.doc[row]


def _draw_times(axes: "Axes", planned: PackPlan) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_title("MODELLED step of one layer, not measured (filled: a2a, hollow: ring or none)", loc="left", size=10)
    if not planned.one_gpu_us:
        why = "no tokens" if planned.one_gpu_us == 0 else "no times in grid mode"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    worlds = list(planned.worlds)
    even = [planned.one_gpu_us / 1000 / world for world in worlds]
    axes.plot(worlds, even, color="0.6", linewidth=1, linestyle=":", label="one GPU's time / ranks")
    for layout in planned.layouts:
        rows = [row for row in planned.rows if row.layer.partition.layout == layout]
        times = [row.time.step_us / 1000 for row in rows if row.time]
        style: dict[str, Any] = STYLES[layout]
        axes.plot(worlds, times, label=layout, alpha=0.85, **style)
        hollow = [i for i, row in enumerate(rows) if row.choice.kind != "a2a"]
        style = {**style, "linestyle": "", "markerfacecolor": "white"}
        axes.plot([worlds[i] for i in hollow], [times[i] for i in hollow], **style)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="ranks", ylabel="ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
