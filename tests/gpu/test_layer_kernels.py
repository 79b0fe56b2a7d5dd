"""Kernels of a layer's gates and gated norm: against fp64, by bits over rows and entries; a layer that has them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cp_gdn
from cp_gdn.backends import hopper_conv, hopper_gates, hopper_norm
from cp_gdn.layer_ops import gated_norm, gates, torch_gates, torch_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

TOKENS, HEADS = 3001, (2, 6)
ROUNDED, SUMMED = 4e-3, 2e-5
"""Relative L2 of what is rounded to bf16, and of what stays fp32."""


def context(tokens: int = TOKENS, conv: tuple[int, int] | None = None) -> Any:
    part = cp_gdn.partition([0, tokens // 3, tokens], 1)
    return cp_gdn.build_context(part, cp_gdn.Comm.alone(), device="cuda", heads=HEADS, conv=conv, backend="hopper")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device="cuda").manual_seed(seed), device="cuda")


def norm_inputs() -> tuple[list[Tensor], list[Tensor]]:
    """o, z (a view of wider rows that are NaN elsewhere), weight; and the gradient of y."""
    shape = (1, TOKENS, HEADS[1], 128)
    wide = torch.full((1, TOKENS, 3000), float("nan"), device="cuda").bfloat16()
    z = wide[..., 64 : 64 + 128 * HEADS[1]]
    z.copy_(3 * normal(1, TOKENS, 128 * HEADS[1], seed=1))
    o = normal(*shape).bfloat16() * normal(1, TOKENS, 1, 1, seed=2).bfloat16()
    return [o, z.unflatten(-1, shape[-2:]), 1 + 0.3 * normal(128, seed=3)], [normal(*shape, seed=4).bfloat16()]


def gates_inputs() -> tuple[list[Tensor], list[Tensor]]:
    """b | a, A_log, dt_bias, far from zero too; and the gradients of g and beta."""
    ba = (8 * normal(1, TOKENS, 2 * HEADS[1])).bfloat16()
    ba[0, :2] = torch.tensor([[300.0], [-300.0]])
    grads = [normal(1, TOKENS, HEADS[1], seed=seed) for seed in (1, 2)]
    return [ba, normal(HEADS[1], seed=3), normal(HEADS[1], seed=4)], grads


PARTS = {
    "norm": (norm_inputs, lambda ctx, o, z, w: (gated_norm(o, z, w, 1e-6, ctx),), lambda *x: (torch_norm(*x, 1e-6),)),
    "gates": (gates_inputs, lambda ctx, *x: gates(*x, 2.0, ctx), lambda *x: torch_gates(*x, 2.0)),
}
every_part = pytest.mark.parametrize("part", PARTS)


def results(call: Any, tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = call(*leaves)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def on_kernels(part: str, ctx: Any, tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    assert hopper_norm.kernels_for(ctx)
    assert hopper_gates.kernels_for(ctx)
    return results(lambda *x: PARTS[part][1](ctx, *x), tensors, grads)


@every_part
def test_results_and_gradients_are_close_to_fp64(part: str) -> None:
    tensors, grads = PARTS[part][0]()
    got = on_kernels(part, context(), tensors, grads)
    want = results(PARTS[part][2], [x.double() for x in tensors], [x.double() for x in grads])
    for i, (ours, exact) in enumerate(zip(got, want, strict=True)):
        assert ours.isfinite().all()
        error = float((ours.double() - exact).norm() / exact.norm())
        assert error <= (ROUNDED if ours.dtype == torch.bfloat16 else SUMMED), (i, error)


@every_part
def test_a_tokens_bits_depend_on_no_other_token_and_not_on_strides(part: str) -> None:
    tensors, grads = PARTS[part][0]()
    want = on_kernels(part, context(), tensors, grads)
    rows = slice(7, 1500)
    own = [x[:, rows].contiguous() if x.dim() > 1 else x for x in tensors]
    got = on_kernels(part, context(1493), own, [x[:, rows] for x in grads])
    for ours, whole in zip(got, want, strict=True):
        if ours.dim() > 1:
            assert torch.equal(ours, whole[:, rows])


class Looking(TorchDispatchMode):
    """A mode that changes nothing, but sees operators only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@every_part
def test_runs_and_the_operator_have_the_same_bits_and_nothing_synchronizes(part: str) -> None:
    (tensors, grads), ctx = PARTS[part][0](), context()
    want = on_kernels(part, ctx, tensors, grads)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [on_kernels(part, ctx, tensors, grads) for _ in range(10)]
        with Looking():
            found.append(on_kernels(part, ctx, tensors, grads))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got in found:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@every_part
def test_a_rank_without_tokens_has_gradients_of_zero(part: str) -> None:
    tensors, grads = PARTS[part][0]()
    none = [x[:, :0] if x.dim() > 1 else x for x in tensors]
    got = on_kernels(part, context(), none, [x[:, :0] for x in grads])
    assert all(not x.any() for x in got)


# ---- the layer -------------------------------------------------------------------------------------------------------


def make_layer() -> cp_gdn.GatedDeltaNet:
    torch.manual_seed(0)
    layer = cp_gdn.GatedDeltaNet(256, heads=HEADS, head_dims=(128, 128)).cuda().bfloat16()
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    return layer


def layer_step(layer: Any, parameters: list[Tensor], ctx: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x, ctx)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)]


def layer_case() -> tuple[cp_gdn.GatedDeltaNet, list[Any]]:
    layer = make_layer()
    x, dy = (normal(1, TOKENS, 256, seed=seed).bfloat16() for seed in (5, 6))
    return layer, [list(layer.parameters()), context(conv=layer.conv), x, dy]


def test_the_layer_is_close_to_the_one_in_torch_forms() -> None:
    layer, case = layer_case()
    got = layer_step(layer, *case)
    with (
        mock.patch.object(hopper_conv, "form_for", return_value=hopper_conv.TORCH),
        mock.patch.object(hopper_norm, "kernels_for", return_value=None),
        mock.patch.object(hopper_gates, "kernels_for", return_value=None),
    ):
        want = layer_step(layer, *case)
    for i, (ours, torchs) in enumerate(zip(got, want, strict=True)):
        assert (ours.double() - torchs.double()).norm() <= 1e-2 * torchs.double().norm(), i


def test_a_compiled_layer_is_one_graph_and_a_captured_one_replays_with_the_same_bits() -> None:
    layer, case = layer_case()
    want = layer_step(layer, *case)
    compiled = layer_step(torch.compile(layer, backend="aot_eager", fullgraph=True), *case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer_step(layer, *case)
    graph.replay()
    for other in (compiled, captured):
        assert all(torch.equal(a, b) for a, b in zip(other, want, strict=True))
