"""Machines played by this one: launchers as a user starts them, one per machine, on gloo and localhost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = "tests.dist.nodes_worker"

Launcher = Callable[[int, int, int, int], tuple[list[str], dict[str, str]]]
"""(machine, machines, ranks on each, port) -> the launcher's command, up to the script, and its variables."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def torchrun(node: int, nodes: int, per_node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """`launch/torchrun.sh` on one of the machines, all with the same line, and its variables."""
    sizes = {"NNODES": str(nodes), "NPROC_PER_NODE": str(per_node)}
    places = {"HEAD_ADDR": "localhost", "HEAD_PORT": str(port), "PYTHON": sys.executable}
    return ["bash", str(ROOT / "launch" / "torchrun.sh")], {**sizes, **places}


def numbered(node: int, nodes: int, per_node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """As `torchrun`, each machine told its number: number 0 hosts the store and rank 0."""
    command, variables = torchrun(node, nodes, per_node, port)
    return command, {**variables, "NODE_RANK": str(node)}


def accelerate(node: int, nodes: int, per_node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """`accelerate launch` with the YAML for two machines, smaller."""
    flags = {
        "config_file": ROOT / "launch" / "accelerate" / "two_nodes.yaml",
        "machine_rank": node,
        "num_machines": nodes,
        "num_processes": nodes * per_node,
        "main_process_ip": "localhost",
        "main_process_port": port,
        "parallelism_config_cp_size": per_node,
    }
    written = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *written], {}


class Machine:
    """One launcher and all that it started, with what it printed in a file."""

    def __init__(self, command: Sequence[str], variables: dict[str, str], log: Path) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT)

    def power_off(self) -> None:
        """Kill the launcher and its workers at once, as a machine that loses its power."""
        import psutil

        if self.process.poll() is not None:
            return
        launcher = psutil.Process(self.process.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s:\n{self.text}") from None

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")


@contextmanager
def machines(
    launcher: Launcher, nodes: int, per_node: int, folder: Path, task: str, variables: Mapping[str, str] | None = None
) -> Iterator[list[Machine]]:
    """Start a task of the worker on all machines; whatever still runs at the end is killed."""
    port, started = free_port(), []
    try:
        for node in range(nodes):
            command, own = launcher(node, nodes, per_node, port)
            call = [*command, "-m", WORKER, task, str(folder)]
            started.append(Machine(call, {**own, **(variables or {})}, folder / f"machine-{node}.log"))
        yield started
    finally:
        for machine in started:
            machine.power_off()


def run(launcher: Launcher, nodes: int, per_node: int, folder: Path, tasks: str, timeout: float = 300.0) -> None:
    """Run tasks of the worker to their end on all machines."""
    with machines(launcher, nodes, per_node, folder, tasks) as started:
        for node, machine in enumerate(started):
            status = machine.wait(timeout)
            assert status == 0, f"machine {node} ended with {status}:\n{machine.text}"


def wait_for(paths: Sequence[Path], started: Sequence[Machine], timeout: float = 180.0) -> None:
    """Until all files are there, or a launcher ended, or the time is over."""
    end = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        over = time.monotonic() > end or any(machine.process.poll() is not None for machine in started)
        assert not over, "\n".join(machine.text for machine in started)
        time.sleep(0.05)
