"""The tile emulator is exact where it rounds nothing, and its budgets refuse what a faulty kernel would do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cp_gdn
from tests.gpu import tile_emulator
from tests.gpu.tile_emulator import EXACT, FLOORS, Drawn, Roundings, drawn_errors, emulate, head_errors, noisy

torch.set_num_threads(1)
LENGTHS = [130, 62]
KERNEL = Roundings.drawn(1, "cpu")
"""A draw that is not among those of the budgets."""


def inputs(gate: str) -> dict[str, Tensor]:
    gen, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    noise = normal(tokens, 2)
    x = {name: F.normalize(normal(tokens, 1, 128), dim=-1).bfloat16() for name in ("q", "k")}
    x |= {name: normal(tokens, 2, 128).bfloat16() for name in ("v", "dout")}
    x["g"] = {"none": 0 * noise, "model": -F.softplus(noise - 3), "A16": -16 * F.softplus(noise * 0.5 + 1)}[gate]
    states = (len(LENGTHS), 2, 128, 128)
    return x | {"beta": normal(tokens, 2).sigmoid(), "start": normal(*states) * 0.3, "dend": normal(*states) / 8}


def budgets(x: dict[str, Tensor], want: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, Drawn]:
    monkeypatch.setattr(tile_emulator, "DRAWS", 64)
    return drawn_errors(x, LENGTHS, want, FLOORS)


def refused(found: dict[str, Tensor], want: dict[str, Tensor], drawn: dict[str, Drawn]) -> dict[str, str]:
    """Tensors whose errors are beyond their budget, and why."""
    faults = {n: each.fault(head_errors(found[n], want[n]), FLOORS[n]) for n, each in drawn.items()}
    return {name: why for name, why in faults.items() if why}


@pytest.mark.parametrize("gate", ["none", "model", "A16"])
def test_without_rounding_it_is_the_oracle(gate: str) -> None:
    x, bounds = inputs(gate), [0, 130, 192]
    alone, shape = cp_gdn.Comm.alone(), {"heads": (1, 2), "dtype": torch.float64, "segments": 1, "backend": "torch"}
    ctx = cp_gdn.build_context(cp_gdn.partition(bounds, 1), alone, **shape)
    leaves = {name: x[name].double().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    leaves["initial_state"] = x["start"].double().requires_grad_()
    o, end = cp_gdn.chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=True)
    grads = torch.autograd.grad([o, end], list(leaves.values()), [x["dout"].double(), x["dend"].double()])
    want = dict(
        zip(("o", "end", "dq", "dk", "dv", "dg", "dbeta", "dstart"), (o.detach(), end.detach(), *grads), strict=True)
    )
    got = emulate(x, LENGTHS, EXACT)
    for name in FLOORS:
        assert float(head_errors(got[name], want[name]).max()) < (1e-8 if name == "dg" else 1e-12), name


@pytest.mark.parametrize("gate", ["none", "model", "A16"])
def test_a_right_kernel_is_within_its_budgets_and_faulty_ones_are_not(
    gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(gate)
    want = emulate(x, LENGTHS, EXACT)
    drawn = budgets(x, want, monkeypatch)
    assert not refused(emulate(x, LENGTHS, KERNEL), want, drawn)
    coarse = noisy(2, "cpu", bits=7)
    faults = {
        "squares of one bit less": replace(KERNEL, squares=coarse, t=coarse),
        "rows of one bit less": replace(KERNEL, rows=coarse),
        "states of one bit less": replace(KERNEL, states=coarse),
    }
    if gate == "none":
        faults["states kept in bf16 from chunk to chunk"] = replace(KERNEL, carried=noisy(3, "cpu"))
    for name, fault in faults.items():
        assert refused(emulate(x, LENGTHS, fault), want, drawn), name


def test_one_wrong_decay_of_one_token_and_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs("model")
    want = emulate(x, LENGTHS, EXACT)
    drawn = budgets(x, want, monkeypatch)
    x["g"][100, 1] -= 0.3
    assert {"o", "dq", "dk", "dv"} <= refused(emulate(x, LENGTHS, KERNEL), want, drawn).keys()


def test_a_result_that_is_no_number_is_refused() -> None:
    drawn = Drawn(errors=torch.full((4, 3), 1e-3, dtype=torch.float64))
    assert not drawn.fault(torch.full((3,), 1e-3), 5e-3)
    assert drawn.fault(torch.tensor([1e-3, float("nan"), 1e-3]), 5e-3)
