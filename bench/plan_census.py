"""Census of the measured rule: modelled step time at its P against the best P of all and against one segment.

Every figure is modelled from a calibration, nothing is timed.
Run: python bench/plan_census.py [--calibration FILE] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from cp_gdn.calibration import Calibration, calibration_for, load_calibration
from cp_gdn.cost_model import MAX_SEGMENTS, StepModel, may_run
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


def step_times(rows: Rows, heads: int, calibration: Calibration) -> dict[int, int]:
    """Modelled ns of a rank's step at every P that may run."""
    longest = np.array(max((nc for nc, *_ in rows), default=0))
    tried = np.arange(1, MAX_SEGMENTS + 1)
    tried = tried[may_run(tried, longest, calibration)]
    model = StepModel([rows], heads, calibration, tried)
    return {p: model.step_ns(0, i) for i, p in enumerate(tried.tolist())}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calibration", metavar="FILE", help="constants that cp-gdn bench --calibrate wrote")
    parser.add_argument(
        "--device", default="NVIDIA H200", help="GPU name as its driver gives it (default: %(default)s)"
    )
    parser.add_argument("--sms", type=int, help="SM count of a GPU that is not in the table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    calibration, note = calibration_for(args.device, args.sms)
    if args.calibration:
        calibration, note = load_calibration(args.calibration), ""
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
