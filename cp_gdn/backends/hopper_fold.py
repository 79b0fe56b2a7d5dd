"""Host side of ``kernels/fold.cu``: hops on summaries."""

import struct

import torch
from torch import Tensor

from cp_gdn.backends.hopper_hops import KernelHops
from cp_gdn.backends.launch import Kernel, load, on_device

FOLD_THREADS, FOLD_BLOCKS = 256, 8
"""A block takes 16 of the 128 columns of the states of one chain and head."""
_FOLD = struct.Struct("<6Qi4x")


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
    buffers = [0 if x is None else x.data_ptr() for x in (states, maps, offsets, dropped)]
    tables = hops.table.data_ptr(), hops.chains.data_ptr() + 4 * hops.first_chain
    params = _FOLD.pack(*buffers[:3], *tables, buffers[3], states.shape[1])
    with on_device(states.device.index):
        kernel = load_fold(adjoint=adjoint)
        kernel.launch((FOLD_BLOCKS * hops.num_chains, states.shape[1]), params)
