"""`python -m cp_gdn.run`: how a script runs under it, without a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cp_gdn.integrations.run import main


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["--loud"], 2), (["-m"], 2), (["--help"], 0)])
def test_run_without_a_script_prints_how_to_use_it(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    said = capsys.readouterr()
    assert "usage: python -m cp_gdn.run SCRIPT" in (said.err if status else said.out)


def test_run_gives_a_script_its_arguments_its_folder_and_its_exit_status(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside\nprint(__name__, beside.NAME, sys.argv[1:])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "cp_gdn.run", str(script), "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "__main__ beside ['--lr', '1']\n"), done.stderr


PACKED = """
import sys
import torch
from accelerate import Accelerator
from tests.dist.hybrid_models import build

accelerator, model = Accelerator(cpu=True), build("qwen3_5")
model = accelerator.prepare(model)
ids, bounds = torch.arange(23)[None], torch.tensor([0, 9, 23])
with torch.no_grad():
    packed = model(ids, cu_seq_lens_q=bounds).logits
    apart = [model(input_ids=ids[:, a:b]).logits for a, b in ((0, 9), (9, 23))]
torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize(("variables", "status"), [({"CP_GDN_ON_ONE_RANK": "1"}, 0), ({}, 1)])
def test_under_run_one_rank_takes_packed_rows_only_if_it_shall_run_our_layers(
    variables: dict[str, str], status: int, tmp_path: Path
) -> None:
    """transformers' own layers need flash-linear-attention for them."""
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(PACKED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}
    command = [sys.executable, "-m", "cp_gdn.run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == status, done.stderr
