"""Census of the measured rule: step time at its P against the best P of all and against one segment.

Run: python bench/plan_census.py [--calibration FILE] [--json]      72 packs, modelled for gates that never decay
     python bench/plan_census.py --cuda [--rounds N] [--out FILE]   packs of one GPU, timed on it, for both gates
Timed: forward + backward of the kernels behind queued work, so that no host time is in it; every P once, then the best
few, the rule's and P = 1 in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cp_gdn
from cp_gdn.calibration import Calibration, calibration_for, load_calibration
from cp_gdn.cli.bench_measure import inputs
from cp_gdn.cost_model import MAX_SEGMENTS, RankModel, may_run
from cp_gdn.layout import partition
from cp_gdn.makespan import Rows, rank_tables, table_rows
from cp_gdn.segments import p_vector

HEADS = (6, 8, 16, 32, 48, 64)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
TOKENS = (8192, 16384, 32768, 65536, 131072, 262144)
"""Tokens per rank."""
DOCUMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
WORLDS = (1, 2, 3, 4, 8, 16)
NUM_PACKS = 72


@dataclass(frozen=True, kw_only=True, slots=True)
class CensusRow:
    """One row; times in us of the slowest rank, modelled. `best` gives every rank the P that a trial of all finds."""

    documents: int
    tokens_per_rank: int
    heads: int
    layout: str
    world: int
    p: tuple[int, ...]
    measured_us: float
    best_us: float
    one_us: float

    @property
    def over_best(self) -> float:
        return self.measured_us / self.best_us - 1

    @property
    def over_one(self) -> float:
        return self.measured_us / self.one_us - 1


def packs() -> Iterator[tuple[list[int], int, str, int]]:
    """(cu_seqlens, value heads, layout, world): the axes cycle against each other, lengths are log-uniform."""
    rng = np.random.default_rng(0)
    for i in range(NUM_PACKS):
        world = WORLDS[(i + i // len(HEADS)) % len(WORLDS)]
        documents = DOCUMENTS[(i // 2) % len(DOCUMENTS)]
        total = TOKENS[(i + i // (len(HEADS) * len(WORLDS))) % len(TOKENS)] * world
        shares = np.exp(rng.uniform(0.0, 4.0, documents))
        bounds = np.round(np.cumsum(shares) / shares.sum() * total).astype(int)
        yield [0, *bounds.tolist()], HEADS[(i * 5 + i // 6) % len(HEADS)], LAYOUTS[i % len(LAYOUTS)], world


def step_times(rows: Rows, heads: int, calibration: Calibration) -> dict[int, float]:
    """Modelled ns of a rank's step at every P that may run."""
    longest = np.array(max((nc for nc, *_ in rows), default=0))
    tried = np.arange(1, MAX_SEGMENTS + 1)
    tried = tried[may_run(tried, longest, calibration)]
    return dict(zip(tried.tolist(), RankModel(rows, heads, calibration, tried).times_ns[0].tolist(), strict=True))


def census(calibration: Calibration) -> list[CensusRow]:
    result = []
    for cu_seqlens, heads, layout, world in packs():
        tables = rank_tables(partition(cu_seqlens, world, layout))
        vector = p_vector("measured", tables, heads, calibration.sm_count, calibration)
        times_of = cache(lambda rows, heads=heads: step_times(rows, heads, calibration))
        times = [times_of(table_rows(table)) for table in tables]
        result.append(
            CensusRow(
                documents=len(cu_seqlens) - 1,
                tokens_per_rank=cu_seqlens[-1] // world,
                heads=heads,
                layout=layout,
                world=world,
                p=tuple(vector),
                measured_us=max(t[p] for t, p in zip(times, vector, strict=True)) / 1000,
                best_us=max(min(t.values()) for t in times) / 1000,
                one_us=max(t[1] for t in times) / 1000,
            )
        )
    return result


def print_table(rows: list[CensusRow], calibration: Calibration, note: str) -> None:
    constants = f"{calibration.device}, {calibration.sm_count} SMs; {calibration.source}"
    print(f"Modelled, not timed. Constants: {constants}. {note}".rstrip())
    print("docs tokens/rank heads world layout              measured us   best us   P=1 us  +best    +one  P")
    for row in rows:
        p = ",".join(map(str, row.p if len(set(row.p)) > 1 else row.p[:1]))
        shape = f"{row.documents:4} {row.tokens_per_rank:11} {row.heads:5} {row.world:5} {row.layout:19}"
        times = f"{row.measured_us:11.0f} {row.best_us:9.0f} {row.one_us:8.0f}"
        print(f"{shape} {times} {row.over_best:6.2%} {row.over_one:7.1%}  {p}")
    worst, one = max(row.over_best for row in rows), max(row.over_one for row in rows)
    print(f"{len(rows)} rows, modelled: at most {worst:.2%} above the best P, at most {one:+.2%} against P = 1.")


# ---- timed -----------------------------------------------------------------------------------------------------------

MIXED = (30_000, 12_000, 9_000, 6_000, 4_000, 2_500, 1_500, 536)
TIMED = (
    *(
        (lengths, heads)
        for heads in ((16, 48), (16, 32), (2, 6), (2, 8))
        for lengths in ((65_536,), (32_768,), (8_192,) * 8, (16_384,) * 4, MIXED)
    ),
    ((261_987,), (2, 6)),
)
"""(lengths, heads) of one rank."""
FINALISTS = 3
"""P that are timed again beside the rule's and P = 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """Steps of a pack at any P under one of the gates."""

    contexts: dict[int, cp_gdn.Context]
    x: list[torch.Tensor]
    dout: torch.Tensor

    def ms(self, p: int, steps: int = 2) -> float:
        """Milliseconds of the device per step, the host ahead of it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(5_000_000)
        self.step(p)
        start.record()
        for _ in range(steps):
            self.step(p)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / steps

    def step(self, p: int) -> None:
        saved = cp_gdn.forward(*self.x, ctx=self.contexts[p])[2]
        cp_gdn.backward(self.dout, None, saved, ctx=self.contexts[p])


