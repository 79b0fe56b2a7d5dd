"""The scale of loss and gradients: whatever the split and the shares of trained tokens, one step is the global one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_gdn import Comm, GatedDeltaNet, build_context, partition, shard, shift_labels, token_mean_loss, twin

SHAPE: dict[str, Any] = {"heads": (1, 2), "head_dims": (8, 8)}
HIDDEN, CLASSES, RATE = 6, 5, 0.1

# Documents of each micro-batch, and the labels that are not trained: unequal shares, a rank's or all of a batch's.
MICRO_BATCHES: list[tuple[tuple[int, ...], slice]] = [
    ((40, 7, 33), slice(0, 25)),
    ((1, 64), slice(0, 60)),
    ((20, 0, 11), slice(None)),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = GatedDeltaNet(HIDDEN, **SHAPE)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        return self.head(x + self.layer(x, ctx))


def make_state() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model().double().state_dict()


STATE = make_state()


def make_model() -> Model:
    model = Model().double()
    model.load_state_dict({name: x.clone() for name, x in STATE.items()})
    return model


def batch(index: int) -> tuple[list[int], Tensor, Tensor]:
    """Boundaries, rows [1, T, hidden] and labels [T] of a micro-batch."""
    lengths, ignored = MICRO_BATCHES[index]
    gen = torch.Generator().manual_seed(index)
    x = torch.randn(1, sum(lengths), HIDDEN, generator=gen, dtype=torch.float64)
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    labels = shift_labels(torch.randint(CLASSES, (sum(lengths),), generator=gen), bounds)
    labels[ignored] = -100
    return bounds, x, labels


def step_on_rank(comm: Comm, batches: Sequence[int], layout: str) -> list[Tensor]:
    """Gradients that this rank contributes: losses over the trained tokens of all micro-batches and all ranks."""
    model, made = make_model(), []
    for index in batches:
        bounds, x, labels = batch(index)
        ctx = build_context(
            partition(bounds, comm.size, layout), comm, dtype=torch.float64, conv=model.layer.conv, **SHAPE
        )
        made.append((ctx, shard(x, ctx), shard(labels, ctx, 0)))
    trained = sum(int((labels != -100).sum()) for _, _, labels in made)
    for ctx, x, labels in made:
        total = F.cross_entropy(model(x, ctx)[0], labels, ignore_index=-100, reduction="sum")
        token_mean_loss(total, trained, comm).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def step_alone(batches: Sequence[int]) -> list[Tensor]:
    """The specification: one process, one mean over all trained tokens."""
    model = make_model()
    losses, trained = [], 0
    for index in batches:
        bounds, x, labels = batch(index)
        rows = model.head(x + model.layer(x, cu_seqlens=bounds))[0]
        losses.append(F.cross_entropy(rows, labels, ignore_index=-100, reduction="sum"))
        trained += int((labels != -100).sum())
    (sum(losses) / max(trained, 1)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("batches", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_gradients_summed_over_ranks_and_micro_batches_are_those_of_one_process(
    batches: tuple[int, ...], world: int, layout: str
) -> None:
    expected = step_alone(batches)
    per_rank = twin(world, lambda comm: step_on_rank(comm, batches, layout))
    assert len(expected) == len(list(make_model().parameters()))
    total = [sum(grads) for grads in zip(*per_rank, strict=True)]
    for ours, theirs in zip(total, expected, strict=True):
        assert float((ours - theirs).norm()) <= 1e-12 * float(theirs.norm())
    norms = [torch.stack([g.norm() for g in grads]).norm() for grads in (total, expected)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0.0)
    for parameter, ours, theirs in zip(make_model().parameters(), total, expected, strict=True):
        torch.testing.assert_close(parameter - RATE * ours, parameter - RATE * theirs, rtol=1e-12, atol=1e-15)
