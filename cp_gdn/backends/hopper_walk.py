"""Host side of ``kernels/walk.cu``: the recurrence over the chunks of segments, emitting o, B or M."""

import struct
from dataclasses import dataclass

from torch import Tensor

from cp_gdn.backends.hopper_prepare import Prepared
from cp_gdn.backends.launch import Kernel, load, tensor_map

WALK_THREADS = 384
_TAIL = struct.Struct("<13Qf6i60x")
"""What follows the four tensor maps in the kernels' struct, padded to its alignment of 64."""


def load_walk(*, emit_o: bool = False, emit_s: bool = False, has_v: bool = True) -> Kernel:
    """`walk` emitting o, or the states and Vn of every chunk, or nothing: then the end states are B, and without v,
    from the identity, M."""
    return load("walk", {"EMIT_O": int(emit_o), "EMIT_S": int(emit_s), "HAS_V": int(has_v)}, WALK_THREADS)


def load_adjoint(*, emit: bool) -> Kernel:
    """`adjoint` emitting dv and the adjoints of every chunk, or nothing: then the end states are Bt."""
    return load("adjoint", {"EMIT": int(emit)}, WALK_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkInputs:
    """One call's tensors: q, k [T, H, 128] and v (in the mirror dO) [T, HV, 128] bf16, g and beta [T, HV] fp32, and
    what `prepare` made."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    prepared: Prepared
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Where walks start and end.

    Attributes:
        rows: packed [segments, 2] int32, row of ``start`` and row of ``end`` of each segment; -1: from zero, not kept.
        start, end: [.., HV, 128, 128] fp32, or None where no row points there.
        limits: [segments, HV] int32, chunks to skip where the walk starts, from zero then; all of them: the end is
            zero. None: nothing is skipped.
    """

    rows: Tensor
    start: Tensor | None
    end: Tensor | None
    limits: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tapes:
    """What a walk leaves of every chunk for a backward.

    Attributes:
        states: [chunks, HV, 2, 128, 64] bf16 images of the states before the chunks, from ``first_chunk`` on.
        values: [HV, 2, rows, 64] bf16 images of Vn, from token row ``first_row`` on.
    """

    states: Tensor
    values: Tensor
    first_chunk: int
    first_row: int


def walk_rows(
    kernel: Kernel,
    x: WalkInputs,
    tables: tuple[Tensor, Tensor],
    ends: Ends,
    out: Tensor | None,
    tapes: Tapes | None = None,
) -> None:
    """Walk every item; fills the rows of ``ends.end`` and, if it is given, ``out`` [T, HV, 128] bf16.

    Args:
        kernel: `walk`, or `adjoint`, whose struct is the same. tables: chunks, [N, 2] int32 (first row, count), and
            items, [n, 4] int32 (first chunk, chunks, value head, segment), the longest first.
        tapes: what is filled by a kernel that emits states.
    """
    chunks, items = tables
    if not items.shape[0]:
        return
    (tokens, value_heads, _), prepared = x.v.shape, x.prepared
    maps = tensor_map(x.k) + tensor_map(x.q) + tensor_map(x.v) + tensor_map(x.v if out is None else out)
    inputs = (prepared.t, prepared.qk, x.g, prepared.rstd, chunks, items)
    states, values = (None, None) if tapes is None else (tapes.states, tapes.values)
    tensors = (*inputs, ends.rows, ends.limits, ends.start, ends.end, out, states, values)
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    place = (0, 0, 0) if tapes is None else (tapes.first_chunk, tapes.first_row, tapes.values.shape[2])
    sizes = (tokens, value_heads, value_heads // x.q.shape[1], *place)
    kernel.launch((items.shape[0],), maps + _TAIL.pack(*pointers, x.scale, *sizes))
