"""The token mean of a step under Accelerate, however its tokens are spread over ranks and micro-batches.

Ranks hold different tokens, and some train none; a mean per rank or per micro-batch would weigh tokens unequally.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_gdn.integrations.accelerate_batch import IGNORED, read_shape, with_shifted_labels

DATA = ("dp_replicate", "dp_shard")
"""Axes of Accelerate's mesh along which ranks have batches of their own."""

SPREAD = (*DATA, "cp")
"""Axes along which ranks train different tokens, and FSDP and DDP average gradients."""


def token_mean_loss(
    accelerator: Any, model: torch.nn.Module, batch: Mapping[str, Any], num_items: int | Tensor | None = None
) -> Tensor:
    """Run the model on the batch inside `shard`; the loss to give to `accelerator.backward`, a scalar.

    The gradients that the optimizer sees are those of the mean loss of all trained tokens of the step: over data- and
    context-parallel ranks, and over all micro-batches of `num_items`. Every rank calls it, also one that trains none.

    Args:
        batch: with labels; what `shard` made of it.
        num_items: trained tokens of the whole step, from `count_tokens`; needed with gradient accumulation. By default
            those of this batch on all ranks are counted, one int64 per rank.

    Returns:
        Its mean over ranks (`accelerator.reduce(loss.detach(), "mean")`) is the mean loss of the tokens, times the
        gradient accumulation steps that `accelerator.backward` divides by. A router's auxiliary loss, if the model
        returns one, is that of local tokens, averaged over ranks and micro-batches.

    Raises:
        ValueError: no shifted labels, or gradient accumulation without num_items.
    """
    if batch.get("labels") is None or batch.get("shift_labels") is None:
        raise ValueError("cp_gdn: batch: got no shift_labels; give labels, and call this inside cp_gdn's shard")
    steps = accelerator.gradient_accumulation_steps if torch.is_grad_enabled() else 1
    if num_items is None:
        if steps > 1:
            raise ValueError(
                f"cp_gdn: num_items: got None with gradient_accumulation_steps={steps}; micro-batches train different "
                "numbers of tokens, so count them first: num_items=cp_gdn.accelerate.count_tokens(accelerator, batches)"
            )
        num_items = _sum(accelerator, _trained(batch["shift_labels"]), SPREAD)
    total = torch.as_tensor(num_items, device=batch["shift_labels"].device, dtype=torch.float32).clamp(min=1)
    # The model divides the sum of its tokens' losses by this; FSDP and DDP then average over ranks.
    averaged = math.prod(size for _, size in groups_of(accelerator, SPREAD))
    share = total / (averaged * steps)
    loss: Tensor = model(**{**batch, "num_items_in_batch": share}).loss
    return loss


def count_tokens(accelerator: Any, batches: Iterable[Mapping[str, Any]], cu_seqlens: Any = None) -> Tensor:
    """Trained tokens of the micro-batches of one step, over all data-parallel ranks: int64, a scalar.

    Args:
        batches: whole ones, not inside `shard`, of this rank. cu_seqlens: one per batch, where the batches do not carry
            their boundaries themselves.
    """
    count = torch.zeros((), dtype=torch.int64)
    batches = list(batches)
    given = [None] * len(batches) if cu_seqlens is None else list(cu_seqlens)
    for batch, bounds in zip(batches, given, strict=True):
        entries = with_shifted_labels(batch, read_shape(batch, bounds))
        count = count.to(entries["shift_labels"].device) + _trained(entries["shift_labels"])
    # Context-parallel ranks hold the same whole batches.
    return _sum(accelerator, count, DATA)


def _trained(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def _sum(accelerator: Any, count: Tensor, axes: tuple[str, ...]) -> Tensor:
    """The count of every rank along these axes of the mesh, added; integers, so in any order."""
    for group, size in groups_of(accelerator, axes):
        if size > 1:
            dist.all_reduce(count, group=group)
    return count


def groups_of(accelerator: Any, axes: tuple[str, ...]) -> list[tuple[Any, int]]:
    """Process group and size of each of the axes that the mesh has; the whole world where there is no mesh."""
    mesh = None if accelerator.parallelism_config is None else accelerator.torch_device_mesh
    if mesh is None:
        return [(None, accelerator.num_processes)]
    return [(mesh.get_group(axis), mesh[axis].size()) for axis in axes if axis in mesh.mesh_dim_names]
