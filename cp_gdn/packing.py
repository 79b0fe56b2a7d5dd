"""Views of a packed q|k|v row, and their gradients side by side again."""

from typing import Any

import torch
from torch import Tensor


def packed_qkv_views(qkv: Tensor, heads: tuple[int, int], head_dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Head views of packed rows without a copy.

    Where their gradients come side by side, as the op on the kernels writes them, the gradient of the rows is that
    memory; otherwise they are put together.

    Args:
        qkv: [..., T, 2 * H * K + HV * V], the queries, then the keys, then the values of each token.
        heads: (H, HV). head_dims: (K, V).

    Returns:
        q, k [..., T, H, K] and v [..., T, HV, V], strided views of ``qkv``.
    """
    (num_heads, value_heads), (key_dim, value_dim) = heads, head_dims
    channels = 2 * num_heads * key_dim + value_heads * value_dim
    if qkv.shape[-1] != channels:
        raise ValueError(f"qkv: got {qkv.shape[-1]} channels, expected 2*H*K + HV*V = {channels}")
    if torch.compiler.is_compiling():  # which cannot ask where a gradient lies
        return split_heads(qkv, heads, head_dims)
    views: tuple[Tensor, Tensor, Tensor] = _Views.apply(qkv, heads, head_dims)
    return views


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: tuple[int, int], head_dims: tuple[int, int]) -> tuple[Tensor, ...]:
        return split_heads(qkv, heads, head_dims)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
        return joined(dq, dk, dv), None, None


def split_heads(qkv: Tensor, heads: tuple[int, int], head_dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The views alone."""
    (num_heads, value_heads), (key_dim, value_dim) = heads, head_dims
    keys, values = num_heads * key_dim, value_heads * value_dim
    q, k, v = qkv.split((keys, keys, values), dim=-1)
    return (
        q.unflatten(-1, (num_heads, key_dim)),
        k.unflatten(-1, (num_heads, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
    )


def are_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the rows of q, k and v [..., T, heads, dim] lie side by side in one piece of memory."""
    place = q.storage_offset()
    if k.storage_offset() != place + q.shape[-2] * q.shape[-1]:
        return False  # tensors of their own, at once
    for x in (q, k, v):
        beside = x.storage_offset() == place and x.stride()[:-2] == q.stride()[:-2]
        dense = x.stride()[-2:] == (x.shape[-1], 1)
        # the storage itself, not its address: under a compiler there is none
        if not (beside and dense and x.untyped_storage()._cdata == q.untyped_storage()._cdata):
            return False
        place += x.shape[-2] * x.shape[-1]
    return True


def joined(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Gradients of head views as rows [..., T, channels]; the same memory where they are packed already."""
    if are_packed(dq, dk, dv):
        channels = sum(x.shape[-2] * x.shape[-1] for x in (dq, dk, dv))
        return dq.as_strided((*dq.shape[:-2], channels), (*dq.stride()[:-2], 1), dq.storage_offset())
    return torch.cat([x.flatten(-2) for x in (dq, dk, dv)], dim=-1)
