"""What a rank runs in the tests of several agents: `python -m tests.dist.nodes_worker TASK FOLDER`, under a launcher.

"layers" and "examples" leave what they computed in FOLDER; the others train, or reduce, until somebody ends them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import cp_gdn
from cp_gdn import lifesigns
from tests.dist.hybrid_models import Case

BOUNDS = (0, 37, 38, 90, 211)
EXCHANGES = ("ring", "a2a")
SPLITS = {"cp 4": Case(cp=4), "dp 2 x cp 2": Case(dp=2, cp=2)}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_hf.py"
SMALL = ["--hidden", "64", "--layers", "4", "--head-dim", "16", "--length", "128", "--steps", "2", "--rows", "2"]
SIZES = ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "PARALLELISM_CONFIG_CP_SIZE")

Results = dict[str, Tensor]


def layers(rank: int, _world: int) -> dict[str, Results]:
    """Per split and exchange, a layer's output and its gradients on this rank of four."""
    found = {}
    for name, case in SPLITS.items():
        group, _ = dist.new_subgroups(case.cp)
        comm = cp_gdn.Comm(group)
        for exchange in EXCHANGES:
            found[f"{name}, {exchange}"] = one_layer(comm, exchange, seed=rank // case.cp)
        comm.close()
        dist.destroy_process_group(group)
    return found


def one_layer(comm: cp_gdn.Comm, exchange: str, seed: int) -> Results:
    torch.manual_seed(seed)
    layer = cp_gdn.GatedDeltaNet(32, heads=(2, 4), head_dims=(16, 16))
    x = torch.randn(1, BOUNDS[-1], 32, requires_grad=True)
    part = cp_gdn.partition(BOUNDS, comm.size)
    ctx = cp_gdn.build_context(
        part,
        comm,
        heads=layer.heads,
        head_dims=layer.head_dims,
        dtype=torch.float32,
        conv=layer.conv,
        exchange=exchange,
    )
    y_l = layer(cp_gdn.shard(x, ctx), ctx)
    y_l.square().sum().backward()
    assert x.grad is not None
    grads = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"y": y_l.detach(), "dx": x.grad, **grads}


def examples(rank: int, world: int, folder: str) -> None:
    """The loop example for each split, its metrics in a folder of that name."""
    from tests.dist.accelerate_scripts import scripts

    for name, case in SPLITS.items():
        call = [str(EXAMPLE), *SMALL, "--out", str(Path(folder, name))]
        # The example ends by destroying the process group, which the next one needs.
        with mock.patch.object(dist, "destroy_process_group"):
            scripts(rank, world, case, [call], {"ACCELERATE_MIXED_PRECISION": "no"})


def forever(rank: int, world: int, folder: str) -> None:
    """Train a layer over and over, for longer than any test waits; a file per rank says when it has begun."""
    comm, end = cp_gdn.Comm(), time.monotonic() + 300.0
    while time.monotonic() < end:
        for exchange in EXCHANGES:
            one_layer(comm, exchange, seed=0)
        Path(folder, f"began-{rank}").touch()


def collectives(rank: int, world: int, folder: str) -> None:
    """What FSDP does, without a message of cp_gdn's."""
    lifesigns.start()
    end = time.monotonic() + 300.0
    while time.monotonic() < end:
        dist.all_reduce(torch.ones(1))
        Path(folder, f"began-{rank}").touch()


def plugin(rank: int, world: int, folder: str) -> None:
    """The loop example for longer than anybody waits, its metrics in FOLDER from the first step on."""
    from tests.dist.accelerate_scripts import scripts

    call = [str(EXAMPLE), *SMALL, "--steps", "3000", "--save-every", "3000", "--out", folder]
    scripts(rank, world, Case(cp=world), [call], {"ACCELERATE_MIXED_PRECISION": "no"})


def main(tasks: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for task in tasks.split(","):
        if task == "layers":
            sizes = [os.environ.get(name) for name in SIZES]
            torch.save({"results": layers(rank, world), "sizes": sizes}, Path(folder, f"rank{rank}.pt"))
        else:
            {f.__name__: f for f in (examples, forever, collectives, plugin)}[task](rank, world, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
