"""Time what a rank does on the host before the first step on a new pack: partition, segments, plan and tables.

    python bench/plan_time.py [--world 4,16] [--heads 2,6 --heads 16,48] [--documents 1,4,12,24] [--repeats 50]
                              [--layout zigzag --layout ..] [--device cpu] [--conv 4] [--scale] [--tables torch,kernels]
                              [--clock cpu] [--steady] [--json] [--out FILE.json]
    python bench/plan_time.py --cuda ...

`--tables`: those of the torch backend, those of the Hopper kernels, or a row for each. `--cuda` prepares for a GPU,
and again behind 100 ms of queued work and after that work is done, and gives the ratio of the two medians: in both the
host has stood still for as long, which alone makes it slower than in a loop.

Every repeat starts from a list of boundaries. The agreement through the store is not in it: it waits for the slowest
rank. `--scale` adds 5,000 documents and W = 1024 with 64 M tokens in 10,000 documents. Tables with an entry per token
are in it on a GPU, as kernels in the stream; on a CPU they are made when they are first used. `--clock cpu` counts the
thread's own time, for a machine on which others run too: it leaves out waiting for a core, not what their work does to
caches and clock rate. `--steady` leaves that out as well: a fixed loop of Python runs before and after every repeat,
and a repeat counts if neither took more than 1.1 times the fastest such loop of the process. A row says how many
repeats it took (`tried`), and the median of the loop beside those that count (`loop_us`).
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cp_gdn
from cp_gdn.backends.choice import TORCH, BackendChoice
from cp_gdn.backends.precision import state_dtype
from cp_gdn.context import assemble_context, device_calibration
from cp_gdn.exchange import Sizes, choose
from cp_gdn.plan import Plan, build_plan
from cp_gdn.segments import resolve_segments
from cp_gdn.tables import build_tables

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
TOKENS = 261_987
TABLES = ("torch", "kernels")
STAGES = ("partition", "segments", "plan_tables", "total")
SLEEP_100_MS = 200_000_000
"""Clock cycles, at up to 2 GHz."""
STEADY, PATIENCE = 1.1, 300.0
"""With `--steady`: how much slower the fixed loop may be beside a repeat that counts; seconds that a row may take."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True, kw_only=True)
class Seat:
    """All that preparation asks a `Comm` for."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class How:
    """Where tables go, whether those of the kernels are among them, the clock, taps of a convolution (0: without)."""

    device: torch.device
    kernels: bool
    clock: str
    conv_width: int

    def asked(self, heads: tuple[int, int]) -> dict[str, Any]:
        """Arguments of `assemble_context`."""
        conv = (2 * heads[0] * 128 + heads[1] * 128, self.conv_width) if self.conv_width else None
        asked = {"device": self.device, "heads": heads, "head_dims": (128, 128), "dtype": torch.bfloat16, "conv": conv}
        taken = BackendChoice(kind="hopper", reason="asked for") if self.kernels else TORCH
        return asked | {"backend": "auto", "options": cp_gdn.Options(), "taken": taken}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. The middle rank is timed: it has a neighbour on either side."""

    tokens: int
    documents: int
    world: int
    layout: str
    heads: tuple[int, int]
    tables: str

    def bounds(self) -> list[int]:
        cuts = np.random.default_rng(self.documents).choice(self.tokens - 1, self.documents - 1, replace=False) + 1
        return [0, *np.sort(cuts).tolist(), self.tokens]


