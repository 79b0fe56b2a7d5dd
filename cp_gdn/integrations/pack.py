"""What one sharded batch is on this rank, and the contexts that layers run on it with.

Legend: B rows of the batch, S tokens of a row, N global and T local tokens.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_gdn.comm import Comm
from cp_gdn.context import Context, build_context
from cp_gdn.layout import Partition

log = logging.getLogger("cp_gdn")


class LayerShape(NamedTuple):
    """What a layer wants of a pack's context; fields as in `build_context`."""

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    conv: tuple[int, int] | None
    dtype: torch.dtype


ShapeOf = Callable[..., LayerShape]
"""Called with a layer and dtype=, None for that of its weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """What one sharded batch is on this rank. Make it with `Seat.rows` or `Seat.packed`.

    Attributes:
        partition: of all N tokens of the batch, row after row. comm: the group. device: of the hidden states.
        batch_shape: (B, T / B), the leading dims of this rank's hidden states; row-major, they are the T local tokens.
        options: what `build_context` gets beside a layer's shape. contexts: those built, by layer shape.
        said: what the log knows of contexts, one set for all packs of a seat.
        checked_bounds: the boundary tensor that was last found equal to this pack's.
    """

    partition: Partition
    comm: Comm
    device: torch.device
    batch_shape: tuple[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    contexts: dict[LayerShape, Context] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    checked_bounds: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = self.partition.local_tokens(self.comm.rank)
        if self.batch_shape[0] * self.batch_shape[1] != tokens:
            raise ValueError(
                f"batch_shape: got {self.batch_shape}, expected {tokens} tokens, which rank {self.comm.rank} holds"
            )

    def context(
        self,
        *,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        conv: tuple[int, int] | None,
        dtype: torch.dtype,
    ) -> Context:
        """The context for layers of this shape; the first call plans it, and every rank must make it."""
        shape = LayerShape(heads, head_dims, conv, dtype)
        if shape not in self.contexts:
            chosen = {"device": self.device, **shape._asdict(), **self.options}
            self.contexts[shape] = torch.compiler.disable(build_context)(self.partition, self.comm, **chosen)
            self._say(shape, self.contexts[shape])
        return self.contexts[shape]

    def _say(self, shape: LayerShape, ctx: Context) -> None:
        """Log on rank 0 what layers of this shape run on, unless that was said before."""
        line = (
            f"cp_gdn: heads {shape.heads} of {shape.head_dims} in {shape.dtype}: backend={ctx.taken.kind} "
            f"({ctx.taken.reason}), exchange={ctx.exchange}"
        )
        if self.comm.rank == 0 and line not in self.said:
            self.said.add(line)
            log.info("%s", line)

    @cached_property
    def token_ids(self) -> Tensor:
        """Index of each local token in the batch of N tokens, row-major, int64 [T] on the device."""
        return torch.as_tensor(self.partition.token_ids(self.comm.rank), device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Offset of each local token in its document, int64 in `batch_shape` on the device."""
        return torch.as_tensor(self.partition.positions(self.comm.rank), device=self.device).view(self.batch_shape)

    def local(self, x: Tensor) -> Tensor:
        """This rank's tokens [B, T / B, ..] of the global x [B, S, ..]. No message; gradients stay on this rank."""
        rows = self.batch_shape[0]
        if x.dim() < 2 or x.shape[0] != rows or x.shape[0] * x.shape[1] != self.partition.num_tokens:
            raise ValueError(
                f"x: got shape {list(x.shape)}, expected [{rows}, {self.partition.num_tokens // max(rows, 1)}, ..], "
                "the whole batch"
            )
        return x.flatten(0, 1).index_select(0, self.token_ids).unflatten(0, self.batch_shape)

    def whole(self, x_l: Tensor) -> Tensor:
        """The batch [B, S, ..] of every rank's x_l [B, T / B, ..], on every rank. All ranks call it; no gradient."""
        if tuple(x_l.shape[:2]) != self.batch_shape:
            raise ValueError(f"x_l: got shape {list(x_l.shape)}, expected {[*self.batch_shape, '..']}")
        counts = [self.partition.local_tokens(rank) for rank in range(self.comm.size)]
        rows = self.comm.all_gather("TOKENS", x_l.detach().flatten(0, 1), counts)
        order = torch.as_tensor(self.partition.gather_rows, device=x_l.device)
        return rows.index_select(0, order).unflatten(0, (self.batch_shape[0], -1))
