"""Two GPUs through NCCL: the bits of gloo, of the twin and, on a grid, of one GPU; whatever is saved or captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist import pool
from tests.gpu import two_gpu_cases as two
from tests.gpu import two_gpu_forms as forms
from tests.gpu.two_gpu_cases import PACKS, SHORT, Case, cases_of

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 CUDA devices, found {GPUS}"),
]
hopper = pytest.mark.skipif(
    GPUS < 2 or torch.cuda.get_device_capability() != (9, 0), reason="the kernels need a Hopper GPU"
)
BACKENDS = [pytest.param("hopper", marks=hopper), "torch"]


def of_backend(backend: str, **more: Any) -> dict[str, Any]:
    """The kernels in their dtype, torch in its own."""
    return {"backend": backend, "dtype": torch.bfloat16 if backend == "hopper" else torch.float32, **more}


def on_two(function: Callable[..., Any], *args: Any) -> list[Any]:
    return pool.run(2, function, "cuda", *args, timeout=150.0, backend="nccl")


def assert_same_everywhere(cases: list[Case], compared: set[str]) -> None:
    for found in on_two(two.compare, cases):
        assert sum(each.crosses for each in found) > len(cases) // 2
        for case, each in zip(cases, found, strict=True):
            assert each.wires == ("nccl", "gloo")
            assert (each.messages > 0) == each.crosses, case
            assert each.differ.keys() == (compared if case.grid else compared - {"one rank"})
            assert not any(each.differ.values()), (case, each.differ)


@hopper
@pytest.mark.parametrize("pack", PACKS)
def test_the_kernels_have_one_set_of_bits_over_nccl_gloo_the_twin_and_on_a_grid_one_gpu(pack: str) -> None:
    assert_same_everywhere(cases_of({pack: PACKS[pack]}), {"gloo", "twin", "one rank"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_products_have_one_set_of_bits_over_nccl_gloo_and_the_twin(dtype: torch.dtype) -> None:
    """Short packs in every layout, and the longest in one."""
    packs, same = {"short": (1500, *SHORT[:9], 0, 700)}, {"backend": "torch", "dtype": dtype}
    cases = [*cases_of(packs, **same), Case(lengths=PACKS["both"], layout="zigzag", exchange="a2a", **same)]
    assert_same_everywhere(cases, {"gloo", "twin"})


FORM_PACK = (700, 0, 9000, *SHORT[:12])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_to_save_and_to_recompute_has_the_bits_of_the_plain_step(backend: str) -> None:
    case = Case(lengths=FORM_PACK, segments=2, **of_backend(backend))
    for found in on_two(forms.compare_forms, case):
        assert len(found) >= 2 * (len(forms.FORMS) - len(forms.TORCH_ONLY))
        assert not any(found.values()), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layers_checkpoint_sends_nothing_again_and_has_the_same_bits(backend: str) -> None:
    case = Case(lengths=FORM_PACK, layout="zigzag", segments=2, **of_backend(backend))
    for found in on_two(forms.compare_layers, case):
        assert len(found) == 4
        assert not any(found.values()), found


def few_cases(backend: str) -> list[Case]:
    """Each exchange, two layouts; for steps that are run in more than one way."""
    same = of_backend(backend, lengths=FORM_PACK)
    grid = Case(**same, layout="contiguous", exchange="a2a", segments="grid:8", gate="slow")
    return [grid, Case(**same, exchange="a2a", segments=2), Case(**same, layout="zigzag", segments=3)]


@hopper
def test_a_step_with_its_messages_is_captured_as_one_graph_and_replays_with_other_values() -> None:
    assert on_two(two.captured, few_cases("hopper")) == [[[]] * 6] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_preparation_and_a_whole_step_over_nccl_make_no_synchronizing_call(backend: str) -> None:
    assert on_two(two.without_a_sync, few_cases(backend)) == [[[]] * 3] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_late_by_50_ms_changes_no_bit(backend: str) -> None:
    assert on_two(two.slow_rank, few_cases(backend)) == [[[]] * 12] * 2
