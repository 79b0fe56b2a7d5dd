"""Every launcher, the examples and every way to lose a machine: `python -m tests.dist.all_nodes`, some five minutes.

The suite runs the short part, `test_nodes.py`. One machine of four ranks is the reference here too, under torchrun.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.dist import nodes
from tests.dist.nodes_worker import SPLITS

Launcher = Callable[..., Any]
LOSSES = {
    "machine 1": (nodes.numbered, 1, "forever", ["began-0", "began-1"]),
    "machine 0, which hosts the store": (nodes.numbered, 0, "forever", ["began-0", "began-1"]),
    "a machine without a number": (nodes.torchrun, 1, "forever", ["began-0", "began-1"]),
    "machine 1 of accelerate launch": (nodes.accelerate, 1, "forever", ["began-0", "began-1"]),
    "machine 1 in a step of the plugin": (nodes.numbered, 1, "plugin", ["metrics.jsonl"]),
}
REASONS = (
    "CommFailed: the context-parallel group failed, by rank",
    "RendezvousConnectionError",  # the agent's, where the other one hosted the rendezvous
    "cp_gdn: rank",  # below what FSDP's own messages say, which know no name
    "cp_gdn: the run's store",
)


def results(launcher: Launcher, machines: int, folder: Path) -> tuple[list[Any], dict[str, str]]:
    """What four ranks computed, and the metrics that the examples logged, as text."""
    folder.mkdir()
    nodes.run(launcher, machines, 4 // machines, folder, "layers,examples")
    ranks = [torch.load(folder / f"rank{rank}.pt")["results"] for rank in range(4)]
    return ranks, {split: (folder / split / "metrics.jsonl").read_text() for split in SPLITS}


def compare(got: tuple[list[Any], dict[str, str]], want: tuple[list[Any], dict[str, str]]) -> int:
    """How many tensors are equal bit for bit; AssertionError at the first that is not, or where a loss differs."""
    count = 0
    for rank, (mine, theirs) in enumerate(zip(got[0], want[0], strict=True)):
        for case, tensors in theirs.items():
            for name, x in tensors.items():
                assert torch.equal(mine[case][name], x), (rank, case, name)
                count += 1
    assert got[1] == want[1]
    return count


def lose(launcher: Launcher, lost: int, task: str, begun: list[str], folder: Path) -> str:
    """Seconds that the other machine took to end, and the best reason that it printed."""
    folder.mkdir()
    with nodes.machines(launcher, 2, 1, folder, task, variables={"CP_GDN_TIMEOUT": "25"}) as started:
        nodes.wait_for([folder / name for name in begun], started)
        start = time.monotonic()
        started[lost].power_off()
        assert started[1 - lost].wait(60.0) != 0
        seconds = time.monotonic() - start
        text = started[1 - lost].text
    lines = [line for reason in REASONS for line in text.splitlines() if reason in line]
    assert lines, text
    return f"{seconds:.1f} s: {lines[0]}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        want = results(nodes.torchrun, 1, folder / "one")
        for split, text in want[1].items():
            print(f"one machine, {split}:\n{text}", end="")
        for launcher in (nodes.torchrun, nodes.numbered, nodes.accelerate):
            count = compare(results(launcher, 2, folder / launcher.__name__), want)
            print(f"two machines, {launcher.__name__}: {count} tensors and all metrics equal", flush=True)
        for number, (what, (launcher, lost, task, begun)) in enumerate(LOSSES.items()):
            print(f"lost {what}: {lose(launcher, lost, task, begun, folder / f'lost-{number}')}", flush=True)


if __name__ == "__main__":
    main()
