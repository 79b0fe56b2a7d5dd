"""What a take-over leaves alone and takes back: classes, bits, copies, files, wrapped parts, forwards of instances."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from cp_gdn import Comm, Options, twin
from cp_gdn.integrations.families import family_of
from cp_gdn.integrations.seat import seat_of, unsharded
from cp_gdn.integrations.transformers import take_over
from tests.gdn_layers import (
    BATCHES,
    CLASSES,
    STAND_INS,
    Adapted,
    StandIn,
    alone,
    config_of,
    errors_above,
    make_layer,
    modeling,
    needs,
    needs_transformers,
    on_rank,
    output,
    run,
    some_rows,
    tiny_model,
    together,
    whole,
)

LAYERS = [*STAND_INS, *(pytest.param(kind, marks=needs(kind)) for kind in CLASSES)]


@needs_transformers
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_every_channel_of_a_fused_projection_goes_to_its_part(kind: str) -> None:
    """Each output of a projection is its own number; heads and dims that no other cut would fit."""
    heads, dims = (2, 6), (64, 128)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    config = config_of(kind, **dict(zip(names, (*heads, *dims), strict=True)))
    layer = getattr(modeling(kind), CLASSES[kind][1])(config, 0)
    numbers = {}
    with torch.no_grad():
        for name in ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
            if hasattr(layer, name):
                weight = getattr(layer, name).weight
                numbers[name] = torch.arange(len(weight))
                weight.zero_()[:, 0] = numbers[name]
        family = family_of(layer)
        assert family is not None
        got = family.project(layer, torch.eye(1, config.hidden_size)[None])
    group, (key_width, value_width) = heads[1] // heads[0], (heads[0] * dims[0], heads[1] * dims[1])
    if kind == "qwen3_next":  # of each query head in turn: q, k, its value heads' v, their z; and their b, their a
        parts = (
            numbers["in_proj_qkvz"].view(heads[0], -1).split([dims[0], dims[0], group * dims[1], group * dims[1]], 1)
        )
        qkv, z = torch.cat([part.flatten() for part in parts[:3]]), parts[3].flatten()
        b, a = (part.flatten() for part in numbers["in_proj_ba"].view(heads[0], -1).split([group, group], 1))
    else:
        qkv, z, b, a = (numbers[f"in_proj_{name}"] for name in ("qkv", "z", "b", "a"))
    assert got.z is not None
    assert torch.equal(got.qkv[0, 0].long(), qkv)
    assert len(qkv) == 2 * key_width + value_width
    assert torch.equal(got.z[0, 0].long(), z.view(heads[1], dims[1]))
    assert torch.equal(got.b[0, 0].long(), b)
    assert torch.equal(got.a[0, 0].long(), a)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_swap_keeps_name_type_and_keys_and_disable_restores_bits(kind: str) -> None:
    layer, x = make_layer(kind, torch.float32), some_rows().float()
    before, cls, keys = output(layer(x)), type(layer), list(layer.state_dict())
    signature = inspect.signature(layer.forward)
    takeover = alone(layer)
    assert isinstance(layer, cls)
    assert type(layer).__qualname__ == cls.__qualname__
    assert list(layer.state_dict()) == keys
    assert inspect.signature(layer.forward) == signature
    with unsharded(layer):
        assert torch.equal(output(layer(x)), before)
    assert not torch.equal(run(layer, takeover.seat, x), before)  # other roundings: ours ran
    takeover.disable()
    assert type(layer) is cls
    assert not any(name.startswith("_cp_gdn") for name in vars(layer))
    assert torch.equal(output(layer(x)), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_is_taken_over_by_the_same_seat(copied: Callable[[nn.Module], nn.Module]) -> None:
    layer, x = make_layer("fla"), some_rows()
    seat = alone(layer).seat
    other = copied(layer)
    assert seat_of(other) is seat
    assert torch.equal(run(other, seat, x), run(layer, seat, x))
    assert (other.A_log is layer.A_log) == (copied is copy.copy)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_of_the_original_class_and_runs_the_original_forward(protocol: int) -> None:
    layer, x = nn.Sequential(make_layer("fla")), some_rows()
    before = output(layer[0](x))
    alone(layer)
    back = pickle.loads(pickle.dumps(layer, protocol))
    assert type(back[0]) is StandIn
    assert torch.equal(output(back[0](x)), before)


@needs_transformers
def test_a_saved_model_loads_as_if_it_had_not_been_taken_over(tmp_path: Any) -> None:
    model, plain = tiny_model(), tiny_model()
    alone(model)
    for name, saved in (("taken", model), ("plain", plain)):
        saved.save_pretrained(tmp_path / name)
    assert (tmp_path / "taken" / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("taken", "plain")]
    assert weights[0] == weights[1]
    for cls in (type(model), type(plain)):
        loaded = cls.from_pretrained(tmp_path / "taken")
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
        ids = torch.arange(32)[None]
        assert torch.equal(loaded(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


@needs_transformers
def test_weights_may_come_after_the_take_over_from_the_meta_device() -> None:
    layer, x = make_layer("qwen3_5"), some_rows()
    with torch.device("meta"):
        empty = type(layer)(config_of("qwen3_5"), 0).double()
    seat = alone(empty).seat
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(run(empty, seat, x), run(layer, alone(layer).seat, x))


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in list(STAND_INS)[1:]])
def test_wrapped_linears_are_called_and_get_gradients(kind: str) -> None:
    layer, batch = make_layer(kind), BATCHES["packed"]
    for name, child in list(layer.named_children()):
        if type(child) is nn.Linear:
            setattr(layer, name, Adapted(child).double())
    got = together(twin(2, lambda comm: on_rank(comm, layer, batch)), batch)
    assert errors_above(got, whole(layer, batch), 1e-9) == {}


@needs_transformers
def test_a_model_says_that_it_supports_context_parallelism_as_long_as_all_layers_do() -> None:
    model = tiny_model()
    assert not getattr(model, "supports_context_parallel", False)  # older releases do not say
    takeover = alone(model)
    assert model.supports_context_parallel
    assert model.model.supports_context_parallel
    model.config.layer_types = ["linear_attention", "sliding_attention"]
    assert not model.supports_context_parallel
    takeover.seat.layer_types.add("sliding_attention")
    assert model.supports_context_parallel
    takeover.disable()
    assert not getattr(model, "supports_context_parallel", False)


@needs_transformers
def test_a_model_that_would_shift_its_labels_itself_takes_those_that_were_shifted_on_the_whole_batch() -> None:
    model, ids = tiny_model(), torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(1))
    seat = alone(model).seat
    given = {"labels": ids, "shift_labels": ids.roll(-1, 1).clamp(max=50), "num_items_in_batch": torch.tensor(40)}
    with seat.hold(seat.rows(*ids.shape)):
        want = model(ids, **given)
        model.criterion = None  # the mark of flash-linear-attention's models
        got = model(ids, **given)
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.logits, want.logits)
        for changes in ({"shift_labels": None}, {"return_dict": False}):
            with pytest.raises(NotImplementedError, match="shifts labels itself"):
                model(ids, **given | changes)


@needs_transformers
def test_what_was_taken_over_is_named_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(num_hidden_layers=4, layer_types=None, mlp_only_layers=[0, 1, 2, 3])
    with caplog.at_level(logging.INFO, "cp_gdn"):
        takeovers = twin(2, lambda comm: take_over(copy.deepcopy(model), comm))
    assert takeovers[0].layers == tuple(f"model.layers.{layer}.linear_attn" for layer in range(3))
    assert takeovers[0].attention == ("model.layers.3.self_attn",)
    assert takeovers[0].families == {"qwen3_next": 3}
    lines = [record.getMessage() for record in caplog.records if "took over" in record.getMessage()]
    assert lines == [
        "cp_gdn: Qwen3NextForCausalLM: took over 3 Gated DeltaNet layers (3 qwen3_next) beside 1 softmax attention "
        "layers, cp=2"
    ]


def test_taking_over_again_changes_nothing_and_otherwise_is_refused() -> None:
    layer, comm = make_layer("fla"), Comm.alone()
    first = take_over(layer, comm, exchange="ring", options=Options(save_transfer=False))
    cls = type(layer)
    again = take_over(layer, comm, exchange="ring", options=Options(save_transfer=False))
    assert again.seat is first.seat
    assert type(layer) is cls
    same = {"exchange": "ring", "options": Options(save_transfer=False)}
    for other, options in ((Comm.alone(), same), (comm, {"exchange": "a2a"}), (comm, same | {"on_one_rank": True})):
        with pytest.raises(ValueError, match=r"taken over before.* Call disable\(\)"):
            take_over(layer, other, **options)
    first.disable()
    assert take_over(layer, comm, exchange="a2a").seat is not first.seat


def test_a_forward_of_the_instance_is_kept_as_the_original_but_may_not_come_after() -> None:
    layer, x = make_layer("fla"), some_rows()
    layer.forward = MethodType(lambda self, hidden_states: hidden_states + 1, layer)
    takeover = alone(layer)
    assert output(run(layer, takeover.seat, x)).shape == x.shape
    with unsharded(layer):
        assert torch.equal(layer(x), x + 1)
    layer.forward = layer.__class__.forward
    with (
        pytest.raises(RuntimeError, match="replaced after it was taken over"),
        takeover.seat.hold(takeover.seat.rows(3, 48)),
    ):
        pass
    del layer.forward
    takeover.disable()
    assert torch.equal(layer(x), x + 1)


@needs_transformers
def test_hooks_of_accelerate_stay_around_both_forwards() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Counts(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            Counts.calls += 1
            return args, kwargs

    layer, x = make_layer("fla"), some_rows()
    before = output(layer(x))
    hooks.add_hook_to_module(layer, Counts())
    takeover = alone(layer)
    assert errors_above({"y": run(layer, takeover.seat, x)}, {"y": before}, 1e-9) == {}
    assert not torch.equal(run(layer, takeover.seat, x), before)
    takeover.disable()
    assert torch.equal(output(layer(x)), before)
    assert Counts.calls == 3
