"""Frozen linears in float8 under trained adapters, inside a taken-over layer: their weights are nobody's business."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cp_gdn import Comm, twin
from cp_gdn.integrations.transformers import take_over
from tests.gdn_layers import (
    BATCHES,
    Adapted,
    Outcome,
    errors_above,
    make_layer,
    needs,
    on_rank,
    outcome,
    together,
    whole,
)

FP8 = torch.float8_e4m3fn
FINE_GRAINED = "transformers.integrations.finegrained_fp8"
BATCH = BATCHES["three rows"]
LARGEST = torch.finfo(FP8).max


def quantized(x: Tensor, rows: bool = True) -> tuple[Tensor, Tensor]:
    """x [.., D] in float8, and what to multiply it by: [.., 1] per row, or [1] for all."""
    largest = x.abs().amax(-1, keepdim=True) if rows else x.abs().max().reshape(1)
    scale = (largest / LARGEST).clamp_min(1e-12)
    return (x / scale).to(FP8), scale


class InFloat8(torch.autograd.Function):
    """x in float8 by rows, times a frozen weight in float8 by rows; its adjoint by the weight alone."""

    @staticmethod
    def forward(fctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        fctx.save_for_backward(weight, scale)
        rows, row_scale = quantized(x.flatten(0, -2))
        if x.dtype is torch.float64:
            return ((rows.double() @ weight.double().T) * row_scale * scale.T).view(*x.shape[:-1], -1)
        y = torch._scaled_mm(rows, weight.T, torch.ones(()), torch.ones(()), out_dtype=torch.float32)
        return (y * row_scale * scale.T).view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(fctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = fctx.saved_tensors
        return dy @ (weight.to(dy.dtype) * scale), None, None


class Float8Linear(nn.Module):
    """A frozen linear that holds buffers alone: a weight [out, in] in float8 and its scales [out, 1]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, value in zip(("weight", "scale"), quantized(linear.weight.detach()), strict=True):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return InFloat8.apply(x, self.weight, self.scale)


def of_transformers(linear: nn.Linear) -> nn.Module:
    """The linear of transformers' fine-grained float8, with one scale per weight."""
    made: Any = importlib.import_module(FINE_GRAINED).FP8Linear(linear.in_features, linear.out_features)
    weight, scale = quantized(linear.weight.detach(), rows=False)
    made.weight, made.weight_scale_inv = (nn.Parameter(x, requires_grad=False) for x in (weight, scale[0]))
    return made


def on_a_cpu(x: Tensor, weight: Tensor, scale: Tensor, *_: Any) -> Tensor:
    """What transformers asks its kernel for, whose code is not in its package."""
    return InFloat8.apply(x, weight, scale.expand(len(weight), 1))


def has_trainable_float8() -> bool:
    try:
        return hasattr(importlib.import_module(FINE_GRAINED), "FP8LinearFunction")
    except ImportError:
        return False


MAKERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "buffers": Float8Linear,
    "buffers, not adapted": Float8Linear,
    "transformers": of_transformers,
}
no_adjoint = pytest.mark.skipif(not has_trainable_float8(), reason="transformers, if any, trains no float8 linears")
LINEARS = ["buffers", "buffers, not adapted", pytest.param("transformers", marks=no_adjoint)]
FAMILIES = [*(pytest.param(kind, marks=needs(kind)) for kind in ("qwen3_next", "qwen3_5", "olmo_hybrid")), "fla"]


def make(kind: str, linears: str, dtype: torch.dtype = torch.float64, keep: Sequence[str] = ()) -> nn.Module:
    """A layer with float8 linears, mostly adapted, in the place of its own, but for those to keep. What else is a
    parameter is trained, as the adapters are."""
    layer = make_layer(kind, dtype)
    torch.manual_seed(4)
    for name, child in list(layer.named_children()):
        if type(child) is nn.Linear and name not in keep:
            made = MAKERS[linears](child)
            setattr(layer, name, made)
            if "not adapted" not in linears:
                setattr(layer, name, Adapted(made))
                for part in (getattr(layer, name).down, getattr(layer, name).up):
                    part.to(dtype)
    return layer


@pytest.mark.parametrize("linears", LINEARS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_layer_of_float8_linears_under_adapters_trains_as_on_one_process(
    kind: str, linears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if linears == "transformers":
        monkeypatch.setattr(importlib.import_module(FINE_GRAINED), "fp8_linear", on_a_cpu)
    layer = make(kind, linears)
    want = whole(layer, BATCH)
    frozen = [name for name, number in layer.state_dict().items() if number.dtype is FP8]
    assert len(frozen) >= 3
    assert not want.keys() & set(frozen)
    assert {"A_log", "dt_bias"} < want.keys()
    assert sum("up.weight" in name for name in want) == (0 if "not adapted" in linears else len(frozen))
    for world in (1, 2, 4):
        got = together(twin(world, lambda comm: on_rank(comm, layer, BATCH, on_one_rank=True)), BATCH)
        assert errors_above(got, want, 1e-9) == {}


@needs("qwen3_next")
def test_with_torchs_scaled_product_in_fp32_it_trains_as_on_one_process() -> None:
    """The output projection keeps its dtype: other last bits of its input, as on several ranks, float8 may magnify."""
    layer = make("qwen3_next", "buffers", torch.float32, keep=["out_proj"])
    x, dy = BATCH.tensors(torch.float32)
    want = outcome(layer, x.requires_grad_(), layer(x), dy)

    def on(comm: Comm) -> tuple[Tensor, Outcome]:
        mine = copy.deepcopy(layer)
        seat = take_over(mine, comm, on_one_rank=True).seat
        with seat.hold(BATCH.pack(seat)) as pack:
            rows = pack.local(x.detach()).requires_grad_()
            return pack.token_ids, outcome(mine, rows, mine(rows), pack.local(dy))

    for world in (1, 2, 4):
        assert errors_above(together(twin(world, on), BATCH), want, 1e-5) == {}


@pytest.mark.parametrize("linears", LINEARS)
def test_float8_weights_keep_their_names_and_bits_through_a_take_over(linears: str) -> None:
    layer = make("fla", linears)
    before = {name: number.clone() for name, number in layer.state_dict().items()}
    takeover = take_over(layer, Comm.alone(), on_one_rank=True)
    taken = layer.state_dict()
    takeover.disable()
    for state in (taken, layer.state_dict()):
        assert list(state) == list(before)
        assert [name for name in before if state[name].dtype is not before[name].dtype] == []
        assert [name for name in before if not torch.equal(state[name].double(), before[name].double())] == []
