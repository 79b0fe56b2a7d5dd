"""The examples of README.md and docs/usage.md, run as printed, against the gradients and weights of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import cp_gdn
from cp_gdn.cli.demo_model import HEAD_DIMS, HEADS, ByteModel, build_model
from tests.dist import pool

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = (0, 37, 38, 90, 131)
HEADINGS = ("Plain all-reduce", "DistributedDataParallel", "FSDP2")

Weights = dict[str, tuple[Tensor, Tensor]]
"""Per parameter its gradient and its value after one step."""


def code_below(text: str, heading: str) -> str:
    """The first python block after a heading."""
    found = re.search(rf"^#+ {re.escape(heading)}$.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found, heading
    return found.group(1)


def run_printed(heading: str, names: dict[str, Any]) -> None:
    usage = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    for block in ("One step", heading):
        exec(compile(code_below(usage, block), f"docs/usage.md: {block}", "exec"), names)


def make_context(model: ByteModel, comm: cp_gdn.Comm) -> cp_gdn.Context:
    part = cp_gdn.partition(BOUNDS, comm.size)
    return cp_gdn.build_context(part, comm, heads=HEADS, head_dims=HEAD_DIMS, dtype=torch.float32, conv=model.conv)


def one_step(rank: int, world: int, heading: str) -> Weights:
    """The printed code on one rank, with the names that the text around it introduces."""
    model, comm = build_model(0, torch.device("cpu")), cp_gdn.Comm()
    tokens = torch.randint(256, (1, BOUNDS[-1]), generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {
        "cp_gdn": cp_gdn, "F": F, "dist": dist, "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard, "init_device_mesh": init_device_mesh, "device_type": "cpu",
        "model": model, "comm": comm, "ctx": make_context(model, comm), "tokens": tokens, "cu_seqlens": BOUNDS,
    }  # fmt: skip
    names["optimizer"] = Optimizer(names)
    run_printed(heading, names)
    comm.close()
    return {
        name.removeprefix("module."): (whole(parameter.grad), whole(parameter))
        for name, parameter in names["model"].named_parameters()
    }


class Optimizer:
    """SGD over whatever the model's parameters are when it steps: the printed code wraps the model before."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def step(self) -> None:
        torch.optim.SGD(self.names["model"].parameters(), lr=0.1).step()


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def readme_rows(rank: int, world: int) -> Tensor:
    names: dict[str, Any] = {}
    exec(compile(code_below((ROOT / "README.md").read_text(encoding="utf-8"), "Use it"), "README.md", "exec"), names)
    names["comm"].close()
    return names["y"].detach()


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("heading", HEADINGS)
def test_one_printed_training_step_gives_the_gradients_and_weights_of_one_process(heading: str, world: int) -> None:
    (want,) = pool.run(1, one_step, "Plain all-reduce")
    for got in pool.run(world, one_step, heading):
        assert got.keys() == want.keys()
        for name, (grad, value) in want.items():
            scale = float(grad.norm()) + 1e-6
            assert float((got[name][0] - grad).norm()) < 1e-5 * scale, name
            assert torch.allclose(got[name][1], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.dist
def test_the_readme_example_gives_the_same_rows_on_two_ranks_and_on_one() -> None:
    (want,) = pool.run(1, readme_rows)
    for got in pool.run(2, readme_rows):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
