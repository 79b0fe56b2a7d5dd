"""Tiny hybrid models trained through the real `accelerator.prepare`, FSDP2 and gloo, in the workers of the pool."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.dist.hybrid_models import (
    STEPS,
    WRAPPERS,
    Batch,
    Case,
    Run,
    batches_of,
    build,
    make_optimizer,
    model_of,
    trained_of,
)
from tests.dist.logged import logged


def config_class(plugin: Any) -> Any:
    """Accelerate's ParallelismConfig that accepts FSDP2 and context parallelism on gloo; for tests only."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from cp_gdn.integrations.accelerate import ParallelismConfig

    class OnCpu(ParallelismConfig):
        enabled = True

        def _validate_accelerator(self, accelerator: Any) -> None:
            accelerator.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
            if self.enabled:
                super()._validate_accelerator(accelerator)
            else:
                super(ParallelismConfig, self)._validate_accelerator(accelerator)

    return OnCpu


def fsdp_plugin(case: Case) -> Any:
    """As a launcher's YAML makes it: the layers to wrap are the model's own list."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=case.checkpointing == "fsdp",
        state_dict_type="SHARDED_STATE_DICT",
        # Accelerate sets it from its own mixed_precision before the config above has made it an FSDP run.
        mixed_precision_policy=case.precision if case.precision == "bf16" else None,
    )


@contextmanager
def accelerator_of(case: Case, rank: int, *, through_config: bool = False) -> Iterator[Any]:
    """A fresh accelerator in a worker that lives on; through_config: enabled by the config class, else not at all."""
    from accelerate import Accelerator

    from cp_gdn.integrations.accelerate import disable

    plugin = fsdp_plugin(case)
    config = config_class(plugin)
    config.enabled = through_config
    with environment(case, rank):
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=config(dp_shard_size=case.dp, cp_size=case.cp),
            fsdp_plugin=plugin,
            gradient_accumulation_steps=case.accumulate,
            mixed_precision=case.precision if case.precision == "bf16" else "no",
            dynamo_backend=case.compiler or None,
        )
        try:
            yield accelerator
        finally:
            disable(accelerator)


@contextmanager
def environment(case: Case, rank: int) -> Iterator[None]:
    """What a launcher sets, and none of the state that Accelerate keeps in a process."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world, "LOCAL_WORLD_SIZE": case.world}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost", MASTER_PORT="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def together(rank: int, _world: int, cases: list[Case]) -> list[Run]:
    return [train_together(case, rank) for case in cases]


def train_together(case: Case, rank: int) -> Run:
    """The loop that docs and examples show, with the ranks of one case."""
    import cp_gdn.accelerate as plugin

    with accelerator_of(case, rank) as accelerator, logged() as lines:
        options = {"layout": case.layout, **case.options}
        plugin.enable(accelerator, **options)
        model = model_of(case)
        if case.checkpointing == "model":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        model.train()
        losses, norms, grads = [], [], {}
        for step in range(STEPS):
            batches = batches_of(case, step, rank // case.cp)
            items = plugin.count_tokens(accelerator, batches)
            with case.running():
                losses.append(sum(one_batch(accelerator, model, batch, items) for batch in batches))
            if step == 0:
                grads = {name: whole(parameter.grad) for name, parameter in trained_of(model).items()}
            norms.append(float(whole(accelerator.clip_grad_norm_(model.parameters(), 1e9))))
            optimizer.step()
            optimizer.zero_grad()
        # Before a forward without backward, which leaves FSDP's last weights gathered, and in the dtype of the forward.
        weights = {name: whole(parameter) for name, parameter in trained_of(model).items()}
        keys = [re.sub(WRAPPERS, "", name) for name in model.state_dict()]
        # Without flash-linear-attention the original layers refuse packed rows.
        ways = (True, False) if case.rows else (True, True)
        with case.running():
            evaluated = [evaluate(accelerator, model, case, rank // case.cp, sharded) for sharded in ways]
    return Run(losses=losses, norms=norms, evaluated=evaluated, grads=grads, weights=weights, keys=keys, lines=lines)


def one_batch(accelerator: Any, model: Any, batch: Batch, items: Tensor) -> float:
    """A micro-batch's share of the step's mean loss."""
    import cp_gdn.accelerate as plugin

    with accelerator.accumulate(model), plugin.shard(accelerator, batch):
        loss = plugin.token_mean_loss(accelerator, model, batch, num_items=items)
        accelerator.backward(loss)
    mean = accelerator.reduce(loss.detach(), "mean")
    return float(mean) / accelerator.gradient_accumulation_steps


@torch.no_grad()
def evaluate(accelerator: Any, model: Any, case: Case, dp_rank: int, sharded: bool) -> float:
    """The mean loss of step 0's batches, over shards or over whole rows on every context-parallel rank."""
    import cp_gdn.accelerate as plugin

    batches = batches_of(case, 0, dp_rank)
    counts = [plugin.count_tokens(accelerator, [batch]) for batch in batches]
    means = []
    for batch in batches:
        with nullcontext() if sharded else plugin.unsharded(model), plugin.shard(accelerator, batch):
            loss = plugin.token_mean_loss(accelerator, model, batch)
        means.append(accelerator.reduce(loss, "mean"))
    return float(sum(mean * count for mean, count in zip(means, counts, strict=True)) / max(1, int(sum(counts))))


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def disabled(rank: int, world: int) -> tuple[float, bool]:
    """The loss of a whole batch after `disable`, and whether the accelerator and the config are as they were."""
    import cp_gdn.accelerate as plugin

    case = Case(cp=world)
    with accelerator_of(case, rank) as accelerator:
        before = set(vars(accelerator))
        plugin.enable(accelerator)
        model = build(case.family)
        model, _ = accelerator.prepare(model, make_optimizer(model))
        plugin.disable(accelerator)
        (batch,) = batches_of(case, 0, 0)
        with torch.no_grad():
            loss = float(model(**batch).loss)
        added = set(vars(accelerator)) - before - {"_cp_context"}
        return loss, not added and model.model.config is model.config
