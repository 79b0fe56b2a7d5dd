"""GPUs through NCCL: the bits of gloo, of the twin and, on a grid, of one GPU; whatever is saved or captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist import pool
from tests.gpu import nccl_cases as ranks
from tests.gpu import nccl_forms as forms
from tests.gpu.nccl_cases import PACKS, SHORT, WORLDS, Case, cases_of, hopper

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("world", WORLDS)]
BACKENDS = [pytest.param("hopper", marks=hopper), "torch"]


def of_backend(backend: str, **more: Any) -> dict[str, Any]:
    """The kernels in their dtype, torch in its own."""
    return {"backend": backend, "dtype": torch.bfloat16 if backend == "hopper" else torch.float32, **more}


def on(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank returned; a rank is its own twin of all, so that time grows with the world."""
    return pool.run(world, function, "cuda", *args, timeout=120.0 + 15.0 * world, backend="nccl")


def assert_same_everywhere(world: int, cases: list[Case], compared: set[str]) -> None:
    ranks.assert_same_bits(cases, on(world, ranks.compare, cases), ("nccl", "gloo"), compared)


@hopper
@pytest.mark.parametrize("pack", PACKS)
def test_the_kernels_have_one_set_of_bits_over_nccl_gloo_the_twin_and_on_a_grid_one_gpu(pack: str, world: int) -> None:
    assert_same_everywhere(world, cases_of({pack: PACKS[pack]}), {"gloo", "twin", "one rank"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_products_have_one_set_of_bits_over_nccl_gloo_and_the_twin(dtype: torch.dtype, world: int) -> None:
    """Short packs in every layout, and the longest in one."""
    packs, same = {"short": (1500, *SHORT[:9], 0, 700)}, {"backend": "torch", "dtype": dtype}
    cases = [*cases_of(packs, **same), Case(lengths=PACKS["both"], layout="zigzag", exchange="a2a", **same)]
    assert_same_everywhere(world, cases, {"gloo", "twin"})


FORM_PACK = (700, 0, 9000, *SHORT[:12])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_to_save_and_to_recompute_has_the_bits_of_the_plain_step(backend: str, world: int) -> None:
    case = Case(lengths=FORM_PACK, segments=2, **of_backend(backend))
    for found in on(world, forms.compare_forms, case):
        assert len(found) >= 2 * (len(forms.FORMS) - len(forms.TORCH_ONLY))
        assert not any(found.values()), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layers_checkpoint_sends_nothing_again_and_has_the_same_bits(backend: str, world: int) -> None:
    case = Case(lengths=FORM_PACK, layout="zigzag", segments=2, **of_backend(backend))
    for found in on(world, forms.compare_layers, case):
        assert len(found) == 4
        assert not any(found.values()), found


def few_cases(backend: str) -> list[Case]:
    """Each exchange, two layouts; for steps that are run in more than one way."""
    same = of_backend(backend, lengths=FORM_PACK)
    grid = Case(**same, layout="contiguous", exchange="a2a", segments="grid:8", gate="slow")
    return [grid, Case(**same, exchange="a2a", segments=2), Case(**same, layout="zigzag", segments=3)]


@hopper
def test_a_step_with_its_messages_is_captured_as_one_graph_and_replays_with_other_values(world: int) -> None:
    assert on(world, ranks.captured, few_cases("hopper")) == [[[]] * 6] * world


@pytest.mark.parametrize("backend", BACKENDS)
def test_preparation_and_a_whole_step_over_nccl_make_no_synchronizing_call(backend: str, world: int) -> None:
    assert on(world, ranks.without_a_sync, few_cases(backend)) == [[[]] * 3] * world


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_late_by_50_ms_changes_no_bit(backend: str, world: int) -> None:
    assert on(world, ranks.slow_rank, few_cases(backend)) == [[[]] * 6 * world] * world
