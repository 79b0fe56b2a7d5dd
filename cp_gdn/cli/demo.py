"""`cp-gdn demo`: one model trained twice on the same real text, split over ranks and on one rank, side by side."""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cp_gdn.cli.arguments import EXCHANGES, LAYOUTS, positive, require_gpu, require_packages

SUMMARY = "train a byte-level model on the Python library's sources with its sequence split over ranks, and on one rank"
NUM_TOKENS = 2048
LOSS_GOAL = 0.7
"""A run counts as training when its last loss is below this share of its first."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run: how it is launched and where its lines go."""

    world: int
    device: str
    arguments: tuple[str, ...]
    out: Path

    @property
    def name(self) -> str:
        return "1 rank" if self.world == 1 else f"{self.world} ranks"

    @property
    def rows_path(self) -> Path:
        return self.out / f"loss-world{self.world}.jsonl"

    @property
    def log_path(self) -> Path:
        return self.out / f"run-world{self.world}.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=40, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--world", type=positive, help="ranks of the split run (default: the GPUs, at least 2)")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag_per_document", help="default: %(default)s")
    parser.add_argument("--exchange", choices=EXCHANGES, default="auto", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the text and the parameters (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="folder of the results (default: ./%(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    require_packages("demo", "rich", "matplotlib")
    from cp_gdn.cli import demo_report

    split, single = _runs(args)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for each in (split, single):
        with demo_report.progress(f"{each.name} on {each.device}", args.steps) as show:
            rows[each.name] = _train(each, show)
        if len(rows[each.name]) != args.steps:
            return _report_failure(each)
    demo_report.write_plot(rows, args.out / "loss.png")
    demo_report.print_summary(rows, args.out)
    return _verdict(rows)


def _runs(args: argparse.Namespace) -> tuple[Run, Run]:
    import torch

    from cp_gdn.cli.ranks import group_backend

    num_gpus = torch.cuda.device_count()
    if args.device == "cuda":
        require_gpu("auto or cpu")
    device = args.device if args.device != "auto" else ("cuda" if num_gpus else "cpu")
    world = args.world or max(2, num_gpus)
    arguments = []
    for name in ("steps", "layout", "exchange", "seed"):
        arguments += [f"--{name}", str(getattr(args, name))]
    arguments += ["--tokens", str(NUM_TOKENS), "--device", device]

    def make(ranks: int) -> Run:
        group = ("--backend", group_backend(device, ranks))
        return Run(world=ranks, device=device, arguments=(*arguments, *group), out=args.out)

    return make(world), make(1)


def _command(each: Run) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(each.world)]
    return [*launcher, "-m", "cp_gdn.cli.demo_worker", *each.arguments]


@contextlib.contextmanager
def _started(each: Run) -> Iterator["subprocess.Popen[str]"]:
    """The run under torchrun; ended with it when this process is interrupted."""
    # One thread per rank in both runs: their rates compare, and threads that outnumber the free cores cannot stall.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with each.log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(_command(each), stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _train(each: Run, show: Any) -> list[Row]:
    """Run to the end; the rows that rank 0 printed, fewer than the steps when the run failed."""
    rows: list[Row] = []
    with _started(each) as process, each.rows_path.open("w", encoding="utf-8") as file:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            file.write(line)
            rows.append(json.loads(line))
            show(rows[-1])
        # A run that trained but did not end well has failed as well.
        return rows if process.wait() == 0 else []


def _report_failure(each: Run) -> int:
    lines = each.log_path.read_text(encoding="utf-8").splitlines()
    # A rank's own reason says more than torchrun's summary, which ends the log.
    reasons = [line for line in lines if line.startswith("cp_gdn:")]
    print("\n".join(reasons or lines[-25:]), file=sys.stderr)
    print(f"cp-gdn demo: the run on {each.name} failed; the whole log is in {each.log_path}", file=sys.stderr)
    return 1


def _verdict(rows: dict[str, list[Row]]) -> int:
    for name, each in rows.items():
        first, last = each[0]["loss"], each[-1]["loss"]
        if not (math.isfinite(last) and last < LOSS_GOAL * first):
            text = f"{name}: last loss {last:.3f} is not below {LOSS_GOAL} x first loss {first:.3f}"
            print(f"cp-gdn demo: {text}", file=sys.stderr)
            return 1
    return 0
