"""The kernels' sources run on the CPU, thread by thread: values against fp64, bits, barriers that everybody passes."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_gdn import (
    Comm,
    Options,
    affine,
    build_context,
    chunk_gated_delta_rule,
    packed_qkv_views,
    packing,
    partition,
    twin,
)
from cp_gdn.backends import hopper_items, hopper_slabs
from cp_gdn.backends.cubins import source_folder
from cp_gdn.packing import are_packed, joined, split_heads
from tests import kernel_host
from tests.kernel_host import host_kernels
from tests.spread import spread

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.skipif(kernel_host.COMPILER is None, reason="needs g++"),
    pytest.mark.xdist_group("host kernels"),  # one process compiles them
]

NAMES = ("q", "k", "v", "g", "beta")
CASES = {  # lengths, (H, HV), P, gate, raw q and k
    "whole": ((64,), (1, 1), 1, "model", False),
    "partial chunks, short neighbours": ((70, 5, 64, 1), (1, 2), 1, "model", False),
    "segments, slow decay": ((300, 20), (1, 1), 3, "slow", False),
    "segments, maps that vanish": ((330,), (1, 2), 4, "fast", False),
    "raw rows, three heads a group": ((66,), (1, 3), 1, "model", True),
}
BUDGETS = {"o": 5e-3, "dq": 5e-3, "dk": 5e-3, "dv": 5e-3, "dg": 8e-3, "dbeta": 8e-3}
"""bf16 operands cost this much, see the tests on a GPU; sums of other order on a CPU."""


def inputs(lengths: tuple[int, ...], heads: tuple[int, int], gate: str) -> dict[str, Tensor]:
    gen, tokens = torch.Generator().manual_seed(0), sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    q, k = (torch.nn.functional.normalize(normal(tokens, heads[0], 128), dim=-1).bfloat16() for _ in range(2))
    x = {"q": q, "k": k, "v": normal(tokens, heads[1], 128).bfloat16(), "beta": normal(tokens, heads[1]).sigmoid()}
    scale = {"model": 1.0, "slow": 1e-4, "fast": 8.0}[gate]
    x["g"] = -torch.nn.functional.softplus(normal(tokens, heads[1]) - 3) * scale
    return x | {"dout": normal(tokens, heads[1], 128).bfloat16()}


def step(x: dict[str, Tensor], ctx: Any, *, raw: bool = False) -> dict[str, Tensor]:
    """o and every gradient, of this rank's tokens."""
    wide = ctx.dtype == torch.float64
    leaves = {n: (x[n][ctx.token_ids].double() if wide else x[n][ctx.token_ids]).requires_grad_() for n in NAMES}
    o, _ = chunk_gated_delta_rule(**leaves, ctx=ctx, use_qk_l2norm_in_kernel=raw)
    grads = torch.autograd.grad(o, list(leaves.values()), x["dout"][ctx.token_ids].to(o.dtype))
    return {"o": o.detach(), **{f"d{n}": grad for n, grad in zip(NAMES, grads, strict=True)}}


