"""The file of a measurement on a GPU: rows, and what they were measured with."""

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import cp_gdn


def record(out: Path | None, rows: Sequence[object], commit: str | None, **beside: object) -> dict[str, object]:
    """Written to ``out`` if there is one; ``commit``: None for that of the checkout. ``beside``: what else it says."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    made = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cp_gdn": cp_gdn.__version__},
        "commit": commit or git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        **beside,
        "rows": list(rows),
    }
    if out:
        out.write_text(json.dumps(made, indent=1) + "\n")
    return made
