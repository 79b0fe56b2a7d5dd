"""Exact bytes before anything runs: what travels, per rank and kind of message, and what a forward keeps.

Everything is a function of the partition and of a layer's shape, so that a plan on paper (`LayerOnPack`) and a context
get the same figures from the same functions. Legend of array shapes: W ranks, F fragments of all ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cp_gdn.a2a.routes import heads_of
from cp_gdn.backends.precision import state_dtype
from cp_gdn.backends.torch_chunked import padded
from cp_gdn.backends.torch_kept import kept_shapes
from cp_gdn.context import Context
from cp_gdn.layout import Partition
from cp_gdn.options import Options
from cp_gdn.plan import Ints, chunk_counts, segment_counts
from cp_gdn.recompute import EXPLICIT, saves_tapes

FORWARD = ("STATE", "STATE_HOME", "HALO")
"""Purposes of a forward's messages; all others are a backward's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one rank sends to and receives from other ranks; what it keeps for itself is not sent."""

    sent: int
    received: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllTraffic:
    """The same of every rank, int64 [W]."""

    sent: Ints
    received: Ints

    def of(self, rank: int) -> Traffic:
        return Traffic(sent=int(self.sent[rank]), received=int(self.received[rank]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerOnPack:
    """One layer's shape on a partition, and what was chosen for it: all that bytes depend on.

    Attributes:
        heads, head_dims, dtype, conv: as for `build_context`.
        exchange: "ring", "a2a" or "none", as `choose_exchange` resolves it.
        p_vector, grid: as `resolve_segments` gives them. options: of the context.
    """

    partition: Partition
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: torch.dtype
    conv: tuple[int, int] | None
    exchange: str
    p_vector: tuple[int, ...]
    grid: int = 0
    options: Options = Options()  # noqa: RUF009 - frozen

    @property
    def world_size(self) -> int:
        return self.partition.world_size

    @property
    def itemsize(self) -> int:
        """Bytes of one number of a state, map or message."""
        return state_dtype(self.dtype).itemsize

    @property
    def state_bytes(self) -> int:
        """One head's state."""
        return padded(self.head_dims[0]) * padded(self.head_dims[1]) * self.itemsize

    @property
    def map_bytes(self) -> int:
        """One head's map."""
        return padded(self.head_dims[0]) ** 2 * self.itemsize

    def owned_heads(self) -> Ints:
        """Value heads that each rank owns in an a2a exchange, [W]."""
        owned = (heads_of(rank, self.world_size, self.heads[1]) for rank in range(self.world_size))
        return np.array([heads.stop - heads.start for heads in owned], dtype=np.int64)

    def per_rank(self, weights: Ints) -> Ints:
        """Sums of a column of the fragment table [F] over each rank, [W]; exact below 2**53."""
        summed = np.bincount(self.partition.table.rank, weights, self.world_size)
        return summed.astype(np.int64)


def saved_bytes(ctx: Context, *, use_qk_l2norm_in_kernel: bool = False, initial_state: bool = False) -> dict[str, int]:
    """Bytes that one call of the op keeps for its backward on this rank.

    Args:
        use_qk_l2norm_in_kernel: as in the call. initial_state: whether one comes in; the kernels keep rows for segments
            that start a document only then, the torch backend always.

    Returns:
        ``inputs`` (q, k, v, g, beta: the caller's own tensors, held, not copied; g and beta counted in
        ``ctx.state_dtype``), ``states`` (entry states), ``maps`` and ``owned_maps`` (0 without ``save_transfer``; the
        latter only with a2a), ``tapes`` (of a call outside of checkpoints). With ``boundary="recompute"`` all but the
        inputs are 0, and initial states that are given are held too.
    """
    layer = layer_of(ctx)
    kept = {name: int(each[ctx.rank]) for name, each in kept_by_rank(layer, l2norm=use_qk_l2norm_in_kernel).items()}
    if ctx.kernels is not None:
        rows = ctx.options.keeps_states * ctx.kernels.saved_rows(initial=initial_state)
        saves = saves_tapes(ctx.options, EXPLICIT, small=True)
        tapes = ctx.kernels.sizes.prepared if saves else 0
        kept |= {"states": rows * ctx.heads[1] * layer.state_bytes, "tapes": tapes}
    return kept


