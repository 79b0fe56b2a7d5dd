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

Tree = TypeVar("Tree")
Home = tuple[dict[str, Any], str, Any]
"""The fields of a copied node, the name of one of them, and the array or the arrays that it still holds."""
_PADDING = [np.zeros(n, dtype=np.int64) for n in range(ALIGN)]
_PLAIN = frozenset((int, bool, str, float, types.NoneType, ...))


def upload(tree: Tree, device: torch.device) -> Tree:
    """A copy of ``tree`` with a tensor on ``device`` for every array; one pinned buffer, one copy that does not block.
    What is there twice is moved once."""
    homes: list[Home] = []
    copy: Tree = _copied(tree, homes, {None: None})
    arrays: dict[int, np.ndarray] = {}
    for _, _, value in homes:
        if type(value) is tuple:
            for array in value:
                arrays[id(array)] = array
        else:
            arrays[id(value)] = value
    tables = dict(zip(arrays, _moved([*arrays.values()], device), strict=True))
    for fields, name, value in homes:
        fields[name] = tuple([tables[id(x)] for x in value]) if type(value) is tuple else tables[id(value)]
    return copy


def _copied(node: Any, homes: list[Home], known: dict[int | None, Any]) -> Any:
    """The tree anew, still with arrays; ``homes`` takes where they are. ``known``: nodes that are there, by id."""
    if node is None:
        return None
    kind: Any = type(node)
    if kind is tuple:
        return tuple([_copied(item, homes, known) for item in node]) if node else node
    key = id(node)
    if key in known:
        return known[key]
    copy = known[key] = object.__new__(kind)  # not by the constructor of a frozen class, which takes twice the time
    fields: dict[str, Any] = copy.__dict__
    fields.update(node.__dict__)
    for name in _names_of_tables(kind):
        value = fields[name]
        held = type(value)
        if held is np.ndarray or (held is tuple and value and type(value[0]) is np.ndarray):
            homes.append((fields, name, value))
        elif value is not None:
            fields[name] = _copied(value, homes, known)
    return copy


@functools.cache
def _names_of_tables(kind: Hashable) -> tuple[str, ...]:
    """Fields of a class that may hold tables, or what holds some."""
    return tuple(name for name, hint in typing.get_type_hints(kind).items() if not _is_plain(hint))


def _is_plain(hint: Any) -> bool:
    """Whether a type stands for numbers and text, and tuples of them."""
    inside = typing.get_args(hint)
    return all(map(_is_plain, inside)) if inside else hint in _PLAIN


def _moved(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The table of each array, all in one buffer."""
    pieces, sizes = [_PADDING[0]], [0]  # a table without entries is the first piece
    for array in arrays:
        size = array.size
        if size:
            rest = -size % ALIGN
            pieces += array if array.ndim == 1 else array.reshape(-1), _PADDING[rest]
            sizes += size, rest
    buffer = torch.from_numpy(np.concatenate(pieces))
    if device.type != "cpu":
        buffer = buffer.pin_memory().to(device, non_blocking=True)
    nothing, *tables = buffer.split_with_sizes(sizes)
    filled = iter(tables[::2])
    found = [next(filled) if array.size else nothing for array in arrays]
    return [t if a.ndim == 1 else t.view(a.shape) for a, t in zip(arrays, found, strict=True)]
