"""Integer tables of a plan, moved to a device in one copy: any tree of dataclasses, tuples and int64 arrays."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGN = 32
"""Every table starts at a 256-byte border, counted in int64 elements."""

Tree = TypeVar("Tree")


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Field names of a dataclass, () of anything else."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _is_branch(node: Any) -> bool:
    """Tuples of dataclasses or arrays hold tables; tuples of numbers do not."""
    return isinstance(node, tuple) and bool(node) and (isinstance(node[0], np.ndarray) or bool(_fields(type(node[0]))))


def _collect(node: Any, found: list[np.ndarray]) -> None:
    if isinstance(node, np.ndarray):
        found.append(node)
    elif _is_branch(node):
        for item in node:
            _collect(item, found)
    else:
        for name in _fields(type(node)):
            _collect(getattr(node, name), found)


def _rebuild(node: Any, tables: Iterator[Tensor]) -> Any:
    """The same walk as `_collect`, taking the next of ``tables`` for each array."""
    if isinstance(node, np.ndarray):
        return next(tables)
    if _is_branch(node):
        return tuple(_rebuild(item, tables) for item in node)
    names = _fields(type(node))
    return type(node)(**{name: _rebuild(getattr(node, name), tables) for name in names}) if names else node


def upload(tree: Tree, device: torch.device) -> Tree:
    """``tree`` with every int64 array replaced by a tensor on ``device``; one pinned buffer, one copy that does not
    block."""
    arrays: list[np.ndarray] = []
    _collect(tree, arrays)
    sizes = [-(-a.size // ALIGN) * ALIGN for a in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    starts = (np.cumsum(sizes) - sizes).tolist() if sizes else []
    for start, a in zip(starts, arrays, strict=True):
        host[start : start + a.size] = a.reshape(-1)
    moved = buffer.to(device, non_blocking=True)
    pieces = moved.split(sizes) if sizes else ()
    result: Tree = _rebuild(tree, (piece[: a.size].view(a.shape) for piece, a in zip(pieces, arrays, strict=True)))
    return result
