"""What the set-up scripts ask Python, standard library only: `python launch/venv_tools.py probe | share | pins`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

PYTHON_FLOOR = (3, 10)
TORCH_FLOOR = (2, 8)


def torch_version() -> str | None:
    """The version of the torch that this interpreter would import, None when it is missing or below the floor."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return version if numbers >= TORCH_FLOOR else None


def probe() -> int:
    """Print the torch version or "none"; the status is 1 when this Python is too old."""
    print(torch_version() or "none")
    return 0 if sys.version_info >= PYTHON_FLOOR else 1


def share(target: str) -> int:
    """Write the .pth file `target` that shows this interpreter's packages to another one.

    NOTE: --system-site-packages shows the base interpreter's packages only; when this one is itself a virtual
    environment, its torch would stay hidden.
    """
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in folders]
    Path(target).write_text("".join(lines), encoding="utf-8")
    return 0


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pins(constraints: str) -> int:
    """Print the pins of packages that are not installed yet: what is there already is used as it is."""
    for line in Path(constraints).read_text(encoding="utf-8").splitlines():
        name = re.match(r"[A-Za-z0-9_.-]+(?===)", line)
        if name and not is_installed(name.group()):
            print(line)
    return 0


if __name__ == "__main__":
    commands = {"probe": probe, "share": share, "pins": pins}
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
