"""Where T lies between `prepare` and the walks: in strips.

T of a chunk is lower triangular. Its 64 rows are four strips of 16, and strip s is kept as wide as the triangle is
there, 16 (s + 1) columns, for every chunk that has a row in it: [strips of kind s, HV, 16, 16 (s + 1)] bf16, the kinds
one after the other. That is 5 KB of a whole chunk in place of 8; what a copy reads beyond a strip's columns is zero.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cp_gdn.backends.launch import strip_map
from cp_gdn.fragments import Ints
from cp_gdn.plan import CHUNK

ROWS, KINDS = 16, CHUNK // 16
_BORDERS = ROWS * np.arange(1, KINDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """The chunks of a call, as the kernels look them up.

    Attributes:
        rows: [N, 2] int32, first row and count. ranks: [N, 4] int32, the number of each strip among those of its kind.
        kinds: how many strips there are of each kind.
    """

    rows: Tensor
    ranks: Tensor
    kinds: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.kinds[0]


def partial_chunks(counts: Ints) -> Ints:
    """[m + 1, 4] of chunks with so many rows, at least one each: those without all strips, and of the chunks before
    each how many lack strip 1, 2 and 3; the last row stands behind all chunks."""
    short = (counts <= ROWS * (KINDS - 1)).nonzero()[0]
    found = np.zeros((len(short) + 1, KINDS), dtype=np.int64)
    found[:-1, 0], found[-1, 0] = short, len(counts)
    np.add.accumulate(counts[short, None] <= _BORDERS, axis=0, out=found[1:, 1:])
    return found


def strips_of(partial: Ints) -> tuple[int, ...]:
    """Strips of each kind, of `partial_chunks`."""
    count, *lacks = partial[-1].tolist()
    return (count, *(count - n for n in lacks))


def strip_bytes(kinds: tuple[int, ...], value_heads: int) -> tuple[int, ...]:
    """Bytes of the strips of each kind."""
    return tuple(2 * ROWS * ROWS * (kind + 1) * count * value_heads for kind, count in enumerate(kinds))


@functools.lru_cache(maxsize=256)
def strip_maps(starts: tuple[int, ...], kinds: tuple[int, ...], value_heads: int) -> bytes:
    """The tensor maps of strips that start at these addresses."""
    pieces = zip(starts, kinds, range(1, KINDS + 1), strict=True)
    return b"".join([strip_map(start, ROWS * count * value_heads, ROWS * width) for start, count, width in pieces])


def in_rows(strips: Sequence[Tensor], chunks: Chunks, tokens: int) -> Tensor:
    """T [T, HV, 64] of ``strips`` [strips, HV, 16, 16 (kind + 1)], one of each kind."""
    found = strips[0].new_zeros((tokens, strips[0].shape[1], CHUNK))
    for (first, count), ranks in zip(chunks.rows.tolist(), chunks.ranks.tolist(), strict=True):
        for kind in range(-(-count // ROWS)):
            height, width = min(ROWS, count - ROWS * kind), ROWS * (kind + 1)
            block = strips[kind][ranks[kind], :, :height].transpose(0, 1)
            found[first + ROWS * kind : first + ROWS * kind + height, :, :width] = block
    return found