def comm_bytes(ctx: Context, rank: int | None = None) -> dict[str, Traffic]:
    """Bytes of one forward and one backward of a layer on ``rank`` (this one when None), by purpose as `Comm.record`
    lists them.

    ``STATE`` and ``ADJOINT``, with a2a also ``STATE_HOME`` and ``ADJOINT_HOME``; with ``boundary="recompute"`` also
    ``STATE_AGAIN`` (and ``STATE_AGAIN_HOME``) of the backward; ``HALO`` and ``HALO_GRAD`` where the context has a
    convolution. Every rank can ask for every rank, so the slowest link of a pack is known before it runs.
    """
    rank = ctx.rank if rank is None else rank
    if not 0 <= rank < ctx.world_size:
        raise ValueError(f"rank: got {rank}, expected 0 to {ctx.world_size - 1}")
    return {purpose: each.of(rank) for purpose, each in traffic_by_rank(layer_of(ctx)).items()}


def layer_of(ctx: Context) -> LayerOnPack:
    """What the bytes of a context depend on."""
    return LayerOnPack(
        partition=ctx.partition,
        heads=ctx.heads,
        head_dims=ctx.head_dims,
        dtype=ctx.dtype,
        conv=ctx.conv,
        exchange=ctx.exchange,
        p_vector=ctx.segments.p_vector,
        grid=ctx.segments.grid,
        options=ctx.options,
    )


def busiest(traffic: Mapping[str, AllTraffic], *, forward: bool) -> tuple[int, Traffic]:
    """The rank with the most bytes of one direction of a step on its way in or out, and its totals."""
    chosen = [each for purpose, each in traffic.items() if (purpose in FORWARD) == forward]
    if not chosen:
        return 0, Traffic(sent=0, received=0)
    sent, received = (np.sum([getattr(each, name) for each in chosen], axis=0) for name in ("sent", "received"))
    total = AllTraffic(sent=sent, received=received)
    rank = int(np.maximum(total.sent, total.received).argmax())
    return rank, total.of(rank)


# ---- kept ------------------------------------------------------------------------------------------------------------


def kept_by_rank(layer: LayerOnPack, *, l2norm: bool = False) -> dict[str, Ints]:
    """`saved_bytes` of every rank, [W] each."""
    table, (heads, value_heads), (key_dim, value_dim) = layer.partition.table, layer.heads, layer.head_dims
    row = (2 * heads * key_dim + value_heads * value_dim) * layer.dtype.itemsize + 2 * value_heads * layer.itemsize
    p = np.asarray(layer.p_vector, dtype=np.int64)[table.rank]
    chunks = chunk_counts(table.offset, table.length)
    segments, options = segment_counts(chunks, p, layer.grid), layer.options
    has_prev, has_next = table.prev >= 0, table.next >= 0
    maps = np.maximum(segments - ~has_prev - ~has_next, 0)  # a map has tokens of its document on both sides
    composed = has_prev & has_next & (segments > 1) & (not layer.grid)
    owned = np.zeros(layer.world_size, dtype=np.int64)
    if layer.exchange == "a2a":
        owned = _shipped_rows(layer).sum() * layer.owned_heads()
    return {
        "inputs": layer.per_rank(table.length) * row,
        "states": options.keeps_states * layer.per_rank(segments) * value_heads * layer.state_bytes,
        "maps": options.keeps_maps * layer.per_rank(maps + composed) * value_heads * layer.map_bytes,
        "owned_maps": options.keeps_maps * owned * layer.map_bytes,
        "tapes": options.keeps_tapes * layer.per_rank(chunks) * _chunk_tape_bytes(layer, l2norm),
    }


def _chunk_tape_bytes(layer: LayerOnPack, l2norm: bool) -> int:
    """What a forward of the torch backend keeps of one chunk."""
    key_dim, value_dim = map(padded, layer.head_dims)
    state = (layer.heads[1], key_dim, value_dim)
    bound = layer.options.cutoff(layer.dtype) is not None
    shapes = kept_shapes(1, layer.heads[0], state, l2norm=l2norm, bound=bound)
    return sum(math.prod(shape) for shape in shapes.values()) * layer.itemsize


# ---- sent ------------------------------------------------------------------------------------------------------------


