"""The kernels beside the committed errors of the emulator, in every case of the budgets' table."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import cp_gdn
from tests.gpu.emulator_table import CASES, DRAWS, GATES, GROUP, TABLE, block
from tests.gpu.tile_emulator import EXACT, FACTOR, FLOORS, emulate, head_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

NEAR = 1e-3
SEGMENTS = {192: 1, 4_096: 4, 65_536: 22}


def committed(gate: str, tokens: int) -> dict[str, Any]:
    (found,) = [row for row in json.loads(TABLE.read_text())["rows"] if (row["gate"], row["tokens"]) == (gate, tokens)]
    return found


def on_kernels(x: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    asked = {"heads": (len(CASES), len(CASES) * GROUP), "backend": "hopper", "segments": SEGMENTS[tokens]}
    ctx = cp_gdn.build_context(
        cp_gdn.partition([0, tokens], 1, "contiguous"), cp_gdn.Comm.alone(), device="cuda", **asked
    )
    leaves = {name: x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    leaves["initial_state"] = x["start"].requires_grad_()
    o, end = cp_gdn.chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=True)
    grads = torch.autograd.grad([o, end], list(leaves.values()), [x["dout"], x["dend"]])
    found = {"o": o.detach(), "end": end.detach()}
    return found | dict(zip(("dq", "dk", "dv", "dg", "dbeta", "dstart"), grads, strict=True))


def excess(gate: str, tokens: int) -> dict[str, Tensor]:
    """Errors per head over their budgets: 1e-3 more than the emulator's usual one, or 1.15 x its largest draw where
    that is more; gradients of gates and beta may always have their floor."""
    row, x, over = committed(gate, tokens), block(gate, tokens, "cuda"), {}
    got = on_kernels(x, tokens)
    want = emulate({name: t.detach() for name, t in x.items()}, [tokens], EXACT)
    for name, floor in FLOORS.items():
        usual, largest = (
            torch.tensor(row[key][name], dtype=torch.float64, device="cuda") for key in ("usual", "largest")
        )
        if name in ("dg", "dbeta"):  # some heads' errors are one Gaussian: draws of all cases count
            largest, least = largest.amax(), usual.clamp(min=floor)
        else:
            largest, least = largest.repeat_interleave(len(usual) // len(CASES)), usual + NEAR
        budget = torch.maximum(least, FACTOR * largest * usual)
        over[name] = head_errors(got[name], want[name]) / budget
    return over


@pytest.mark.parametrize("tokens", sorted(DRAWS))
@pytest.mark.parametrize("gate", GATES)
def test_errors_are_within_1e3_of_the_emulators(gate: str, tokens: int) -> None:
    for name, over in excess(gate, tokens).items():
        assert bool((over <= 1).all()), f"{name}: {over.tolist()}"
