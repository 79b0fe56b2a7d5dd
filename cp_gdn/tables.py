"""Integer tables of a plan, moved to a device in one copy: any tree of dataclasses, tuples and int64 arrays."""

import dataclasses
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGN = 32
"""Every table starts at a 256-byte border, counted in int64 elements."""

Tree = TypeVar("Tree")


def _collect(node: Any, found: list[np.ndarray]) -> None:
    if isinstance(node, np.ndarray):
        found.append(node)
    elif isinstance(node, tuple):
        for item in node:
            _collect(item, found)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            _collect(getattr(node, field.name), found)


def _rebuild(node: Any, tables: list[Tensor]) -> Any:
    """The same walk as `_collect`, taking one tensor per array from the front of ``tables``."""
    if isinstance(node, np.ndarray):
        return tables.pop(0)
    if isinstance(node, tuple):
        return tuple(_rebuild(item, tables) for item in node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return dataclasses.replace(
            node, **{f.name: _rebuild(getattr(node, f.name), tables) for f in dataclasses.fields(node)}
        )
    return node


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
    tables = [moved[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays, strict=True)]
    result: Tree = _rebuild(tree, tables)
    return result