def prepare(case: Case, bounds: list[int], how: How) -> tuple[Plan, dict[str, float], str]:
    """One rank's plan, seconds by stage, and its exchange."""
    seat, clock, asked = Seat(rank=case.world // 2, size=case.world), CLOCKS[how.clock], how.asked(case.heads)
    times = [clock()]
    part = cp_gdn.partition(bounds, case.world, case.layout)
    times.append(clock())
    calibration, note = device_calibration(how.device)
    picked = resolve_segments("auto", part, case.heads[1], calibration, note)
    p = picked.p_of(seat.rank)
    sizes = Sizes.of(case.heads[1], (128, 128), state_dtype(torch.bfloat16).itemsize)
    choice = choose("auto", part, sizes, calibration.times, grid=False)
    times.append(clock())
    plan = build_plan(part, seat.rank, p_vector=p)
    if how.kernels and how.device.type == "cpu":
        # What `assemble_context` makes for the kernels, where there is no GPU to load them.
        tables = build_tables(part, plan, choice.kind, case.heads, on_kernels=True, width=how.conv_width or None)
        tables.upload(how.device)
    else:
        assemble_context(part, seat, plan, picked, choice, asked)  # type: ignore[arg-type]
    times.append(clock())
    parts = [b - a for a, b in pairwise(times)]
    return plan, dict(zip(STAGES, (*parts, times[-1] - times[0]), strict=True)), choice.kind


def row(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Medians in microseconds of the stages, and the least and the most of each."""
    bounds = case.bounds()
    kernels = case.tables == "kernels"
    how = How(device=torch.device(args.device), kernels=kernels, clock=args.clock, conv_width=args.conv)
    plan, _, exchange = prepare(case, bounds, how)
    if how.device.type == "cuda":
        torch.cuda.synchronize()
    runs, of_machine = repeated(lambda: prepare(case, bounds, how)[1], args)
    found: dict[str, Any] = {
        "shape": f"1x{case.tokens}",
        "documents": case.documents,
        "world": case.world,
        "layout": case.layout,
        "heads": f"{case.heads[0]},{case.heads[1]}",
        "tables": case.tables,
        "exchange": exchange,
        "p": plan.p,
        "segments": len(plan.segments),
        "repeats": args.repeats,
        **of_machine,
    }
    for stage in STAGES:
        found |= _figures(stage, [1e6 * seconds[stage] for seconds in runs])
    if args.cuda:
        for name, done in (("idle", True), ("busy", False)):
            spent = [prepare_beside_work(case, bounds, how, done=done) for _ in range(args.repeats)]
            found |= _figures(f"{name}_total", [1e6 * seconds for seconds in spent])
        found["busy_ratio"] = round(found["busy_total_us"] / found["idle_total_us"], 3)
    return found


def repeated(
    run: Callable[[], dict[str, float]], args: argparse.Namespace
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Runs that count, and with `--steady` what is known of the machine while they ran."""
    if not args.steady:
        return [run() for _ in range(args.repeats)], {}
    fastest, runs, beside, tried, end = fastest_loop(), [], [], 0, time.perf_counter() + PATIENCE
    while len(runs) < args.repeats and time.perf_counter() < end:
        before, found, after = fixed_loop(), run(), fixed_loop()
        tried += 1
        if max(before, after) <= STEADY * fastest:
            runs.append(found)
            beside.append(1e6 * max(before, after))
    if len(runs) < args.repeats:
        raise SystemExit(f"--steady: in {PATIENCE:.0f} s {len(runs)} of {tried} repeats ran undisturbed")
    return runs, {"tried": tried, "loop_us": round(statistics.median(beside), 1)}


@functools.cache
def fastest_loop() -> float:
    """Seconds of `fixed_loop` on this machine when nobody disturbs it, as far as can be seen in two seconds."""
    end = time.perf_counter() + 2
    return min(fixed_loop() for _ in iter(lambda: time.perf_counter() < end, False))


def fixed_loop() -> float:
    """Seconds of some Python that does the same whenever it runs."""
    start, total = time.perf_counter(), 0
    for i in range(2000):
        total += i * i
    return time.perf_counter() - start


def _figures(name: str, us: list[float]) -> dict[str, Any]:
    return {f"{name}_us": round(statistics.median(us), 1), f"{name}_us_spread": [round(min(us), 1), round(max(us), 1)]}


def prepare_beside_work(case: Case, bounds: list[int], how: How, *, done: bool) -> float:
    """Seconds of host time while the GPU has 100 ms of work queued, or right after it is ``done``."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_100_MS)
    if done:
        torch.cuda.synchronize()
    seconds = prepare(case, bounds, how)[1]["total"]
    torch.cuda.synchronize()
    return seconds


def cases(args: argparse.Namespace) -> Iterator[Case]:
    layouts = args.layout or LAYOUTS
    usual = itertools.product(args.world, args.heads or [(2, 6), (16, 48)], layouts, args.documents, args.tables)
    for world, heads, layout, documents, tables in usual:
        yield Case(tokens=TOKENS, documents=documents, world=world, layout=layout, heads=heads, tables=tables)
    if not args.scale:
        return
    for layout, tables in itertools.product(layouts, args.tables):
        yield Case(tokens=TOKENS, documents=5_000, world=4, layout=layout, heads=(16, 48), tables=tables)
        yield Case(tokens=64_000_000, documents=10_000, world=1024, layout=layout, heads=(16, 48), tables=tables)


def print_row(found: dict[str, Any]) -> None:
    times = "".join(f"{found[f'{stage}_us']:12.0f}" for stage in STAGES)
    shape = f"{found['world']:5} {found['layout']:19} {found['heads']:>5} {found['documents']:9} {found['exchange']:>5}"
    shape += f" {found['tables']:>7}"
    busy = ""
    if "busy_ratio" in found:
        busy = f"  idle {found['idle_total_us']:.0f}, busy {found['busy_total_us']:.0f}, x {found['busy_ratio']}"
    print(
        f"{shape} {found['p']:3}{times}  {found['total_us_spread'][0]:8.0f} to {found['total_us_spread'][1]:.0f}{busy}"
    )


def result(rows: list[dict[str, Any]], device: str, clock: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    return {
        "device": f"{name}, 1 host thread",
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "cp_gdn": cp_gdn.__version__},
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "clock": clock,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "rows": rows,
    }


def ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def kinds_of_tables(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(TABLES):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected some of {', '.join(TABLES)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=ints, default=[4, 16])
    parser.add_argument("--heads", type=lambda text: tuple(ints(text)), action="append", help="H,HV; may be repeated")
    parser.add_argument("--documents", type=ints, default=[1, 4, 12, 24])
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--conv", type=int, default=0, metavar="WIDTH", help="with the halo of a convolution")
    parser.add_argument("--scale", action="store_true", help="thousands of documents, and a thousand ranks, too")
    parser.add_argument("--tables", type=kinds_of_tables, default=[*TABLES], help="torch, kernels, or both")
    parser.add_argument("--cuda", action="store_true", help="--device cuda, and again behind 100 ms of work")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--steady", action="store_true", help="only repeats during which nobody slowed the core down")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cuda:
        args.device = "cuda"
    torch.set_num_threads(1)
    if not args.json:
        print("world layout              heads documents  exch  tables   P" + "".join(f"{x:>12}" for x in STAGES), "us")
    rows = []
    for case in cases(args):
        rows.append(row(case, args))
        if not args.json:
            print_row(rows[-1])
    text = json.dumps(result(rows, args.device, args.clock), indent=1)
    if args.json:
        print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
