"""flash-linear-attention's own layer and models, taken over: against their own forward and backward, kernels and all.

On a CPU those kernels run in Triton's interpreter. Not part of `launch/test`: where fla and triton can be imported,
transformers takes fla's kernels for its own layers, which then need a GPU. `launch/test_versions` runs it.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cp_gdn import Comm, twin
from cp_gdn.integrations.families import family_of, layer_shape
from cp_gdn.integrations.forward import _gates
from cp_gdn.integrations.seat import unsharded
from cp_gdn.integrations.transformers import take_over
from tests.dist import accelerate_world, hybrid_models, pool
from tests.dist.hybrid_models import Case
from tests.fla_layers import INTERPRETED, LAYERS, MISSING, interpret, make_fla_layer, make_fla_model
from tests.gdn_layers import BATCHES, Batch, Outcome, alone, errors_above, outcome, run, some_rows, together

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; launch/test_versions installs them"
    ),
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start; launch/test_versions sets it"),
]
BUDGET = 1e-5
"""Relative L2 per tensor between two fp32 computations of the same layer."""


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpret()


def own(layer: nn.Module, batch: Batch) -> Outcome:
    """The original layer on the whole batch, as its users call it."""
    x, dy = batch.tensors(torch.float32)
    x.requires_grad_()
    bounds = {"cu_seqlens": torch.tensor(batch.bounds)} if batch.bounds else {}
    return outcome(layer, x, layer(x, attention_mask=batch.mask, **bounds)[0], dy)


def on_rank(comm: Comm, layer: nn.Module, batch: Batch) -> tuple[Tensor, Outcome]:
    """A copy of the layer on one rank's share: indices of its tokens, and its outcome."""
    mine = copy.deepcopy(layer)
    seat = take_over(mine, comm, on_one_rank=True).seat
    with seat.hold(batch.pack(seat)) as pack:
        x, dy = (pack.local(tensor) for tensor in batch.tensors(torch.float32))
        mask = None if batch.mask is None else pack.local(batch.mask)
        x.requires_grad_()
        return pack.token_ids, outcome(mine, x, mine(x, attention_mask=mask)[0], dy)


@cache
def wanted(kind: str, batch: str) -> Outcome:
    return own(make_fla_layer(kind), BATCHES[batch])


CASES = [(kind, "packed", 2) for kind in LAYERS] + [
    ("plain", "one row", 1), ("plain", "one row", 4), ("value heads shared and wide", "one row", 4),
    ("plain", "packed, per document", 4), ("value heads shared and wide", "packed", 1),
    ("plain", "right padding", 2), ("beta up to 2, conv biases, sigmoid gate", "right padding", 2),
    ("beta up to 2, conv biases, sigmoid gate", "left padding", 4),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "batch", "world"), CASES)
def test_split_the_layer_computes_what_its_own_kernels_compute_whole(kind: str, batch: str, world: int) -> None:
    layer, cut = make_fla_layer(kind), BATCHES[batch]
    got = together(twin(world, lambda comm: on_rank(comm, layer, cut)), cut)
    assert errors_above(got, wanted(kind, batch), BUDGET) == {}


def test_beta_is_in_fp32_under_bf16_as_the_original_has_it() -> None:
    from fla.ops.common.gate import fused_beta_sigmoid

    layer = make_fla_layer("beta up to 2, conv biases, sigmoid gate", torch.bfloat16)
    seat, x = alone(layer).seat, some_rows().bfloat16()
    family = family_of(layer)
    assert family is not None
    projected = family.project(layer, x)
    ctx = seat.rows(*x.shape[:2]).context(**layer_shape(layer, family, x.dtype)._asdict())
    _, beta = _gates(layer, family, projected, ctx)
    want = fused_beta_sigmoid(projected.b, scale=2.0).flatten(0, 1)[None]
    assert beta.dtype == want.dtype == torch.float32
    assert float((beta - want).detach().abs().max()) < 1e-6


@pytest.mark.parametrize("kind", LAYERS)
def test_a_swap_keeps_name_keys_and_copies_and_disable_restores_bits(kind: str) -> None:
    layer, x = make_fla_layer(kind), some_rows().float()
    before, cls, keys = layer(x)[0], type(layer), list(layer.state_dict())
    signature = inspect.signature(layer.forward)
    takeover = alone(layer)
    assert takeover.families == {"fla": 1}
    assert isinstance(layer, cls)
    assert type(layer).__qualname__ == cls.__qualname__
    assert list(layer.state_dict()) == keys
    assert inspect.signature(layer.forward) == signature
    other = copy.deepcopy(layer)
    assert torch.equal(run(other, takeover.seat, x), run(layer, takeover.seat, x))
    assert not torch.equal(run(layer, takeover.seat, x), before)  # other roundings: ours ran
    with unsharded(layer):
        assert torch.equal(layer(x)[0], before)
    takeover.disable()
    assert type(layer) is cls
    assert torch.equal(layer(x)[0], before)


# ---- whole models ----------------------------------------------------------------------------------------------------


def labelled() -> tuple[Tensor, Tensor]:
    """Ids [2, 32] and labels, the first five of each row ignored."""
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(2))
    return ids, ids.masked_fill(torch.arange(32) < 5, -100)


