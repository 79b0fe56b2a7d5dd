"""Exact bytes of a context, before anything runs: what travels, per rank and kind of message, and what a forward
keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from cp_gdn.a2a.routes import OwnerRoutes, heads_of
from cp_gdn.chains import chain_order
from cp_gdn.context import Context
from cp_gdn.halo import build_halo


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one rank sends to and receives from other ranks; what it keeps for itself is not sent."""

    sent: int
    received: int


def saved_bytes(ctx: Context) -> dict[str, int]:
    """Bytes that one call of the op keeps for its backward on this rank.

    Returns:
        ``inputs`` (q, k, v, g, beta: the caller's own tensors, held, not copied; g and beta counted in
        ``ctx.state_dtype``), ``states`` (entry states), ``maps`` and ``owned_maps`` (0 without ``save_transfer``; the
        latter only with a2a).
    """
    tokens, (heads, value_heads), (key_dim, value_dim) = ctx.num_tokens, ctx.heads, ctx.head_dims
    itemsize = ctx.state_dtype.itemsize
    rows = tokens * (2 * heads * key_dim + value_heads * value_dim) * ctx.dtype.itemsize
    keep, owner = ctx.options.save_transfer, ctx.routes.forward_owner
    owned = 0 if owner is None else prod(owner.owned_shape(ctx.rank, ctx.world_size, ctx.state_shape))
    return {
        "inputs": rows + 2 * tokens * value_heads * itemsize,
        "states": len(ctx.plan.segments) * prod(ctx.state_shape) * itemsize,
        "maps": keep * ctx.schedule.num_maps * ctx.state_shape[0] * ctx.state_shape[1] ** 2 * itemsize,
        "owned_maps": keep * owned * itemsize,
    }


def comm_bytes(ctx: Context, rank: int | None = None) -> dict[str, Traffic]:
    """Bytes of one forward and one backward of a layer on ``rank`` (this one when None), by purpose as `Comm.record`
    lists them.

    ``STATE`` and ``ADJOINT``, with a2a also ``STATE_HOME`` and ``ADJOINT_HOME``; ``HALO`` and ``HALO_GRAD`` where the
    context has a convolution. Every rank can ask for every rank, so the slowest link of a pack is known before it runs.
    """
    rank = ctx.rank if rank is None else rank
    if not 0 <= rank < ctx.world_size:
        raise ValueError(f"rank: got {rank}, expected 0 to {ctx.world_size - 1}")
    found: dict[str, Traffic] = {}
    if ctx.exchange == "ring":
        found |= {"STATE": _ring(ctx, rank, reverse=False), "ADJOINT": _ring(ctx, rank, reverse=True)}
    elif ctx.exchange == "a2a":
        forward, adjoint = ctx.routes.forward_owner, ctx.routes.adjoint_owner
        assert forward is not None and adjoint is not None  # noqa: PT018
        found["STATE"], found["STATE_HOME"] = _owners(ctx, forward, rank, maps=True)
        found["ADJOINT"], found["ADJOINT_HOME"] = _owners(ctx, adjoint, rank, maps=not ctx.options.save_transfer)
    if ctx.conv is not None:
        channels, width = ctx.conv
        plan = build_halo(ctx.partition, rank, width)
        found["HALO"] = _rows(plan.forward.send_counts, plan.forward.recv_counts, channels * ctx.dtype.itemsize)
        found["HALO_GRAD"] = _rows(
            plan.adjoint.send_counts, plan.adjoint.recv_counts, channels * ctx.state_dtype.itemsize
        )
    return found


def _rows(sent: Sequence[int], received: Sequence[int], row: int) -> Traffic:
    return Traffic(sent=sum(sent) * row, received=sum(received) * row)


def _ring(ctx: Context, rank: int, *, reverse: bool) -> Traffic:
    """One state per hop between ranks."""
    table, order = ctx.partition.table, chain_order(ctx.partition.table, reverse=reverse)
    hops = np.flatnonzero(order.before >= 0)
    source, target = table.rank[order.before[hops]], table.rank[hops]
    state = prod(ctx.state_shape) * ctx.state_dtype.itemsize
    leaves, enters = ((source == rank) & (target != rank)).sum(), ((target == rank) & (source != rank)).sum()
    return Traffic(sent=int(leaves) * state, received=int(enters) * state)


def _owners(ctx: Context, routes: OwnerRoutes, rank: int, *, maps: bool) -> tuple[Traffic, Traffic]:
    """Summaries to the owners, and states home."""
    world, (value_heads, key_dim, value_dim) = ctx.world_size, ctx.state_shape
    width = [h.stop - h.start for h in (heads_of(j, world, value_heads) for j in range(world))]
    state = key_dim * value_dim * ctx.state_dtype.itemsize
    square = key_dim * key_dim * ctx.state_dtype.itemsize if maps else 0
    per_head = [(h + r) * state + r * square for h, r in zip(routes.num_heads, routes.num_rows, strict=True)]
    others = [j for j in range(world) if j != rank]
    out = Traffic(
        sent=per_head[rank] * sum(width[j] for j in others), received=width[rank] * sum(per_head[j] for j in others)
    )
    replies = routes.num_replies
    home = Traffic(
        sent=width[rank] * state * sum(replies[j] for j in others),
        received=replies[rank] * state * sum(width[j] for j in others),
    )
    return out, home
