"""Argument types that the commands share, and the error that ends a command with exit status 2."""

import argparse
import importlib.util

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
EXCHANGES = ("auto", "ring", "a2a")


class BadInput(ValueError):
    """What the user gave cannot be run; the message says what was got and what to change."""


def integers(text: str) -> tuple[int, ...]:
    """`"0,37,88"` -> (0, 37, 88)."""
    values = []
    for part in text.split(","):
        try:
            values.append(int(part))
        except ValueError:
            got = repr(text) if part == text else f"{part!r} in {text!r}"
            raise argparse.ArgumentTypeError(f"got {got}, expected integers with commas between them") from None
    return tuple(values)


def pair(text: str) -> tuple[int, int]:
    """`"2,4"` -> (2, 4), both at least 1."""
    values = integers(text)
    if len(values) != 2 or min(values) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected two integers of at least 1, such as 2,4")
    return values[0], values[1]


def positive(text: str) -> int:
    """An integer of at least 1."""
    values = integers(text)
    if len(values) != 1 or values[0] < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return values[0]


def require_gpu(otherwise: str) -> None:
    """Raise BadInput unless torch sees a GPU; ``otherwise``: what --device takes without one."""
    import torch

    if torch.cuda.device_count() == 0:
        raise BadInput(f"--device: got cuda, but torch sees no GPU here; expected {otherwise}")


def require_packages(command: str, *names: str) -> None:
    """Raise BadInput unless the optional packages are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"{command} needs {' and '.join(missing)}; install them with: pip install 'cp_gdn[cli]'")
