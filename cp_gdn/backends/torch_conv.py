"""The causal convolution of one rank in torch: plain tensors, no messages. The reference of the kernels.

Taps are added in the order j = 0 .. w - 1, each a multiply and then an add, so the bits of y and dx depend neither on
the split nor on T. In fp64 for fp64 inputs, else in fp32. Legend: T local tokens, C channels, w width, R halo rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ConvInput(NamedTuple):
    """What both directions read. x: [T, C], any row stride; halo: [R, C]; weight: [C, w]; bias: [C] or None; taps:
    int64 [T, w], rows of concat(x, halo, zero row); silu: whether it follows."""

    x: Tensor
    halo: Tensor
    weight: Tensor
    bias: Tensor | None
    taps: Tensor
    silu: bool


class TorchConv:
    """The form for every device and dtype."""

    def forward(self, call: ConvInput) -> Tensor:
        """y [T, C]."""
        pre = _pre_activation(call, _extend(call.x, call.halo), call.taps)
        return (pre * _sigmoid(pre) if call.silu else pre).to(call.x.dtype)

    def listed(self, call: ConvInput, dy: Tensor, rows: Tensor) -> Tensor:
        """The gradient before the activation of some rows of dy [T, C], [S, C] fp32 or fp64. rows: int64 [S]."""
        if not len(rows):
            return dy.new_empty(0, dy.shape[1], dtype=_compute_dtype(dy))
        extended = _extend(call.x, call.halo)
        return _before_activation(call, extended, dy.index_select(0, rows), call.taps.index_select(0, rows))

    def backward(
        self, call: ConvInput, dy: Tensor, adj_taps: Tensor, adj_halo: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """dx [T, C], and [w + 1, C] in fp32 or fp64: the columns of dweight, then dbias.

        Args:
            adj_taps: int64 [T, w], rows of concat(own rows, adj_halo, zero row). adj_halo: [R', C], as `listed`.
            out: where dx may be written, any row stride.
        """
        extended = _extend(call.x, call.halo)
        dpre = _before_activation(call, extended, dy, call.taps)
        by_tap = [(dpre * extended.index_select(0, rows).to(dpre.dtype)).sum(0) for rows in call.taps.unbind(1)]
        dx = _tap_sum(_extend(dpre, adj_halo), call.weight, adj_taps)
        return dx.to(call.x.dtype), torch.stack([*by_tap[::-1], dpre.sum(0)])


def _pre_activation(call: ConvInput, extended: Tensor, taps: Tensor) -> Tensor:
    pre = _tap_sum(extended, call.weight, taps)
    return pre if call.bias is None else pre + call.bias.to(pre.dtype)


def _before_activation(call: ConvInput, extended: Tensor, dy: Tensor, taps: Tensor) -> Tensor:
    """dpre of the rows that ``dy`` and ``taps`` have."""
    dpre = dy.to(_compute_dtype(dy)).contiguous()  # a strided sum may round in another order
    return dpre * _silu_slope(_pre_activation(call, extended, taps)) if call.silu else dpre


def _tap_sum(extended: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """sum_j weight[:, w - 1 - j] * extended[taps[:, j]], added in the order of j; [T, C]."""
    dtype = _compute_dtype(extended)
    weight_by_tap = weight.to(dtype).flip(1).unbind(1)
    total = extended.index_select(0, taps[:, 0]).to(dtype) * weight_by_tap[0]
    for j in range(1, len(weight_by_tap)):
        total = total + extended.index_select(0, taps[:, j]).to(dtype) * weight_by_tap[j]
    return total


def _sigmoid(x: Tensor) -> Tensor:
    """Written with exp of a non-positive number: no overflow, and no vector routine whose bits depend on strides."""
    small = torch.exp(-x.abs())
    return torch.where(x < 0, small, 1.0) / (1.0 + small)


def _silu_slope(x: Tensor) -> Tensor:
    gate = _sigmoid(x)
    return gate * (1.0 + x * (1.0 - gate))


def _extend(own: Tensor, halo: Tensor) -> Tensor:
    """concat(own [T, C], halo [R, C], zero row), the rows that taps index."""
    return torch.cat((own, halo, own.new_zeros(1, own.shape[1])))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
