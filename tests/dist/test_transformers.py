"""Taken-over layers over real process groups: gloo like the twin, and under TP, FSDP2, checkpoints and compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from cp_gdn import Comm, CommFailed, twin
from cp_gdn.integrations.families import whole as parameter
from cp_gdn.integrations.parallel_style import GDNContextParallel, parallelize_plan
from cp_gdn.integrations.seat import seat_of, unsharded
from cp_gdn.integrations.transformers import take_over
from tests.dist import pool
from tests.gdn_layers import (
    BATCHES,
    HIDDEN,
    KINDS,
    Batch,
    InDouble,
    Outcome,
    errors_above,
    make_layer,
    needs_transformers,
    on_rank,
    outcome,
    output,
    together,
    whole,
)

pytestmark = pytest.mark.dist
PATIENCE = 120.0  # s: every worker imports transformers once
BATCH = BATCHES["right padding"]


def over_gloo(_rank: int, _world: int, kind: str) -> tuple[Tensor, Outcome]:
    comm = Comm(timeout=PATIENCE)
    try:
        return on_rank(comm, make_layer(kind), BATCH)
    finally:
        comm.close()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS[:7])
def test_over_gloo_every_rank_has_the_bits_of_the_twin(kind: str, world: int) -> None:
    layer = make_layer(kind)
    want = twin(world, lambda comm: on_rank(comm, layer, BATCH))
    got = pool.run(world, over_gloo, kind, timeout=PATIENCE)
    for (_, wanted), (_, have) in zip(want, got, strict=True):
        assert [name for name in wanted if not torch.equal(wanted[name], have[name])] == []
    assert errors_above(together(got, BATCH), whole(layer, BATCH), 1e-9) == {}


class Blocks(nn.Sequential):
    """Two layers with residuals, each under the name that Hugging Face gives it."""

    def __init__(self, kind: str) -> None:
        super().__init__(Block(make_layer(kind)), Block(make_layer(kind)))


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.linear_attn = layer

    def forward(self, x: Tensor) -> Tensor:
        with InDouble():  # here, for a recompute runs without the modes around the first forward
            y: Tensor = x + output(self.linear_attn(hidden_states=x))
        return y


def full(outcome_: Outcome) -> Outcome:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in outcome_.items()}


def under_tensor_parallelism(rank: int, _world: int, kind: str) -> tuple[Tensor, Outcome]:
    """cp 2 x tp 2: projections in columns whose outputs are gathered, as in Hugging Face's plans."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model, batch = Blocks(kind), BATCHES["packed"]
    replica = distribute_tensor(model[0].linear_attn.A_log.detach(), mesh["tp"], [Replicate()])
    model[0].linear_attn.A_log = nn.Parameter(replica)
    with pytest.raises(NotImplementedError, match="A_log is a DTensor placed as"):
        parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]), "A_log")
    style = ColwiseParallel(output_layouts=Replicate())
    columns = {name: style for name, module in model.named_modules() if type(module) is nn.Linear}
    parallelize_module(model, mesh["tp"], columns)
    plan = parallelize_plan(model, GDNContextParallel(timeout=PATIENCE))
    assert list(plan) == ["0.linear_attn", "1.linear_attn"]
    parallelize_module(model, mesh["cp"], plan)
    seat = seat_of(model)
    with seat.hold(batch.pack(seat)) as pack:
        x, dy = (pack.local(tensor) for tensor in batch.tensors())
        x.requires_grad_()
        result = full(outcome(model, x, model(x), dy))
    seat.comm.close()
    return pack.token_ids, result


def whole_blocks(kind: str, batch: Batch) -> Outcome:
    model = Blocks(kind)
    x, dy = batch.tensors()
    x.requires_grad_()
    y = torch.cat([model(x[:, start:end]) for _, start, end in batch.documents()], dim=1)
    return outcome(model, x, y, dy)


@pytest.mark.parametrize("kind", ["fla", pytest.param("qwen3_5", marks=needs_transformers)])
def test_a_plan_on_the_cp_axis_goes_after_tensor_parallelism(kind: str) -> None:
    ranks = pool.run(4, under_tensor_parallelism, kind, timeout=PATIENCE)
    want = whole_blocks(kind, BATCHES["packed"])
    for tp in (0, 1):
        assert errors_above(together([ranks[tp], ranks[2 + tp]], BATCHES["packed"]), want, 1e-9) == {}


