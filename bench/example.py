"""The plugin's example under `accelerate launch`, on all GPUs and on fewer: losses side by side, memory and tokens/s.

python bench/example.py [--gpus 8] [--out FILE.json] [--commit HASH] [--quick] [--logs FOLDER]

Every run is a launcher's, with its YAML or by launch/torchrun.sh; runs on fewer GPUs are beside each other. A step's
seconds are those between two lines of the log, whatever was done between them; the first two are left out. Exit status
1 if a run failed or a loss is more than one bf16 step from that of one GPU with as many sequences a step.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "finetune_hf.py")
LOSS_STEP = 0.04
"""What comes back from a bf16 model is a multiple of 0.03 where losses are between 4 and 8."""
LEFT_OUT = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; runs of one ``turn`` go at the same time. ``gpus``: of CUDA_VISIBLE_DEVICES. ``sequences``: of
    a step, on all ranks and in all its micro-batches."""

    turn: int
    command: tuple[str, ...]
    gpus: str
    arguments: tuple[str, ...] = ()
    sequences: int = 1

    @property
    def ranks(self) -> int:
        return len(self.gpus.split(","))


TORCHRUN = ("bash", str(ROOT / "launch" / "torchrun.sh"))
ONE_RANK = ("--on-one-rank",)


def by_yaml(yaml: str, first: int, sizes: tuple[int, int], sequences: int, turn: int) -> Run:
    """``sizes``: dp and cp, in place of the YAML's; on neighbouring GPUs from the ``first`` on."""
    dp, cp = sizes
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "launch" / "accelerate" / f"{yaml}.yaml"), "--num_processes", str(dp * cp)]
    launch += ["--parallelism_config_dp_shard_size", str(dp), "--parallelism_config_cp_size", str(cp)]
    return Run(
        turn=turn,
        command=(*launch, "--main_process_port", str(29611 + 10 * turn + first)),
        gpus=",".join(str(first + i) for i in range(dp * cp)),
        arguments=("--accumulate", str(sequences // dp), *(ONE_RANK if cp == 1 else ())),
        sequences=sequences,
    )


TWO = {
    "one GPU, YAML": by_yaml("two_gpus", 0, (1, 1), 1, 0),
    "one GPU, python": Run(turn=0, command=(sys.executable,), gpus="1", arguments=ONE_RANK),
    "two GPUs, YAML": by_yaml("two_gpus", 0, (1, 2), 1, 1),
    "two GPUs, torchrun.sh, the kernels asked for": Run(turn=2, command=TORCHRUN, gpus="0,1"),
}
"""One process by python: no FSDP, no activation checkpoints."""
EIGHT = {
    "1 GPU, 2 sequences": by_yaml("eight_gpus", 0, (1, 1), 2, 0),
    "1 GPU, 4 sequences": by_yaml("eight_gpus", 1, (1, 1), 4, 0),
    "2 GPUs, cp 2, 4 sequences": by_yaml("eight_gpus", 2, (1, 2), 4, 0),
    "4 GPUs, cp 4, 2 sequences": by_yaml("eight_gpus", 4, (1, 4), 2, 0),
    "8 GPUs, dp 2, cp 4, 2 sequences": by_yaml("eight_gpus", 0, (2, 4), 2, 1),
    "8 GPUs, dp 4, cp 2, 4 sequences": by_yaml("eight_gpus", 0, (4, 2), 4, 2),
    "8 GPUs, cp 8, 2 sequences": by_yaml("eight_gpus", 0, (1, 8), 2, 3),
}
RUNS = {2: TWO, 8: EIGHT}
"""By GPUs of the machine. The first of as many sequences a step is what others are compared with."""


# ---- inside of a rank ------------------------------------------------------------------------------------------------


def worker(file: str, script: str, *arguments: str) -> None:
    """Run the script as it is, with a line for every call of `Accelerator.log`: seconds since the last, and memory."""
    sys.path[0] = str(Path(script).parent)  # not this folder, whose kernels.py others would take for a package
    import torch
    from accelerate import Accelerator

    original, last = Accelerator.log, [time.perf_counter()]

    @functools.wraps(original)
    def log(self: Any, values: dict[str, Any], *args: Any, **options: Any) -> Any:
        now, peak = time.perf_counter(), 0.0
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated() / 2**20
            torch.cuda.reset_peak_memory_stats()
        line = {"seconds": now - last[0], "peak_mib": peak, "tokens": values.get("tokens")}
        with Path(f"{file}-{os.environ.get('RANK', '0')}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        last[0] = now
        return original(self, values, *args, **options)

    Accelerator.log = log
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


# ---- all runs --------------------------------------------------------------------------------------------------------


def start(name: str, run: Run, args: argparse.Namespace, logs: Path) -> subprocess.Popen[bytes]:
    variables = {"CUDA_VISIBLE_DEVICES": run.gpus, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables |= {"NPROC_PER_NODE": str(run.ranks), "PYTHON": sys.executable, "CP_GDN_LOG": "info"}
    variables |= {"ACCELERATE_MIXED_PRECISION": "bf16", "CP_GDN_BACKEND": "hopper"}
    sizes = ["--packed", "--length", str(args.length), "--steps", str(args.steps), "--save-every", str(args.steps + 1)]
    sizes += ["--hidden", str(args.hidden), "--layers", str(args.layers), "--out", str(logs / name)]
    command = [*run.command, __file__, "--worker", str(logs / f"{name}, rank"), SCRIPT, *sizes, *run.arguments]
    with (logs / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables}, cwd=ROOT)


def finish(name: str, run: Run, process: subprocess.Popen[bytes], logs: Path, limit: float) -> dict[str, Any]:
    """What a run gave, or how it ended. ``limit``: seconds it may take from here on."""
    row: dict[str, Any] = {"run": name, "gpus": run.ranks, "sequences": run.sequences}
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # its launcher ends its workers
        process.wait()
        return {**row, "error": f"not ended within {limit:.0f} s"}
    if status:
        said = [
            line for line in (logs / f"{name}.log").read_text().splitlines() if "Error" in line or "cp_gdn:" in line
        ]
        return {**row, "error": f"status {status}: {' | '.join(said[-3:])[:400]}"}
    metrics = [json.loads(line) for line in (logs / name / "metrics.jsonl").read_text().splitlines()]
    ranks = [
        [json.loads(line) for line in (logs / f"{name}, rank-{rank}.jsonl").read_text().splitlines()][:-1]
        for rank in range(run.ranks)
    ]
    rates = [line["tokens"] / line["seconds"] / run.ranks for line in ranks[0][LEFT_OUT:]]
    return row | {
        "loss": [entry["loss"] for entry in metrics if "loss" in entry],
        "grad_norm": [entry["grad_norm"] for entry in metrics if "grad_norm" in entry],
        "eval_loss": metrics[-1].get("eval_loss"),
        "tokens_per_s_per_gpu": round(statistics.median(rates), 1),
        "step_s": round(statistics.median(line["seconds"] for line in ranks[0][LEFT_OUT:]), 4),
        "peak_mib_per_gpu": [round(max(line["peak_mib"] for line in lines[1:])) for lines in ranks],
    }


def compare(rows: list[dict[str, Any]]) -> bool:
    """Add how far each run's losses and norms are from those of the first that ended well, of as many sequences a step;
    whether all are near."""
    fine = [row for row in rows if "error" not in row]
    for row in fine:
        first = next(other for other in fine if other["sequences"] == row["sequences"])
        row["compared_with"] = first["run"]
        row["largest_loss_difference"] = max(abs(a - b) for a, b in zip(row["loss"], first["loss"], strict=True))
        norms = zip(row["grad_norm"], first["grad_norm"], strict=True)
        row["largest_norm_difference_pct"] = round(100 * max(abs(a / b - 1) for a, b in norms), 3)
    return len(fine) == len(rows) and all(row["largest_loss_difference"] <= LOSS_STEP for row in fine)


def write(out: Path | None, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from record import document, record  # brings torch, which a parent of workers needs last

    versions = {name: importlib.metadata.version(name) for name in ("accelerate", "transformers")}
    model = {name: getattr(args, name) for name in ("length", "hidden", "layers", "steps")}
    record(out, document(rows, args.commit, versions, model=model))


def print_table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "error" in row:
            print(f"{row['run']:46} {row['error']}")
            continue
        figures = f"{row['tokens_per_s_per_gpu']:10.0f} tokens/s/GPU  peak MiB {row['peak_mib_per_gpu']}"
        off = f"loss off {row['largest_loss_difference']:.4f}, norm off {row['largest_norm_difference_pct']:.2f} %"
        print(f"{row['run']:46} {figures}  loss {row['loss'][0]:.4f} -> {row['loss'][-1]:.4f}  {off}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=RUNS, default=2)
    parser.add_argument("--length", type=int, help="default: 32768 on two GPUs, 131072 on eight")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=90, help="seconds that runs of one turn may take")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    parser.add_argument("--logs", type=Path, help="folder that keeps the runs' logs")
    args = parser.parse_args()
    if args.quick:
        args.length, args.hidden, args.layers, args.steps = 4096, 256, 4, 4
    args.length = args.length or {2: 32768, 8: 131072}[args.gpus]
    logs = args.logs or Path(tempfile.mkdtemp(prefix="cp_gdn-example-"))
    logs.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    runs, same = RUNS[args.gpus], True
    for turn in dict.fromkeys(run.turn for run in runs.values()):
        end = time.monotonic() + args.limit
        started = {name: start(name, run, args, logs) for name, run in runs.items() if run.turn == turn}
        for name, process in started.items():
            rows.append(finish(name, runs[name], process, logs, max(1.0, end - time.monotonic())))
        same = compare(rows)
        write(args.out, rows, args)
    print_table(rows)
    return 0 if same else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
