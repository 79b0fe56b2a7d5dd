"""Causal softmax attention over a sharded batch: every rank gathers keys and values, documents stay apart.

Any device, layout and documents. Nothing is kept for the backward but the local tensors: it gathers again, and sends
each rank its rows of the gradients, which are added in rank order.
Legend: T local tokens, N tokens of the batch, H query heads, KV key/value heads, D and DV head dims, R rows and C keys
of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_gdn.comm import Comm
from cp_gdn.integrations.pack import Pack

BLOCK_ROWS = 1024
"""Queries of one block: its mask over 262,144 keys takes 256 MiB, and it still fills a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Local rows whose documents lie near each other, and the tokens of the batch that they may look at."""

    rows: slice
    keys: slice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """What the attention of a pack reads.

    Attributes:
        counts: tokens of each rank. gather_rows, rank_order: int64 [N], as in `Partition`.
        token_ids, doc_starts: each local token's index in the batch and that of its document's first token, int64 [T].
    """

    comm: Comm
    counts: tuple[int, ...]
    gather_rows: Tensor
    rank_order: Tensor
    token_ids: Tensor
    doc_starts: Tensor
    blocks: tuple[Block, ...]

    def mask(self, block: Block) -> Tensor:
        """What each row of a block sees of its keys, bool [R, C]: its own document, up to itself."""
        keys = torch.arange(block.keys.start, block.keys.stop, device=self.token_ids.device)
        since, upto = self.doc_starts[block.rows, None], self.token_ids[block.rows, None]
        return (keys >= since) & (keys <= upto)


def build_tables(pack: Pack, block_rows: int = BLOCK_ROWS) -> Tables:
    """The tables of a pack, on its device, with blocks of at most `block_rows` rows."""
    part, rank = pack.partition, pack.comm.rank
    ids = part.token_ids(rank)
    starts = ids - part.positions(rank)
    arrays = (part.gather_rows, part.rank_order, ids, starts)
    gather_rows, rank_order, token_ids, doc_starts = (torch.as_tensor(x, device=pack.device) for x in arrays)
    return Tables(
        comm=pack.comm,
        counts=tuple(part.local_tokens(r) for r in range(part.world_size)),
        gather_rows=gather_rows,
        rank_order=rank_order,
        token_ids=token_ids,
        doc_starts=doc_starts,
        blocks=tuple(cut_blocks(ids, starts, block_rows)),
    )


def cut_blocks(ids: np.ndarray, starts: np.ndarray, limit: int) -> Iterator[Block]:
    """Blocks of at most `limit` rows, cut where tokens lie more than that apart. ids, starts: int64 [T].

    Short documents share a block; a gap inside one costs at most `limit` keys that nobody looks at.
    """
    # ids 0 1 2 | 90 91 of one document, limit 8: rows 0:3 see keys 0:3, rows 3:5 see keys 0:92
    jumps = np.flatnonzero(np.abs(np.diff(ids) - 1) > limit) + 1
    for first, last in pairwise([0, *jumps.tolist(), len(ids)]):
        for row in range(first, last, limit):
            rows = slice(row, min(row + limit, last))
            yield Block(rows=rows, keys=slice(int(starts[rows].min()), int(ids[rows].max()) + 1))


def attend(q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float) -> Tensor:
    """o [T, H, DV] of q [T, H, D], k [T, KV, D] and v [T, KV, DV], all of this rank's tokens. Every rank calls it."""
    o: Tensor = _Gathered.apply(q, k, v, tables, scale)
    return o


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float) -> Tensor:
        with tables.comm.guard("attention"):
            keys, values = _gather(k, v, tables)
            o = q.new_empty(*q.shape[:2], v.shape[2])
            for block in tables.blocks:
                part = (q[block.rows], keys[block.keys], values[block.keys])
                o[block.rows] = _attend_block(*part, tables.mask(block), scale)
        node.save_for_backward(q, k, v)
        node.tables, node.scale = tables, scale
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = node.saved_tensors
        tables: Tables = node.tables
        with tables.comm.guard("attention backward"):
            keys, values = _gather(k, v, tables)
            # Blocks and ranks add up in fp32 at least.
            wide = torch.promote_types(k.dtype, torch.float32)
            dq, dkeys, dvalues = torch.empty_like(q), *(torch.zeros_like(x, dtype=wide) for x in (keys, values))
            for block in tables.blocks:
                part = (q[block.rows], keys[block.keys], values[block.keys])
                grads = _block_gradients(part, grad[block.rows], tables.mask(block), node.scale)
                dq[block.rows] = grads[0]
                dkeys[block.keys] += grads[1]
                dvalues[block.keys] += grads[2]
            dk, dv = _scatter(dkeys, dvalues, tables)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _gather(k: Tensor, v: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Keys [N, KV, D] and values [N, KV, DV] of the batch in its own order."""
    rows = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    rows = tables.comm.all_gather("KEYS", rows, tables.counts).index_select(0, tables.gather_rows)
    return _split(rows, k, v)


def _scatter(dkeys: Tensor, dvalues: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """This rank's rows of the sum over ranks of the gradients of all keys and values."""
    rows = torch.cat((dkeys.flatten(1), dvalues.flatten(1)), dim=1).index_select(0, tables.rank_order)
    width, own = rows.shape[1], tables.counts[tables.comm.rank]
    send, receive = [n * width for n in tables.counts], [own * width] * len(tables.counts)
    parts = tables.comm.all_to_all("KEYS_GRAD", rows.flatten(), send, receive).wait()
    total, *others = parts.view(len(tables.counts), own, width)
    for part in others:
        total = total + part
    return _split(total, dkeys, dvalues)


def _split(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of keys | values as two tensors with the heads of k and v."""
    keys, values = rows.split((k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]), dim=1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


def _attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """o [R, H, DV] of q [R, H, D], k [C, KV, D], v [C, KV, DV], mask [R, C]; head h looks at key head h // (H / KV)."""
    groups = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (k.shape[1], groups)).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k, v))
    # NOTE: the operator itself; the name in torch.nn.functional is what torch's context parallelism replaces.
    o: Tensor = torch.ops.aten.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=scale)
    return o.permute(2, 0, 1, 3).flatten(1, 2)


def _block_gradients(part: tuple[Tensor, ...], grad: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k and v of a block, by running it again."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in part)
        return torch.autograd.grad(_attend_block(q, k, v, mask, scale), (q, k, v), grad)
