"""Integer tables of a plan, moved to a device in one copy: any tree of dataclasses, tuples and int64 arrays."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, TypeVar

import numpy as np
import torch

ALIGN = 32
"""Every table starts at a 256-byte border, counted in int64 elements."""

Tree = TypeVar("Tree")
_PADDING = np.zeros(ALIGN, dtype=np.int64)
_NUMBERS = (int, bool, str, float, type(None))


def upload(tree: Tree, device: torch.device) -> Tree:
    """``tree`` with every int64 array replaced by a tensor on ``device``; one pinned buffer, one copy that does not
    block. What is there twice is moved once."""
    found: dict[int, Any] = {}
    _collect(tree, found)
    arrays = {key: node for key, node in found.items() if type(node) is np.ndarray}
    pieces: list[np.ndarray] = []
    for a in arrays.values():
        pieces += a.ravel(), _PADDING[: -a.size % ALIGN]
    sizes = [piece.size for piece in pieces]
    buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    if pieces:
        np.concatenate(pieces, out=buffer.numpy())
    tables = buffer.to(device, non_blocking=True).split_with_sizes(sizes)[::2]
    moved: dict[int, Any] = {}
    for (key, a), table in zip(arrays.items(), tables, strict=True):
        moved[key] = table if a.ndim == 1 else table.view(a.shape)
    result: Tree = _rebuild(tree, moved)
    return result


@functools.cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    """Names of a dataclass's constructor arguments, () of anything else."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.init) if dataclasses.is_dataclass(kind) else ()


def _branches(node: Any) -> tuple[Any, ...]:
    """Where tables may lie below: the fields of a dataclass, the items of a tuple that starts with one or a table."""
    kind: Any = type(node)
    if kind is not tuple:
        return tuple([getattr(node, name) for name in _fields(kind)])
    first: Any = type(node[0]) if node else kind
    return node if first is np.ndarray or _fields(first) else ()


def _collect(node: Any, found: dict[int, Any]) -> None:
    """Every array of the tree, and every node, once, by its id."""
    found[id(node)] = node
    if type(node) is not np.ndarray:
        for item in _branches(node):
            if type(item) not in _NUMBERS and id(item) not in found:
                _collect(item, found)


def _rebuild(node: Any, moved: dict[int, Any]) -> Any:
    """The tree with tensors for arrays; ``moved`` has them, and takes every node that is done."""
    branches = _branches(node)
    if branches:
        items = [
            item if type(item) in _NUMBERS else moved[id(item)] if id(item) in moved else _rebuild(item, moved)
            for item in branches
        ]
        kind: Any = type(node)
        node_moved = tuple(items) if kind is tuple else kind(**dict(zip(_fields(kind), items, strict=True)))
        moved[id(node)] = node_moved
        return node_moved
    return node
