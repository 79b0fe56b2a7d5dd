"""Host side of ``kernels/fold.cu`` and ``kernels/limits.cu``: hops on summaries, what the decay bound leaves out."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_gdn.backends.hopper_hops import KernelHops
from cp_gdn.backends.launch import Kernel, load, on_device

FOLD_THREADS, FOLD_BLOCKS = 256, 8
"""A block takes 16 of the 128 columns of the states of one chain and head."""
LIMIT_WARPS = 8
_FOLD, _LIMITS = struct.Struct("<6Qi4x"), struct.Struct("<6Qf3i")


def load_fold(*, adjoint: bool) -> Kernel:
    """`fold` with the maps as they are, or transposed."""
    return load("fold", {"TRANSPOSED": int(adjoint)}, FOLD_THREADS, 0)


def fold(
    hops: KernelHops,
    states: Tensor,
    maps: Tensor,
    offsets: Tensor | None,
    *,
    adjoint: bool,
    dropped: Tensor | None = None,
) -> None:
    """`affine.run` in one launch; all buffers [.., HV, 128, 128] fp32, dense."""
    if not (hops.num_chains and states.shape[1]):  # an owner may have no heads
        return
    for name, x in (("states", states), ("maps", maps), ("offsets", offsets)):
        if x is not None and not (x.is_contiguous() and x.dtype == torch.float32):
            raise ValueError(f"{name}: got {x.dtype} with strides {x.stride()}, expected dense torch.float32")
    pointers = [0 if x is None else x.data_ptr() for x in (states, maps, offsets, hops.hops, hops.chains, dropped)]
    with on_device(states.device.index):
        kernel = load_fold(adjoint=adjoint)
        kernel.launch((FOLD_BLOCKS * hops.num_chains, states.shape[1]), _FOLD.pack(*pointers, states.shape[1]))


def load_limits() -> Kernel:
    """`limits`."""
    return load("limits", {}, 32 * LIMIT_WARPS, 0)


def limits(kernel: Kernel, bound: Tensor, segments: Tensor, found: Sequence[Tensor], cutoff: float) -> None:
    """Chunks that the decay bound leaves out, per segment and head.

    Args:
        bound: [HV, N] fp32, of `prepare`. segments: packed [n, 4] int32, first chunk, chunks, map row (-1: none), 0.
        found: int32, filled: [n, HV] chunks to skip at the start of a summary, at the end of an adjoint summary, and
            all of them where the map is zero, else 0; [maps, HV], 1 where a segment's own map is zero, else 0.
    """
    (value_heads, chunks), count = bound.shape, found[0].shape[0]
    params = (bound.data_ptr(), segments.data_ptr(), *(x.data_ptr() for x in found), cutoff, chunks, count, value_heads)
    kernel.launch((-(-count * value_heads // LIMIT_WARPS),), _LIMITS.pack(*params))
