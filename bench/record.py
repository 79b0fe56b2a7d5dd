"""The file of a measurement: rows, and what they were measured with."""

import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import cp_gdn


def document(
    rows: Sequence[object], commit: str | None, versions: Mapping[str, object] | None = None, **beside: object
) -> dict[str, object]:
    """What a file says. ``commit``: None for that of the checkout. ``versions``, ``beside``: what else it says."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    on_gpu = torch.cuda.is_available()
    known = {"torch": torch.__version__, "cuda": torch.version.cuda, "cp_gdn": cp_gdn.__version__}
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {**known, **(versions or {})},
        "commit": commit or git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        **beside,
        "rows": list(rows),
    }


def record(out: Path | None, made: dict[str, object]) -> None:
    """``made`` into ``out``, if there is one."""
    if out:
        out.write_text(json.dumps(made, indent=1) + "\n")
