"""Integer tables of a plan, moved to a device in one copy: any tree of dataclasses (without slots) whose fields hold
int64 arrays, tuples of them, and further such dataclasses."""

import functools
import types
import typing
from collections.abc import Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGN = 32
"""Every table starts at a 256-byte border, counted in int64 elements."""
PINNED = 1 << 17
"""Least elements of a pinned buffer, 1 MiB: torch keeps such buffers by size, and the driver, which may wait for the
device, is asked for one only while packs are in flight whose buffers of that size are all in use."""

Tree = TypeVar("Tree")
Home = tuple[dict[str, Any], str, Any]
"""The fields of a copied node, the name of one of them, and the array or the arrays that it still holds."""
_PADDING = [np.zeros(n, dtype=np.int64) for n in range(ALIGN)]
_PLAIN = frozenset((int, bool, str, float, types.NoneType, ...))


def upload(tree: Tree, device: torch.device) -> Tree:
    """A copy of ``tree`` with a tensor on ``device`` for every array; one pinned buffer, one copy that does not block.
    What is there twice is moved once."""
    homes: list[Home] = []
    arrays: dict[int, np.ndarray] = {}
    copy: Tree = _copied(tree, homes, arrays, {None: None})
    tables = dict(zip(arrays, _moved([*arrays.values()], device), strict=True))
    for fields, name, value in homes:
        fields[name] = tuple([tables[id(x)] for x in value]) if type(value) is tuple else tables[id(value)]
    return copy


def _copied(node: Any, homes: list[Home], arrays: dict[int, np.ndarray], known: dict[int | None, Any]) -> Any:
    """The tree anew, still with arrays; ``homes`` takes where they are, ``arrays`` each of them by its id. ``known``:
    nodes that are there, by id."""
    if node is None:
        return None
    kind: Any = type(node)
    if kind is tuple:
        return tuple([_copied(item, homes, arrays, known) for item in node]) if node else node
    key = id(node)
    if key in known:
        return known[key]
    copy = known[key] = object.__new__(kind)  # not by the constructor of a frozen class, which takes twice the time
    fields: dict[str, Any] = copy.__dict__
    fields.update(node.__dict__)
    for name in _names_of_tables(kind):
        value = fields[name]
        held = type(value)
        if held is np.ndarray:
            arrays[id(value)] = value
            homes.append((fields, name, value))
        elif held is tuple and value and type(value[0]) is np.ndarray:
            arrays.update(zip(map(id, value), value, strict=True))
            homes.append((fields, name, value))
        elif value is not None:
            fields[name] = _copied(value, homes, arrays, known)
    return copy


@functools.cache
def _names_of_tables(kind: Hashable) -> tuple[str, ...]:
    """Fields of a class that may hold tables, or what holds some."""
    return tuple(name for name, hint in typing.get_type_hints(kind).items() if not _is_plain(hint))


def _is_plain(hint: Any) -> bool:
    """Whether a type stands for numbers and text, and tuples of them."""
    inside = typing.get_args(hint)
    return all(map(_is_plain, inside)) if inside else hint in _PLAIN


def _buffer(pieces: list[np.ndarray], size: int, device: torch.device) -> Tensor:
    """The pieces one after the other on the device, written once on the host: pinned where they are copied."""
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(pieces))
    host = torch.empty(max(size, PINNED), dtype=torch.int64, pin_memory=True)[:size]
    np.concatenate(pieces, out=host.numpy())
    return host.to(device, non_blocking=True)


def _moved(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The table of each array, all in one buffer."""
    pieces, sizes = [_PADDING[0]], [0]  # a table without entries is the first piece
    for array in arrays:
        size = array.size
        if size:
            rest = -size % ALIGN
            pieces += array if array.ndim == 1 else array.reshape(-1), _PADDING[rest]
            sizes += size, rest
    nothing, *tables = _buffer(pieces, sum(sizes), device).split_with_sizes(sizes)
    filled = iter(tables[::2])
    found = [next(filled) if array.size else nothing for array in arrays]
    return [t if a.ndim == 1 else t.view(a.shape) for a, t in zip(arrays, found, strict=True)]
