"""Tokens to ranks and back, all ranks in one process: values, gradients, labels, and the loss over trained tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_gdn.layout import Partition
from cp_gdn.loss import global_mean, token_mean_loss
from cp_gdn.sharding import positions, shard, shift_labels, unshard
from cp_gdn.twin import twin
from tests.token_cases import LAYOUTS, PACKS, WORLDS, bare_context, cut


def on_ranks(part: Partition, fn: Callable[[Any], Any]) -> list[Any]:
    return twin(part.world_size, lambda comm: fn(bare_context(part, comm)))


def every_partition() -> list[Partition]:
    return [cut(lengths, world, layout) for lengths in PACKS.values() for world in WORLDS for layout in LAYOUTS]


@given(
    lengths=st.lists(st.integers(0, 20), max_size=6),
    world=st.integers(1, 8),
    layout=st.sampled_from(LAYOUTS),
    dim=st.integers(-3, 2),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.int32)),
)
def test_unshard_of_shard_is_the_identity(
    lengths: list[int], world: int, layout: str, dim: int, dtype: torch.dtype
) -> None:
    part = cut(lengths, world, layout)
    shape = [2, 2, 2]
    shape[dim] = part.num_tokens
    x = torch.arange(4 * part.num_tokens).reshape(shape).to(dtype)
    for back in on_ranks(part, lambda ctx: unshard(shard(x, ctx, dim), ctx, dim)):
        assert torch.equal(back, x)


def test_a_shard_holds_the_tokens_of_the_rank_and_positions_count_from_their_document() -> None:
    for part in every_partition():
        global_positions = torch.cat([torch.arange(n) for n in PACKS_BY_BOUNDS[part.doc_bounds]])
        x = torch.arange(part.num_tokens)[None]
        for rank, (row, position) in enumerate(on_ranks(part, lambda ctx, x=x: (shard(x, ctx), positions(ctx)))):
            assert row[0].tolist() == part.token_ids(rank).tolist()
            assert position.dtype == torch.int64
            assert torch.equal(position, global_positions[row[0]])


PACKS_BY_BOUNDS = {cut(lengths, 1, "contiguous").doc_bounds: lengths for lengths in PACKS.values()}


def test_the_gradient_of_shard_is_the_full_gradient_on_every_rank() -> None:
    for part in every_partition():
        x, dy = torch.randn(2, 1, part.num_tokens, 3, generator=torch.Generator().manual_seed(1))

        def full_gradient(ctx: Any, x: torch.Tensor = x, dy: torch.Tensor = dy) -> torch.Tensor:
            own = x.clone().requires_grad_()
            return torch.autograd.grad(shard(own, ctx), own, dy[:, ctx.token_ids])[0]

        assert all(torch.equal(gradient, dy) for gradient in on_ranks(part, full_gradient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_unshard_is_the_slice_of_the_replicated_or_of_the_summed_gradient(dtype: torch.dtype) -> None:
    for part in every_partition():
        dx = torch.randn(part.world_size, 2, part.num_tokens, 3, generator=torch.Generator().manual_seed(2)).to(dtype)
        total = dx[0].float()
        for rank in range(1, part.world_size):
            total = total + dx[rank].float()

        def slices(ctx: Any, dx: torch.Tensor = dx) -> tuple[torch.Tensor, torch.Tensor]:
            x_l = torch.zeros(2, ctx.num_tokens, 3, dtype=dx.dtype, requires_grad=True)
            replicated = torch.autograd.grad(unshard(x_l, ctx), x_l, dx[0])[0]
            return replicated, torch.autograd.grad(unshard(x_l, ctx, grad="partial"), x_l, dx[ctx.rank])[0]

        for rank, (replicated, partial) in enumerate(on_ranks(part, slices)):
            ids = torch.tensor(part.token_ids(rank))
            assert torch.equal(replicated, dx[0][:, ids])
            assert torch.equal(partial, total.to(dtype)[:, ids])


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda ctx: shard(torch.zeros(1, 13), ctx), "x: got 13 tokens in dim 1.*expected 26 global.*boundaries.*global"),
    (lambda ctx: shard(torch.zeros(1, 26), ctx, dim=0), "x: got 1 tokens in dim 0"),
    (lambda ctx: shard(torch.zeros(26), ctx), "dim: got 1 for x"),
    (lambda ctx: shard(torch.zeros(1, 26, device="meta"), ctx), "x: got device meta"),
    (lambda ctx: unshard(torch.zeros(1, 27), ctx), "x_l: got 27 tokens.*expected 26 local.*26 on this rank"),
    (lambda ctx: unshard(torch.zeros(1, 26), ctx, grad="sum"), "grad: got 'sum'.*replicated, partial"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_tensors_that_do_not_fit_the_context_are_refused_by_name(call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        on_ranks(cut(PACKS["ragged"], 1, "contiguous"), call)


# ---- labels and loss -------------------------------------------------------------------------------------------------


def test_labels_are_the_next_tokens_and_never_cross_a_document_end() -> None:
    bounds = torch.tensor([0, 3, 3, 4, 6])
    labels = torch.tensor([[10, 11, 12, 20, 30, 31]])
    assert shift_labels(labels, bounds).tolist() == [[11, 12, -100, -100, 31, -100]]
    assert shift_labels(labels[0], bounds.tolist(), ignore_index=-1).tolist() == [11, 12, -1, -1, 31, -1]
    assert shift_labels(labels[:, :0], [0]).shape == (1, 0)
    assert labels.tolist() == [[10, 11, 12, 20, 30, 31]]


def test_labels_of_another_length_than_the_boundaries_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels: got shape \[1, 5\], expected 6 tokens"):
        shift_labels(torch.zeros(1, 5), [0, 6])


def test_every_token_of_every_layout_has_the_loss_it_has_in_one_process() -> None:
    for part in every_partition():
        ids = torch.arange(1, 1 + part.num_tokens)[None]
        labels = shift_labels(ids, part.doc_bounds)
        paired = labels * 1000 + ids
        pairs = on_ranks(part, lambda ctx, i=ids, t=labels: unshard(shard(t, ctx) * 1000 + shard(i, ctx), ctx))
        assert all(torch.equal(pair, paired) for pair in pairs)


def trained(ctx: Any, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of squared errors over the trained tokens of a rank, and their number."""
    kept = shard(labels, ctx, 0) != -100
    values = shard(torch.arange(1.0, 1.0 + len(labels)), ctx, 0)
    return (((values * weight) ** 2) * kept).sum(), kept.sum()


