"""Sharding and the loss over real process groups: values and gradients of every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_gdn.comm import Comm
from cp_gdn.loss import global_mean, token_mean_loss
from cp_gdn.sharding import shard, unshard
from cp_gdn.twin import twin
from tests.dist import pool
from tests.token_cases import LAYOUTS, PACKS, bare_context, cut

pytestmark = pytest.mark.dist

CASES = [(pack, layout) for pack in PACKS for layout in LAYOUTS]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def there_and_back(ctx: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The way to a shard and back, and every gradient of it, each rank's own gradient of the result."""
    generator = torch.Generator().manual_seed(ctx.rank)
    x = (100 * torch.randn(2, ctx.partition.num_tokens, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    dx = torch.randn(x.shape, generator=generator).to(dtype)
    if not dtype.is_floating_point:
        return [unshard(shard(x, ctx), ctx)]
    results = []
    for grad in ("replicated", "partial"):
        own = x.clone().requires_grad_()
        x_l = shard(own, ctx)
        back = unshard(x_l, ctx, grad=grad)
        results += [back.detach(), *torch.autograd.grad(back, (x_l, own), dx)]
    loss_sum = (shard(x, ctx) ** 2).sum().requires_grad_()
    loss = token_mean_loss(loss_sum, ctx.num_tokens, ctx.comm)
    return [*results, loss.detach(), global_mean(loss_sum, ctx.num_tokens, ctx.comm)]


def all_cases(comm: Comm, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    contexts = [bare_context(cut(PACKS[pack], comm.size, layout), comm) for pack, layout in CASES]
    return [there_and_back(ctx, dtype) for ctx in contexts]


def on_rank(_rank: int, _world_size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    comm = Comm()
    try:
        return all_cases(comm, dtype)
    finally:
        comm.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_shards_gradients_and_losses_of_every_rank_are_the_twins(world: int, dtype: torch.dtype) -> None:
    expected = twin(world, lambda comm: all_cases(comm, dtype))
    got = pool.run(world, on_rank, dtype)
    for rank in range(world):
        for case, ours, theirs in zip(CASES, got[rank], expected[rank], strict=True):
            assert len(ours) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"{case} on rank {rank}"


def one_rank_has_local_tokens_only(rank: int, _world_size: int) -> None:
    ctx = bare_context(cut(PACKS["long"], 2, "contiguous"), Comm())
    unshard(shard(torch.zeros(1, 64 if rank else 128), ctx), ctx)


def test_a_rank_that_passes_its_local_part_fails_every_rank_with_its_number_and_reason() -> None:
    outcomes = pool.run_failing(2, one_rank_has_local_tokens_only)
    assert [outcome.name for outcome in outcomes] == ["CommFailed", "ValueError"]
    for outcome in outcomes:
        assert "x: got 64 tokens" in outcome.text
    assert "rank 1" in outcomes[0].text
