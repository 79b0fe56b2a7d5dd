"""Strips of T: every row of every chunk has one place, and comes back from it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_gdn.backends.hopper_strips import KINDS, ROWS, Chunks, in_rows, partial_chunks, strip_bytes, strips_of
from cp_gdn.plan import CHUNK
from tests.spread import ranks_of, table


def chunks_of(counts: list[int]) -> Chunks:
    rows = [[int(first), count] for first, count in zip(np.cumsum(counts) - counts, counts, strict=True)]
    return Chunks(rows=table(rows, 2), ranks=table(ranks_of(counts), 4), kinds=kinds_of(counts))


def kinds_of(counts: list[int]) -> tuple[int, ...]:
    return strips_of(partial_chunks(np.array(counts, dtype=np.int64)))


@given(st.lists(st.integers(1, CHUNK), max_size=12), st.integers(1, 3))
def test_a_triangle_comes_back_from_its_strips(counts: list[int], heads: int) -> None:
    chunks, tokens = chunks_of(counts) if counts else chunks_of([]), sum(counts)
    wanted = torch.randn(tokens, heads, CHUNK)
    strips = [torch.full((n, heads, ROWS, ROWS * (kind + 1)), torch.nan) for kind, n in enumerate(chunks.kinds)]
    for (first, count), ranks in zip(chunks.rows.tolist(), chunks.ranks.tolist(), strict=True):
        for row in range(count):
            kind = row // ROWS
            wanted[first + row, :, row + 1 :] = 0
            strips[kind][ranks[kind], :, row % ROWS] = wanted[first + row, :, : ROWS * (kind + 1)]
    assert torch.equal(in_rows(strips, chunks, tokens), wanted)


@given(st.lists(st.integers(1, CHUNK), min_size=1, max_size=40))
def test_strips_of_a_kind_are_numbered_without_a_gap(counts: list[int]) -> None:
    chunks = chunks_of(counts)
    for kind in range(KINDS):
        has = torch.tensor(counts) > ROWS * kind
        assert chunks.ranks[has, kind].tolist() == list(range(chunks.kinds[kind]))


def test_a_whole_chunk_takes_five_kilobytes_and_a_short_one_half() -> None:
    assert sum(strip_bytes(kinds_of([64]), 1)) == 5 * 1024
    assert sum(strip_bytes(kinds_of([16]), 1)) == 512
    assert sum(strip_bytes(kinds_of([17, 1]), 3)) == 3 * (2 * 512 + 1024)
