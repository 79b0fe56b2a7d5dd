"""What `layout.partition` refuses: TypeError for a wrong type or dtype, ValueError for a wrong value, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

INT_TYPES = {int, np.int32, np.int64}
_ACCEPTED = "a list or tuple of ints, a numpy int32/int64 array or a torch int32/int64 tensor"


def check_int(name: str, value: Any) -> int:
    """`value` as an int, at least 1."""
    if type(value) not in INT_TYPES:
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an int >= 1")
    if value < 1:
        raise ValueError(f"{name}: got {value}, expected an int >= 1")
    return int(value)


def check_doc_bounds(cu_seqlens: Any) -> np.ndarray:
    """Global document boundaries as int64 [D + 1]; the same values whatever the accepted type was."""
    bounds = _as_array(cu_seqlens)
    if bounds.ndim != 1:
        raise ValueError(f"cu_seqlens: got shape {list(bounds.shape)}, expected one dimension [documents + 1]")
    if len(bounds) == 0:
        raise ValueError("cu_seqlens: got no boundary, expected [0, ...]; a pack without documents is [0]")
    if bounds.dtype not in (np.int32, np.int64):
        raise TypeError(f"cu_seqlens: got dtype {bounds.dtype}, expected {_ACCEPTED}")
    bounds = bounds.astype(np.int64)
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: starts at {bounds[0]}, expected 0; pass the global boundaries on every rank")
    drops = bounds[1:] < bounds[:-1]
    if np.count_nonzero(drops):
        i = int(drops.argmax())
        raise ValueError(f"cu_seqlens: decreases from {bounds[i]} to {bounds[i + 1]} at index {i + 1}")
    return bounds


def _as_array(cu_seqlens: Any) -> np.ndarray:
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, expected {_ACCEPTED}")
        return cu_seqlens.detach().cpu().numpy()
    if isinstance(cu_seqlens, np.ndarray):
        return cu_seqlens
    if not isinstance(cu_seqlens, (list, tuple)):
        raise TypeError(f"cu_seqlens: got {type(cu_seqlens).__name__}, expected {_ACCEPTED}")
    others = {*map(type, cu_seqlens)} - INT_TYPES
    if others:
        names = ", ".join(sorted(kind.__name__ for kind in others))
        raise TypeError(f"cu_seqlens: got elements of type {names}, expected {_ACCEPTED}")
    return _as_int64("cu_seqlens", cu_seqlens)


def _as_int64(name: str, values: Sequence[int]) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{name}: holds an int beyond int64") from None


def check_layout(layout: str, layouts: tuple[str, ...], has_cut_points: bool, has_fragments: bool) -> str:
    """The layout meant by the three arguments together."""
    if layout not in layouts:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(layouts)}")
    if has_fragments:
        if layout in ("contiguous", "zigzag"):
            raise ValueError(f'fragments: got layout "{layout}" too, expected layout="explicit"')
        layout = "explicit"
    elif layout == "explicit":
        raise ValueError("fragments: got None, expected per rank a list of (doc, offset, length)")
    if has_cut_points and layout != "zigzag_per_document":
        raise ValueError(
            f'cut_points: got layout "{layout}", expected layout="zigzag_per_document"; else leave it None'
        )
    return layout


def check_cut_points(cut_points: Any, lengths: np.ndarray, world_size: int) -> np.ndarray:
    """Cut offsets int64 [D, 2W + 1]; `lengths` [D, 1]."""
    shape = (len(lengths), 2 * world_size + 1)
    rows = list(cut_points)
    uneven = [doc for doc, row in enumerate(rows) if np.ndim(row) != 1 or len(row) != shape[1]]
    if len(rows) != shape[0] or uneven:
        got = f"{len(rows)} rows" + (f", row {uneven[0]} is not {shape[1]} offsets" if uneven else "")
        raise ValueError(f"cut_points: got {got}, expected [documents][2 * world_size + 1] = {list(shape)}")
    cuts = np.asarray(rows).reshape(shape)
    if cuts.size and cuts.dtype not in (np.int32, np.int64):
        raise TypeError(f"cut_points: got dtype {cuts.dtype}, expected ints")
    cuts = cuts.astype(np.int64)
    wrong = (cuts[:, 0] != 0) | (cuts[:, -1] != lengths[:, 0]) | (np.diff(cuts, axis=1) < 0).any(axis=1)
    if wrong.any():
        doc = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"cut_points: document {doc} has {cuts[doc].tolist()}, expected offsets from 0 to its length "
            f"{lengths[doc, 0]} that never decrease"
        )
    return cuts


def check_triples(fragments: Any, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Explicit fragments as (rank [F], triples [F, 3] of doc, offset, length), int64."""
    if len(fragments) != world_size:
        raise ValueError(f"fragments: got lists for {len(fragments)} ranks, expected world_size = {world_size}")
    for of_rank in fragments:
        if not isinstance(of_rank, (list, tuple)):
            raise TypeError(f"fragments: got {of_rank!r} for a rank, expected a list of (doc, offset, length)")
    triples = [triple for of_rank in fragments for triple in of_rank]
    for triple in triples:
        if not isinstance(triple, (list, tuple)) or len(triple) != 3 or not {type(x) for x in triple} <= INT_TYPES:
            raise TypeError(f"fragments: got {triple!r}, expected (doc, offset, length), three ints")
    rank = np.repeat(np.arange(world_size), [len(of_rank) for of_rank in fragments])
    return rank, _as_int64("fragments", triples).reshape(-1, 3)


