"""The convolution's kernels on the GPU: by bits against the torch form, against fp64, over cuts, strides, entries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cp_gdn
from cp_gdn.backends import cubins, hopper_conv, hopper_layer
from cp_gdn.layout import Partition
from tests.token_cases import LAYOUTS, WORLDS, conv_inputs, conv_of_documents, cut, in_global_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

PACKS = {
    "strips": (130, 3, 260, 1, 2, 128, 5, 517),
    "one document": (1031,),
    "a strip": (128,),
    "two tokens": (2,),
    "no tokens": (0,),
    "many": tuple(1 + i % 4 for i in range(5000)),
}
FORMS = [(True, "silu"), (False, "silu"), (True, None), (False, None)]
Results = dict[str, Tensor]
"""NOTE: a group of 5 is none that the op's kernels take: here only the convolution's are loaded."""


def context(part: Partition, comm: cp_gdn.Comm, conv: tuple[int, int], dtype: torch.dtype, **asked: Any) -> Any:
    asked = {"device": "cuda", "heads": (1, 5), "dtype": dtype, "conv": conv, **asked}
    return cp_gdn.build_context(part, comm, **asked)


def on_gpu(tokens: int, channels: int, width: int, dtype: torch.dtype) -> Results:
    return {name: x.cuda() for name, x in conv_inputs(tokens, channels, width, dtype).items()}


def run(ctx: Any, inputs: Results, bias: bool, activation: str | None) -> Results:
    """y and gradients of this rank's rows."""
    x = inputs["x"][ctx.token_ids].requires_grad_()
    weight = inputs["weight"].clone().requires_grad_()
    parameters = [weight, *([inputs["bias"].clone().requires_grad_()] if bias else [])]
    y = cp_gdn.causal_conv1d(x[None], weight, parameters[1] if bias else None, ctx=ctx, activation=activation)[0]
    grads = torch.autograd.grad(y, [x, *parameters], inputs["dy"][ctx.token_ids])
    return {"y": y.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=False))}


def split(part: Partition, inputs: Results, *form: Any) -> Results:
    """Rows in global order, sums over the ranks."""
    conv, dtype = tuple(inputs["weight"].shape), inputs["x"].dtype
    ranks = cp_gdn.twin(part.world_size, lambda comm: run(context(part, comm, conv, dtype), inputs, *form))
    rows = {name: in_global_order(part, [r[name].cpu() for r in ranks]).cuda() for name in ("y", "dx")}
    return rows | {name: sum(r[name] for r in ranks) for name in ranks[0] if name not in rows}


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """`split` by the torch form."""

    def torch_split(*args: Any) -> Results:
        with monkeypatch.context() as patch:
            patch.setattr(hopper_conv, "form_for", lambda ctx: hopper_conv.TORCH)
            return split(*args)

    return torch_split


