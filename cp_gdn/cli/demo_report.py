"""What the demo shows: progress while it trains, a table and a plot of both loss curves at the end."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Row = dict[str, Any]
TABLE_ROWS = 11


@contextlib.contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[Row], None]]:
    """Yield a function that shows one step: a bar on a terminal, else every tenth step as a line."""
    console = Console()
    if not console.is_terminal:
        yield lambda row: _print_line(console, title, row, steps)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=console) as bar:
        task = bar.add_task(title, total=steps, figures="starting")
        yield lambda row: bar.update(task, advance=1, figures=_figures(row))


def _figures(row: Row) -> str:
    return f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"


def _print_line(console: Console, title: str, row: Row, steps: int) -> None:
    if row["step"] % 10 == 0 or row["step"] == steps - 1:
        console.print(f"{title}: step {row['step']:4d}  {_figures(row)}", highlight=False)


def print_summary(rows: dict[str, list[Row]], out: Path) -> None:
    """Both loss columns side by side, how far they are apart, the backends that ran, and where the files are."""
    (split_name, split), (single_name, single) = rows.items()
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(split, single, strict=True)]
    table = Table(title="Training loss")
    for heading in ("step", f"loss, {split_name}", f"loss, {single_name}", "difference"):
        table.add_column(heading, justify="right")
    for step in _spread(len(split)):
        losses = (f"{each[step]['loss']:.6f}" for each in (split, single))
        table.add_row(str(step), *losses, f"{differences[step]:.1e}")
    console = Console()
    console.print(table)
    rates = (f"{name}: {statistics.median(row['tokens_per_s'] for row in each):,.0f}" for name, each in rows.items())
    lines = [*_apart(differences, split[0]["dtype"]), f"median tokens/s: {', '.join(rates)}"]
    lines += [f"{name}: {_backends(each)}" for name, each in rows.items()]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    console.print(f"results in {out.resolve()}", highlight=False, soft_wrap=True)


def _apart(differences: list[float], dtype: str) -> list[str]:
    worst = max(range(len(differences)), key=differences.__getitem__)
    line = f"largest difference: {differences[worst]:.1e} (step {worst})"
    if dtype == "fp32":
        return [line]
    # Step 0 is the forward alone, on the same parameters; later steps add up what sums in another order round away.
    line += f"; {differences[0]:.1e} at step 0, before any update"
    return [line, f"in {dtype} other cuts round other numbers: the two runs are close, not equal"]


def _backends(each: list[Row]) -> str:
    """A run has a context, and so a choice, per pack."""
    return ", ".join(dict.fromkeys(f"backend={row['backend']} ({row['backend_reason']})" for row in each))


def _spread(count: int) -> list[int]:
    """At most `TABLE_ROWS` step numbers, the first and the last among them."""
    shown = min(TABLE_ROWS, count)
    return sorted({round(row * (count - 1) / max(1, shown - 1)) for row in range(shown)})


def write_plot(rows: dict[str, list[Row]], path: Path) -> None:
    """Both curves in one plot."""
    # NOTE: a Figure of its own draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The curves lie on each other: a wide pale one below, a dashed one on top.
    for (name, each), (style, width, alpha) in zip(rows.items(), (("-", 4, 0.5), ("--", 1.5, 1)), strict=True):
        steps, losses = [row["step"] for row in each], [row["loss"] for row in each]
        axes.plot(steps, losses, style, label=name, linewidth=width, alpha=alpha)
    axes.set_xlabel("step")
    axes.set_ylabel("mean loss per byte (nats)")
    axes.set_title("Gated DeltaNet byte model on the Python library's sources")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
