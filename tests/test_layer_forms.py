"""Which form the parts of a layer take and why; gradients that are written side by side; the operators' glue."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_gdn import Comm, build_context, partition
from cp_gdn.backends import hopper_conv, hopper_gates, hopper_layer, hopper_norm
from cp_gdn.backends.choice import TORCH, WAY_OUT, BackendChoice
from cp_gdn.column_gradients import ColumnGradients, split_columns
from cp_gdn.gates import sigmoid, silu
from cp_gdn.layer_ops import gated_norm, gates, torch_gates, torch_norm
from cp_gdn.options import Options

# ---- the choice ------------------------------------------------------------------------------------------------------

HOPPER = BackendChoice(kind="hopper", reason="auto: every rank can run the kernels")
ELSEWHERE = BackendChoice(kind="torch", reason="auto: rank 2: an old driver")


def context_on(device: str = "cuda", **changes: Any) -> Any:
    """What the choice reads of a context."""
    asked = {"backend": "auto", "heads": (2, 6), "head_dims": (128, 128), "dtype": torch.bfloat16, "options": Options()}
    found = {"device": torch.device(device), "taken": HOPPER, "conv": (64, 4), **asked, **changes}
    return SimpleNamespace(**found, asked={name: found[name] for name in asked})


@pytest.fixture
def hopper_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hopper_layer._say_once.cache_clear()


def choose(ctx: Any, unfit: str = "", found: object = "kernels") -> object:
    """What a part takes; ``found`` is a one-element list for kernels, or what stands against them."""
    return hopper_layer.taken(ctx, "the part", unfit, lambda index: ["kernels"] if found == "kernels" else found)


def test_a_part_takes_its_kernels_where_it_can_and_its_torch_form_elsewhere(hopper_machine: None) -> None:
    unfit_op = context_on(dtype=torch.float32, taken=BackendChoice(kind="torch", reason="auto: dtype"))
    assert choose(context_on()) == choose(unfit_op) == ["kernels"]
    assert choose(context_on(device="cpu")) is None
    assert choose(context_on(backend="torch", taken=TORCH)) is None
    assert choose(context_on(), unfit="12 channels") is None


def test_a_rank_that_cannot_run_the_ops_kernels_takes_every_rank_to_torch(
    hopper_machine: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cp_gdn"):
        assert choose(context_on(taken=ELSEWHERE)) is None
    assert "the torch form of the part instead of its kernels: auto: rank 2: an old driver" in caplog.text


@pytest.mark.parametrize(("capability", "found", "why"), [((8, 0), "kernels", "sm_80"), ((9, 0), "no nvcc", "no nvcc")])
def test_a_machine_that_cannot_is_logged_once_and_refused_where_hopper_was_asked_for(
    hopper_machine: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    found: str,
    why: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with caplog.at_level(logging.WARNING, "cp_gdn"):
        assert [choose(context_on(), found=found) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert why in caplog.text
    with pytest.raises(RuntimeError, match=rf'backend="hopper": the part: {why}.*; {WAY_OUT}'):
        choose(context_on(backend="hopper"), found=found)


MISFITS = [
    (hopper_conv.unfit, {"dtype": torch.float64}, "dtype torch.float64: its kernels take torch.bfloat16 and"),
    (hopper_conv.unfit, {"conv": (12, 4)}, "12 channels: its kernels take multiples of 8"),
    (hopper_conv.unfit, {"conv": (64, 1)}, "width 1: its kernels take 2 to 8"),
    (hopper_norm.unfit, {"dtype": torch.float32}, "dtype torch.float32: its kernels take torch.bfloat16"),
    (hopper_norm.unfit, {"head_dims": (128, 64)}, "value heads of 64 channels: its kernels take 128"),
]


@pytest.mark.parametrize(("unfit", "changes", "why"), MISFITS)
def test_arguments_that_the_kernels_do_not_take_are_named(unfit: Any, changes: dict[str, Any], why: str) -> None:
    assert unfit(context_on()) == ""
    assert unfit(context_on(**changes)).startswith(why)


def test_what_cannot_be_compiled_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(variants: object) -> None:
        raise RuntimeError("nvcc failed on norm_grad.cu")

    monkeypatch.setattr(hopper_layer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(hopper_layer.cubins, "cubins", broken)
    for load in (hopper_norm.load_kernels, hopper_gates.load_kernels):
        load.cache_clear()
        assert load(0) == "they cannot be built or loaded: nvcc failed on norm_grad.cu"
        load.cache_clear()


# ---- rooms -----------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """2 x; the gradient is written into a part of a room, or nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: ColumnGradients, part: int | None) -> Tensor:
        ctx.place = room, part
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        room, part = ctx.place
        return 2 * dy if part is None else room.part(part, dy).copy_(2 * dy), None, None