@pytest.mark.parametrize("ignored", ["a few", "all of rank 0", "all"])
def test_summed_gradients_are_those_of_the_global_token_mean_and_finite(ignored: str) -> None:
    for world in WORLDS:
        part = cut(PACKS["ragged"], world, "zigzag")
        labels = shift_labels(torch.arange(26), part.doc_bounds)
        labels[{"a few": [3, 4], "all of rank 0": part.token_ids(0), "all": slice(None)}[ignored]] = -100

        def step(ctx: Any, labels: torch.Tensor = labels) -> tuple[torch.Tensor, torch.Tensor]:
            weight = torch.tensor(0.5, requires_grad=True)
            loss_sum, n = trained(ctx, weight, labels)
            loss = token_mean_loss(loss_sum, int(n) if ctx.rank else n, ctx.comm)
            return torch.autograd.grad(loss, weight)[0], global_mean(loss_sum, n, ctx.comm)

        results = on_ranks(part, step)
        tokens = torch.arange(1.0, 27.0)[labels != -100]
        scale = (tokens**2).mean() if len(tokens) else torch.tensor(0.0)
        torch.testing.assert_close(sum(gradient for gradient, _ in results), scale)
        for _, mean in results:
            torch.testing.assert_close(mean, (scale * 0.25).double())


@pytest.mark.parametrize(
    ("loss_sum", "n", "said"),
    [
        (torch.zeros(3), 1, r"loss_sum: got shape \[3\]"),
        (0.0, 1, "loss_sum: got 0.0"),
        (torch.tensor(0.0), -1, "n: got -1"),
        (torch.tensor(0.0), 1.0, "n: got 1.0"),
        (torch.tensor(0.0), torch.tensor(1.0), "n: got shape"),
    ],
)
def test_a_mean_instead_of_a_sum_and_a_count_is_refused(loss_sum: Any, n: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        twin(1, lambda comm: token_mean_loss(loss_sum, n, comm))
