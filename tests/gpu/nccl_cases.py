"""What ranks run, a GPU each: one table of cases, compared by bits over NCCL, gloo, as the twin and on one rank.

Every comparison is made where the tensors are, so that nothing large travels: a rank's function returns the names of
tensors that differ. With ``device="cpu"`` the same functions run on gloo alone, and prove themselves without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cp_gdn
from cp_gdn import Comm, Context

GPUS = torch.cuda.device_count()
WORLDS = [
    pytest.param(n, id=f"{n}gpus", marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} CUDA devices, found {GPUS}"))
    for n in (2, 4, 8)
]
"""Numbers of ranks; -k 4gpus picks those of 4."""
hopper = pytest.mark.skipif(
    GPUS == 0 or torch.cuda.get_device_capability() != (9, 0), reason="the kernels need a Hopper GPU"
)

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
EXCHANGES = ("ring", "a2a")
DIMS, WIDTH = (128, 128), 4
INPUTS = ("x", "weight", "g", "beta", "initial")
SUMMED = ("dweight",)
"""Sums over tokens: each rank's own part, so they differ between numbers of ranks."""
Tensors = dict[str, Tensor]

SHORT = tuple(90 + 461 * i % 1709 for i in range(40))
LONG = 131_072
PACKS = {"one long document": (LONG,), "40 short ones": SHORT, "both": (*SHORT[:20], LONG, *SHORT[20:])}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pack and how it is run on the ranks."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (2, 6)
    layout: str = "zigzag_per_document"
    exchange: str = "ring"
    segments: int | str = "auto"
    gate: str = "model"
    backend: str = "hopper"
    dtype: torch.dtype = torch.bfloat16

    @property
    def grid(self) -> int:
        return int(str(self.segments).partition(":")[2] or 0)

    @property
    def conv(self) -> tuple[int, int]:
        return (2 * self.heads[0] + self.heads[1]) * 128, WIDTH

    @property
    def bounds(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]


def cases_of(packs: Mapping[str, Sequence[int]], **same: Any) -> list[Case]:
    """Every pack, layout and exchange; "auto" segments and a grid, each with its own kind of gates."""
    kinds = (("auto", "model"), ("grid:8", "slow"))
    return [
        Case(lengths=tuple(lengths), layout=layout, exchange=exchange, segments=segments, gate=gate, **same)
        for lengths in packs.values()
        for layout in LAYOUTS
        for exchange in EXCHANGES
        for segments, gate in kinds
    ]


# ---- one rank --------------------------------------------------------------------------------------------------------


def place(rank: int, kind: str) -> torch.device:
    """This rank's device, made the current one of the thread."""
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@contextmanager
def comms(*, gloo: bool = False) -> Iterator[list[Comm]]:
    """A Comm of the world, which is NCCL's on GPUs; with ``gloo`` a second one over gloo, of the same processes."""
    made = [Comm(), *([Comm(dist.new_group(backend="gloo"))] if gloo else [])]
    yield made
    for comm in made:
        comm.close()


