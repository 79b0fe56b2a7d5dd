"""What tests/gpu runs on several GPUs, on gloo processes here: the functions find what differs, and nothing does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cp_gdn import Comm
from tests import kernel_host
from tests.dist import pool
from tests.gpu import nccl_cases as ranks
from tests.gpu import nccl_forms as forms
from tests.gpu.nccl_cases import Case, cases_of
from tests.gpu.test_nccl_faults import WAYS, assert_all_end, last_rank_fails

pytestmark = pytest.mark.dist
SAME: dict[str, Any] = {"backend": "torch", "dtype": torch.float32}
SMALL = Case(lengths=(150, 0, 70), segments=2, **SAME)


@pytest.mark.parametrize("world", [2, 4])
def test_half_of_the_cases_have_the_same_bits_over_two_wires_as_the_twin_and_on_one_rank(world: int) -> None:
    """Every layout, each exchange and each kind of segments in it."""
    table = cases_of({"": (130, 0, 70)}, **SAME)
    cases = [replace(table[i], segments=str(table[i].segments).replace("8", "1")) for i in (0, 3, 5, 6, 8, 11)]
    found = pool.run(world, ranks.compare, "cpu", cases, timeout=120.0)
    ranks.assert_same_bits(cases, found, ("gloo", "gloo"), {"gloo", "twin", "one rank"})


ON_HOST = Case(
    lengths=(150,), heads=(1, 2), dtype=torch.bfloat16, layout="contiguous", exchange="a2a", segments="grid:1"
)


def compare_on_host(rank: int, world: int, folder: str, cases: list[Case]) -> list[ranks.Found]:
    """`ranks.compare` on kernels that another process has compiled."""
    made = {path.stem: path for path in Path(folder).glob("*.so")}

    def compiled(name: str, defines: tuple[tuple[str, int], ...]) -> Path:
        return made["-".join([name, *(f"{key}{value}" for key, value in defines)])]

    with patch.object(kernel_host, "compiled", compiled), kernel_host.host_kernels():
        return ranks.compare(rank, world, "cpu", cases)


@pytest.mark.skipif(kernel_host.COMPILER is None, reason="needs g++")
def test_the_kernels_on_the_cpu_have_the_same_bits_over_two_wires_as_the_twin_and_on_one_rank() -> None:
    with kernel_host.host_kernels():
        ranks.context(Comm.alone(), ON_HOST, torch.device("cpu"))  # compiles them
    for (found,) in pool.run(2, compare_on_host, str(kernel_host.folder()), [ON_HOST], timeout=300.0):
        assert found.crosses
        assert found.differ == {"gloo": [], "twin": [], "one rank": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_has_the_bits_and_the_messages_of_the_plain_step(dtype: torch.dtype) -> None:
    for found in pool.run(2, forms.compare_forms, "cpu", replace(SMALL, dtype=dtype), timeout=120.0):
        assert len(found) == 2 * len(forms.FORMS)
        assert not any(found.values()), found


def test_a_layers_checkpoint_sends_nothing_again() -> None:
    for found in pool.run(2, forms.compare_layers, "cpu", SMALL):
        assert len(found) == 4
        assert not any(found.values()), found


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_repeated_has_the_same_bits(world: int) -> None:
    assert pool.run(world, ranks.slow_rank, "cpu", [SMALL]) == [[[]] * 2 * world] * world


@pytest.mark.parametrize(("way", "where", "world"), [("raises", "forward", 4), ("is killed", "backward", 2)])
def test_when_one_rank_fails_all_end_in_time_and_name_it(way: str, where: str, world: int) -> None:
    assert way in WAYS
    assert_all_end(pool.run_failing(world, last_rank_fails, "cpu", SMALL, way, where, deadline=45.0), way)
