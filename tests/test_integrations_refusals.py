"""What a take-over, a taken-over layer and a seat refuse, before anything is sent, and what they say."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from cp_gdn import Comm, twin
from cp_gdn.integrations.parallel_style import GDNContextParallel, parallelize_plan
from cp_gdn.integrations.seat import Seat, seat_of, unsharded
from cp_gdn.integrations.transformers import take_over
from tests.gdn_layers import (
    BATCHES,
    HIDDEN,
    alone,
    config_of,
    make_layer,
    modeling,
    needs,
    needs_transformers,
    output,
    some_rows,
    tiny_model,
)

UNKNOWN = {
    "kimi_linear": ("KimiLinearConfig", {"num_hidden_layers": 1}, r"KimiLinearForgetGate at .*\(KDA\)"),
    "minimax": ("MiniMaxConfig", {"num_hidden_layers": 2}, "MiniMaxLightningAttention at .*: lightning attention"),
    "mamba2": ("Mamba2Config", {"num_hidden_layers": 1}, r"Mamba2Mixer at .*\(Mamba\)"),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 1}, r"RG-LRU"),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 1, "layer_types": ["conv"]}, r"a short convolution \(conv\)"),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(kind)) for kind in UNKNOWN])
def test_recurrences_that_we_do_not_know_are_refused_by_name(kind: str) -> None:
    config_class, changes, message = UNKNOWN[kind]
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, config_class)(**changes))

    def on(comm: Comm) -> None:
        with pytest.raises(NotImplementedError, match=message):
            take_over(copy.deepcopy(model), comm)

    twin(2, on)


@needs("qwen4_exp")
def test_a_model_of_known_layers_and_another_convolution_is_refused_by_its_name() -> None:
    ple = {"ple_layer_ids": [1], "ple_embed_dim": 32, "eos_token_id": 0, "ngram_vocab_size_base": 64}
    with torch.device("meta"):
        model = modeling("qwen4_exp").Qwen4ExpTextModel(config_of("qwen4_exp", heads_per_ngram=2, **ple))

    def on(comm: Comm) -> None:
        with pytest.raises(NotImplementedError, match=r"Qwen4ExpTextPLELayer at layers.0.ple: a short convolution"):
            take_over(copy.deepcopy(model), comm)

    twin(2, on)


def test_parts_that_the_structure_or_the_config_shows_as_unknown_are_refused() -> None:
    comba, plain = make_layer("fla"), nn.Sequential(nn.Linear(4, 4))
    comba.D = nn.Parameter(torch.ones(4))
    counted = nn.Sequential(make_layer("fla"))
    counted.config = type("Config", (), {"layer_types": ["linear_attention"] * 3})()
    other = make_layer("fla")
    other.k_conv1d.activation = "gelu"
    unmarked, mixed, doubled = (make_layer("fla") for _ in range(3))
    del unmarked.use_gate
    mixed = nn.Sequential(mixed, nn.ModuleDict({"q_proj": nn.Linear(4, 4), "k_proj": nn.Linear(4, 4)}))
    doubled.num_heads *= 2
    cases = [
        (unmarked, NotImplementedError, "like Gated DeltaNet, but no such layer that cp_gdn knows"),
        (mixed, NotImplementedError, "ModuleDict at 1: attention or a recurrence of k_proj, q_proj"),
        (comba, NotImplementedError, "gated recurrence, with A_log, D, dt_bias"),
        (plain, ValueError, "Sequential has no Gated DeltaNet layer"),
        (counted, NotImplementedError, "3 of linear_attention, but 1 Gated DeltaNet layers were found"),
        (doubled, NotImplementedError, r"convolutions of \[32, 32, 96\] channels; expected .* \[64, 64, 96\]"),
        (other, NotImplementedError, r"activation \['gelu', 'silu'\]; expected silu"),
    ]
    for model, error, message in cases:

        def on(comm: Comm, model: nn.Module = model, error: Any = error, message: str = message) -> None:
            with pytest.raises(error, match=message):
                take_over(copy.deepcopy(model), comm)

        twin(2, on)
    for model, error, message in cases:
        with pytest.raises(error, match=message):
            parallelize_plan(model)
    mixed[1].is_causal = True  # somebody sees to it
    assert list(parallelize_plan(mixed)) == ["0"]


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a cache": ({"past_key_values": object()}, NotImplementedError, "got past_key_values, but decoding"),
    "use_cache": ({"use_cache": True}, NotImplementedError, "got use_cache=True, but decoding"),
    "a global mask": ({"attention_mask": torch.ones(3, 96)}, ValueError, r"attention_mask: got shape \[3, 96\]"),
    "a 4-D mask": ({"attention_mask": torch.ones(3, 1, 48, 48)}, ValueError, "attention_mask: got shape"),
    "other boundaries": (
        {"cu_seq_lens_q": torch.tensor([0, 40, 144])},
        ValueError,
        r"cu_seq_lens_q: got \[0, 40, 144\]",
    ),
}


@pytest.mark.parametrize(("inputs", "error", "message"), CALLS.values(), ids=CALLS)
def test_calls_that_do_not_fit_a_shard_are_refused(inputs: Any, error: type[Exception], message: str) -> None:
    layer = make_layer("fla")
    seat = alone(layer).seat
    with seat.hold(seat.rows(3, 48)), pytest.raises(error, match=message):
        layer(hidden_states=some_rows(), **inputs)


def test_boundaries_of_the_pack_may_be_given_again_with_or_without_its_padding() -> None:
    layer, batch = make_layer("fla"), BATCHES["packed"]
    seat = alone(layer).seat
    x, _ = batch.tensors()
    with seat.hold(batch.pack(seat)):
        want = output(layer(x))
        for bounds in (batch.bounds, batch.bounds[:-1]):
            assert torch.equal(output(layer(x, cu_seq_lens_q=torch.tensor(bounds))), want)


def test_without_a_sharded_batch_or_with_another_one_it_is_said_what_to_do() -> None:
    def on(comm: Comm) -> None:
        layer, x = make_layer("fla"), some_rows()
        seat = take_over(layer, comm).seat
        with pytest.raises(RuntimeError, match=r"without a sharded batch.*accelerate\.shard.*unsharded\(model\)"):
            layer(x)
        with pytest.raises(
            ValueError, match=r"length: got 50 tokens, expected a multiple of 2 \* 2 .* to 52 on the right"
        ):
            seat.rows(3, 50)
        with seat.hold(seat.rows(3, 48)):
            with pytest.raises(ValueError, match=r"hidden_states: got shape \[3, 48, 32\], expected \[3, 24, '..'\]"):
                layer(x)
            with unsharded(layer):
                output(layer(x))
        with pytest.raises(RuntimeError, match="without a sharded batch"):
            layer(x[:, :24])

    twin(2, on)


def test_ranks_with_other_batches_meet_in_an_error_and_not_in_a_layer() -> None:
    def on(comm: Comm) -> None:
        seat = Seat(comm)
        with pytest.raises(Exception, match="doc_bounds"):
            seat.packed([0, 16, 32] if comm.rank else [0, 10, 32])

    twin(2, on)


@needs_transformers
def test_a_model_refuses_images_caches_and_masks_that_are_not_sharded() -> None:
    model, ids = tiny_model(layer_types=["linear_attention", "full_attention"]), torch.arange(32)[None]
    seat = alone(model).seat
    cases = [
        ({"pixel_values": torch.ones(1)}, NotImplementedError, "got pixel_values, but images"),
        ({"use_cache": True}, NotImplementedError, "got use_cache=True"),
        ({"past_key_values": object()}, NotImplementedError, "got past_key_values"),
        ({"attention_mask": torch.ones(1, 64)}, ValueError, r"attention_mask: got shape \[1, 64\], expected \[1, 32\]"),
    ]
    with seat.hold(seat.rows(1, 32)):
        for inputs, error, message in cases:
            with pytest.raises(error, match=message):
                model(ids, **inputs)
        assert model(ids).past_key_values is None
    with unsharded(model):
        assert model(ids).past_key_values is not None


def test_unknown_options_and_foreign_packs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"options: got segment, expected only on_one_rank, segments"):
        GDNContextParallel(segment=1)
    with pytest.raises(RuntimeError, match="no seat yet"):
        _ = GDNContextParallel().seat
    one, two = Seat(Comm.alone()), Seat(Comm.alone())
    with pytest.raises(ValueError, match="another group"), one.hold(two.rows(1, 2)):
        pass
    with pytest.raises(ValueError, match="with 0 seats"):
        seat_of(nn.Linear(HIDDEN, HIDDEN))
