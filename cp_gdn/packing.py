"""Views of a packed q|k|v row."""

from torch import Tensor


def packed_qkv_views(qkv: Tensor, heads: tuple[int, int], head_dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Head views of packed rows without a copy.

    Args:
        qkv: [..., T, 2 * H * K + HV * V], the queries, then the keys, then the values of each token.
        heads: (H, HV). head_dims: (K, V).

    Returns:
        q, k [..., T, H, K] and v [..., T, HV, V], strided views of ``qkv``.
    """
    (num_heads, value_heads), (key_dim, value_dim) = heads, head_dims
    keys, values = num_heads * key_dim, value_heads * value_dim
    if qkv.shape[-1] != 2 * keys + values:
        raise ValueError(f"qkv: got {qkv.shape[-1]} channels, expected 2*H*K + HV*V = {2 * keys + values}")
    q, k, v = qkv.split((keys, keys, values), dim=-1)
    return (
        q.unflatten(-1, (num_heads, key_dim)),
        k.unflatten(-1, (num_heads, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
    )
