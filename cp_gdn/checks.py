"""What is refused before anything is computed or sent: arguments of a context, then of a call, tensor by tensor in this
order: device, layout, dtype, shapes.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cp_gdn.backends.precision import state_dtype
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.comm import Comm
from cp_gdn.halo import MAX_WIDTH
from cp_gdn.layout import Partition
from cp_gdn.options import Options

if TYPE_CHECKING:
    from cp_gdn.context import Context

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_tensor(name: str, x: object, ctx: "Context", shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    """Refuse ``x`` unless it is a dense tensor of ``shape`` on the context's device in one of ``dtypes``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
    if x.shape == shape and x.dtype in dtypes and x.device == ctx.device and x.layout is torch.strided:
        return
    if x.device.type != ctx.device.type or (ctx.device.index is not None and x.device.index != ctx.device.index):
        raise ValueError(
            f"{name}: got device {x.device}, expected {ctx.device}; move it, or build a context for its device"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, expected a dense (strided) tensor")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name}: got dtype {x.dtype}, expected {' or '.join(map(str, dtypes))} (the context's dtype decides)"
        )
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected {tuple(shape)}: this rank holds {ctx.num_tokens} of the "
            f"pack's {ctx.partition.num_tokens} tokens (boundaries are those of the whole pack), heads={ctx.heads}, "
            f"head_dims={ctx.head_dims}"
        )


def token_shape(x: object, *dims: int) -> tuple[int, ...]:
    """``dims`` with the leading 1 that a batched tensor carries."""
    return (1, *dims) if isinstance(x, Tensor) and x.dim() == len(dims) + 1 else dims


def check_call(ctx: "Context", tensors: Sequence[Any], initial_state: Any) -> None:
    """Refuse a call whose tensors do not fit the context.

    Args:
        tensors: q, k [1, T, H, K] or [T, H, K], v [.., HV, V], g and beta [.., HV], all alike with or without the 1.
        initial_state: [entry_docs, HV, K, V] or None.
    """
    batched = isinstance(tensors[0], Tensor) and tensors[0].dim() == 4
    wanted = _wanted(ctx.heads, ctx.head_dims, ctx.num_tokens, ctx.dtype, batched)
    device, strided = ctx.device, torch.strided
    for x, (name, shape, dtypes) in zip(tensors, wanted, strict=True):
        fits = isinstance(x, Tensor) and x.shape == shape and x.dtype in dtypes and x.device == device
        if not (fits and x.layout is strided):  # here, since every call comes by before its first launch
            check_tensor(name, x, ctx, shape, dtypes)
    if initial_state is not None:
        check_state("initial_state", initial_state, ctx, len(ctx.plan.entry_docs))


@functools.lru_cache(maxsize=256)
def _wanted(
    heads: tuple[int, int], head_dims: tuple[int, int], tokens: int, dtype: torch.dtype, batched: bool
) -> tuple[tuple[str, tuple[int, ...], tuple[torch.dtype, ...]], ...]:
    """Name, shape and dtypes of q, k, v, g and beta, with the leading 1 if ``batched``."""
    rows, gates = (1, tokens) if batched else (tokens,), tuple(dict.fromkeys((state_dtype(dtype), dtype)))
    (query_heads, value_heads), (key_dim, value_dim) = heads, head_dims
    keys = ((*rows, query_heads, key_dim), (dtype,))
    per_head = ((*rows, value_heads), gates)
    return (
        ("q", *keys),
        ("k", *keys),
        ("v", (*rows, value_heads, value_dim), (dtype,)),
        ("g", *per_head),
        ("beta", *per_head),
    )


def token_rows(tensors: Sequence[Tensor], scale: float, l2norm: bool) -> Inputs:
    """Checked q, k, v, g, beta without the leading 1 that they may carry."""
    q, k, v, g, beta = (t[0] for t in tensors) if tensors[0].dim() == 4 else tensors
    return Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=scale, l2norm=l2norm)


def like_rows(x: Tensor, other: Tensor) -> Tensor:
    """``x`` with the leading 1 where ``other`` has it, else without; the rest of their shapes is the same."""
    if x.dim() == other.dim():
        return x
    return x.unsqueeze(0) if other.dim() > x.dim() else x[0]


def check_choices(ctx: "Context", scale: object, l2norm: object) -> tuple[float, bool]:
    """The scale and the flag of a call; what is not a tensor is refused here."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale: got {type(scale).__name__}, expected a number, or None for K ** -0.5")
    if not isinstance(l2norm, bool):
        raise TypeError(f"use_qk_l2norm_in_kernel: got {type(l2norm).__name__}, expected True or False")
    return ctx.head_dims[0] ** -0.5 if scale is None else float(scale), l2norm


def check_state(name: str, x: object, ctx: "Context", docs: int) -> None:
    """A compact state tensor: one row [HV, K, V] per document, in the dtype of states."""
    if x is not None:
        check_tensor(name, x, ctx, (docs, ctx.heads[1], *ctx.head_dims), (state_dtype(ctx.dtype),))


def check_comm(comm: object) -> Comm:
    """``comm`` itself."""
    if not isinstance(comm, Comm):
        raise TypeError(
            f"comm: got {type(comm).__name__}, expected cp_gdn.Comm(group), or Comm.alone() for one process"
        )
    return comm


def check_context(part: Any, comm: Comm, asked: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(H, HV) and (K, V) of a context's arguments ``asked``; segments and exchange are read where they are resolved."""
    if not isinstance(part, Partition):
        raise TypeError(f"part: got {type(part).__name__}, expected the result of cp_gdn.partition")
    if part.world_size != comm.size:
        raise ValueError(
            f"part: made for world_size={part.world_size}, but comm has {comm.size} ranks; partition for {comm.size}"
        )
    try:
        torch.device(asked["device"])
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device: got {asked['device']!r}, expected a torch device such as 'cpu' or 'cuda:0'"
        ) from None
    if asked["dtype"] not in DTYPES:
        raise TypeError(f"dtype: got {asked['dtype']}, expected {' or '.join(map(str, DTYPES))}")
    if asked["backend"] not in ("auto", "torch", "hopper"):
        raise ValueError(f"backend: got {asked['backend']!r}, expected 'auto', 'torch' or 'hopper'")
    if not isinstance(asked["options"], Options):
        raise TypeError(f"options: got {type(asked['options']).__name__}, expected cp_gdn.Options")
    if asked["conv"] is not None:
        channels, width = _check_pair("conv", asked["conv"], "(channels, width), or None without a convolution")
        if width > MAX_WIDTH:
            raise ValueError(f"conv: got {(channels, width)}, expected a width of 1 to {MAX_WIDTH}")
    return check_heads(asked["heads"], asked["head_dims"])


def check_heads(heads: object, head_dims: object) -> tuple[tuple[int, int], tuple[int, int]]:
    """(H, HV) with HV a multiple of H, and (K, V), all positive."""
    heads = _check_pair("heads", heads, "(H, HV)")
    if heads[1] % heads[0]:
        raise ValueError(f"heads: got {heads}, expected the value heads to be a multiple of the query/key heads")
    return heads, _check_pair("head_dims", head_dims, "(K, V)")


def _check_pair(name: str, pair: object, meaning: str) -> tuple[int, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(n) is int and n > 0 for n in pair):
        raise ValueError(f"{name}: got {pair!r}, expected two positive ints {meaning}")
    return pair[0], pair[1]
