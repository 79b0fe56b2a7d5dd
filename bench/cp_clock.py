"""Timing of calls that all ranks of a run make together: they start as one, and the slowest counts."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

WARM_UP = 2
AHEAD = 60_000_000
"""Clock ticks (30 ms) that the device sleeps while the host runs ahead."""


class Clock:
    """Marks on the device's stream, or on the host of a CPU; `aligned` lets all ranks pass at about the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._token = torch.zeros(1, device=device)

    def mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds; the device has passed both."""
        return float(1e3 * (end - start) if self.device.type == "cpu" else start.elapsed_time(end))

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def aligned(self) -> None:
        dist.all_reduce(self._token)

    def over_ranks(self, values: list[float], *, largest: bool = True) -> list[float]:
        """Element by element the largest (least) of all ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
        return list(found.tolist())

    def of_each_rank(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        return [float(x) for x in found]

    def single(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Milliseconds of this rank's calls, each from a start of all ranks; launches included."""
        times = []
        for i in range(repeats + WARM_UP):
            self.settle()
            self.aligned()
            start = self.mark()
            result = call()
            end = self.mark()
            self.settle()
            if i >= WARM_UP:
                times.append(self.between(start, end))
            del result
        return times

    def queued(self, call: Callable[[], Any], rounds: int, calls: int) -> list[float]:
        """Milliseconds of a call where the host is ahead of the device, as in training."""
        times = []
        for _ in range(rounds):
            self.settle()
            if self.device.type == "cuda":
                torch.cuda._sleep(AHEAD)
            self.aligned()
            start = self.mark()
            for _ in range(calls):
                call()
            end = self.mark()
            self.settle()
            times.append(self.between(start, end) / calls)
        return times

    def peak_mib(self, call: Callable[[], Any]) -> float:
        """Memory of a call above what was there."""
        if self.device.type == "cpu":
            return 0.0
        self.settle()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        call()
        self.settle()
        return (torch.cuda.max_memory_allocated() - base) / 2**20


def timings(
    clock: Clock, name: str, call: Callable[[], Any], repeats: int, *, largest: bool = True
) -> dict[str, object]:
    """Median and spread of single and of queued calls of the slowest rank (``largest=False``: of the fastest)."""
    single = clock.over_ranks(clock.single(call, repeats), largest=largest)
    calls = 1 if clock.device.type == "cpu" else 8
    queued = clock.over_ranks(clock.queued(call, max(3, repeats // 2), calls), largest=largest)
    (peak,) = clock.over_ranks([clock.peak_mib(call)])
    found: dict[str, object] = {}
    for kind, times in (("ms", single), ("queued_ms", queued)):
        found[f"{name}_{kind}"] = round(statistics.median(times), 4)
        found[f"{name}_{kind}_spread"] = [round(min(times), 4), round(max(times), 4)]
    return {**found, f"{name}_peak_mib": round(peak)}


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A B C C B A, ``groups`` times; a turn has ``repeats`` single calls and ``queued`` calls behind one another."""

    groups: int
    repeats: int
    queued: int

    def timings(
        self, clock: Clock, ways: Mapping[str, tuple[Callable[[], Any], ...]], *, largest: bool = True
    ) -> dict[str, dict[str, object]]:
        """Of each way's forward and step what `timings` gives: medians of all calls, spreads of the turns' medians."""
        times: dict[str, dict[str, list[list[float]]]] = {name: defaultdict(list) for name in ways}
        for name in [*ways, *reversed(ways)] * self.groups:
            for kind, call in zip(("fwd", "step"), ways[name], strict=True):
                single, queued = clock.single(call, self.repeats), clock.queued(call, 1, self.queued)
                times[name][f"{kind}_ms"].append(clock.over_ranks(single, largest=largest))
                times[name][f"{kind}_queued_ms"].append(clock.over_ranks(queued, largest=largest))
        return {name: self._summary(kinds) for name, kinds in times.items()}

    @staticmethod
    def _summary(kinds: Mapping[str, list[list[float]]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for kind, turns in kinds.items():
            medians = [statistics.median(turn) for turn in turns]
            found[kind] = round(statistics.median(x for turn in turns for x in turn), 4)
            found[f"{kind}_spread"] = [round(min(medians), 4), round(max(medians), 4)]
        return found
