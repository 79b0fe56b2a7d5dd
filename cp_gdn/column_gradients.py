"""Gradients that belong side by side, written there, so that nobody has to put them together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ColumnGradients:
    """The gradient of columns that were split off each other, one tensor that the parts' gradients are written into.

    One object serves one forward; backwards of it run one after the other. widths: of the parts, in order.
    """

    __slots__ = ("_rows", "widths")

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self._rows: Tensor | None = None

    def part(self, index: int, like: Tensor) -> Tensor:
        """Where the gradient of a part may be written. like: [.., T, any], of the same rows, dtype and device."""
        if self._rows is None:
            self._rows = torch.empty((*like.shape[:-1], sum(self.widths)), dtype=like.dtype, device=like.device)
        return self._rows.split(self.widths, dim=-1)[index]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts' gradients side by side; what was not written here is copied."""
        rows, self._rows = self._rows, None
        if rows is None:
            return torch.cat([*parts], dim=-1)
        for place, found in zip(rows.split(self.widths, dim=-1), parts, strict=True):
            if found.data_ptr() != place.data_ptr():
                place.copy_(found)
        return rows


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, room: ColumnGradients) -> tuple[Tensor, ...]:
        ctx.room = room
        return x.split(room.widths, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.room.joined(grads), None


def split_columns(x: Tensor, room: ColumnGradients) -> tuple[Tensor, ...]:
    """x.split(room.widths, dim=-1), views whose gradients are collected in the room."""
    parts: tuple[Tensor, ...] = _Split.apply(x, room)
    return parts