def bounds_of(lengths: tuple[int, ...]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def context_of(case: tuple, **options: Any) -> Any:
    """Of one rank, inside of `host_kernels`."""
    lengths, heads, segments, _, _ = case
    part = partition(bounds_of(lengths), 1, "contiguous")
    return build_context(part, Comm.alone(), heads=heads, segments=segments, options=Options(**options))


def on_kernels(case: tuple, x: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """On one rank, inside of `host_kernels`."""
    return step(x, context_of(case, **options), raw=case[4])


def test_adjoints_that_know_which_maps_are_zero_have_the_bits_of_those_that_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, flags, run = CASES["segments, maps that vanish"], [], affine.run

    def looking(*args: Any, adjoint: bool = False, dropped: Tensor | None = None) -> None:
        if adjoint and dropped is not None:
            flags.append(dropped.clone())
            dropped = None
        run(*args, adjoint=adjoint, dropped=dropped)

    x = inputs(*case[:2], case[3])
    x["g"][:, 1] *= 1e-5  # the maps of the other head vanish
    with host_kernels():
        told = on_kernels(case, x)
        monkeypatch.setattr(affine, "run", looking)
        assert_same(told, on_kernels(case, x))
    (found,) = flags
    assert found.tolist() == [[1, 0]] * 2


@pytest.mark.parametrize(
    ("bounds", "heads", "slab"),
    [([0, 300, 300, 317, 700, 701], (2, 6), 1), ([0, 64], (1, 1), 100), ([0, 20, 39, 87, 100, 130], (2, 2), 3)],
    ids=["slabs that cut an item", "one chunk", "short neighbours"],
)
def test_tables_of_heads_steps_and_strips_are_those_of_plain_python(
    bounds: list[int], heads: tuple[int, int], slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_slabs, "SLAB_BYTES", slab * hopper_slabs.CHUNK_BYTES)
    monkeypatch.setattr(hopper_slabs, "BLOCKS", 2)

    def of_rank(comm: Comm) -> None:
        ctx = build_context(partition(bounds, 2, "zigzag"), comm, heads=heads, segments=2, exchange="ring")
        backend = ctx.kernels.forward
        assert_same(asdict(backend.made), asdict(spread(None, backend.tables, heads)))

    with host_kernels():
        twin(2, of_rank)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_match_fp64(case: tuple) -> None:
    lengths, heads, _, gate, raw = case
    x = inputs(lengths, heads, gate)
    part, alone = partition(bounds_of(lengths), 1, "contiguous"), Comm.alone()
    exact = build_context(part, alone, heads=heads, dtype=torch.float64, segments=1, backend="torch")
    want = step(x, exact, raw=raw)
    with host_kernels():
        got = on_kernels(case, x)
    for name, budget in BUDGETS.items():
        error = float((got[name].double() - want[name]).norm() / want[name].norm())
        assert error < budget, (name, error)


@pytest.mark.parametrize("name", ["segments, maps that vanish", "raw rows, three heads a group"])
def test_tapes_that_are_saved_handed_on_or_made_again_have_the_same_bits(name: str) -> None:
    case = CASES[name]
    x = inputs(case[0], case[1], case[3])
    with host_kernels():
        want = on_kernels(case, x, save="light")
        for options in ({}, {"save": "full"}, {"save": "full", "save_transfer": False}, {"boundary": "recompute"}):
            assert_same(on_kernels(case, x, **options), want)
        for reuse, tapes in (("auto", "kept"), (False, "rerun")):
            ctx = context_of(case, reuse_recompute_tapes=reuse)
            leaves = [x[n].requires_grad_() for n in NAMES]

            def region(*tensors: Tensor, ctx: Any = ctx) -> Tensor:
                return chunk_gated_delta_rule(*tensors, ctx=ctx, use_qk_l2norm_in_kernel=case[4])[0]

            o = checkpoint(region, *leaves, use_reentrant=False)
            assert ctx.last_call["tapes"] == "rerun"  # the original forward keeps none
            grads = torch.autograd.grad(o, leaves, x["dout"])
            assert ctx.last_call["tapes"] == tapes
            assert_same({"o": o.detach(), **{f"d{n}": g for n, g in zip(NAMES, grads, strict=True)}}, want)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_order_of_threads_and_copies_changes_a_bit(seed: int) -> None:
    case = CASES["partial chunks, short neighbours"]
    x = inputs(case[0], case[1], case[3])
    with host_kernels():
        want = on_kernels(case, x)
    with host_kernels(seed):
        assert_same(on_kernels(case, x), want)


def test_neither_shared_blocks_nor_slabs_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["partial chunks, short neighbours"]
    x = inputs(case[0], case[1], case[3])
    with host_kernels():
        want = on_kernels(case, x)
        monkeypatch.setattr(hopper_items, "RUN_CHUNKS", 1)
        monkeypatch.setattr(hopper_slabs, "SLAB_BYTES", 1)
        monkeypatch.setattr(hopper_slabs, "BLOCKS", 1)
        assert_same(on_kernels(case, x), want)


def test_ranks_of_a_grid_have_the_bits_of_one() -> None:
    lengths, heads = (150, 70), (1, 1)
    x = inputs(lengths, heads, "model")

    def run(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        part = partition(bounds_of(lengths), comm.size, "zigzag", align=64)
        ctx = build_context(part, comm, heads=heads, segments="grid:1")
        return ctx.token_ids, step(x, ctx)

    with host_kernels():
        alone, ranks = twin(1, run), twin(2, run)
    (rows_alone, want), *_ = alone
    for name, value in want.items():
        one, two = torch.full_like(value, float("nan")), torch.full_like(value, float("nan"))
        one[rows_alone] = value
        for rows, found in ranks:
            two[rows] = found[name]
        assert torch.equal(one, two), name


def test_gradients_of_packed_rows_are_written_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, heads = CASES["partial chunks, short neighbours"][:2]
    x, seen = inputs(lengths, heads, "model"), []
    rows = torch.cat([x[name].flatten(1) for name in "qkv"], 1)[None].requires_grad_()

    def spied(*grads: Tensor) -> Tensor:
        seen.append(are_packed(*grads))
        return joined(*grads)

    def drows(ctx: Any, views: Any) -> Tensor:
        gates = [x[name][None] for name in ("g", "beta")]
        o, _ = chunk_gated_delta_rule(*views(rows, heads, (128, 128)), *gates, ctx=ctx)
        (grad,) = torch.autograd.grad(o, rows, x["dout"][None])
        return grad

    monkeypatch.setattr(packing, "joined", spied)
    with host_kernels():
        ctx = build_context(partition(bounds_of(lengths), 1, "contiguous"), Comm.alone(), heads=heads)
        packed = drows(ctx, packed_qkv_views)
        apart = drows(ctx, lambda *args: [view.contiguous() for view in split_heads(*args)])
    assert seen == [True]
    assert torch.equal(packed, apart)


def test_the_cpu_has_every_function_of_the_gpu() -> None:
    """So that neither header is changed alone."""
    gpu, cpu = source_folder() / "ptx.cuh", Path(kernel_host.__file__).parent / "host_kernels" / "ptx.cuh"
    known = re.findall(r"__device__ __forceinline__ \w+ (\w+)\(", gpu.read_text())
    there = re.findall(r"^(?:inline|template <.*>) \w+ (\w+)\(", cpu.read_text(), re.M)
    assert len(known) > 40
    assert set(known) == {name for name in there if not name.startswith("host_")} - {"to_bf16", "of_bf16"}
