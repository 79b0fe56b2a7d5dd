"""The scalar nonlinearities of a Gated DeltaNet layer, written with exp.

NOTE: torch's own sigmoid, silu and softplus are vectorised for dense rows only, so a strided view of the same numbers
gives other bits. exp, log1p and the four operations do not, and a layer's bits must not depend on how its rows are
stored. Each function has its derivative written out: what autograd would make of the formulas is inf * 0 far from zero,
and wrong at zero itself, where |x| has no derivative. Results have the input's dtype and shape; 16-bit inputs are
computed in fp32.
"""

from typing import Any

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _sigmoid(x: Tensor) -> Tensor:
    # exp(-|x|) <= 1: neither side of zero overflows.
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1.0, small) / (1.0 + small)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _sigmoid(_wide(x))
        ctx.save_for_backward(x)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = _sigmoid(_wide(x))
        # 1 - y is sigmoid(-x), which keeps its digits where y rounds to 1.
        return (_wide(dy) * y * _sigmoid(-_wide(x))).to(x.dtype)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = _wide(x)
        ctx.save_for_backward(x)
        return (wide * _sigmoid(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = _wide(x)
        return (_wide(dy) * _sigmoid(wide) * (1.0 + wide * _sigmoid(-wide))).to(x.dtype)


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = _wide(x)
        ctx.save_for_backward(x)
        return (wide.clamp(min=0.0) + torch.log1p(torch.exp(-wide.abs()))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (_wide(dy) * _sigmoid(_wide(x))).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), in (0, 1)."""
    return _Sigmoid.apply(x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _Silu.apply(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow: max(x, 0) + log1p(exp(-|x|))."""
    return _Softplus.apply(x)
