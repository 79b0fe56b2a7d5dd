"""Host side of ``kernels/walk.cu`` and ``kernels/adjoint.cu``: the recurrence over the chunks of segments."""

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cp_gdn.backends.hopper_prepare import Prepared
from cp_gdn.backends.hopper_slabs import STATE_BYTES, VALUE_BYTES
from cp_gdn.backends.launch import Kernel, load, tensor_map

WALK_THREADS = 384
_CALL, _LAUNCH = struct.Struct("<6Qf4i4x"), struct.Struct("<11Qfi24x")
"""What follows the tensor maps in the kernels' struct: of a call, of a launch, padded to its alignment of 64."""


def load_walk(*, emit_o: bool = False, emit_s: bool = False) -> Kernel:
    """`walk` emitting o, or the states and Vn of every chunk, or neither: then it makes summaries."""
    return load("walk", {"EMIT_O": int(emit_o), "EMIT_S": int(emit_s)}, WALK_THREADS)


def load_adjoint(*, emit: bool) -> Kernel:
    """`adjoint` emitting dv and the adjoints of every chunk, or nothing: then it makes summaries."""
    return load("adjoint", {"EMIT": int(emit)}, WALK_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkInputs:
    """One call's tensors: q, k [T, H, 128] and v (in the mirror dO) [T, HV, 128] bf16, g and beta [T, HV] fp32, what
    `prepare` made (whose norms count where q and k are raw), the output of a walk that has one [T, HV, 128] bf16 (heads
    dense), and all of it as the kernels take it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    prepared: Prepared
    out: Tensor
    scale: float
    l2norm: bool = False
    call: bytes = field(init=False)

    def __post_init__(self) -> None:
        out, made = self.out, self.prepared
        maps = b"".join([tensor_map(x) for x in (self.k, self.q, self.v, out)]) + made.t_maps
        heads, value_heads = made.heads
        tables = (made.chunks.rows.data_ptr(), made.chunks.ranks.data_ptr())
        pointers = (made.at[0], self.g.data_ptr(), self.rstd, *tables, out.data_ptr())
        sizes = (self.v.shape[0], value_heads, value_heads // heads, out.stride(0))
        object.__setattr__(self, "call", maps + _CALL.pack(*pointers, self.scale, *sizes))

    def mirrored(self, dout: Tensor, dv: Tensor) -> "WalkInputs":
        """For walks of adjoints: dO in place of v, which leave dv."""
        return WalkInputs(
            q=self.q,
            k=self.k,
            v=dout,
            g=self.g,
            beta=self.beta,
            prepared=self.prepared,
            out=dv,
            scale=self.scale,
            l2norm=self.l2norm,
        )

    @property
    def rstd(self) -> int:
        """Address of the norms of raw q and k, else 0."""
        return self.prepared.at[2] if self.l2norm else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """Blocks of a walk.

    Attributes:
        items: [n, 4] int32, see `hopper_items`, the longest first. segments: packed [s, 4] int32, first chunk, chunks,
            row of the map, 0. places: [n, 2] int32, see `hopper_slabs`, of walks that leave tapes.
    """

    items: Tensor
    segments: Tensor
    places: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Where walks start and end.

    Attributes:
        rows: packed [segments, 2] int32, row of ``start`` and row of ``end`` of each segment; -1: from zero, not kept.
        start, end: [.., HV, 128, 128] fp32, or None where no row points there.
    """

    rows: Tensor
    start: Tensor | None
    end: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summaries:
    """What summaries know beside.

    Attributes:
        maps: [maps, HV, 128, 128] fp32, filled by items that ask for a map; None without such items.
        cutoff: the decay bound that leaves chunks out; None: nothing is left out.
        dropped: [maps, HV] int32, filled: 1 where a map is zero, else 0, by items that make a map, and by those of
            adjoints whose segments have one; None without a cutoff.
    """

    maps: Tensor | None
    cutoff: float | None
    dropped: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabTapes:
    """Memory of what walks leave for `grad`, images of chunks by place: states and adjoints, then Vn.

    ``zero``: which flags of the steps hold, see `hopper_spread.Spread`.
    """

    room: Tensor
    places: int
    zero: int

    @property
    def states(self) -> int:
        """Address of the states before the chunks."""
        return self.room.data_ptr()

    @property
    def adjoints(self) -> int:
        """Address of the adjoints after the chunks."""
        return self.room.data_ptr() + self.places * STATE_BYTES

    def before_adjoints(self, shape: tuple[int, ...]) -> Tensor:
        """fp32 scratch where adjoints will be, until a walk leaves some there."""
        first, count = self.places * STATE_BYTES, torch.Size(shape).numel()
        return self.room[first : first + 4 * count].view(torch.float32).view(shape)

    @property
    def values(self) -> int:
        """Address of Vn."""
        return self.room.data_ptr() + 2 * self.places * STATE_BYTES


def slab_bytes(places: int) -> int:
    """Of `SlabTapes` of so many chunks and value heads."""
    return places * (2 * STATE_BYTES + VALUE_BYTES)


def summarize(kernel: Kernel, x: WalkInputs, work: Items, ends: Ends, found: Summaries) -> None:
    """Offsets into the rows of ``ends.end``, maps into the rows that ``work.segments`` names."""
    bound = 0 if found.cutoff is None else x.prepared.at[1]
    _launch(kernel, x, work, ends, (0, 0, bound, _at(found.maps), _at(found.dropped), found.cutoff or 0.0))


def replay(kernel: Kernel, x: WalkInputs, work: Items, ends: Ends, tapes: tuple[int, int] = (0, 0)) -> None:
    """Walk every item; fills the rows of ``ends.end``, the output ``x.out`` where the kernel has one, and
    ``tapes``, the addresses of states and Vn."""
    _launch(kernel, x, work, ends, (*tapes, 0, 0, 0, 0.0))


Others = tuple[int, int, int, int, int, float]


def _launch(kernel: Kernel, x: WalkInputs, work: Items, ends: Ends, others: Others) -> None:
    count = work.items.shape[0]  # len of a tensor is ten times as slow
    if not count:
        return
    tables = (work.items.data_ptr(), ends.rows.data_ptr(), work.segments.data_ptr())
    pointers = (*tables, _at(ends.start), _at(ends.end), _at(work.places))
    kernel.launch((count,), x.call + _LAUNCH.pack(*pointers, *others, x.prepared.chunks.count))


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
