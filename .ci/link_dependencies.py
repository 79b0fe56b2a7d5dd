"""`link_dependencies.py VENV NAME...`: show VENV the installed distributions NAME and what they need, and nothing else.

Symbolic links instead of an install: the wheel check needs no second copy of torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

UNWANTED = re.compile(r"triton|cuda-(core|bindings|python|pathfinder)")
"""Never linked even though a CUDA build of torch names them: the package must import without them."""


def closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions `names` and, recursively, those they require without an extra, as far as installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found or UNWANTED.match(name):
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # A requirement whose marker is false here.
        needs = [line for line in found[name].requires or [] if "extra ==" not in line]
        todo += [match.group() for line in needs if (match := re.match(r"[A-Za-z0-9_.-]+", line))]
    return found


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Link every top-level entry of a distribution into the folder `site`."""
    tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    for top in sorted(tops):
        target = site / top
        if not target.exists():
            os.symlink(Path(str(distribution.locate_file(top))).resolve(), target)


def main() -> int:
    venv, *names = sys.argv[1:]
    ask = [f"{venv}/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    found = closure(names)
    missing = set(names) - set(found)
    if missing:
        print(f"link_dependencies: not installed: {sorted(missing)}", file=sys.stderr)
        return 1
    for distribution in found.values():
        link(distribution, site)
    return 0


if __name__ == "__main__":
    sys.exit(main())
