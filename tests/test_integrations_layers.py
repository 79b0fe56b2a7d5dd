"""Layers of other libraries, taken over: against the original on every document alone."""

from __future__ import annotations

import copy
import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_gdn import Comm, twin
from cp_gdn.integrations.seat import Seat
from cp_gdn.integrations.transformers import take_over
from tests.gdn_layers import (
    BATCHES,
    HIDDEN,
    KINDS,
    Batch,
    InDouble,
    Outcome,
    alone,
    config_of,
    errors_above,
    make_layer,
    modeling,
    needs_transformers,
    on_rank,
    outcome,
    output,
    randomize,
    together,
    whole,
)

WORLDS = {
    "one row": 4, "three rows": 2, "right padding": 4, "left padding": 2,
    "packed": 2, "packed, per document": 4, "packed, contiguous": 4,
}  # fmt: skip
EVERY = ("right padding", "packed")
"""Batches that every kind of layer runs; those of "qwen3_next" and "fla" run all."""

CASES = [
    pytest.param(*(kind.values if hasattr(kind, "values") else (kind,)), batch, world, marks=getattr(kind, "marks", ()))
    for kind in KINDS
    for batch, world in WORLDS.items()
    if batch in EVERY
    or kind == "fla"
    or getattr(kind, "values", ()) == ("qwen3_next",)
    or (batch == "left padding" and kind in KINDS[-2:])
]


@cache
def wanted(kind: str, batch: str) -> Outcome:
    return whole(make_layer(kind), BATCHES[batch])


def split(layer: nn.Module, batch: Batch, world: int, **options: Any) -> Outcome:
    return together(twin(world, lambda comm: on_rank(comm, layer, batch, **options)), batch)


@pytest.mark.parametrize(("kind", "batch", "world"), CASES)
def test_split_a_layer_computes_what_it_computes_on_every_document_alone(kind: str, batch: str, world: int) -> None:
    got = split(make_layer(kind), BATCHES[batch], world)
    assert errors_above(got, wanted(kind, batch), 1e-9) == {}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], *KINDS[-2:]])
def test_padding_rows_are_the_originals(kind: str) -> None:
    layer, batch = make_layer(kind), BATCHES["right padding"]
    x, _ = batch.tensors()
    mine = copy.deepcopy(layer)
    seat = alone(mine).seat
    with InDouble(), seat.hold(batch.pack(seat)):
        got, want = (output(each(hidden_states=x, attention_mask=batch.mask)) for each in (mine, layer))
    assert errors_above({"y": got}, {"y": want}, 1e-9) == {}
    assert not kind.startswith("fla") or not got[batch.mask == 0].any()


def test_rows_are_cut_as_torch_and_accelerate_cut_them() -> None:
    """Rank r holds pieces r and 2 W - 1 - r of every row."""
    tokens, world = torch.arange(3 * 48).view(3, 48), 3

    def on(comm: Comm) -> tuple[Tensor, Tensor]:
        pack = Seat(comm).rows(3, 48)
        return pack.local(tokens), pack.positions

    pieces = tokens.view(3, 2 * world, 8)
    for rank, (local, positions) in enumerate(twin(world, on)):
        assert torch.equal(local, torch.cat([pieces[:, rank], pieces[:, 2 * world - 1 - rank]], dim=1))
        assert torch.equal(positions, local % 48)


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_options_reach_the_context_and_change_nothing_beyond_rounding(exchange: str) -> None:
    layer, batch = make_layer("fla"), BATCHES["packed"]
    options = {"exchange": exchange, "segments": 2}
    assert errors_above(split(layer, batch, 3, **options), wanted("fla", "packed"), 1e-9) == {}

    def chosen(comm: Comm) -> tuple[str, int]:
        mine = copy.deepcopy(layer)
        seat = take_over(mine, comm, **options).seat
        with seat.hold(batch.pack(seat)) as pack:
            (ctx,) = pack.contexts.values()  # planned ahead
        return ctx.exchange, ctx.asked["segments"]

    assert twin(3, chosen) == [(exchange, 2)] * 3