@pytest.mark.parametrize("written", [(0, 1), (None, 1), (0, None), (None, None)])
def test_gradients_of_split_columns_are_joined_wherever_they_were_written(written: tuple[int | None, ...]) -> None:
    x, dy = (torch.arange(15.0).reshape(1, 3, 5) + i for i in range(2))
    room = ColumnGradients((3, 2))
    leaf = x.requires_grad_()
    parts = split_columns(leaf, room)
    y = torch.cat([Doubled.apply(part, room, place) for part, place in zip(parts, written, strict=True)], dim=-1)
    first = torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]
    second = torch.autograd.grad(y, leaf, -dy)[0]
    assert torch.equal(first, 2 * dy)
    assert torch.equal(second, -2 * dy)


def test_parts_that_were_written_in_a_room_are_not_copied() -> None:
    room, like = ColumnGradients((3, 2)), torch.zeros(1, 4, 1)
    parts = [room.part(1, like), room.part(0, like)][::-1]
    assert room.joined(parts).data_ptr() == parts[0].data_ptr()
    assert parts[1].stride() == (20, 5, 1)


# ---- the operators and Functions of gates and norm -------------------------------------------------------------------


class GatesDouble:
    """What the kernels of the gates give, by formulas that do not need autograd."""

    def forward(self, ba: Tensor, a_log: Tensor, dt_bias: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return torch_gates(ba, a_log, dt_bias, factor)

    def backward(
        self, grads: tuple[Tensor, Tensor], ba: Tensor, a_log: Tensor, dt_bias: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        b, a = ba.chunk(2, dim=-1)
        da = -a_log.exp() * grads[0] * sigmoid(a + dt_bias)
        db = factor * grads[1] * sigmoid(b) * sigmoid(-b)
        g, _ = torch_gates(ba, a_log, dt_bias, factor)
        return torch.cat((db, da), dim=-1), torch.stack(((grads[0] * g).sum(0), da.sum(0)))


class NormDouble:
    def forward(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch_norm(o, z, weight, eps)

    def backward(
        self, dy: Tensor, tensors: tuple[Tensor, ...], eps: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        o, z, weight = tensors
        r = 1 / torch.sqrt(o.square().mean(-1, keepdim=True) + eps)
        n, dn = o * r, dy * weight * silu(z)
        dz = dy * n * weight * sigmoid(z) * (1 + z * sigmoid(-z))
        dz = dz if out is None else out.copy_(dz)
        return r * (dn - n * (dn * n).mean(-1, keepdim=True)), dz, (dy * n * silu(z)).sum((0, 1))


@pytest.fixture
def ctx(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context that says that it is on a GPU whose kernels are the doubles."""
    monkeypatch.setattr(hopper_gates, "kernels_for", lambda ctx: GatesDouble())
    monkeypatch.setattr(hopper_norm, "kernels_for", lambda ctx: NormDouble())
    real = build_context(partition([0, 5], 1), Comm.alone(), heads=(1, 2), head_dims=(4, 8), dtype=torch.float64)
    known = {"handle": real.handle, "traced": real.traced, "keep": real}
    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64, **known)


class Looking(TorchDispatchMode):
    """A mode that changes nothing, but sees operators only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


PARTS = {
    "gates": (((1, 5, 4), (2,), (2,)), lambda ctx, *x: gates(*x, 2.0, ctx), lambda *x: torch_gates(*x, 2.0)),
    "norm": (
        ((1, 5, 2, 8), (1, 5, 2, 8), (8,)),
        lambda ctx, *x: (gated_norm(*x, 1e-6, ctx),),
        lambda *x: (torch_norm(*x, 1e-6),),
    ),
}


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_through_function_and_operator_gradients_are_those_of_the_torch_form(
    ctx: Any, part: str, looking: bool
) -> None:
    shapes, ours, torchs = PARTS[part]
    leaves = [normal(*shape).requires_grad_() for shape in shapes]
    want = torchs(*leaves)
    grads = [normal(*y.shape) for y in want]
    if looking:
        with Looking():
            got = ours(ctx, *leaves)
            found = torch.autograd.grad(got, leaves, grads, retain_graph=True)
    else:
        got = ours(ctx, *leaves)
        found = torch.autograd.grad(got, leaves, grads, retain_graph=True)
    exact = torch.autograd.grad(want, leaves, grads)
    for a, b in zip((*got, *found), (*want, *exact), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    again = torch.autograd.grad(got, leaves, grads, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(again[0].sum(), leaves)


def test_the_norms_gradient_of_z_goes_to_its_room(ctx: Any) -> None:
    o, z, weight = (normal(*shape).requires_grad_() for shape in PARTS["norm"][0])
    room = ColumnGradients((3, 16))
    y = gated_norm(o, z, weight, 1e-6, ctx, room)
    dz = torch.autograd.grad(y.sum(), z)[0]
    assert dz.data_ptr() == room.part(1, normal(1, 5, 1)).data_ptr()
    want = torch.autograd.grad(torch_norm(o, z, weight, 1e-6).sum(), z)[0]
    torch.testing.assert_close(dz, want, rtol=1e-12, atol=1e-12)
