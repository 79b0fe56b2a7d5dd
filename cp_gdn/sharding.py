"""Tokens, labels and positions between the global order and the order of one rank.

A shard holds the rows `ctx.token_ids` of a tensor's token dim; boundaries and labels are always the global ones.
Legend: N global tokens, T tokens of this rank, W ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from cp_gdn.checks import check_tensor
from cp_gdn.layout_checks import check_doc_bounds

if TYPE_CHECKING:
    from cp_gdn.context import Context

_GRADS = ("replicated", "partial")


def shard(x: torch.Tensor, ctx: Context, dim: int = 1) -> torch.Tensor:
    """This rank's tokens of the global x, in local order: size N of `dim` becomes T. No message.

    The backward returns the full gradient on every rank (it gathers the ranks' slices), so that what produced x may be
    computed on every rank alike, or owned by one.
    """
    with ctx.comm.guard("shard"):
        _check_tokens("x", x, dim, ctx.partition.num_tokens, "global", ctx)
        rows: torch.Tensor = _Shard.apply(x, ctx, dim % x.dim())
        return rows


def unshard(x_l: torch.Tensor, ctx: Context, dim: int = 1, grad: str = "replicated") -> torch.Tensor:
    """The global tensor in global order on every rank, from every rank's shard: size T of `dim` becomes N.

    `grad` says what the ranks' gradients of the result are. "replicated": every rank computed the same one, and takes
    its slice. "partial": each holds a part of it; they are summed in rank order and each rank takes its slice.
    """
    with ctx.comm.guard("unshard"):
        if grad not in _GRADS:
            raise ValueError(f"grad: got {grad!r}, expected one of {', '.join(_GRADS)}")
        _check_tokens("x_l", x_l, dim, ctx.num_tokens, "local", ctx)
        x: torch.Tensor = _Unshard.apply(x_l, ctx, dim % x_l.dim(), grad)
        return x


def positions(ctx: Context) -> torch.Tensor:
    """Offset of each local token inside its document, int64 [T]; what a rotary embedding on a shard needs."""
    return ctx.positions


def shift_labels(labels: torch.Tensor, cu_seqlens: Any, ignore_index: int = -100) -> torch.Tensor:
    """Next-token labels [.., N]: each token's label is the one after it, a document's last token gets `ignore_index`.

    Takes global labels and global boundaries: shift first, then shard. A shard's last token keeps its label.
    """
    bounds = check_doc_bounds(cu_seqlens)
    if labels.dim() == 0 or labels.shape[-1] != bounds[-1]:
        raise ValueError(
            f"labels: got shape {list(labels.shape)}, expected {bounds[-1]} tokens in the last dimension, where "
            "cu_seqlens ends; both are global"
        )
    last = torch.tensor(bounds[1:][bounds[1:] > bounds[:-1]] - 1, device=labels.device)
    return labels.roll(-1, -1).index_fill(-1, last, ignore_index)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(fctx: Any, x: torch.Tensor, ctx: Context, dim: int) -> torch.Tensor:
        fctx.cp, fctx.dim = ctx, dim
        return x.index_select(dim, ctx.token_ids)

    @staticmethod
    @once_differentiable
    def backward(fctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with fctx.cp.comm.guard("shard backward"):
            return _gather(grad, fctx.cp, fctx.dim, "SHARD_GRAD"), None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(fctx: Any, x_l: torch.Tensor, ctx: Context, dim: int, grad: str) -> torch.Tensor:
        fctx.cp, fctx.dim, fctx.partial = ctx, dim, grad == "partial"
        return _gather(x_l, ctx, dim, "UNSHARD")

    @staticmethod
    @once_differentiable
    def backward(fctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        with fctx.cp.comm.guard("unshard backward"):
            if fctx.partial:
                return _sum_slices(grad, fctx.cp, fctx.dim), None, None, None
            return grad.index_select(fctx.dim, fctx.cp.token_ids), None, None, None


def _gather(x_l: torch.Tensor, ctx: Context, dim: int, purpose: str) -> torch.Tensor:
    """Every rank's rows in global order."""
    part = ctx.partition
    counts = [part.local_tokens(rank) for rank in range(part.world_size)]
    by_rank = ctx.comm.all_gather(purpose, x_l.movedim(dim, 0).contiguous(), counts)
    rows = torch.as_tensor(part.gather_rows, device=x_l.device)
    return by_rank.index_select(0, rows).movedim(0, dim).contiguous()


def _sum_slices(grad: torch.Tensor, ctx: Context, dim: int) -> torch.Tensor:
    """This rank's slice of the sum of every rank's gradient: slices travel, not whole gradients."""
    part = ctx.partition
    by_rank = torch.as_tensor(part.rank_order, device=grad.device)
    send = grad.movedim(dim, 0).index_select(0, by_rank)
    width = send[:1].numel() if len(send) else 0
    send_counts = [part.local_tokens(rank) * width for rank in range(part.world_size)]
    recv_counts = [ctx.num_tokens * width] * part.world_size
    received = ctx.comm.all_to_all("UNSHARD_GRAD", send.reshape(-1), send_counts, recv_counts).wait()
    slices = received.view(part.world_size, ctx.num_tokens, *send.shape[1:])
    total = slices[0].to(_sum_dtype(grad))
    for rank in range(1, part.world_size):
        total = total + slices[rank]
    return total.to(grad.dtype).movedim(0, dim).contiguous()


def _sum_dtype(grad: torch.Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _check_tokens(name: str, x: torch.Tensor, dim: int, tokens: int, whose: str, ctx: Context) -> None:
    check_tensor(name, x, ctx, x.shape, (x.dtype,))
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: got {dim} for {name} with shape {list(x.shape)}, expected a dimension of it")
    if x.shape[dim] != tokens:
        raise ValueError(
            f"{name}: got {x.shape[dim]} tokens in dim {dim} of shape {list(x.shape)}, expected {tokens} {whose} ones; "
            f"a context's boundaries are global: {ctx.partition.num_tokens} tokens, {ctx.num_tokens} on this rank"
        )
