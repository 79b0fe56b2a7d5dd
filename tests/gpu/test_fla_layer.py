"""flash-linear-attention's own layer on its own kernels, and taken over on ours: both in bf16, beside fp32.

Relative L2 per tensor. What we may be off is what the original is off: see FACTOR and ROUNDING.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cp_gdn import Comm, twin
from cp_gdn.integrations.transformers import take_over
from tests.fla_layers import MISSING, first_that_runs, make_fla_layer, tuned_one_at_a_time
from tests.gdn_layers import Batch, Outcome, errors_above, outcome, together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

FACTOR, ROUNDING, SANE = 2.0, 2.0**-8, 0.1
"""Our error may be the larger of the original's and of one rounding to bf16, times the factor. An original that is
further off than the last measures nothing."""

FEW = ("A_log", "dt_bias")
"""Gradients of so few entries that an error may be small by luck: of these, the original's largest over all cases."""

HEADS = {"head_dim": 128, "num_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "a value head per head": {},
    "two value heads per head": {"num_v_heads": 8},
    "beta up to 2": {"allow_neg_eigval": True, "num_v_heads": 8},
    "no output gate": {"use_gate": False},
}
BATCHES = {
    "rows": Batch(length=1024, real=(1024, 1024)),
    "packed": Batch(bounds=(0, 700, 703, 1500, 2048)),
    "padded": Batch(length=1024, real=(1024, 515)),
}
CASES = [
    ("a value head per head", "rows"),
    ("two value heads per head", "rows"),
    ("two value heads per head", "packed"),
    ("a value head per head", "padded"),
    ("beta up to 2", "packed"),
    ("no output gate", "rows"),
]


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning would take most of the time, and numbers do not want it. Nothing of it is left on the disk for others."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    for (owner, name), locked in tuned_one_at_a_time().items():
        monkeypatch.setattr(owner, name, locked)
    monkeypatch.setattr(autotuner, "do_bench", first_that_runs)
    monkeypatch.setattr(autotuner, "check_disk_cache", lambda _self, _key, _configs, bench: bool(bench()))


def make(kind: str) -> nn.Module:
    return make_fla_layer("plain", torch.bfloat16, **HEADS | KINDS[kind]).cuda()


def on_cpu(found: Outcome) -> Outcome:
    return {name: number.double().cpu() for name, number in found.items()}


def its_own(kind: str, batch: Batch) -> Outcome:
    """The original layer on its own kernels."""
    layer, (x, dy) = make(kind), (tensor.cuda().bfloat16() for tensor in batch.tensors())
    x.requires_grad_()
    bounds = {"cu_seqlens": torch.tensor(batch.bounds, device="cuda")} if batch.bounds else {}
    mask = None if batch.mask is None else batch.mask.cuda()
    return on_cpu(outcome(layer, x, layer(x, attention_mask=mask, **bounds)[0], dy))


def taken_over(kind: str, batch: Batch, world: int, backend: str, dtype: torch.dtype) -> Outcome:
    """The layer on cp_gdn's operators, on ranks that share the GPU; weights and inputs are those of bf16."""
    layer = make(kind).to(dtype)

    def on(comm: Comm) -> tuple[Tensor, Outcome]:
        mine = copy.deepcopy(layer)
        seat = take_over(mine, comm, on_one_rank=True, backend=backend).seat
        pack = seat.packed(batch.bounds, device="cuda") if batch.bounds else seat.rows(*batch.shape, device="cuda")
        with seat.hold(pack):
            x, dy = (pack.local(tensor.cuda().bfloat16().to(dtype)) for tensor in batch.tensors())
            mask = None if batch.mask is None else pack.local(batch.mask.cuda())
            x.requires_grad_()
            found = outcome(mine, x, mine(x, attention_mask=mask)[0], dy)
        assert {ctx.last_call["backend"] for ctx in pack.contexts.values()} == {backend}
        return pack.token_ids.cpu(), on_cpu(found)

    return together(twin(world, on), batch)


@cache
def exact(kind: str, batch: str) -> Outcome:
    return taken_over(kind, BATCHES[batch], 1, "torch", torch.float32)


@cache
def original_errors(kind: str, batch: str) -> dict[str, float]:
    return errors_above(its_own(kind, BATCHES[batch]), exact(kind, batch), -1.0)


def allowed(name: str, theirs: dict[str, float]) -> float:
    errors = [original_errors(*case)[name] for case in CASES] if name in FEW else [theirs[name]]
    return FACTOR * max(*errors, ROUNDING)


def has_adjoint() -> bool:
    """Its backward on Hopper is refused with Triton from 3.4 to 3.7.0, unless TileLang's kernels are there."""
    from packaging.version import Version

    triton = importlib.import_module("triton")
    return Version(triton.__version__) >= Version("3.7.1") or importlib.util.find_spec("tilelang") is not None


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "batch"), CASES)
def test_taken_over_it_is_as_close_to_fp32_as_on_its_own_kernels(
    kind: str, batch: str, world: int, record_property: Callable[[str, object], None]
) -> None:
    if not has_adjoint():
        pytest.skip("fla refuses its backward on Hopper with this Triton; TileLang is not installed")
    got = taken_over(kind, BATCHES[batch], world, "hopper", torch.bfloat16)
    ours, theirs = errors_above(got, exact(kind, batch), -1.0), original_errors(kind, batch)
    record_property("errors", {name: (f"{ours[name]:.1e}", f"{theirs[name]:.1e}") for name in ours})
    assert {name: error for name, error in theirs.items() if not error <= SANE} == {}, "the original's"
    far = {name: (ours[name], allowed(name, theirs)) for name in ours if not ours[name] <= allowed(name, theirs)}
    assert far == {}, "ours, allowed"


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_forward_is_not_far_from_fp32(kind: str) -> None:
    """What the budget above stands on; without a backward, wherever fla runs."""
    layer, (x, _) = make(kind), (tensor.cuda().bfloat16() for tensor in BATCHES["rows"].tensors())
    with torch.no_grad():
        y = layer(x)[0]
    assert errors_above({"y": y.double().cpu()}, {"y": exact(kind, "rows")["y"]}, 3e-2) == {}