def test_on_one_rank_the_original_runs_unless_asked() -> None:
    layer, batch = make_layer("fla"), BATCHES["packed"]
    x, _ = batch.tensors()
    before = output(layer(x))
    seat = take_over(copy.deepcopy(layer), Comm.alone()).seat
    assert seat.original
    mine = copy.deepcopy(layer)
    take_over(mine, Comm.alone())
    assert torch.equal(output(mine(x)), before)
    asked = together([on_rank(Comm.alone(), layer, batch, on_one_rank=True)], batch)
    assert errors_above(asked, wanted("fla", "packed"), 1e-9) == {}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_a_document_does_not_see_another(layout: str, world: int) -> None:
    """Slow decay, so that a leak would not hide; the convolution too."""
    layer, batch = make_layer("fla"), Batch(bounds=(0, 37, 88, 128), layout=layout)
    with torch.no_grad():
        layer.A_log.fill_(-7.0)
    x, _ = batch.tensors()
    changed = x.clone()
    changed[0, batch.bounds[2] - 3 : batch.bounds[2]] += 1.0

    def on(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mine = copy.deepcopy(layer)
        seat = take_over(mine, comm).seat
        with seat.hold(batch.pack(seat)) as pack:
            rows = pack.local(changed).requires_grad_()
            y = output(mine(hidden_states=rows))
            third = (pack.token_ids >= batch.bounds[2])[None, :, None]
            (dx,) = torch.autograd.grad((y * third).sum(), rows)
            return pack.token_ids, output(mine(hidden_states=pack.local(x))), y.detach(), dx

    differing = []
    for token_ids, before, after, dx in twin(world, on):
        differing.append(token_ids[(before != after).any(-1)[0]])
        assert not dx[:, token_ids < batch.bounds[2]].any()
    found = torch.cat(differing)
    assert len(found)
    assert batch.bounds[1] <= found.min() <= found.max() < batch.bounds[2]


@needs_transformers
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_in_other_dtypes_it_comes_close_and_dtypes_are_the_originals(dtype: torch.dtype, limit: float) -> None:
    layer, batch = make_layer("qwen3_next", dtype), BATCHES["three rows"]
    x, dy = (tensor.requires_grad_() for tensor in batch.tensors(dtype))
    want = outcome(layer, x, layer(x), dy)

    def on(comm: Comm) -> tuple[Tensor, Outcome]:
        mine = copy.deepcopy(layer)
        seat = take_over(mine, comm).seat
        with seat.hold(batch.pack(seat)) as pack:
            rows = pack.local(x.detach()).requires_grad_()
            return pack.token_ids, outcome(mine, rows, mine(rows), pack.local(dy.detach()))

    ranks = twin(2, on)
    assert {name: grad.dtype for name, grad in ranks[0][1].items()} == {name: grad.dtype for name, grad in want.items()}
    assert errors_above(together(ranks, batch), want, limit) == {}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def stepped(comm: Comm, layer: nn.Module, batch: Batch, checkpointed: bool, how: str) -> list[Tensor]:
    """Gradients on one rank, of a backward that runs inside `hold`, after it, or after it in another thread."""
    mine = nn.Sequential(copy.deepcopy(layer), nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64))
    nn.init.eye_(mine[1].weight)
    seat = take_over(mine, comm).seat
    x, dy = batch.tensors()

    def block(rows: Tensor) -> Tensor:
        return mine[1](output(mine[0](hidden_states=rows)).tanh())

    grads: list[Tensor] = []

    def backward(y: Tensor, dy_local: Tensor) -> None:
        grads.extend(torch.autograd.grad(y, [rows, *mine.parameters()], dy_local))

    with seat.hold(batch.pack(seat)) as pack:
        rows = pack.local(x).requires_grad_()
        y = checkpoint(block, rows, use_reentrant=False) if checkpointed else block(rows)
        if how == "inside":
            backward(y, pack.local(dy))
    if how == "after":
        backward(y, pack.local(dy))
    if how == "in another thread":
        thread = threading.Thread(target=backward, args=(y, pack.local(dy)))
        thread.start()
        thread.join()
    return grads


