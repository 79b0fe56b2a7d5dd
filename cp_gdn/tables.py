"""Integer tables of a plan, moved to a device in one copy: any tree of dataclasses (without slots), tuples and int64
arrays."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch

ALIGN = 32
"""Every table starts at a 256-byte border, counted in int64 elements."""

Tree = TypeVar("Tree")
_PADDING = [np.zeros(n, dtype=np.int64) for n in range(ALIGN)]
_NUMBERS = frozenset((int, bool, str, float, type(None)))


def upload(tree: Tree, device: torch.device) -> Tree:
    """``tree`` with every int64 array replaced by a tensor on ``device``; one pinned buffer, one copy that does not
    block. What is there twice is moved once."""
    nodes: dict[int, Any] = {}
    _collect(tree, nodes)
    arrays = [(key, node) for key, node in nodes.items() if type(node) is np.ndarray]
    pieces = [_PADDING[0]] * 2
    for _, a in arrays:
        if a.size:
            pieces += a.reshape(-1), _PADDING[-a.size % ALIGN]
    sizes = [len(piece) for piece in pieces]
    buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(pieces, out=buffer.numpy())
    empty, *others = buffer.to(device, non_blocking=True).split_with_sizes(sizes)[::2]
    tables = iter(others)
    moved: dict[int, Any] = {}
    for key, a in arrays:
        table = next(tables) if a.size else empty
        moved[key] = table if a.ndim == 1 else table.view(a.shape)
    result: Tree = _rebuild(tree, moved)
    return result


@functools.cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    """Names of a dataclass's fields, () of anything else."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


@functools.cache
def _values_of(kind: Hashable) -> Callable[[Any], tuple[Any, ...]]:
    """What reads those fields."""
    names = _fields(kind)
    return attrgetter(*names) if len(names) > 1 else lambda node: tuple(getattr(node, name) for name in names)


def _branches(node: Any) -> tuple[Any, ...]:
    """Where tables may lie below: the fields of a dataclass, the items of a tuple that starts with one or a table."""
    kind: Any = type(node)
    if kind is not tuple:
        return _values_of(kind)(node)
    first: Any = type(node[0]) if node else kind
    return node if first is np.ndarray or _fields(first) else ()


def _collect(node: Any, nodes: dict[int, Any]) -> None:
    """Every array of the tree, and every other node that may hold some, once, by its id."""
    nodes[id(node)] = node
    for item in _branches(node):
        if type(item) is np.ndarray:
            nodes[id(item)] = item
        elif type(item) not in _NUMBERS and id(item) not in nodes:
            _collect(item, nodes)


def _rebuild(node: Any, moved: dict[int, Any]) -> Any:
    """The tree with tensors for arrays; ``moved`` has them, and takes every node that is done."""
    branches = _branches(node)
    if not branches:
        return node
    items = []
    for item in branches:
        if type(item) not in _NUMBERS:
            known = moved.get(id(item))
            item = _rebuild(item, moved) if known is None else known
        items.append(item)
    kind: Any = type(node)
    done: Any = tuple(items)
    if kind is not tuple:
        done = object.__new__(kind)  # not through the constructor of a frozen class, which takes twice the time
        done.__dict__.update(zip(_fields(kind), items, strict=True))
    moved[id(node)] = done
    return done
