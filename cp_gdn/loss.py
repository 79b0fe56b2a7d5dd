"""The mean loss over all trained tokens of the group, without a NaN when a rank or the whole group trains none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cp_gdn.comm import Comm


def token_mean_loss(loss_sum: torch.Tensor, n: int | torch.Tensor, comm: Comm) -> torch.Tensor:
    """The loss this rank back-propagates: loss_sum / max(1, trained tokens of the whole group).

    `loss_sum` is the sum (not the mean) of the losses of this rank's trained tokens, `n` their number; one message of
    one int64. Adding the parameter gradients of all ranks (all-reduce SUM) gives the gradient of the global token mean.
    A wrapper that averages gradients instead (DDP, FSDP2) divides by the ranks it averages over: multiply the returned
    loss by that number. Where nothing is trained the loss is a zero that still leads into the graph, so that every rank
    enters its backward. All ranks of the group must call this.
    """
    with comm.guard("token_mean_loss"):
        total = comm.all_reduce_sum("TOKENS", _count(loss_sum, n))
        return loss_sum / total[0].clamp(min=1)


def global_mean(loss_sum: torch.Tensor, n: int | torch.Tensor, comm: Comm) -> torch.Tensor:
    """The mean loss of the group's trained tokens, fp64, for the log: the same on every rank, without gradient."""
    with comm.guard("global_mean"):
        count = _count(loss_sum, n)
        total = comm.all_reduce_sum("LOSS", torch.stack((loss_sum.detach().double(), count[0].double())))
        return total[0] / total[1].clamp(min=1)


def _count(loss_sum: torch.Tensor, n: int | torch.Tensor) -> torch.Tensor:
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim() != 0 or not loss_sum.is_floating_point():
        raise ValueError(f"loss_sum: got {_describe(loss_sum)}, expected a floating-point tensor without dimensions")
    if isinstance(n, torch.Tensor):
        if n.numel() != 1 or n.is_floating_point():
            raise ValueError(f"n: got {_describe(n)}, expected an int or a tensor of one int")
        return n.detach().reshape(1).to(loss_sum.device, torch.int64)
    if not isinstance(n, int) or n < 0:
        raise ValueError(f"n: got {n!r}, expected the number of trained tokens of this rank, an int >= 0")
    return torch.tensor([n], device=loss_sum.device)


def _describe(value: object) -> str:
    return f"shape {list(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
