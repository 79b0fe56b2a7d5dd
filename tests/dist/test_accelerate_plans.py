"""What is planned ahead of a model's first step under mixed precision: what its layers then ask for, no more."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.dist import pool
from tests.dist.accelerate_world import accelerator_of
from tests.dist.hybrid_models import Case, batches_of, make_optimizer, model_of

pytestmark = pytest.mark.dist


def planned(rank: int, world: int, precision: str) -> tuple[list[torch.dtype], list[torch.dtype]]:
    """Dtypes of the plans that there are before the first forward, and after it."""
    import cp_gdn.accelerate as plugin
    from cp_gdn.integrations.accelerate import plugin_of

    case = Case(cp=world, precision=precision)
    with accelerator_of(case, rank) as accelerator:
        plugin.enable(accelerator)
        model = model_of(case)
        model, _ = accelerator.prepare(model, make_optimizer(model))
        (batch, *_) = batches_of(case, 0, 0)
        (taken,) = plugin_of(accelerator)._taken
        with case.running(), plugin.shard(accelerator, batch):
            contexts = taken.seat.pack.contexts
            ahead = [ctx.dtype for ctx in contexts.values()]
            plugin.token_mean_loss(accelerator, model, batch)
            return ahead, [ctx.dtype for ctx in contexts.values()]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("no", torch.float32)])
def test_the_plan_ahead_is_of_the_dtype_that_layers_compute_in(precision: str, dtype: torch.dtype) -> None:
    for ahead, after in pool.run(2, planned, precision, timeout=120.0):
        assert ahead == [dtype]
        assert after == ahead
