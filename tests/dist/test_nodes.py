"""Several machines, played by launchers on this one: torchrun agents and `accelerate launch`, on gloo.

Longer runs (the examples, every launcher, the machine that hosts the store) are a script: `all_nodes.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.dist import nodes, pool
from tests.dist.nodes_worker import EXCHANGES, SPLITS, layers

pytest.importorskip("accelerate")
pytest.importorskip("psutil")
pytestmark = pytest.mark.dist

LAUNCHERS = (nodes.torchrun, nodes.accelerate)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_machines_of_two_ranks_give_the_bits_of_one_machine_of_four(
    launcher: nodes.Launcher, tmp_path: Path
) -> None:
    """Outputs and gradients of every rank, with the sequence across the machines and inside each of them."""
    want = pool.run(4, layers, timeout=120)
    nodes.run(launcher, 2, 2, tmp_path, "layers")
    for rank in range(4):
        got = torch.load(tmp_path / f"rank{rank}.pt")
        assert got["sizes"] == ["2", "2"], "by default a sequence stays inside a machine"
        assert list(got["results"]) == [f"{split}, {exchange}" for split in SPLITS for exchange in EXCHANGES]
        for case, results in want[rank].items():
            different = [name for name, x in results.items() if not torch.equal(got["results"][case][name], x)]
            assert different == [], (rank, case)


REASONS = [
    ("forever", 1, r"CommFailed: .* by rank 1: rank 1 gave no sign of life"),
    ("collectives", 1, r"cp_gdn: rank 1 of the run gave no sign of life"),
    ("collectives", 0, r"cp_gdn: the run's store cannot be reached: its host, rank 0's machine"),
]


@pytest.mark.parametrize(("task", "lost", "reason"), REASONS)
def test_when_a_machine_loses_its_power_the_other_one_ends_and_says_which_rank_is_gone(
    task: str, lost: int, reason: str, tmp_path: Path
) -> None:
    """While cp_gdn's messages are on their way, and while torch's own collectives are."""
    with nodes.machines(nodes.numbered, 2, 1, tmp_path, task) as started:
        nodes.wait_for([tmp_path / f"began-{rank}" for rank in range(2)], started)
        started[lost].power_off()
        assert started[1 - lost].wait(60.0) != 0
    assert re.search(reason, started[1 - lost].text), started[1 - lost].text
