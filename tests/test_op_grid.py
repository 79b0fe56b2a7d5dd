"""Grid mode: the same bits for every world size, every layout, both exchanges and the run on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import Comm, twin
from tests.cases import LAYOUTS, WORLDS, Content, Run, cut, name_of
from tests.pack import assemble, assert_close, context_of, differences, expected, make_pack, run_in_twin
from tests.test_layer import Outcome, make_layer, split

GRID_PACK = (300, 0, 65, 130)
UNEVEN = (250, 0, 65, 430)
"""4 and 7 chunks: borders every 3 chunks are not those of near-equal parts."""
CONTENTS = [
    (Content(pack=GRID_PACK, gate="model"), "grid:1", torch.float32),
    (Content(pack=UNEVEN, gate="slow", heads=(2, 6), head_dims=(5, 7), beta=1.9), "grid:3", torch.float32),
    (Content(pack=GRID_PACK, gate="one reset", inputs=torch.bfloat16, l2norm=True), "grid:1", torch.bfloat16),
    (Content(pack="on the grid", gate="none", heads=(1, 1), head_dims=(48, 8)), "grid:1", torch.float64),
]


@cache
def on_one_rank(content: Content, grid: str, dtype: torch.dtype) -> dict[str, Tensor]:
    run = Run(world=1, layout="contiguous", segments=grid, dtype=dtype)
    shares = run_in_twin(run, make_pack(content))
    if dtype != torch.bfloat16:
        assert_close(shares, expected(content), (1e-5, 1e-4))
    return assemble(shares)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("content", "grid", "dtype"), CONTENTS, ids=lambda x: name_of(x) or str(x))
def test_outputs_states_and_all_gradients_are_those_of_one_rank(
    content: Content, grid: str, dtype: torch.dtype, world: int
) -> None:
    want = on_one_rank(content, grid, dtype)
    for layout in (*LAYOUTS, "explicit"):
        for exchange in ("ring", "a2a") if world > 1 else ("ring",):
            run = Run(world=world, layout=layout, exchange=exchange, segments=grid, dtype=dtype)
            assert differences(assemble(run_in_twin(run, make_pack(content))), want) == [], (layout, exchange)


def test_maps_that_are_made_again_change_no_bit() -> None:
    content, grid, dtype = CONTENTS[0]
    run = Run(world=3, segments=grid, dtype=dtype, save_transfer=False)
    for exchange in ("ring", "a2a"):
        got = assemble(run_in_twin(replace(run, exchange=exchange), make_pack(content)))
        assert differences(got, on_one_rank(content, grid, dtype)) == []


def test_a_cut_off_the_grid_is_refused_with_document_cut_and_the_align_that_helps() -> None:
    content = Content(pack=GRID_PACK)

    def refused(comm: Comm) -> None:
        part = cut(content.lengths, comm.size, "contiguous")
        text = r'segments="grid:2": document 0 is cut at its token 248, .* build the partition with align=128'
        with pytest.raises(ValueError, match=text):
            context_of(part, Comm.alone() if comm.size == 1 else comm, Run(segments="grid:2"), make_pack(content))

    twin(2, refused)


@cache
def layer_in_grid_mode(world: int, layout: str, dtype: torch.dtype) -> Outcome:
    return split(make_layer(dtype), (0, 130, 130, 195, 420), world, layout, grid=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_layers_rows_have_one_ranks_bits_and_its_parameter_gradients_add_up(world: int, layout: str) -> None:
    """Sums over tokens are partial sums of each rank, so those alone may round in another order."""
    got, want = (layer_in_grid_mode(w, name, torch.float64) for w, name in ((world, layout), (1, "contiguous")))
    rows: dict[str, Any] = {name: got[name] for name in ("y", "dx")}
    assert differences(rows, {name: want[name] for name in rows}) == []
    errors = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}