def candidates(lengths: tuple[int, ...], heads: int, chosen: int) -> list[int]:
    """P worth a trial: all that may run up to 24, then every fourth, while segments have at least 6 chunks."""
    longest = -(-max(lengths) // 64)
    share = -(-sum(lengths) // 64) * heads / 132
    tried = [p for p in range(1, MAX_SEGMENTS + 1) if p <= 24 or p % 4 == 0]
    fits = [p for p in tried if longest / p <= 300 and longest / p >= max(6, share / 16)]
    return sorted({1, chosen, *fits})


def shape_of(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) > 1:
        return f"{len(lengths)} documents, {sum(lengths)}"
    return f"{lengths[0]}x{len(lengths)}" if len(lengths) > 1 else f"1x{lengths[0]}"


def timed_row(
    lengths: tuple[int, ...], heads: tuple[int, int], gate: str, rounds: int, calibration: Calibration
) -> dict[str, Any]:
    """The rule's P, the best one and P = 1: median milliseconds, and the least and the most of each."""
    part = cp_gdn.partition([0, *np.cumsum(lengths).tolist()], 1, "contiguous")
    asked = {"device": "cuda", "heads": heads, "backend": "hopper"}

    def built(segments: int) -> cp_gdn.Context:
        return cp_gdn.build_context(part, cp_gdn.Comm.alone(), segments=segments, **asked)

    (chosen,) = p_vector("measured", rank_tables(part), heads[1], calibration.sm_count, calibration)
    tried = candidates(lengths, heads[1], chosen)
    x, dout = inputs(sum(lengths), heads, gate, "cuda")
    timer = Timer(contexts={p: built(p) for p in tried}, x=x, dout=dout)
    timer.ms(1)
    once = {p: timer.ms(p, steps=1) for p in tried}
    final = sorted({1, chosen, *sorted(once, key=once.__getitem__)[:FINALISTS]})
    times: dict[int, list[float]] = {p: [] for p in final}
    for i in range(rounds):
        for p in final if i % 2 else final[::-1]:
            times[p].append(timer.ms(p))
    median = {p: statistics.median(ms) for p, ms in times.items()}
    best = min(median, key=median.__getitem__)
    found: dict[str, Any] = {"shape": shape_of(lengths), "world": 1, "gate": gate}
    found |= {"heads": f"{heads[0]},{heads[1]}", "p": chosen, "best_p": best, "repeats": 2 * rounds}
    for label, p in (("step_ms", chosen), ("best_ms", best), ("one_ms", 1)):
        found[label] = round(median[p], 4)
        found[f"{label}_spread"] = [round(min(times[p]), 4), round(max(times[p]), 4)]
    found |= {
        "over_best": round(median[chosen] / median[best] - 1, 4),
        "over_one": round(median[chosen] / median[1] - 1, 4),
    }
    return found | {"once_ms": {p: round(ms, 4) for p, ms in once.items()}}


def timed_census(args: argparse.Namespace, calibration: Calibration) -> None:
    print("shape              heads gate   P (best)    step ms  best ms   P=1 ms   +best    +one")
    rows = []
    for lengths, heads in TIMED:
        for gate in ("model", "slow") if args.only in (None, shape_of(lengths)) else ():
            row = timed_row(lengths, heads, gate, args.rounds, calibration)
            rows.append(row)
            shape = f"{row['shape']:18} {row['heads']:5} {gate:5} {row['p']:3} ({row['best_p']:3})"
            times = f"{row['step_ms']:9.3f}{row['best_ms']:9.3f}{row['one_ms']:9.3f}"
            print(f"{shape}  {times} {row['over_best']:7.1%} {row['over_one']:7.1%}", flush=True)
            torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cp_gdn": cp_gdn.__version__},
        "commit": args.commit,
        "date": datetime.date.today().isoformat(),
        "constants": calibration.source,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calibration", metavar="FILE", help="constants that cp-gdn bench --calibrate wrote")
    parser.add_argument(
        "--device", default="NVIDIA H200", help="GPU name as its driver gives it (default: %(default)s)"
    )
    parser.add_argument("--sms", type=int, help="SM count of a GPU that is not in the table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--cuda", action="store_true", help="time packs of one rank on this GPU instead")
    parser.add_argument("--rounds", type=int, default=7, help="with --cuda: timings of each finalist")
    parser.add_argument("--only", metavar="SHAPE", help="with --cuda: rows of one shape, such as 8192x8")
    parser.add_argument("--out", type=Path, help="with --cuda: write the rows to this file")
    parser.add_argument("--commit", default="", help="with --cuda: for the file")
    args = parser.parse_args()
    calibration, note = calibration_for(args.device, args.sms)
    if args.calibration:
        calibration, note = load_calibration(args.calibration), ""
    if args.cuda:
        timed_census(args, calibration)
        return
    rows = census(calibration)
    if args.json:
        listed = [{**asdict(row), "over_best": row.over_best, "over_one": row.over_one} for row in rows]
        print(
            json.dumps({"modelled": True, "note": note, "calibration": asdict(calibration), "rows": listed}, indent=1)
        )
    else:
        print_table(rows, calibration, note)


if __name__ == "__main__":
    main()
