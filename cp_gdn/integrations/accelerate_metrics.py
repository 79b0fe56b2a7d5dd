"""What a metric sees under context parallelism: whole rows, each once.

Ranks of one sequence have parts of its logits and labels. `Trainer` pads them over processes and gathers them for its
metrics and its predictions, as scripts do with `gather_for_metrics`; these two stand in for Accelerate's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor

from cp_gdn.integrations.accelerate_loss import DATA, groups_of
from cp_gdn.integrations.pack import Pack


class Metrics:
    """For one accelerator. pack: that of the last step, None where rows were whole."""

    def __init__(self, accelerator: Any, pack: Callable[[], Pack | None]) -> None:
        self._accelerator, self._pack = accelerator, pack
        self._pad, self._gather = accelerator.pad_across_processes, accelerator.gather_for_metrics

    def pad_across_processes(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Accelerate's own, of whole rows: entries [B, S / W, ..] of the last step are made [B, S, ..] first."""
        return self._pad(recursively_apply(self._whole, tensor), *args, **options)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Accelerate's own, but for tensors over data-parallel ranks alone: whole rows, and losses averaged over ranks.

        What is no tensor is gathered over all ranks, as ever.
        """
        if use_gather_object or not _all_tensors(input_data):
            return self._gather(input_data, use_gather_object=use_gather_object)
        gathered = recursively_apply(lambda x: self._over_data(self._mean(self._whole(x))), input_data)
        state = self._accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:  # the last batch was filled up with rows from the start
            return recursively_apply(lambda x: x[: state.remainder], gathered)
        return gathered

    def _whole(self, x: Tensor) -> Tensor:
        pack = self._pack()
        return pack.whole(x) if pack is not None and tuple(x.shape[:2]) == pack.batch_shape else x

    def _mean(self, x: Tensor) -> Tensor:
        """A loss is its rank's share; scalars and vectors of them."""
        pack = self._pack()
        if pack is None or x.dim() > 1 or not x.is_floating_point():
            return x
        return pack.comm.all_reduce_sum("LOSS", x) / pack.comm.size

    def _over_data(self, x: Tensor) -> Tensor:
        x = torch.atleast_1d(x).contiguous()
        for group, size in reversed(groups_of(self._accelerator, DATA)):
            if size > 1:
                parts = [torch.empty_like(x) for _ in range(size)]
                dist.all_gather(parts, x, group=group)
                x = torch.cat(parts)
        return x


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