def check_tiling(bounds: np.ndarray, rank: np.ndarray, triples: np.ndarray) -> None:
    """Fragments in chain order own every token of every document exactly once."""
    doc, offset, length = triples.T
    _check_inside(bounds, rank, triples)
    live = length > 0
    rank, doc, offset, end = rank[live], doc[live], offset[live], (offset + length)[live]
    same = np.concatenate(([False], doc[1:] == doc[:-1]))[: len(doc)]
    expected = np.where(same, np.roll(end, 1), 0)
    wrong = np.flatnonzero(offset != expected)
    if len(wrong):
        i = int(wrong[0])
        if offset[i] > expected[i]:
            raise ValueError(f"fragments: nobody owns document {doc[i]} from offset {expected[i]} to {offset[i]}")
        raise ValueError(f"fragments: ranks {rank[i - 1]} and {rank[i]} both own document {doc[i]}, offset {offset[i]}")
    covered = np.zeros(len(bounds) - 1, dtype=np.int64)
    covered[doc] = end  # the last write of a document is its chain's end
    short = np.flatnonzero(covered != np.diff(bounds))
    if len(short):
        d = int(short[0])
        raise ValueError(f"fragments: nobody owns document {d} from offset {covered[d]} to {bounds[d + 1] - bounds[d]}")


def _check_inside(bounds: np.ndarray, rank: np.ndarray, triples: np.ndarray) -> None:
    doc, offset, length = triples.T
    num_docs = len(bounds) - 1
    outside = np.flatnonzero((doc < 0) | (doc >= num_docs) | (offset < 0) | (length < 0))
    if len(outside):
        i = int(outside[0])
        raise ValueError(
            f"fragments: rank {rank[i]} holds {tuple(triples[i].tolist())}, expected a document below {num_docs}, "
            "offset >= 0 and length >= 0"
        )
    doc_length = np.diff(bounds)[doc]
    beyond = np.flatnonzero(offset + length > doc_length)
    if len(beyond):
        i = int(beyond[0])
        raise ValueError(
            f"fragments: rank {rank[i]} holds document {doc[i]} from offset {offset[i]} to {offset[i] + length[i]}, "
            f"past its length {doc_length[i]}"
        )