def inputs(case: Case, device: torch.device, seed: int = 0) -> Tensors:
    """The whole pack: x is what the convolution takes, q | k | v side by side."""
    gen, tokens, docs = torch.Generator(device).manual_seed(seed), sum(case.lengths), len(case.lengths)
    channels, value_heads = case.conv[0], case.heads[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    g = -torch.nn.functional.softplus(normal(tokens, value_heads) - 3) * (1e-4 if case.gate == "slow" else 1)
    return {
        "x": normal(tokens, channels).to(case.dtype),
        "weight": (0.5 * normal(channels, WIDTH)).to(case.dtype),
        "g": g.to(wide),
        "beta": normal(tokens, value_heads).sigmoid().to(wide),
        "initial": (0.3 * normal(docs, value_heads, *DIMS)).to(wide),
        "dout": normal(tokens, value_heads, DIMS[1]).to(case.dtype),
        "dfinal": (0.3 * normal(docs, value_heads, *DIMS)).to(wide),
    }


def context(comm: Comm, case: Case, device: torch.device, **options: Any) -> Context:
    part = cp_gdn.partition(case.bounds, comm.size, case.layout, align=64 * case.grid or 1)
    asked = {"segments": case.segments, "exchange": case.exchange, "backend": case.backend, "dtype": case.dtype}
    shape = {"heads": case.heads, "head_dims": DIMS, "conv": case.conv}
    ctx = cp_gdn.build_context(part, comm, device=device, **shape, **asked, options=cp_gdn.Options(**options))
    assert ctx.taken.kind == case.backend
    return ctx


def rows_of(name: str, ctx: Context) -> Tensor:
    """Which rows of a whole pack's tensor this rank holds; all of the weight."""
    device = ctx.device
    if name.endswith("weight"):
        return torch.arange(ctx.conv[0] if ctx.conv else 0, device=device)
    if name.endswith("initial"):
        return torch.tensor(ctx.entry_docs, dtype=torch.int64, device=device)
    if name.endswith("final"):
        return torch.tensor(ctx.exit_docs, dtype=torch.int64, device=device)
    return ctx.token_ids


def local(ctx: Context, whole: Tensors) -> Tensors:
    """This rank's rows; inputs are leaves."""
    mine = {name: x[rows_of(name, ctx)] for name, x in whole.items()}
    return {name: x.requires_grad_() if name in INPUTS else x for name, x in mine.items()}


def outputs(ctx: Context, x: Mapping[str, Tensor], handle: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
    """The convolution and the op: o and the final states."""
    y = cp_gdn.causal_conv1d(x["x"], x["weight"], None, ctx=ctx, activation="silu", recompute=handle)
    o, final = cp_gdn.chunk_gated_delta_rule(
        *cp_gdn.packed_qkv_views(y, ctx.heads, DIMS),
        x["g"],
        x["beta"],
        ctx=ctx,
        initial_state=x["initial"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        recompute=handle,
        **more,
    )
    assert final is not None
    return o, final


def step(ctx: Context, mine: Tensors, between: Callable[[], None] = lambda: None) -> Tensors:
    """Forward and backward of one rank; ``between`` is called in the middle."""
    o, final = outputs(ctx, mine)
    between()
    grads = torch.autograd.grad((o, final), [mine[n] for n in INPUTS], (mine["dout"], mine["dfinal"]))
    return {"o": o.detach(), "final": final.detach(), **{f"d{n}": t for n, t in zip(INPUTS, grads, strict=True)}}


def differences(got: Mapping[str, Tensor], want: Mapping[str, Tensor], leave: Sequence[str] = ()) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert got.keys() == want.keys()
    assert all(x.isfinite().all() for x in want.values())
    return [name for name in want if name not in leave and not torch.equal(got[name], want[name])]


# ---- what ranks compare ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """A rank's comparisons of a case by name, and what ran; ``crosses``: whether a document is cut."""

    differ: dict[str, list[str]]
    wires: tuple[str, ...]
    messages: int
    crosses: bool


def assert_same_bits(
    cases: Sequence[Case], ranks: Sequence[Sequence[Found]], wires: tuple[str, str], compared: set[str]
) -> None:
    """Of what every rank found: nothing differs, and messages were sent wherever a document is cut."""
    for case, *found in zip(cases, *ranks, strict=True):
        # in a pack of short documents a rank may have nothing to send
        assert any(each.messages for each in found) == found[0].crosses, case
        for each in found:
            assert each.wires == wires, each.wires
            assert each.differ.keys() == (compared if case.grid else compared - {"one rank"}), each.differ
            assert not any(each.differ.values()), (case, each.differ)
    assert sum(each.crosses for each in ranks[0]) > len(cases) // 2


def compare(rank: int, _world: int, kind: str, cases: list[Case]) -> list[Found]:
    """Every case over the world's wire, over gloo and as the twin; on a grid, and where it is promised, on one rank."""
    device = place(rank, kind)
    with comms(gloo=True) as (main, gloo):
        return [compare_case(rank, (main, gloo), case, device) for case in cases]


def compare_case(rank: int, wires: tuple[Comm, Comm], case: Case, device: torch.device) -> Found:
    whole = inputs(case, device)

    def on(comm: Comm) -> tuple[Tensors, Context]:
        place(rank, device.type)  # a thread of the twin starts on device 0
        ctx = context(comm, case, device)
        return step(ctx, local(ctx, whole)), ctx

    with wires[0].record() as log:
        want, ctx = on(wires[0])
    differ = {"gloo": differences(on(wires[1])[0], want)}
    differ["twin"] = differences(cp_gdn.twin(wires[0].size, on)[rank][0], want)
    if case.grid and (case.backend == "hopper" or device.type == "cpu"):
        alone = on(Comm.alone())[0]
        rows = {name: x[rows_of(name, ctx)] for name, x in alone.items()}
        differ["one rank"] = differences(want, rows, leave=SUMMED)
    kinds = tuple(comm.kind for comm in wires)
    return Found(differ=differ, wires=kinds, messages=len(log), crosses=ctx.partition.crosses)


def without_a_sync(rank: int, _world: int, kind: str, cases: list[Case]) -> list[list[str]]:
    """A pack's preparation and a whole step where a synchronizing call raises, against one where none does."""
    device, found = place(rank, kind), []
    with comms() as (comm,):
        for case in cases:
            whole = inputs(case, device)
            mine = local(ctx := context(comm, case, device), whole)
            want = step(ctx, mine)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                got = step(context(comm, case, device), mine)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append(differences(got, want))
    return found


def captured(rank: int, _world: int, kind: str, cases: list[Case]) -> list[list[str]]:
    """A whole step, its messages too, as one graph: replayed twice with other values, against eager calls."""
    device, found = place(rank, kind), []
    with comms() as (comm,):
        for case in cases:
            ctx = context(comm, case, device)
            mine, others = (local(ctx, inputs(case, device, seed)) for seed in (0, 1))
            want = [step(ctx, others), step(ctx, mine)]  # also what a first call makes once
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = step(ctx, mine)
            first = {name: x.detach().clone() for name, x in mine.items()}
            for values, eager in ((others, want[0]), (first, want[1])):
                with torch.no_grad():
                    for name, x in mine.items():
                        x.copy_(values[name])
                graph.replay()
                found.append(differences(got, eager))
            torch.cuda.synchronize()
            del graph, got  # before its communicator
    return found


SPIN = 100_000_000
"""Clock ticks, 50 ms."""


def slow_rank(rank: int, world: int, kind: str, cases: list[Case]) -> list[list[str]]:
    """One rank's device spins before its forward and before its backward, twice for each rank, against no spinning."""
    device, found = place(rank, kind), []
    with comms() as (comm,):
        for case in cases:
            ctx = context(comm, case, device)
            mine = local(ctx, inputs(case, device))
            want = step(ctx, mine)
            for slow in (*range(world), *range(world)):

                def spin(slow: int = slow) -> None:
                    if slow == rank and device.type == "cuda":
                        torch.cuda._sleep(SPIN)

                spin()
                found.append(differences(step(ctx, mine, between=spin), want))
    return found