def under_fsdp(rank: int, world: int, kind: str) -> tuple[Tensor, Outcome]:
    """Taken over, then checkpointed, then sharded; at last given back to the original forward."""
    comm, mesh = Comm(timeout=PATIENCE), init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model, batch = Blocks(kind), BATCHES["packed"]
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    takeover = take_over(model, comm)
    inner = fully_shard(model[1].linear_attn, mesh=mesh)  # its class gets one on top of ours
    for index, block in enumerate(model):
        model[index] = checkpoint_wrapper(block)
        fully_shard(model[index], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert list(model.state_dict()) == keys
    with takeover.seat.hold(batch.pack(takeover.seat)) as pack:
        x, dy = (pack.local(tensor) for tensor in batch.tensors())
        y = model(x.requires_grad_())
    (world * (y * dy).sum()).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    result = full({"y": y.detach(), "dx": x.grad / world} | dict(zip(names, grads, strict=True)))
    rows = torch.ones(1, 8, HIDDEN, dtype=torch.float64)
    with unsharded(model):
        want = model(rows)
    takeover.disable()
    assert isinstance(inner, FSDPModule)
    assert torch.equal(model(rows), want)
    comm.close()
    return pack.token_ids, result


@pytest.mark.parametrize("kind", ["fla", pytest.param("qwen3_next", marks=needs_transformers)])
def test_fsdp_and_checkpoints_go_after_a_take_over(kind: str) -> None:
    ranks = pool.run(2, under_fsdp, kind, timeout=PATIENCE)
    want = whole_blocks(kind, BATCHES["packed"])
    for _, result in ranks:
        assert (
            errors_above(
                {name: result[name] for name in result if name not in ("y", "dx")},
                {name: want[name] for name in want if name not in ("y", "dx")},
                1e-9,
            )
            == {}
        )
    rows = [(ids, {name: result[name] for name in ("y", "dx")}) for ids, result in ranks]
    assert errors_above(together(rows, BATCHES["packed"]), {name: want[name] for name in ("y", "dx")}, 1e-9) == {}


def compiled(_rank: int, _world: int, kind: str) -> list[str]:
    """Names of what a compiled layer computes otherwise than an eager one, on two batches."""
    comm = Comm(timeout=PATIENCE)
    layer = make_layer(kind, torch.float32)
    seat = take_over(layer, comm).seat
    fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
    differing = []
    for batch in (BATCHES["packed"], Batch(bounds=(0, 50, 60, 128))):
        with seat.hold(batch.pack(seat)) as pack:
            results = []
            for run in (fast, layer):
                x, dy = (pack.local(tensor) for tensor in batch.tensors(torch.float32))
                x.requires_grad_()
                results.append(outcome(layer, x, output(run(hidden_states=x)), dy))
            got, want = results
            differing += [name for name in want if not torch.equal(want[name], got[name])]
    comm.close()
    return differing


@needs_transformers
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_a_compiled_layer_is_one_graph_and_has_the_same_bits(kind: str) -> None:
    assert pool.run(2, compiled, kind, timeout=PATIENCE) == [[], []]


def one_rank_refuses(rank: int, _world: int) -> str:
    comm = Comm(timeout=PATIENCE)
    layer = make_layer("fla")
    seat = take_over(layer, comm).seat
    with seat.hold(seat.rows(3, 48)) as pack:
        mask: Any = torch.ones(3, 48) if rank == 1 else None
        try:
            layer(hidden_states=pack.local(BATCHES["three rows"].tensors()[0]), attention_mask=mask)
        except (CommFailed, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_when_one_rank_refuses_the_others_hear_why() -> None:
    said = pool.run(2, one_rank_refuses)
    assert said[1].startswith("ValueError: attention_mask: got shape [3, 48], expected [3, 24]")
    assert said[0].startswith("CommFailed")
    assert "rank 1" in said[0]
    assert "attention_mask: got shape [3, 48], expected [3, 24]" in said[0]
