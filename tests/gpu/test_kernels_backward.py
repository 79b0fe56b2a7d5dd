"""The backward kernels against fp64 on one GPU, within what bf16 operands cost (the tile emulator says how much)."""

import pytest
import torch

from tests.gpu.kernel_cases import CASES, inputs, oracle, run, run_backward
from tests.gpu.tile_emulator import FLOORS, drawn_errors, head_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dstart")


def assert_within_budget(got: dict[str, torch.Tensor], x: dict[str, torch.Tensor], lengths: list[int]) -> None:
    """See `Drawn`."""
    want = oracle(x, lengths)
    for name, drawn in drawn_errors(x, lengths, want, GRADIENTS).items():
        fault = drawn.fault(head_errors(got[name], want[name]), FLOORS[name])
        assert not fault, f"{name}: {fault}"


@pytest.mark.parametrize(("lengths", "gate", "group"), CASES)
def test_gradients_match_fp64_per_head(lengths: list[int], gate: str, group: int) -> None:
    x = inputs(lengths, gate, group)
    got = run_backward(x, lengths)
    assert_within_budget(got, x, lengths)
    assert torch.equal(got["dstart"], got["dstart_without_dv"])
    assert torch.equal(got["end"], run(x, lengths)["end"])


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_gradients_hold_at_the_end_of_beta(beta: float) -> None:
    lengths = [130, 70]
    x = inputs(lengths, "model", 3)
    x["beta"].fill_(beta)
    assert_within_budget(run_backward(x, lengths), x, lengths)


def test_where_nothing_is_written_beta_still_has_its_gradient() -> None:
    """beta = 0: dk and dv are 0 up to the floor of beta, the others as always."""
    lengths = [130, 70]
    x = inputs(lengths, "model", 3)
    x["beta"].zero_()
    got, want = run_backward(x, lengths), oracle(x, lengths)
    for name in ("dk", "dv"):
        assert float(got[name].abs().max()) < 1e-9
    for name, budget in (("dq", 5e-3), ("dg", 8e-3), ("dbeta", 8e-3), ("dstart", 5e-3)):
        assert float(head_errors(got[name], want[name]).max()) < budget, name


@pytest.mark.parametrize("group", [1, 3, 4])
def test_gradients_of_raw_rows_pass_through_their_norms(group: int) -> None:
    lengths = [64, 37, 70]
    x = inputs(lengths, "model", group)
    raw = {name: (x[name] * torch.linspace(0.25, 4, 171, device="cuda")[:, None, None]).bfloat16() for name in "qk"}
    got, want = run_backward({**x, **raw}, lengths, l2norm=True), oracle({**x, **raw}, lengths, l2norm=True)
    for name in GRADIENTS:
        assert float(head_errors(got[name], want[name]).max()) < (1.2e-2 if name in ("dg", "dbeta") else 8e-3), name


def test_a_gate_below_the_floor_has_no_gradient_and_the_first_token_of_a_document_almost_none() -> None:
    lengths = [100, 60]
    x = inputs(lengths, "reset", 3)
    x["start"].zero_()
    dg = run_backward(x, lengths)["dg"]
    assert not dg[80].any()  # -inf
    assert float(dg[[0, 100]].abs().max()) < 1e-6 * float(dg.abs().max())
