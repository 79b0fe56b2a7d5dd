"""How `verify` prints its outcome: a table per case, or JSON."""

import dataclasses
import json
from typing import TYPE_CHECKING

from cp_gdn.backends.choice import BackendChoice
from cp_gdn.cli.verify_case import Case
from cp_gdn.cli.verify_compare import Check, Row

if TYPE_CHECKING:
    from rich.console import Console


def print_json(case: Case, backend: BackendChoice, rows: list[Row]) -> None:
    outcome = {
        "case": dataclasses.asdict(case),
        "backend": backend.kind,
        "backend_reason": backend.reason,
        "passed": all(row.passed for row in rows),
        "rows": [row.as_json() for row in rows],
    }
    print(json.dumps(outcome))


def print_table(case: Case, backend: BackendChoice, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(_title(case), highlight=False, soft_wrap=True)
    console.print(f"{case.device}, backend={backend.kind} ({backend.reason})", highlight=False, markup=False)
    table = Table()
    table.add_column("tensor")
    for kind in rows[0].checks:
        table.add_column(kind, no_wrap=True)
    for row in rows:
        table.add_row(row.tensor, *(_cell(check) for check in row.checks.values()))
    console.print(table)
    _print_differences(console, rows)
    console.print("every comparison passed" if all(row.passed for row in rows) else "[red]there are differences[/red]")


def _title(case: Case) -> str:
    segments = case.segments if case.is_grid else f"{case.segments} segment(s) per fragment"
    return (
        f"{case.cu_seqlens[-1]} tokens in {len(case.cu_seqlens) - 1} documents, {case.layout} (align {case.align}) "
        f"over {case.world} ranks; heads {case.heads}, head dims {case.head_dims}, {case.dtype}, gate {case.gate}, "
        f"{segments}"
    )


def _cell(check: Check) -> str:
    if check.kind == "bits":
        return "same bits" if check.passed else "[red]bits differ[/red]"
    return (
        f"{check.error:.1e} <= {check.limit:.1e}"
        if check.passed
        else f"[red]{check.error:.1e} > {check.limit:.1e}[/red]"
    )


def _print_differences(console: "Console", rows: list[Row]) -> None:
    for row in rows:
        for kind, check in row.checks.items():
            if check.first_difference is not None:
                console.print(f"{row.tensor}, {kind}: {check.first_difference}", highlight=False, markup=False)
