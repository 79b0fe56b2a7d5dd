"""sigmoid, silu and softplus: values, derivatives, extremes, and bits that do not depend on strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cp_gdn import gates

FUNCTIONS = {
    "sigmoid": (gates.sigmoid, torch.sigmoid),
    "silu": (gates.silu, torch.nn.functional.silu),
    "softplus": (gates.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EXTREMES = (-1e4, -200.0, -50.0, -1e-3, -0.0, 0.0, 1e-3, 50.0, 200.0, 1e4)

Function = Callable[[Tensor], Tensor]

every_function = pytest.mark.parametrize(("ours", "torchs"), FUNCTIONS.values(), ids=FUNCTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradient(function: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(x).sum(), x)
    return grad


@every_function
def test_values_and_slopes_are_those_of_torch_in_fp64(ours: Function, torchs: Function) -> None:
    x = torch.cat([torch.linspace(-40.0, 40.0, 1001, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    assert torch.allclose(ours(x), torchs(x), rtol=1e-14, atol=0)
    assert torch.allclose(gradient(ours, x), gradient(torchs, x), rtol=1e-12, atol=1e-15)


@every_function
def test_the_slope_is_that_of_finite_differences_at_zero_too(ours: Function, torchs: Function) -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (x,))


@every_function
@every_dtype
def test_nothing_overflows_far_from_zero(ours: Function, torchs: Function, dtype: torch.dtype) -> None:
    x = torch.tensor(EXTREMES, dtype=dtype)
    value, slope = ours(x), gradient(ours, x)
    assert value.dtype == slope.dtype == dtype
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()


def test_the_slope_of_sigmoid_keeps_its_digits_where_the_value_rounds_to_one() -> None:
    slope = gradient(gates.sigmoid, torch.tensor([30.0], dtype=torch.float32))
    assert torch.allclose(slope.double(), torch.exp(torch.tensor([-30.0], dtype=torch.float64)), rtol=1e-6, atol=0)


@every_function
@every_dtype
def test_a_strided_view_gives_the_bits_of_its_copy(ours: Function, torchs: Function, dtype: torch.dtype) -> None:
    rows = (4.0 * torch.randn(257, 24, generator=torch.Generator().manual_seed(0))).to(dtype)
    for view in (rows[:, 3:20], rows[:, 1:2], rows[5:9, 5:13], rows.T):
        copy = view.contiguous()
        assert torch.equal(ours(view), ours(copy))
        assert torch.equal(gradient(ours, view), gradient(ours, copy))
