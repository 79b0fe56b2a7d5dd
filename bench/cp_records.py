"""Whole packs over the ranks of a run: rules for segments and exchanges in turns, beside one GPU, under torchrun.

torchrun --standalone --nproc-per-node 4 bench/cp_records.py [--packs NAME ..] [--rules ..] [--exchanges ..]
    [--worlds 2 4 8] [--gates model slow] [--layout zigzag] [--seconds 200] [--out FILE.json] [--commit HASH]

Three groups of A B C C B A; a call's time is that of the slowest rank, figures are medians. "queued": the host ahead of
the device, as in training; efficiencies are of these. Efficiency: one GPU's time of the whole pack, where it fits, over
ranks x the slowest rank's. Share: one GPU's time of a rank's share, with no message, over the slowest rank's. One GPU's
time is that of the fastest of the run's GPUs, all at once. With fewer ranks than the run has, the others wait.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cp import Bench, Tensors, calls, efficiencies, inputs, nccl_version, of_context, start
from cp_clock import Clock, Turns
from record import document, record

import cp_gdn
from cp_gdn.cli.arguments import pair

MIXED = (65_536, 131_072, 7, 20_000, 64, 1, 4_000, 30_001)
RECORDS = {
    "1x262144": (262_144,),
    "2 documents": (163_840, 90_001),
    "3 documents": (131_072, 65_536, 49_999),
    "5 documents": (98_304, 65_537, 40_000, 30_001, 10_000),
    "8 documents": MIXED,
}
MILLION = 1 << 20
PACKS = {**RECORDS, "1x1048576": (MILLION,), "33 documents": (*(4 * MIXED), MILLION - 4 * sum(MIXED))}
TIMES = ("fwd_queued_ms", "step_queued_ms", "fwd_ms", "step_ms")
EFFICIENCIES = [f"{share}{kind}efficiency_pct" for share in ("", "share_") for kind in ("fwd_", "")]
RULES = ("row_cost", "row_cost_lpt", "measured")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents of these lengths; values of one kind of gates."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    gate: str

    @property
    def bounds(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    @property
    def described(self) -> dict[str, Any]:
        heads = ",".join(map(str, self.heads))
        counts = {"tokens": sum(self.lengths), "documents": len(self.lengths)}
        return {"shape": self.name, **counts, "heads": heads, "gate": self.gate}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The first ``size`` ranks of a run; ``comm``: None on the others."""

    size: int
    comm: cp_gdn.Comm | None


def idle() -> None:
    """What a rank runs that is not of the group."""


