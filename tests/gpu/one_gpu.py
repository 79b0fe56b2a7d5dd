"""Run a script, or -m MODULE, on ranks that share one GPU: `launch/torchrun.sh -m tests.gpu.one_gpu SCRIPT ..`.

NCCL refuses two ranks on one GPU, so messages go by gloo, which lacks two things that this puts in its place. FSDP2
asks for averages: here it adds and divides. torch's functional collectives end a process by a segmentation fault where
gloo is to gather CUDA tensors (2.11): here they gather as FSDP2 does. A first argument --torch-attention lets softmax
layers take torch's context parallelism, which stands on them.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

FLAG = "--torch-attention"


def average_without_nccl() -> None:
    """Let every FSDP2 module that an Accelerator makes add up its gradients and divide them."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import FSDPModule

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **options: Any) -> Any:
        made = original(self, *args, **options)
        for model in made if isinstance(made, tuple) else (made,):
            for module in getattr(model, "modules", list)():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        return made

    Accelerator.prepare = prepare


def gather(x: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
    """In place of torch's functional all-gather."""
    return torch.cat(gathered(x, group, tag).unbind(), dim=gather_dim)


def permute(x: Tensor, src_dst: list[int], group: Any, tag: str = "") -> Tensor:
    """In place of torch's functional permutation: rank r sends to src_dst[r]."""
    return gathered(x, group, tag)[src_dst.index(dist.get_rank(members_of(group, tag)))].clone()


def gathered(x: Tensor, group: Any, tag: str) -> Tensor:
    """x of every rank, in a new first dim."""
    members = members_of(group, tag)
    out = x.new_empty(members.size() * x.numel())
    dist.all_gather_into_tensor(out, x.flatten(), group=members)
    return out.view(members.size(), *x.shape)


def members_of(group: Any, tag: str) -> dist.ProcessGroup:
    """The process group of what functional collectives take for one."""
    return dist.distributed_c10d._resolve_process_group(functional._resolve_group_name(group, tag))


def main() -> None:
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo")
    average_without_nccl()
    functional.all_gather_tensor, functional.permute_tensor = gather, permute
    sys.argv = sys.argv[1:]
    if sys.argv[0] == FLAG:
        sys.argv = sys.argv[1:]
        mock.patch("cp_gdn.comm.Comm.kind", "as nccl").start()
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