def traffic_by_rank(layer: LayerOnPack) -> dict[str, AllTraffic]:
    """`comm_bytes` of every rank."""
    found: dict[str, AllTraffic] = {}
    if layer.exchange == "ring":
        ends, state = hop_ends(layer.partition), layer.heads[1] * layer.state_bytes
        found |= dict.fromkeys(_forward_purposes(layer), _between(layer, *ends, state))
        found["ADJOINT"] = _between(layer, *ends[::-1], state)
    elif layer.exchange == "a2a":
        for purpose, (left, right) in owner_sizes(layer).items():
            found[purpose] = AllTraffic(sent=left * (right.sum() - right), received=right * (left.sum() - left))
    if layer.conv is not None:
        channels, width = layer.conv
        row, adjoint_row = channels * layer.dtype.itemsize, channels * layer.itemsize
        found["HALO"] = _between(layer, *halo_ends(layer.partition, width, reverse=False), row)
        found["HALO_GRAD"] = _between(layer, *halo_ends(layer.partition, width, reverse=True), adjoint_row)
    return found


def hop_ends(part: Partition) -> tuple[Ints, Ints]:
    """Ranks that a state leaves and enters, one entry per hop between ranks; the adjoint's hops are the same, turned
    round."""
    table = part.table
    rows = np.flatnonzero(table.prev >= 0)
    source, target = table.rank[table.prev[rows]], table.rank[rows]
    far = source != target
    return source[far], target[far]


def owner_sizes(layer: LayerOnPack) -> dict[str, tuple[Ints, Ints]]:
    """Messages of an a2a exchange by purpose: rank r sends left[r] * right[j] bytes to rank j, both [W]."""
    table, owned = layer.partition.table, layer.owned_heads()
    crosses, middles = _crosses(layer.partition), _shipped_rows(layer)
    found = {}
    ways = [(purpose, table.prev, True) for purpose in _forward_purposes(layer)]
    for purpose, link, maps in (*ways, ("ADJOINT", table.next, not layer.options.save_transfer)):
        starts = layer.per_rank(crosses & (link < 0))
        rest = layer.per_rank(crosses & (link >= 0))
        shipped = (starts + middles) * layer.state_bytes + maps * middles * layer.map_bytes
        found[purpose] = shipped, owned
        found[f"{purpose}_HOME"] = owned * layer.state_bytes, rest
    return found


def _forward_purposes(layer: LayerOnPack) -> tuple[str, ...]:
    """Of a forward's exchange, and of the same in a backward that runs it again."""
    return ("STATE",) if layer.options.keeps_states else ("STATE", "STATE_AGAIN")


def halo_ends(part: Partition, width: int, *, reverse: bool) -> tuple[Ints, Ints]:
    """Ranks that a row of the convolution's halo leaves and enters, one entry per row.

    A fragment needs the `width` - 1 tokens before it, its mirror (`reverse`) those after it, inside its document.
    """
    table, bounds, steps = part.table, part.bounds, np.arange(width - 1)
    live = np.flatnonzero(table.length > 0)
    start = bounds[table.doc[live]] + table.offset[live]
    order = np.argsort(start)
    edge = start + table.length[live] if reverse else start - 1
    room = bounds[table.doc[live] + 1] - edge if reverse else table.offset[live]
    row, step = np.nonzero(steps < room[:, None])
    key = table.rank[live][row] * max(1, part.num_tokens) + edge[row] + (step if reverse else -step)
    key = np.unique(key)  # two fragments of one rank may need the same token
    target, token = np.divmod(key, max(1, part.num_tokens))
    source = table.rank[live][order][np.searchsorted(start[order], token, side="right") - 1]
    far = source != target
    return source[far], target[far]


def _between(layer: LayerOnPack, source: Ints, target: Ints, item: int) -> AllTraffic:
    sent, received = (np.bincount(end, minlength=layer.world_size) * item for end in (source, target))
    return AllTraffic(sent=sent, received=received)


def _crosses(part: Partition) -> Ints:
    """Whether a fragment belongs to a chain that crosses ranks, [F]."""
    table = part.table
    linked = np.flatnonzero(table.prev >= 0)
    hop = linked[table.rank[table.prev[linked]] != table.rank[linked]]
    docs = np.zeros(part.num_docs, dtype=bool)
    docs[table.doc[hop]] = True
    return docs[table.doc] & (table.length > 0)


def _shipped_rows(layer: LayerOnPack) -> Ints:
    """Offset rows that each rank ships to owners for fragments in the middle of a chain, [W]: one per fragment, or in
    grid mode one per segment."""
    table = layer.partition.table
    middle = _crosses(layer.partition) & (table.prev >= 0) & (table.next >= 0)
    rows = segment_counts(chunk_counts(table.offset, table.length), 1, layer.grid)
    return layer.per_rank(middle * rows)
