"""Preparation of a pack on a GPU: no synchronizing call, no wait for queued work, tables equal to those of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch

import cp_gdn
from cp_gdn.backends.choice import TORCH, BackendChoice, choose_backend
from cp_gdn.context import Context, assemble_context, device_calibration
from cp_gdn.exchange import Sizes, choose
from cp_gdn.halo import Halo
from cp_gdn.layout import Partition
from cp_gdn.page import Table
from cp_gdn.plan import build_plan
from cp_gdn.segments import resolve_segments
from cp_gdn.tables import build_tables
from tests.cases import LAYOUTS
from tests.gpu.queued import behind_work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS = (2, 6)
BOUNDS = [0, 20_000, 20_000, 20_064, 90_001, 131_072]


@dataclass(frozen=True)
class Seat:
    """What preparation asks a `Comm` for."""

    rank: int
    size: int


def backends() -> tuple[BackendChoice, ...]:
    """Torch, and the kernels where they run."""
    asked = {"device": "cuda", "heads": HEADS, "head_dims": (128, 128), "dtype": torch.bfloat16, "backend": "auto"}
    found = choose_backend({**asked, "options": cp_gdn.Options()}, cp_gdn.Comm.alone())
    return (TORCH,) if found.kind == "torch" else (TORCH, found)


def planned(part: Partition, rank: int, device: str, taken: BackendChoice, exchange: str) -> Context:
    """A rank's context without its group: everything but the agreement."""
    asked: dict[str, Any] = {"device": device, "heads": HEADS, "head_dims": (128, 128), "dtype": torch.bfloat16}
    asked |= {"conv": (64, 4), "backend": taken.kind, "options": cp_gdn.Options(), "taken": taken}
    calibration, note = device_calibration(torch.device(device))
    picked = resolve_segments("auto", part, HEADS[1], calibration, note)
    choice = choose(exchange, part, Sizes.of(HEADS[1], (128, 128), 4), calibration.times, grid=False)
    plan = build_plan(part, rank, p_vector=picked.p_of(rank))
    return assemble_context(part, Seat(rank, part.world_size), plan, picked, choice, asked)  # type: ignore[arg-type]


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree of dataclasses and tuples, with where it is."""
    if isinstance(tree, Table):
        yield path, tree.data
    elif isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from tensors_of(item, f"{path}[{i}]")
    elif is_dataclass(tree):
        for name in getattr(tree, "__dict__", None) or [field.name for field in fields(tree)]:
            yield from tensors_of(getattr(tree, name), f"{path}.{name}")


def assert_same_tables(on_device: Any, on_cpu: Any) -> None:
    found, expected = dict(tensors_of(on_device)), dict(tensors_of(on_cpu))
    assert found.keys() == expected.keys()
    assert found
    for path, table in found.items():
        assert table.device.type == "cuda", path
        assert table.dtype == expected[path].dtype, path
        assert torch.equal(table.cpu(), expected[path]), path


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_on_the_device_are_those_that_a_cpu_builds(layout: str, exchange: str) -> None:
    part = cp_gdn.partition(BOUNDS, 3, layout)
    for rank in range(3):
        ours, theirs = (planned(part, rank, device, TORCH, exchange) for device in ("cuda", "cpu"))
        theirs.schedule.tokens.make()
        assert isinstance(theirs.halo, Halo)
        theirs.halo.make()
        assert_same_tables(ours.schedule, theirs.schedule)
        assert_same_tables(ours.halo, theirs.halo)
        if ours.exchange != "none":
            assert_same_tables(ours.routes, theirs.routes)


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_of_the_kernels_are_those_that_a_cpu_builds(layout: str, exchange: str) -> None:
    kernels = [taken for taken in backends() if taken.kind == "hopper"]
    if not kernels:
        pytest.skip("needs a GPU that runs the kernels")
    part = cp_gdn.partition(BOUNDS, 3, layout)
    for rank in range(3):
        ctx = planned(part, rank, "cuda", kernels[0], exchange)
        assert ctx.kernels is not None
        built = build_tables(part, ctx.plan, ctx.exchange, HEADS, on_kernels=True, width=None)
        built.upload(torch.device("cpu"))
        built.schedule.tokens.make(rows=False)
        assert_same_tables(ctx.kernels.forward.tables, built.kernels)
        assert_same_tables(ctx.schedule, built.schedule)
        assert_same_tables(ctx.routes, built.routes)


@pytest.mark.parametrize("seat", ["whole op", "one rank of four"])
def test_preparation_neither_synchronizes_nor_waits_for_queued_work(seat: str) -> None:
    """Order alone: what was queued before is still running when the context is there."""
    for taken in backends():

        def prepare(last: int, taken: BackendChoice = taken) -> Context:
            bounds = [*BOUNDS, last]
            if seat == "whole op":
                asked = {"device": "cuda", "heads": HEADS, "backend": taken.kind, "conv": (64, 4)}
                return cp_gdn.build_context(cp_gdn.partition(bounds, 1), cp_gdn.Comm.alone(), **asked)
            return planned(cp_gdn.partition(bounds, 4), 2, "cuda", taken, "auto")

        ctx = prepared_behind_work(prepare)
        ids = torch.from_numpy(ctx.partition.token_ids(ctx.rank))
        assert torch.equal(ctx.token_ids.cpu(), ids), taken.kind


def prepared_behind_work(prepare: Callable[[int], Context]) -> Context:
    """A context of a pack as long as told, made while work that was queued before is still running."""
    prepare(200_000)  # loads kernels; torch asks the driver, which may wait, for memory that it keeps

    def prepared() -> Context:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return prepare(199_000)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    found: Context = behind_work(prepared)
    return found
