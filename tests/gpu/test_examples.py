"""The examples on one GPU: one process, and two that share it, each with the Hopper kernels; losses side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers", "4", "--length", "4096", "--steps", "3"]
ONE = [sys.executable, "{script}", *SMALL, "--on-one-rank"]
TWO = ["bash", str(ROOT / "launch" / "torchrun.sh"), "-m", "tests.gpu.one_gpu", "{script}", *SMALL]
TORCH = [*TWO[:4], "--torch-attention", *TWO[4:]]
RUNS = {
    "rows, one": ("finetune_hf.py", ONE),
    "rows, two": ("finetune_hf.py", TWO),
    "rows, two, torch's attention": ("finetune_hf.py", TORCH),
    "packed, one": ("finetune_hf.py", [*ONE, "--packed"]),
    "packed, two": ("finetune_hf.py", [*TWO, "--packed"]),
    "trainer, two": ("finetune_trainer.py", [*TWO, "--packed"]),
}
BF16_STEP = 0.04
"""What comes back from a bf16 model is a multiple of 0.03 where losses are between 4 and 8."""


class Run:
    """What an example logged and printed."""

    def __init__(self, folder: Path, text: str) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        self.losses = [entry["loss"] for entry in entries if "loss" in entry]
        self.norms = [entry["grad_norm"] for entry in entries if "grad_norm" in entry]
        self.text = text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All of them at once: most of their time is importing."""
    folder = tmp_path_factory.mktemp("examples")
    variables = {"NPROC_PER_NODE": "2", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables, "CP_GDN_LOG": "info", "ACCELERATE_MIXED_PRECISION": "bf16"}
    started = {}
    with ExitStack() as stack:
        for name, (script, command) in RUNS.items():
            call = [part.format(script=ROOT / "examples" / script) for part in command]
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            call += ["--out", str(folder / name)]
            process = subprocess.Popen(call, stdout=log, stderr=log, env=environment, cwd=ROOT)
            started[name] = stack.enter_context(process)
        for name, process in started.items():
            assert process.wait(timeout=180) == 0, (folder / f"{name}.log").read_text()
    return {name: Run(folder / name, (folder / f"{name}.log").read_text()) for name in RUNS}


PAIRS = [
    ("rows, one", "rows, two"),
    ("rows, one", "rows, two, torch's attention"),
    ("packed, one", "packed, two"),
]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_two_processes_on_one_gpu_train_as_one_does_with_the_kernels(one: str, two: str, runs: dict[str, Run]) -> None:
    assert runs[two].losses == pytest.approx(runs[one].losses, abs=BF16_STEP)
    assert runs[two].norms == pytest.approx(runs[one].norms, rel=0.02)


@pytest.mark.parametrize("name", RUNS)
def test_every_example_runs_on_the_kernels(name: str, runs: dict[str, Run]) -> None:
    assert len(runs[name].losses) == 3
    assert "backend=hopper (auto: every rank can run the kernels)" in runs[name].text


ATTENTION = {
    "rows, one": "gather (there is one rank)",
    "rows, two": "gather (torch's SDPA context parallelism needs NCCL on CUDA, and this group is gloo)",
    "rows, two, torch's attention": "torch (CUDA, unpacked zigzag rows)",
}


@pytest.mark.parametrize("name", ATTENTION)
def test_softmax_attention_is_torchs_own_only_where_it_can_run(name: str, runs: dict[str, Run]) -> None:
    assert f"softmax attention by {ATTENTION[name]}" in runs[name].text