@pytest.mark.parametrize("how", ["inside", "after", "in another thread"])
@pytest.mark.parametrize("batch", ["three rows", "packed"])
def test_checkpointed_gradients_have_the_same_bits(batch: str, how: str) -> None:
    layer = make_layer("fla")
    plain = twin(2, lambda comm: stepped(comm, layer, BATCHES[batch], False, "inside"))
    got = twin(2, lambda comm: stepped(comm, layer, BATCHES[batch], True, how))
    for want, have in zip(plain, got, strict=True):
        assert len(have) == len(want)
        assert all(map(torch.equal, have, want))


OTHERS = {"of another shape": "one row", "cut elsewhere": "packed, moved"}
PACKS = BATCHES | {"packed, moved": Batch(bounds=(0, 40, 88, 128))}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_recompute_under_another_batch_is_refused(other: str) -> None:
    layer = make_layer("fla")
    seat = take_over(layer, Comm.alone(), on_one_rank=True).seat
    x, dy = PACKS["packed"].tensors()
    with seat.hold(PACKS["packed"].pack(seat)) as pack:
        y = checkpoint(lambda rows: output(layer(rows)), pack.local(x).requires_grad_(), use_reentrant=False)
    with seat.hold(PACKS[other].pack(seat)), pytest.raises((RuntimeError, ValueError), match=r"backward .*shard"):
        y.backward(pack.local(dy))


# ---- whole models of linear layers alone -----------------------------------------------------------------------------

MODELS = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    model = getattr(modeling(kind), MODELS[kind])(config_of(kind))
    randomize(model)
    return model.train()


def losses(model: nn.Module, ids: Tensor, keep: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """Logits and gradients; a loss of a sum over real tokens."""
    logits = model(input_ids=ids, **inputs).logits
    (logits.square().mean(-1) * keep).sum().backward()
    return {"logits": logits.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def losses_split(model: nn.Module, ids: Tensor, keep: Tensor, checkpointed: bool) -> list[tuple[Tensor, Outcome]]:
    """Per rank the indices of its tokens and its `losses`."""

    def on(comm: Comm) -> tuple[Tensor, Outcome]:
        mine = copy.deepcopy(model)
        if checkpointed:
            mine.gradient_checkpointing_enable()
        seat = take_over(mine, comm).seat
        assert mine.supports_context_parallel
        with seat.hold(seat.rows(*ids.shape)) as pack:
            local = pack.local(keep)
            inputs = {"attention_mask": local, "position_ids": pack.positions}
            return pack.token_ids, losses(mine, pack.local(ids), local, **inputs)

    return twin(2, on)


@needs_transformers
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_linear_layers_trains_as_on_one_rank(kind: str) -> None:
    ids, mask = torch.randint(64, (3, 48), generator=torch.Generator().manual_seed(2)), BATCHES["right padding"].mask
    assert mask is not None
    model = make_model(kind)
    ranks = losses_split(model, ids, mask, checkpointed=False)
    want = losses(model, ids, mask, attention_mask=mask, use_cache=False)
    order = torch.argsort(torch.cat([token_ids for token_ids, _ in ranks]))
    got = {name: sum(result[name] for _, result in ranks) for name in want if name != "logits"}
    logits = torch.cat([result["logits"].flatten(0, 1) for _, result in ranks])[order].view_as(want["logits"])
    got["logits"], want["logits"] = (x * mask[..., None] for x in (logits, want["logits"]))
    assert errors_above(got, want, 1e-4) == {}


@needs_transformers
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpointed_model_trains_with_the_same_bits(kind: str) -> None:
    ids = torch.randint(64, (1, 64), generator=torch.Generator().manual_seed(2))
    model = make_model(kind)
    plain, got = (losses_split(model, ids, torch.ones_like(ids), checkpointed) for checkpointed in (False, True))
    for (_, want), (_, have) in zip(plain, got, strict=True):
        assert [name for name in want if not torch.equal(want[name], have[name])] == []
