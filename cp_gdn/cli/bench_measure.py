"""Times of single kernels inside of forwards and backwards, by torch's profiler, as samples for a fit."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cp_gdn.comm import Comm
from cp_gdn.context import Context, build_context
from cp_gdn.entries import backward, forward
from cp_gdn.layout import partition
from cp_gdn.makespan import Rows, rank_rows
from cp_gdn.options import Options
from cp_gdn.plan import Segments

GATES = {"model": 1.0, "slow": 1e-4}
"""Factors of -softplus(N(0,1) - 3): gates as models have them, which decay within a few chunks, and gates that hardly
do."""
MIXED = (30_000, 12_000, 9_000, 6_000, 4_000, 2_500, 1_500, 536)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Documents on one rank, heads (H, HV), and the P to time."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    p: tuple[int, ...]


CASES = tuple(
    Case(lengths=lengths, heads=heads, p=p)
    for heads in ((16, 48), (2, 8))
    for lengths, p in (
        ((65_536,), (1, 5, 8, 11, 16, 22, 33)),
        ((32_768,), (1, 2, 5, 8, 13, 16, 22)),
        ((8_192,) * 8, (1, 2, 3, 4)),
        (MIXED, (1, 2, 3, 5, 7, 9)),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A kernel of one step: what the rank held, the device's nanoseconds, and its name: "prepare", "grad", a walk of
    `cost_model.WALKS`, "folds" (both directions), or "launch" (the shortest kernel and the shortest gap between two).
    """

    kernel: str
    rows: Rows
    p: int
    heads: int
    gate: str
    ns: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Kernels of one forward or backward in the order in which they ran: names, nanoseconds, and those from the end
    of one to the start of the next."""

    names: list[str] = field(default_factory=list)
    ns: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        return [ns for own, ns in zip(self.names, self.ns, strict=True) if own == name]


def measured(case: Case, device: str, repeats: int) -> Iterator[Sample]:
    """Samples of a case under both gates. RuntimeError: the kernels do not run here, or ran in another order."""
    bounds = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
    part = partition(bounds, 1, "contiguous")
    # A backward that finds nothing saved prepares again: `grouped` tells by it where one begins.
    asked: dict[str, Any] = {"device": device, "heads": case.heads, "backend": "hopper"}
    asked["options"] = Options(save="light")
    contexts = [build_context(part, Comm.alone(), segments=p, **asked) for p in case.p]
    for gate in GATES:
        x, dout = inputs(sum(case.lengths), case.heads, gate, device)
        for ctx in contexts:
            _step(ctx, x, dout)
        calls = _profiled(contexts * repeats, x, dout)
        for i, ctx in enumerate(contexts):
            runs = [named(ctx.plan.segments, *calls[j]) for j in range(i, len(calls), len(contexts))]
            for kernel in runs[0]:
                ns = statistics.median(run[kernel] for run in runs)
                rows = rank_rows(part, 0)
                yield Sample(kernel=kernel, rows=rows, p=ctx.plan.p, heads=case.heads[1], gate=gate, ns=ns)


def inputs(tokens: int, heads: tuple[int, int], gate: str, device: str) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g, beta of a pack, and a gradient of o; q and k normalised."""
    gen = torch.Generator(device=device).manual_seed(0)

    def normal(*dims: int) -> Tensor:
        return torch.randn(tokens, *dims, generator=gen, device=device)

    q, k = (torch.nn.functional.normalize(normal(heads[0], 128), dim=-1).bfloat16() for _ in range(2))
    g = -torch.nn.functional.softplus(normal(heads[1]) - 3) * GATES[gate]
    return [q, k, normal(heads[1], 128).bfloat16(), g, normal(heads[1]).sigmoid()], normal(heads[1], 128).bfloat16()


def _step(ctx: Context, x: list[Tensor], dout: Tensor) -> None:
    q, k, v, g, beta = x
    saved = forward(q, k, v, g, beta, ctx=ctx)[2]
    backward(dout, None, saved, ctx=ctx)


def _profiled(contexts: list[Context], x: list[Tensor], dout: Tensor) -> list[tuple[Launched, Launched]]:
    """Kernels of a step of each context: of its forward, of its backward; both begin with `prepare`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for ctx in contexts:
            _step(ctx, x, dout)
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if event.device_type.name == "CUDA"]
    calls = grouped(sorted(events, key=lambda event: event.time_range.start))
    if len(calls) != 2 * len(contexts):
        raise RuntimeError(f"profiler: got {len(calls)} calls of prepare, expected {2 * len(contexts)}, two per step")
    return list(zip(calls[::2], calls[1::2], strict=True))


def grouped(events: Iterable[Any]) -> list[Launched]:
    """Events of the profiler, by time, as the forwards and backwards that they are of."""
    calls: list[Launched] = []
    end = 0.0
    for event in events:
        if event.name == "prepare":
            calls.append(Launched())
        elif calls:
            calls[-1].gaps.append(1000.0 * (event.time_range.start - end))
        if calls:
            calls[-1].names.append(event.name)
            calls[-1].ns.append(1000.0 * event.time_range.elapsed_us())
        end = event.time_range.end
    return calls


def named(segments: Segments, before: Launched, after: Launched) -> dict[str, float]:
    """Nanoseconds by `Sample.kernel` of a step, from the order in which a forward and a backward launch."""
    has_prev, summarized = segments.has_prev, bool(segments.has_next.any())
    walks, adjoints, mirrored = before.of("walk"), after.of("adjoint"), int(has_prev.any())
    if len(walks) <= summarized or len(adjoints) <= mirrored:
        got = f"{len(walks)} walks in a forward and {len(adjoints)} adjoint walks in a backward"
        raise RuntimeError(
            f"kernels: got {got} of {len(segments)} segments, expected at least {1 + summarized} of each"
        )
    found = {"prepare": (sum(before.of("prepare")) + sum(after.of("prepare"))) / 2, "grad": sum(after.of("grad"))}
    found |= {"output": walks[-1], "states": sum(after.of("walk")), "adjoint": sum(adjoints[mirrored:])}
    if summarized:
        found |= {"summaries": sum(walks[:-1]), "adjoint_offsets": adjoints[0]}
        found["folds"] = sum(before.of("fold")) + sum(after.of("fold"))
        found["launch"] = min(after.ns) + min(after.gaps)  # a longer gap is the host's
    return found
