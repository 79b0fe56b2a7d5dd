"""The partition of a pack: golden fragments, the tiling property, and every refusal by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_gdn.layout import LAYOUTS, Partition, partition

GOLDEN = json.loads((Path(__file__).parent / "golden" / "partitions.json").read_text())
CUT_LAYOUTS = LAYOUTS[:3]
PACK = [0, 7, 8, 13, 24, 26]


def triples(part: Partition) -> list[list[list[int]]]:
    return [[[f.doc, f.offset, f.length] for f in of_rank] for of_rank in part.fragments]


def same_tables(a: Partition, b: Partition) -> bool:
    names = ("rank", "slot", "doc", "offset", "length", "prev", "next", "starts")
    return all(np.array_equal(getattr(a.table, name), getattr(b.table, name)) for name in names)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    lengths = draw(st.lists(st.integers(0, 40), max_size=8))
    bounds = [0, *np.cumsum(lengths).tolist()]
    world = draw(st.integers(1, 9))
    align = draw(st.sampled_from((1, 2, 3, 64)))
    layout = draw(st.sampled_from(LAYOUTS))
    if layout != "explicit":
        return partition(bounds, world, layout, align=align)
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for doc, length in enumerate(lengths):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
        for a, b in zip([0, *cuts], [*cuts, length], strict=True):
            ranks[draw(st.integers(0, world - 1))].append((doc, a, b - a))
    ranks = [draw(st.permutations(of_rank)) for of_rank in ranks]
    return partition(bounds, world, "explicit", align=align, fragments=ranks)


def test_golden_partitions_are_reproduced_to_the_last_integer() -> None:
    assert len(GOLDEN) == 300
    for case in GOLDEN:
        assert triples(partition(case["cu_seqlens"], case["world_size"], case["layout"])) == case["fragments"]


def test_explicit_fragments_of_a_layout_give_the_table_of_that_layout() -> None:
    for case in GOLDEN:
        cut = partition(case["cu_seqlens"], case["world_size"], case["layout"])
        assert same_tables(cut, partition(case["cu_seqlens"], case["world_size"], fragments=case["fragments"]))


@given(part=partitions())
def test_every_token_is_owned_once_and_positions_belong_to_its_document(part: Partition) -> None:
    ids = [part.token_ids(rank) for rank in range(part.world_size)]
    assert [len(of_rank) for of_rank in ids] == [part.local_tokens(rank) for rank in range(part.world_size)]
    assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(part.num_tokens))
    positions = np.concatenate([np.arange(n) for n in np.diff(part.doc_bounds)] or [[]])
    for rank, of_rank in enumerate(ids):
        assert of_rank.dtype == part.positions(rank).dtype == np.int64
        assert np.array_equal(part.positions(rank), positions[of_rank])


@given(part=partitions())
def test_non_empty_fragments_tile_each_document_along_its_chain(part: Partition) -> None:
    for doc, length in enumerate(np.diff(part.doc_bounds).tolist()):
        places = [
            (r, s) for r, row in enumerate(part.fragments) for s, f in enumerate(row) if f.doc == doc and f.length
        ]
        place = next((p for p in places if part.fragments[p[0]][p[1]].prev is None), None)
        end, before, visited = 0, None, 0
        while place is not None:
            fragment = part.fragments[place[0]][place[1]]
            assert (fragment.offset, fragment.prev) == (end, before)
            end, before, place, visited = end + fragment.length, place, fragment.next, visited + 1
        assert (end, visited) == (length, len(places))


@given(part=partitions())
def test_table_rows_are_ordered_by_rank_and_slot_and_empty_fragments_have_no_neighbours(part: Partition) -> None:
    t = part.table
    assert t.starts.tolist() == [0, *np.cumsum([len(row) for row in part.fragments]).tolist()]
    assert np.array_equal(t.slot, np.concatenate([np.arange(len(row)) for row in part.fragments]))
    assert all(f.prev is None and f.next is None for row in part.fragments for f in row if f.length == 0)
    for neighbour in (t.prev, t.next):
        assert (t.length[neighbour[neighbour >= 0]] > 0).all()


@given(part=partitions())
def test_cuts_inside_a_document_lie_on_the_grid_of_align(part: Partition) -> None:
    t = part.table
    lengths = np.diff(part.doc_bounds)[t.doc] if part.num_docs else t.length
    for cut in (t.offset, t.offset + t.length):
        assert ((cut % part.align == 0) | (cut == lengths)).all()


@pytest.mark.parametrize(
    ("world", "layout", "expected"),
    [
        (3, "contiguous", [[[0, 0, 7], [1, 0, 1]], [[2, 0, 5], [3, 0, 4]], [[3, 4, 7], [4, 0, 2]]]),
        (2, "zigzag", [[[0, 0, 7], [3, 4, 7], [4, 0, 2]], [[1, 0, 1], [2, 0, 5], [3, 0, 4]]]),
    ],
)
def test_align_moves_a_cut_down_on_the_grid_of_its_own_document(world: int, layout: str, expected: Any) -> None:
    assert triples(partition(PACK, world, layout, align=4)) == expected


def test_documents_shorter_than_the_grid_stay_whole() -> None:
    for layout in CUT_LAYOUTS:
        part = partition(PACK, 2, layout, align=64)
        assert sum(f.length > 0 for row in part.fragments for f in row) == part.num_docs


def test_cut_points_place_the_pieces_of_each_document() -> None:
    part = partition([0, 6, 8], 2, cut_points=[[0, 0, 1, 5, 6], [0, 1, 2, 2, 2]])
    assert triples(part) == [[[0, 0, 0], [0, 5, 1], [1, 0, 1], [1, 2, 0]], [[0, 0, 1], [0, 1, 4], [1, 1, 1], [1, 2, 0]]]


@pytest.mark.parametrize(
    "bounds",
    [
        tuple(PACK),
        np.array(PACK, dtype=np.int32),
        np.array(PACK, dtype=np.int64),
        torch.tensor(PACK, dtype=torch.int32),
        torch.tensor(PACK, dtype=torch.int64),
    ],
)
def test_boundaries_of_every_accepted_type_give_the_same_partition(bounds: Any) -> None:
    for layout in CUT_LAYOUTS:
        part = partition(bounds, 3, layout)
        assert part.doc_bounds == tuple(PACK)
        assert {type(bound) for bound in part.doc_bounds} == {int}
        assert same_tables(part, partition(PACK, 3, layout))


REFUSED_BOUNDS = [
    ([], ValueError, "no boundary"),
    ([1, 5], ValueError, "starts at 1"),
    ([0, 5, 3], ValueError, "decreases from 5 to 3 at index 2"),
    ([0, 5.0], TypeError, "float"),
    ([0, True], TypeError, "bool"),
    ([[0, 5]], TypeError, "list"),
    ([0, 1 << 70], ValueError, "int64"),
    ("0,5", TypeError, "str"),
    (5, TypeError, "int"),
    (None, TypeError, "NoneType"),
    (np.array([[0, 5]]), ValueError, re.escape("shape [1, 2]")),
    (np.array(5), ValueError, re.escape("shape []")),
    (np.array([0, 5], dtype=np.int16), TypeError, "int16"),
    (np.array([0, 5], dtype=np.uint64), TypeError, "uint64"),
    (np.array([0.0, 5.0]), TypeError, "float64"),
    (torch.tensor([[0, 5]]), ValueError, re.escape("shape [1, 2]")),
    (torch.tensor([0, 5], dtype=torch.int16), TypeError, "int16"),
    (torch.tensor([0.0, 5.0]), TypeError, "float32"),
    (torch.tensor([], dtype=torch.int32), ValueError, "no boundary"),
]


@pytest.mark.parametrize(("bounds", "error", "said"), REFUSED_BOUNDS)
def test_boundaries_that_are_no_list_of_global_ints_are_refused_by_name(
    bounds: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^cu_seqlens: .*{said}"):
        partition(bounds, 2)


REFUSED_ARGUMENTS = [
    ({"world_size": 0}, ValueError, "world_size: got 0"),
    ({"world_size": 2.0}, TypeError, "world_size: got 2.0"),
    ({"align": 0}, ValueError, "align: got 0"),
    ({"align": "64"}, TypeError, "align: got '64'"),
    ({"layout": "striped"}, ValueError, "layout: got 'striped'.*zigzag"),
    ({"layout": "explicit"}, ValueError, "fragments: got None"),
    ({"layout": "zigzag", "fragments": [[], [(0, 0, 6)]]}, ValueError, "fragments: got layout .zigzag. too"),
    ({"layout": "zigzag", "cut_points": [[0, 1, 2, 3, 6]]}, ValueError, "cut_points: got layout .zigzag."),
    ({"fragments": [[], [(0, 0, 6)]], "cut_points": [[0, 1, 2, 3, 6]]}, ValueError, "cut_points: got layout .explicit"),
    ({"cut_points": [[0, 1, 3, 6]]}, ValueError, r"cut_points: .*\[1, 5\]"),
    ({"cut_points": [[0, 1, 2, 3, 6]] * 2}, ValueError, "cut_points: got 2 rows"),
    ({"cut_points": [0, 1, 2, 3, 6]}, ValueError, "cut_points: got 5 rows"),
    ({"cut_points": [[0, 1, 2.5, 3, 6]]}, TypeError, "cut_points: got dtype float64"),
    ({"cut_points": [[0, 3, 2, 3, 6]]}, ValueError, "cut_points: document 0"),
    ({"cut_points": [[1, 1, 2, 3, 6]]}, ValueError, "cut_points: document 0"),
    ({"cut_points": [[0, 1, 2, 3, 5]]}, ValueError, "cut_points: document 0"),
    ({"fragments": [[(0, 0, 6)]]}, ValueError, "fragments: got lists for 1 ranks"),
    ({"fragments": [[(0, 0, 3)], [(0, 4, 2)]]}, ValueError, "nobody owns document 0 from offset 3 to 4"),
    ({"fragments": [[(0, 0, 3)], [(0, 3, 2)]]}, ValueError, "nobody owns document 0 from offset 5 to 6"),
    ({"fragments": [[], []]}, ValueError, "nobody owns document 0 from offset 0 to 6"),
    ({"fragments": [[(0, 0, 4)], [(0, 3, 3)]]}, ValueError, "ranks 0 and 1 both own document 0, offset 3"),
    ({"fragments": [[(0, 0, 6)], [(0, 0, 6)]]}, ValueError, "both own document 0, offset 0"),
    ({"fragments": [[(0, 0, 6)], [(0, 4, 3)]]}, ValueError, "from offset 4 to 7, past its length 6"),
    ({"fragments": [[(0, 0, 6)], [(1, 0, 1)]]}, ValueError, r"rank 1 holds \(1, 0, 1\)"),
    ({"fragments": [[(0, 0, 6)], [(0, -1, 1)]]}, ValueError, r"rank 1 holds \(0, -1, 1\)"),
    ({"fragments": [[(0, 0, 6)], [(0, 2)]]}, TypeError, r"fragments: got \(0, 2\)"),
    ({"fragments": [[(0, 0, 6)], (0, 2, 0)]}, TypeError, "fragments: got 0"),
    ({"fragments": [[(0, 0, 6.0)], []]}, TypeError, "fragments: got .*6.0"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), REFUSED_ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        partition(**{"cu_seqlens": [0, 6], "world_size": 2, **arguments})


def test_a_rank_outside_the_world_is_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank: got {rank}"):
            partition(PACK, 2).token_ids(rank)


def test_packs_without_tokens_or_documents_have_a_partition() -> None:
    for layout in CUT_LAYOUTS:
        for bounds in ([0], [0, 0], [0, 0, 0]):
            part = partition(bounds, 3, layout)
            assert (part.num_docs, part.num_tokens) == (len(bounds) - 1, 0)
            assert [part.local_tokens(rank) for rank in range(3)] == [0, 0, 0]
