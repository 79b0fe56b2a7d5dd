"""Integer tables of a context: gathered on a page while they are built, then moved to a device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

ALIGN = 32
"""Every table starts at a 256-byte border, counted in int64 elements."""
PINNED = 1 << 17
"""Least elements of a pinned buffer, 1 MiB: torch keeps such buffers by size, and the driver, which may wait for the
device, is asked for one only while packs are in flight whose buffers of that size are all in use."""
_PADDING = [np.zeros(n, dtype=np.int64) for n in range(ALIGN)]


class Table:
    """A place on a `Page`: ``data`` is an int64 array of one or two dims, and a tensor once the page is uploaded."""

    def __init__(self, data: np.ndarray) -> None:
        self.data: Any = data


class Page:
    """All tables of a context."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def put(self, array: np.ndarray) -> Table:
        """A place for the array."""
        table = Table(array)
        self.tables.append(table)
        return table

    def put_lists(self, array: np.ndarray, counts: Sequence[int]) -> "Lists":
        """The same for lists of so many columns each."""
        return Lists(table=self.put(array), cuts=(0, *accumulate(counts)))

    def upload(self, device: torch.device) -> None:
        """Put a tensor in the place of every array; one pinned buffer, one copy that does not block. A CPU has them."""
        if device.type == "cpu":
            for table in self.tables:
                table.data = torch.from_numpy(table.data)
            return
        pieces, starts = self.laid_out()
        host = torch.empty(max(starts[-1], PINNED), dtype=torch.int64, pin_memory=True)[: starts[-1]]
        np.concatenate(pieces, out=host.numpy())
        place = host.to(device, non_blocking=True).as_strided
        for table, start in zip(self.tables, starts, strict=False):
            shape = table.data.shape
            table.data = place(shape, (shape[1], 1) if len(shape) > 1 else (1,), start)

    def laid_out(self) -> tuple[list[np.ndarray], list[int]]:
        """What follows each other in the buffer, tables and padding; where each table begins, and the end."""
        pieces: list[np.ndarray] = []
        starts = [0]
        for table in self.tables:
            array = table.data.reshape(-1)
            rest = -len(array) % ALIGN
            pieces += array, _PADDING[rest]
            starts.append(starts[-1] + len(array) + rest)
        return pieces, starts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lists:
    """Lists of columns side by side in one table [r, ..]; list i is columns cuts[i] to cuts[i + 1], a tuple of r rows.
    ``views``: those that somebody has asked for."""

    table: Table
    cuts: tuple[int, ...]
    views: dict[int, tuple[Any, ...]] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        found = self.views.get(i)
        if found is None:
            found = self.views[i] = tuple(self.table.data[:, self.cuts[i] : self.cuts[i + 1]])
        return found

    def __len__(self) -> int:
        return len(self.cuts) - 1
