"""How much of an exchange a rank waits for while it computes, beside the time that the same messages take alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cp_clock import Clock

import cp_gdn
from cp_gdn.transport import Flight, Messages, Transport


class Watched(Transport):
    """Another transport; remembers its messages, and when the stream came to each wait and left it."""

    monitored = False

    def __init__(self, link: Transport, clock: Clock) -> None:
        self.rank, self.size, self.store, self.kind = link.rank, link.size, link.store, link.kind
        self.link, self.clock = link, clock
        self.waits: list[tuple[Any, Any]] = []
        self.batches: list[tuple[str, Messages, Messages]] = []

    def forget(self) -> None:
        self.waits, self.batches = [], []

    def exchange(self, purpose: str, sends: Messages, recvs: Messages) -> Flight:
        self.batches.append((purpose, sends, recvs))
        return _Watched(self.link.exchange(purpose, sends, recvs), self)

    def abort(self) -> None:
        self.link.abort()

    def close(self) -> None:
        self.link.close()


class _Watched(Flight):
    def __init__(self, flight: Flight, owner: Watched) -> None:
        self.peers, self.flight, self.owner = flight.peers, flight, owner

    def wait(self, timeout: float) -> None:
        start = self.owner.clock.mark()
        self.flight.wait(timeout)
        self.owner.waits.append((start, self.owner.clock.mark()))


def watch(comm: cp_gdn.Comm, clock: Clock) -> Watched:
    """From now on the Comm's messages are watched; `comm._link = watched.link` ends it."""
    comm._link = Watched(comm._link, clock)
    return comm._link


def exposed(watched: Watched, call: Callable[[], Any], repeats: int) -> dict[str, object]:
    """Microseconds of the rank that waits most: in the messages of a call, and in the same messages one by one."""
    clock, waited, alone = watched.clock, [], []
    for i in range(repeats + 2):
        clock.settle()
        watched.forget()
        clock.aligned()
        result = call()
        clock.settle()
        if i >= 2:
            waited.append(sum(clock.between(*pair) for pair in watched.waits))
        del result
    batches = list(watched.batches)
    for i in range(repeats + 2):
        spent = [_alone(watched, batch) for batch in batches]
        if i >= 2:
            alone.append(sum(spent))
    waits, isolated = (statistics.median(clock.over_ranks(times)) for times in (waited, alone))
    return {
        "messages": len(batches),
        "bytes_sent": sum(x.numel() * x.element_size() for _, sends, _ in batches for _, x in sends),
        "exposed_us": round(1e3 * waits, 1),
        "isolated_us": round(1e3 * isolated, 1),
        "exposed_pct": round(100 * waits / isolated, 1) if isolated else None,
    }


def _alone(watched: Watched, batch: tuple[str, Messages, Messages]) -> float:
    clock = watched.clock
    clock.settle()
    clock.aligned()
    start = clock.mark()
    watched.link.exchange(*batch).wait(25.0)
    end = clock.mark()
    clock.settle()
    return clock.between(start, end)


def profiled(clock: Clock, call: Callable[[], Any], trace: Path | None) -> dict[str, object]:
    """From a profile of one call on this rank's device: microseconds of NCCL's kernels for messages, and of these the
    ones in which no other kernel ran."""
    if clock.device.type == "cpu":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        clock.aligned()
        call()
        clock.settle()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "AllReduce" not in event.name:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    covered = sum(_overlap(span, _union(spans[False])) for span in spans[True])
    total = sum(end - start for start, end in spans[True])
    return {"profile_nccl_us": round(total, 1), "profile_uncovered_us": round(total - covered, 1)}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
