"""Softmax attention over shards: gathered keys and values on the twin, who computes what, and what is refused."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_gdn.comm import Comm
from cp_gdn.integrations.attention import (
    SharedAttention,
    attention_forward,
    config_view,
    gather_attention,
    torch_obstacle,
)
from cp_gdn.integrations.gathered import attend, build_tables, cut_blocks
from cp_gdn.integrations.parallel_style import parallelize_plan
from cp_gdn.integrations.seat import Seat
from cp_gdn.integrations.transformers import take_over
from cp_gdn.twin import twin
from tests.gdn_layers import needs_transformers, tiny_model

PACKS = {"rows": (0, 16, 32), "uneven": (0, 37, 38, 38, 90, 131), "tiny": (0, 1, 2, 3), "shorter than ranks": (0, 2)}
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
HEADS, KEY_HEADS, DIM, VALUE_DIM, SCALE = 4, 2, 16, 8, 0.3


def draw(tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of o, fp64."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((HEADS, DIM), (KEY_HEADS, DIM), (KEY_HEADS, VALUE_DIM), (HEADS, VALUE_DIM))
    return [torch.randn(tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one document, written out."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    scores = SCALE * torch.einsum("qhd,khd->hqk", q, k)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def by_documents(bounds: tuple[int, ...]) -> tuple[Tensor, ...]:
    """o and the gradients of q, k and v, each document alone."""
    q, k, v, do = draw(bounds[-1])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = torch.cat([softmax_attention(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds) if b > a])
    return (o.detach(), *torch.autograd.grad(o, leaves, do))


@pytest.mark.parametrize("block_rows", [7, 1024])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gathered_attention_and_its_gradients_are_those_of_each_document_alone(
    world: int, pack: str, layout: str, block_rows: int
) -> None:
    bounds = PACKS[pack]
    expected = by_documents(bounds)

    def of_rank(comm: Comm) -> tuple[Tensor, ...]:
        held = Seat(comm).packed(bounds, layout=layout)
        q, k, v, do = (x[held.token_ids] for x in draw(bounds[-1]))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = attend(q, k, v, build_tables(held, block_rows), SCALE)
        return (held.token_ids, o.detach(), *torch.autograd.grad(o, leaves, do))

    for ids, *got in twin(world, of_rank):
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs[ids], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_of_a_document_and_of_its_gradients_depends_on_another_one(layout: str, world: int) -> None:
    """The last tokens of the second of three documents change; the loss is of the third."""
    bounds = (0, 37, 88, 128)
    changed = slice(bounds[2] - 3, bounds[2])

    def of_rank(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        held = Seat(comm).packed(bounds, layout=layout)
        found = []
        for change in (0.0, 1.0):
            parts = draw(bounds[-1])[:3]
            for x in parts:
                x[changed] += change
            leaves = [x[held.token_ids].requires_grad_() for x in parts]
            o = attend(*leaves, build_tables(held), SCALE)
            third = (held.token_ids >= bounds[2])[:, None, None]
            grads = torch.autograd.grad((o * third).sum(), leaves)
            found.append((o.detach(), grads))
        (before, _), (after, grads) = found
        elsewhere = held.token_ids < bounds[2]
        return held.token_ids[(before != after).flatten(1).any(1)], [grad[elsewhere] for grad in grads]

    for differing, grads in twin(world, of_rank):
        assert all(bounds[1] <= token < bounds[2] for token in differing.tolist())
        assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("limit", [1, 3, 8, 1000])
@pytest.mark.parametrize("bounds", PACKS.values())
def test_blocks_cover_every_row_once_and_hold_all_that_a_row_may_see(bounds: tuple[int, ...], limit: int) -> None:
    for layout in LAYOUTS:
        for rank, part in enumerate(twin(3, lambda comm, layout=layout: Seat(comm).packed(bounds, layout=layout))):
            ids = part.partition.token_ids(rank)
            starts = ids - part.partition.positions(rank)
            blocks = list(cut_blocks(ids, starts, limit))
            rows = [row for block in blocks for row in range(block.rows.start, block.rows.stop)]
            assert rows == list(range(len(ids)))
            for block in blocks:
                assert block.rows.stop - block.rows.start <= limit
                assert block.keys.start <= starts[block.rows].min()
                assert block.keys.stop > ids[block.rows].max()


def test_short_documents_share_blocks_and_distant_pieces_do_not() -> None:
    short = np.arange(5000)
    assert len(list(cut_blocks(short, short // 4 * 4, 1024))) == 5
    far = np.concatenate((np.arange(100), np.arange(9000, 9100)))
    assert [block.rows for block in cut_blocks(far, np.zeros_like(far), 1024)] == [slice(0, 100), slice(100, 200)]


def pack_like(device: str, bounds: tuple[int, ...], rows: int, layout: str, world: int = 2, kind: str = "nccl") -> Any:
    part = SimpleNamespace(bounds=np.array(bounds), num_docs=len(bounds) - 1, world_size=world, layout=layout)
    comm = SimpleNamespace(kind=kind)
    return SimpleNamespace(partition=part, comm=comm, batch_shape=(rows, 4), device=torch.device(device))


OBSTACLES = [
    (("cuda", (0, 16, 32), 2, "zigzag_per_document"), None),
    (("cuda", (0, 16), 1, "zigzag"), None),
    (("cuda", (0, 16), 1, "zigzag", 2, "gloo+nccl"), None),
    (("cuda", (0, 16), 1, "zigzag", 2, "gloo"), "needs NCCL on CUDA, and this group is gloo"),
    (("cuda", (0, 16), 1, "zigzag", 1), "there is one rank"),
    (("cpu", (0, 16), 1, "zigzag"), "no rule for cpu"),
    (("cuda", (0, 16, 32), 1, "zigzag"), "packed documents need a mask"),
    (("cuda", (0, 15), 1, "zigzag"), "zigzag rows of a multiple of 4 tokens"),
    (("cuda", (0, 16), 1, "contiguous"), "zigzag rows of a multiple of 4 tokens"),
]


@pytest.mark.parametrize(("arguments", "text"), OBSTACLES)
def test_torchs_context_parallel_attention_takes_cuda_rows_in_zigzag_only(arguments: Any, text: str | None) -> None:
    obstacle = torch_obstacle(pack_like(*arguments))
    assert obstacle is None if text is None else text in str(obstacle)


def test_attention_that_was_asked_for_and_cannot_be_is_refused_with_the_reason() -> None:
    seat = Seat(Comm.alone(), on_one_rank=True)
    pack = seat.rows(1, 16)
    assert SharedAttention(seat, "auto").kind(pack) == SharedAttention(seat, "gather").kind(pack) == "gather"
    with pytest.raises(ValueError, match='got "torch", but there is one rank; use "auto", or "gather"'):
        SharedAttention(seat, "torch").kind(pack)


REFUSED_CALLS = [
    ({"sliding_window": 8}, "got sliding_window"),
    ({"is_causal": False}, "got is_causal=False"),
    ({"dropout": 0.1}, "set attention_dropout=0"),
    ({"keys": 9}, "9 keys for 8 queries, a cache"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED_CALLS)
def test_attention_of_a_kind_that_shards_cannot_compute_is_refused(change: dict[str, Any], text: str) -> None:
    module = torch.nn.Identity()
    module.__dict__["_cp_gdn_attention"] = SharedAttention(Seat(Comm.alone(), on_one_rank=True))
    change = dict(change)
    q, k = torch.ones(1, 2, 8, 4), torch.ones(1, 2, change.pop("keys", 8), 4)
    with pytest.raises(NotImplementedError, match=text):
        attention_forward(module, q, k, k, None, **change)


@needs_transformers
@pytest.mark.parametrize("world", [2, 4])
def test_a_hybrid_model_whose_layers_all_look_over_ranks_computes_what_it_does_on_every_document_alone(
    world: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny_model(layer_types=["linear_attention", "full_attention"], use_cache=False), torch.arange(64)[None]
    bounds = (0, 9, 30, 64)
    with torch.no_grad():
        want = torch.cat([model(input_ids=ids[:, a:b]).logits for a, b in pairwise(bounds)], dim=1)

    def of_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = copy.deepcopy(model)
        seat = take_over(mine, comm).seat
        undo = gather_attention(mine)
        with seat.hold(seat.packed(bounds)) as pack, torch.no_grad():
            logits = mine(input_ids=pack.local(ids), position_ids=pack.positions).logits
        undo()
        assert mine.model.config._attn_implementation == "sdpa"
        return pack.token_ids, logits[0]

    for token_ids, got in twin(world, of_rank):
        torch.testing.assert_close(got, want[0, token_ids], rtol=1e-4, atol=1e-5)
    with caplog.at_level("WARNING", logger="cp_gdn"):
        parallelize_plan(model)
    said = [message for message in caplog.messages if "softmax attention layers" in message]
    assert ["has 1 softmax attention layers, which this plan leaves alone" in message for message in said] == [True]


def test_a_config_view_shares_values_names_our_attention_and_copies_as_what_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(num_hidden_layers=4, attn_implementation="sdpa")
    seat = Seat(Comm.alone(), on_one_rank=True)
    view = config_view(config, seat)
    assert isinstance(view, transformers.Qwen3NextConfig)
    assert (view._attn_implementation, config._attn_implementation) == ("cp_gdn", "sdpa")
    config.use_cache = False
    assert view.use_cache is False
    assert view.to_dict() == config.to_dict()
    assert copy.deepcopy(view)._attn_implementation == "cp_gdn"
    assert pickle.loads(pickle.dumps(view))._attn_implementation == "sdpa"
    with seat.unsharded():
        assert view._attn_implementation == "sdpa"