def gradients(model: nn.Module, loss: Tensor) -> Outcome:
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": loss.detach()} | {
        name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True)
    }


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_trains_as_one_process_does_with_labels_shifted_on_the_whole_batch(fused: bool) -> None:
    """fused: with the model's own kernels for the loss of one process."""
    model, (ids, labels) = make_fla_model(fuse_linear_cross_entropy=fused), labelled()
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    items = (shifted != -100).sum()
    want = gradients(model, model(ids, labels=labels, use_cache=False).loss)

    def on(comm: Comm) -> Outcome:
        mine = copy.deepcopy(model)
        takeover = take_over(mine, comm)
        assert takeover.families == {"fla": 2}
        assert mine.supports_context_parallel
        with takeover.seat.hold(takeover.seat.rows(*ids.shape)) as pack:
            inputs = {name: pack.local(x) for name, x in [("labels", labels), ("shift_labels", shifted)]}
            return gradients(mine, mine(pack.local(ids), **inputs, num_items_in_batch=items).loss)

    ranks = twin(2, on)
    assert errors_above({name: sum(rank[name] for rank in ranks) for name in want}, want, BUDGET) == {}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "labels alone": ({}, {"labels": True}, "shifts labels itself, .*give it shift_labels"),
    "a tuple": ({}, {"labels": True, "shift_labels": True, "return_dict": False}, "with return_dict"),
    "l2warp": ({"use_l2warp": True}, {"labels": True, "shift_labels": True}, "use_l2warp does not run"),
}


@pytest.mark.parametrize(("changes", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_losses_that_a_model_would_take_of_a_shard_alone_are_refused(
    changes: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    model, (ids, labels) = make_fla_model(**changes), labelled()
    seat = alone(model).seat
    inputs = {name: labels if value is True else value for name, value in given.items()}
    with seat.hold(seat.rows(*ids.shape)), pytest.raises(NotImplementedError, match=message):
        model(ids, **inputs)


def with_its_models(_rank: int, _world: int, train: Callable[[int, int, Any], Any], asked: Any) -> Any:
    """Train, in a worker, this library's model where it would be one of transformers'."""
    interpret()
    sizes = {"vocab_size": hybrid_models.VOCAB, "num_v_heads": 2, "use_cache": False, "fresh": True}
    for module in (hybrid_models, accelerate_world):
        module.build = lambda _family, **changes: hybrid_models.with_long_memory(make_fla_model(**sizes | changes))
    return train(_rank, _world, asked)


@pytest.mark.dist
def test_through_accelerate_and_fsdp_a_model_trains_as_in_one_process_on_its_own_kernels() -> None:
    pytest.importorskip("accelerate")
    case = Case(rows=0, checkpointing="fsdp")
    (want,) = pool.run(1, with_its_models, hybrid_models.alone, case, timeout=300)
    for (got,) in pool.run(2, with_its_models, accelerate_world.together, [case], timeout=300):
        assert got.losses == pytest.approx(want.losses, rel=BUDGET)
        assert got.norms == pytest.approx(want.norms, rel=BUDGET)
        assert got.keys == want.keys
        assert errors_above(got.grads, want.grads, BUDGET) == {}
        assert errors_above(got.weights, want.weights, BUDGET) == {}


# ---- layers that are something else ----------------------------------------------------------------------------------

LAYER = {"hidden_size": 64, "num_heads": 2}
HEADS = {**LAYER, "head_dim": 32}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no convolution": ("GatedDeltaNet", {**HEADS, "use_short_conv": False}, "like Gated DeltaNet"),
    "a product of two": ("GatedDeltaProduct", HEADS, "like Gated DeltaNet"),
    "a product of one": ("GatedDeltaProduct", {**HEADS, "num_householder": 1}, "like Gated DeltaNet"),
    "comba": ("Comba", HEADS, "another gated recurrence"),
    "comba without its own": (
        "Comba", {**HEADS, "use_output_correction": False, "use_inner_decay": False}, "like Gated DeltaNet",
    ),
    "kda": ("KimiDeltaAttention", HEADS, "KDA"),
    "gdn2": ("GatedDeltaNet2", HEADS, "a gate per channel"),
    "delta net": ("DeltaNet", LAYER, "a short convolution"),
    "delta net without convolution": ("DeltaNet", {**LAYER, "use_short_conv": False}, "a recurrence of b_proj"),
    "gla": ("GatedLinearAttention", LAYER, "a recurrence of g_proj, gk_proj"),
    "retention": ("MultiScaleRetention", LAYER, "a recurrence of g_proj, k_proj"),
    "hgrn": ("HGRNAttention", {"hidden_size": 64}, "a recurrence of f_proj, g_proj, i_proj"),
    "rwkv6": ("RWKV6Attention", {**LAYER, "layer_idx": 0}, "a recurrence of g_proj, k_proj"),
    "mamba3": ("Mamba3", {"hidden_size": 64, "head_dim": 32}, "a state space layer"),
    "softmax attention": ("Attention", LAYER, "attention or a recurrence of k_proj, o_proj, q_proj, v_proj"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "message"), OTHERS.values(), ids=OTHERS)
def test_other_layers_of_the_library_are_not_taken_for_gated_deltanet(
    name: str, sizes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fla.layers

    if name == "Attention":  # it is made only where flash-attn is there, and runs on the shard alone
        monkeypatch.setattr(fla.layers.attn, "flash_attn_func", object())
    model = nn.Sequential(make_fla_layer(), getattr(fla.layers, name)(**sizes))

    def on(comm: Comm) -> None:
        with pytest.raises(NotImplementedError, match=rf"{name} at 1: .*{message}"):
            take_over(copy.deepcopy(model), comm)

    twin(2, on)


def test_a_layer_with_convolutions_of_other_channels_is_refused() -> None:
    layer = make_fla_layer()
    layer.num_heads = layer.num_v_heads = 1
    with pytest.raises(
        NotImplementedError, match=r"convolutions of \[32, 32, 32\] channels; expected .* \[16, 16, 16\]"
    ):
        family_of(layer)