def packs_of(args: argparse.Namespace) -> list[Pack]:
    chosen = [(name, gate) for name in args.packs for gate in args.gates]
    cut = {name: tuple(max(1, n // args.shrink) for n in PACKS[name]) for name in args.packs}
    return [Pack(name=name, lengths=cut[name], heads=args.heads, gate=gate) for name, gate in chosen]


def groups_of(main: cp_gdn.Comm, worlds: list[int]) -> list[Group]:
    """Made by all ranks, in one order."""
    made = []
    for world in worlds:
        if world == main.size:
            made.append(Group(size=world, comm=main))
        else:
            group = dist.new_group(list(range(world)))
            made.append(Group(size=world, comm=cp_gdn.Comm(group) if main.rank < world else None))
    return made


# ---- one GPU ---------------------------------------------------------------------------------------------------------


def alone(bench: Bench, turns: Turns, bounds: list[int], heads: tuple[int, int], rows: Tensors) -> dict[str, Any]:
    """A pack on every GPU by itself, the fastest; nothing where one of them has no room for it."""
    part = cp_gdn.partition(bounds, 1)
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), heads=heads, **bench.asked)
    fwd, step = calls(of_context(ctx), [x.detach() for x in rows])
    room = bench.clock.over_ranks([float(fits(step))], largest=False)[0]
    if not room:
        torch.cuda.empty_cache()
        return {}
    found = turns.timings(bench.clock, {"": (fwd, step)}, largest=False)[""]
    peak = max(bench.clock.of_each_rank(bench.clock.peak_mib(step)))
    return {**found, "step_peak_mib": round(peak), "segments": list(ctx.segments.p_vector)}


def fits(call: Callable[[], Any]) -> bool:
    try:
        call()
    except torch.OutOfMemoryError:
        return False
    return True


def share_of(bounds: list[int], rank: int, world: int) -> tuple[slice, list[int]]:
    """A rank's share of a pack in the contiguous layout, as a pack of its own: where it lies, and its bounds."""
    first, last = (bounds[-1] * r // world for r in (rank, rank + 1))
    return slice(first, last), sorted({min(max(b, first), last) - first for b in bounds})


# ---- all ranks -------------------------------------------------------------------------------------------------------


def contexts(bench: Bench, pack: Pack, group: Group, args: argparse.Namespace) -> dict[str, cp_gdn.Context | None]:
    """A plan for every rule and exchange; None on a rank that is not of the group."""
    part, made = cp_gdn.partition(pack.bounds, group.size, args.layout), {}
    for rule in args.rules:
        for exchange in args.exchanges:
            asked = {"heads": pack.heads, "exchange": exchange, "segments": rule, **bench.asked}
            made[f"{rule}, {exchange}"] = group.comm and cp_gdn.build_context(part, group.comm, **asked)
    return made


def plan_of(ctx: cp_gdn.Context | None) -> dict[str, Any]:
    if ctx is None:
        return {}
    return {"exchange": ctx.exchange, "backend": ctx.taken.kind, "segments": list(ctx.segments.p_vector)}


def world_rows(
    bench: Bench, pack: Pack, whole: Tensors, group: Group, one: dict[str, Any], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for every rule and exchange on one number of ranks. ``one``: the whole pack on one GPU, if it fits."""
    where, bounds = share_of(pack.bounds, bench.comm.rank % group.size, group.size)
    share = alone(bench, args.turns, bounds, pack.heads, [x[where] for x in whole])
    plans = contexts(bench, pack, group, args)
    first = next(iter(plans.values()))
    rows = first and [x[first.token_ids] for x in whole]  # the same for all: a rank's tokens follow from the layout
    ways = {name: calls(of_context(ctx), rows) if ctx else (idle, idle) for name, ctx in plans.items()}
    for name, found in args.turns.timings(bench.clock, ways).items():
        peaks = {
            f"{kind}_peak_mib": [round(x) for x in bench.clock.of_each_rank(bench.clock.peak_mib(call))][: group.size]
            for kind, call in zip(("fwd", "step"), ways[name], strict=True)
        }
        row = {**pack.described, "layout": args.layout, "world": group.size, "rule": name.partition(",")[0]}
        row |= {**plan_of(plans[name]), **found, **peaks, "groups": args.turns.groups, "repeats": args.turns.repeats}
        row |= {f"one_gpu_{key}": value for key, value in one.items()}
        row |= efficiencies(found, one, group.size) if one else {"one_gpu": "the pack does not fit on one GPU"}
        row |= {f"share_{key}": value for key, value in share.items()}
        yield row | (efficiencies(found, share, 1, "share_") if share else {})


def all_rows(bench: Bench, groups: list[Group], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    for pack in packs_of(args):
        if max(bench.clock.of_each_rank(time.monotonic() - started)) > args.seconds:
            return
        whole = inputs(sum(pack.lengths), pack.heads, pack.gate, bench.clock.device)
        one = alone(bench, args.turns, pack.bounds, pack.heads, whole)
        for group in groups:
            torch.cuda.empty_cache()
            yield from world_rows(bench, pack, whole, group, one, args)
        del whole
        torch.cuda.empty_cache()


def print_table(rows: list[dict[str, Any]]) -> None:
    print("ranks, rule, exchange; queued ms of the slowest rank: forward, step; ms of a call by itself: the same;")
    print("efficiency %: forward, step, both against one GPU's share; step's peak MiB of the ranks; P")
    shown = ""
    for row in rows:
        head = f"{row['shape']} of {row['tokens']} tokens, ({row['heads']}), gates {row['gate']}, {row['layout']}"
        if head != shown:
            one = [row.get(f"one_gpu_{name}", math.nan) for name in (*TIMES, "step_peak_mib")]
            print(head + ": one GPU " + " ".join(f"{x:.2f}" for x in one))
        shown = head
        times = " ".join(f"{row[name]:7.3f}" for name in TIMES)
        shares = " ".join(f"{row.get(name, math.nan):5.1f}" for name in EFFICIENCIES)
        peaks = row["step_peak_mib"]
        said = f"{row['world']} {row['rule']:12} {row['exchange']:4} {times}  {shares}  {min(peaks)}-{max(peaks)}"
        print(f"  {said}  {' '.join(map(str, row['segments']))}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", nargs="+", choices=PACKS, default=list(RECORDS))
    parser.add_argument("--rules", nargs="+", choices=(*RULES, "auto"), default=list(RULES))
    parser.add_argument("--exchanges", nargs="+", choices=("auto", "ring", "a2a"), default=["auto"])
    parser.add_argument("--worlds", type=int, nargs="+", help="numbers of ranks; by default all of the run")
    parser.add_argument("--gates", nargs="+", choices=("model", "slow"), default=["model"])
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--heads", type=pair, default=(16, 48))
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="single calls of a turn")
    parser.add_argument("--queued", type=int, default=4, help="calls behind one another in a turn")
    parser.add_argument("--seconds", type=float, default=200, help="begin no pack after so many")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try this file")
    parser.add_argument("--cpu", action="store_true", help="gloo and torch, to try this file")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    args.turns = Turns(groups=args.groups, repeats=args.repeats, queued=args.queued)
    return args


def main() -> None:
    args = parsed()
    device = start(args.cpu)
    comm = cp_gdn.Comm()
    bench = Bench(comm=comm, clock=Clock(device), backend="torch" if args.cpu else "hopper", repeats=args.repeats)
    groups, rows = groups_of(comm, args.worlds or [comm.size]), []
    for row in all_rows(bench, groups, args):
        rows.append(row)
        if comm.rank == 0:
            # after every row: a run that is cut short leaves what it has
            record(args.out, document(rows, args.commit, nccl_version(device)))
            print(*(row[name] for name in ("shape", "gate", "world", "rule", "exchange", *TIMES)), flush=True)
    if comm.rank == 0:
        print_table(rows)
    for each in (comm, *(group.comm for group in groups if group.comm)):
        each.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
