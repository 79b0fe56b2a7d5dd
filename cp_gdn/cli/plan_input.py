"""What `cp-gdn plan` reads: document lengths from a file, and argument values of its own."""

import argparse
import re
from itertools import accumulate
from pathlib import Path

import numpy as np

from cp_gdn.cli.arguments import BadInput, integers

WANTED = "a document's length in tokens, an integer of at least 0"
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
INTEGER = re.compile(r"[+-]?[0-9]+")


def read_lengths(path: Path) -> tuple[int, ...]:
    """Document boundaries (0, ..., tokens) from the lengths in a file.

    A `.npy` file holds one dimension of integers; any other file is text, integers with spaces, commas or line ends
    between them. BadInput names the line (of a `.npy` the entry), what was got and what was expected.
    """
    try:
        lengths = _from_npy(path) if path.suffix == ".npy" else _from_text(path)
    except OSError as error:
        raise BadInput(f"--lengths-file {path}: cannot be read ({error.strerror or error})") from None
    return tuple(accumulate(lengths, initial=0))


def _from_text(path: Path) -> list[int]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise BadInput(f"--lengths-file {path}: not a text file; a numpy array must be named .npy") from None
    found = [(number, word) for number, line in enumerate(lines, 1) for word in line.replace(",", " ").split()]
    if not found:
        raise BadInput(f"--lengths-file {path}: holds no length, expected {WANTED}, on each line")
    for number, word in found:
        if not INTEGER.fullmatch(word) or int(word) < 0:
            raise BadInput(f"--lengths-file {path}, line {number}: got {word!r}, expected {WANTED}")
    return [int(word) for _, word in found]


def _from_npy(path: Path) -> list[int]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):
        raise BadInput(f"--lengths-file {path}: not an array of numbers as numpy.save writes it") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        got = f"{array.dtype} of shape {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        raise BadInput(f"--lengths-file {path}: got {got}, expected one dimension of integers, at least one")
    lengths: list[int] = array.tolist()
    for index, length in enumerate(lengths):
        if length < 0:
            raise BadInput(f"--lengths-file {path}, entry {index}: got {length}, expected {WANTED}")
    return lengths


def worlds(text: str) -> tuple[int, ...]:
    """`"8,1,2"` -> (1, 2, 8)."""
    values = integers(text)
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers of ranks of at least 1, such as 1,2,4,8")
    return tuple(sorted(set(values)))


def segments(text: str) -> int | tuple[int, ...] | str:
    """`"4"` -> 4, `"4,2"` -> (4, 2), `"grid:8"`, `"auto"` and rule names stay."""
    if not INTEGER.match(text):
        return text
    values = integers(text)
    return values[0] if len(values) == 1 else values


def dtype_name(text: str) -> str:
    """torch's name of a dtype; "bf16" and the like are taken too."""
    name = DTYPE_NAMES.get(text, text)
    if name not in DTYPE_NAMES.values():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {', '.join(DTYPE_NAMES.values())}")
    return name
