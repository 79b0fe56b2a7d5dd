"""Packed documents of real text that every machine with Python has: the sources of its standard library."""

import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "lib2to3"}
SHORTEST_DOCUMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Documents end to end: their bytes [T] as int64, and their boundaries."""

    tokens: Tensor
    cu_seqlens: tuple[int, ...]


def library_files() -> list[Path]:
    """The standard library's *.py files in a fixed order."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def documents(seed: int, longest: int) -> Iterator[bytes]:
    """Excerpts of the files without end: from the start of a line, of log-uniform lengths up to `longest` bytes."""
    rng = random.Random(seed)
    texts: dict[Path, bytes] = {}
    files = [path for path in library_files() if path.stat().st_size >= SHORTEST_DOCUMENT]
    if not files:
        raise FileNotFoundError(f"no Python sources found under {sysconfig.get_path('stdlib')}")
    while True:
        path = rng.choice(files)
        text = texts.setdefault(path, path.read_bytes())
        length = round(SHORTEST_DOCUMENT * (longest / SHORTEST_DOCUMENT) ** rng.random())
        start = text.rfind(b"\n", 0, rng.randint(0, max(0, len(text) - length))) + 1
        yield text[start : start + length]


def packs(seed: int, num_tokens: int) -> Iterator[Pack]:
    """Packs of exactly `num_tokens` bytes without end; the last document of a pack is cut to fit."""
    source = documents(seed, num_tokens)
    while True:
        text, bounds = b"", [0]
        while len(text) < num_tokens:
            text += next(source)[: num_tokens - len(text)]
            bounds.append(len(text))
        yield Pack(tokens=torch.tensor(list(text), dtype=torch.int64), cu_seqlens=tuple(bounds))