def test_the_kernels_are_what_runs() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        ctx = context(cut((8,), 1, "contiguous"), cp_gdn.Comm.alone(), (8, 4), dtype)
        assert isinstance(hopper_conv.form_for(ctx), hopper_conv.ConvKernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pack", PACKS)
def test_without_activation_y_and_dx_have_the_bits_of_the_torch_form(
    pack: str, dtype: torch.dtype, in_torch: Callable[..., Results]
) -> None:
    for width, channels in ((2, 8), (4, 520), (8, 24)):
        inputs = on_gpu(sum(PACKS[pack]), channels, width, dtype)
        for world, layout in ((1, "contiguous"), (3, "zigzag")) if len(PACKS[pack]) < 100 else ((1, "contiguous"),):
            part = cut(PACKS[pack], world, layout)
            for bias in (False, True):
                got, want = split(part, inputs, bias, None), in_torch(part, inputs, bias, None)
                assert torch.equal(got["y"], want["y"])
                assert torch.equal(got["dx"], want["dx"])


@pytest.mark.parametrize(("dtype", "budget"), [(torch.bfloat16, 4e-3), (torch.float32, 2e-6)])
@pytest.mark.parametrize("pack", PACKS)
def test_everything_is_close_to_fp64(pack: str, dtype: torch.dtype, budget: float) -> None:
    """A rounding to bf16 costs at most 2^-8 of a number, and half of that in the mean."""
    for width in (4, 3):
        inputs = on_gpu(sum(PACKS[pack]), 520, width, dtype)
        for form in FORMS if width == 4 and pack != "many" else FORMS[:1]:
            got = split(cut(PACKS[pack], 1, "contiguous"), inputs, *form)
            want = conv_of_documents(PACKS[pack], inputs, *form)
            for name, value in want.items():
                error = (got[name].double() - value).norm() / value.norm().clamp(min=1e-9)
                assert error <= budget, (name, width, form, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_y_and_dx_have_the_same_bits_for_every_world_size_and_layout(dtype: torch.dtype) -> None:
    lengths = PACKS["strips"]
    inputs = on_gpu(sum(lengths), 136, 4, dtype)
    alone = split(cut(lengths, 1, "contiguous"), inputs, True, "silu")
    for world in WORLDS:
        for layout in LAYOUTS:
            got = split(cut(lengths, world, layout), inputs, True, "silu")
            assert torch.equal(got["y"], alone["y"]), (world, layout)
            assert torch.equal(got["dx"], alone["dx"]), (world, layout)


def test_appended_tokens_change_nothing_before_them() -> None:
    inputs = on_gpu(700, 64, 4, torch.bfloat16)
    inputs["dy"][500:] = 0
    prefix = inputs | {name: inputs[name][:500] for name in ("x", "dy")}
    longer, shorter = (split(cut((n,), 1, "contiguous"), x, False, "silu") for n, x in ((700, inputs), (500, prefix)))
    assert torch.equal(longer["y"][:500], shorter["y"])
    assert torch.equal(longer["dx"][:500], shorter["dx"])


def alone(inputs: Results, **asked: Any) -> Any:
    conv = tuple(inputs["weight"].shape)
    part = cut((len(inputs["x"]),), 1, "contiguous")
    return context(part, cp_gdn.Comm.alone(), conv, inputs["x"].dtype, **asked)


def step(ctx: Any, x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    y = cp_gdn.causal_conv1d(leaves[0], leaves[1], None, ctx=ctx)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def test_rows_of_a_wider_projection_are_read_in_place_and_what_lies_beside_them_is_not() -> None:
    inputs = on_gpu(300, 520, 4, torch.bfloat16)
    ctx, want = alone(inputs), None
    for left, right in ((0, 0), (8, 24), (4, 4), (1, 2)):  # the last is at no border of four numbers, and copied
        x, dy = (torch.nn.functional.pad(inputs[name], (left, right), value=float("nan")) for name in ("x", "dy"))
        x, dy = (t[:, left : left + 520] for t in (x, dy))
        assert (hopper_conv._rows(x) is x) == (left != 1)
        got = step(ctx, x, inputs["weight"], dy)
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (left, right)


def test_outputs_are_written_whole_and_runs_repeat_by_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_gpu(1031, 520, 4, torch.bfloat16)
    ctx = alone(inputs)
    want = step(ctx, inputs["x"], inputs["weight"], inputs["dy"])
    for _ in range(20):
        poison = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(8)]
        del poison
        got = step(ctx, inputs["x"], inputs["weight"], inputs["dy"])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Looking(TorchDispatchMode):
    """A mode that changes nothing, but sees operators only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_operator_has_the_bits_of_the_function_and_nothing_synchronizes() -> None:
    inputs = on_gpu(300, 520, 4, torch.bfloat16)
    ctx = alone(inputs)
    args = inputs["x"], inputs["weight"], inputs["dy"]
    want = step(ctx, *args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step(ctx, *args)
        with Looking():
            got = step(ctx, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in (again, got):
        assert all(torch.equal(a, b) for a, b in zip(other, want, strict=True))


def test_a_captured_step_replays_on_new_numbers() -> None:
    inputs = on_gpu(300, 520, 4, torch.bfloat16)
    ctx = alone(inputs)
    fixed = [inputs[name].clone() for name in ("x", "weight", "dy")]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(ctx, *fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(ctx, *fixed)
    for scale in (1.0, -0.5):
        new = [inputs[name] * scale for name in ("x", "weight", "dy")]
        for place, value in zip(fixed, new, strict=True):
            place.copy_(value)
        graph.replay()
        want = step(ctx, *new)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_silu_neither_overflows_nor_loses_its_slope_far_from_zero() -> None:
    for dtype, rtol in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
        x = torch.linspace(-1e4, 1e4, 300 * 8, device="cuda").reshape(300, 8).to(dtype)
        weight = torch.zeros(8, 4, device="cuda")
        weight[:, 3] = 1.0
        ctx = alone({"x": x, "weight": weight})
        y, dx, _ = step(ctx, x, weight, torch.ones_like(x))
        z = x.double().requires_grad_()
        silu = torch.nn.functional.silu(z)
        torch.testing.assert_close(y.double(), silu.detach(), rtol=rtol, atol=1e-30)
        torch.testing.assert_close(dx.double(), torch.autograd.grad(silu.sum(), z)[0], rtol=rtol, atol=1e-30)


def test_a_kernel_that_does_not_compile_leaves_the_torch_form_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("nvcc failed on conv.cu")

    inputs = on_gpu(64, 8, 5, torch.bfloat16)
    auto, hopper = alone(inputs), alone(inputs, backend="hopper", heads=(1, 3))
    monkeypatch.setattr(cubins, "cubins", broken)
    hopper_conv.load_kernels.cache_clear()
    hopper_layer._say_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "cp_gdn"):
            assert {hopper_conv.form_for(auto) for _ in range(3)} == {hopper_conv.TORCH}
        assert len(caplog.records) == 1
        assert "nvcc failed on conv.cu" in caplog.text
        with pytest.raises(RuntimeError, match=r'backend="hopper": the convolution: .*nvcc failed'):
            hopper_conv.form_for(hopper)
    finally:
        hopper_conv.load_kernels.cache_clear()
