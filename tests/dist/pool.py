"""The one launcher of the distributed tests: worker processes that are started once and run functions as ranks.

`run(world_size, fn, *args)` calls the module-level `fn(rank, world_size, *args)` on ranks 0..world_size-1 of a process
group and returns what each rank returned; `run_failing` returns how each rank ended. One set of workers serves all
world sizes: rank r is always worker r, and the process group is made anew when the size changes or after a failure.
Tensors travel by value. Workers that died or hung, and all that took part in a failed `run`, are replaced.
"""

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
GRACE = 5.0  # s the other ranks have to report after the first one raised or died
START = 120.0  # s a worker has to start: importing torch, many at a time on two cores


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: `name` is "returned", "killed", "hung" or the exception's type; `text` its text.

    `seconds` counts from when all ranks were ready; `intact`: whether the rank is still in the process group it got.
    """

    name: str
    text: str = ""
    seconds: float = 0.0
    details: str = ""
    value: Any = None
    intact: bool = True


class RanksFailed(AssertionError):
    """Some ranks raised, died or hung; the text holds what every one of them did."""


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, backend: str = "gloo") -> list[Any]:
    """What fn(rank, world_size, *args) returned on each rank. Raises RanksFailed with every rank's traceback."""
    outcomes = _POOL.execute(world_size, fn, args, timeout=timeout, grace=GRACE, backend=backend)
    if any(outcome.name != "returned" for outcome in outcomes):
        _POOL.discard(range(world_size))
        raise RanksFailed(_describe(fn, outcomes))
    return [outcome.value for outcome in outcomes]


def run_failing(
    world_size: int, fn: Callable[..., Any], *args: Any, deadline: float = 30.0, backend: str = "gloo"
) -> list[Outcome]:
    """How each rank ended; RanksFailed if one has not by the deadline. A new process group is made afterwards."""
    outcomes = _POOL.execute(world_size, fn, args, timeout=deadline, grace=deadline, backend=backend)
    _POOL.discard(rank for rank, outcome in enumerate(outcomes) if outcome.name in ("killed", "hung"))
    if any(outcome.name == "hung" for outcome in outcomes):
        raise RanksFailed(_describe(fn, outcomes))
    return outcomes


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.stacks = folder / f"stacks-{rank}-{time.monotonic_ns()}"
        self.process: BaseProcess = context.Process(target=_serve, args=(rank, theirs, self.stacks), daemon=True)
        self.process.start()
        theirs.close()

    def what_it_does(self) -> str:
        """The stacks of a hung worker's threads."""
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self.stacks.read_text() if self.stacks.exists() else "nothing known"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool:
    """The workers of this process, by rank, and the world they last formed."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._folder: Path | None = None
        self._worlds = 0
        self._world: tuple[int, str] | None = None

    def execute(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        timeout: float,
        grace: float,
        backend: str,
    ) -> list[Outcome]:
        self._prepare(world_size, backend)
        assert self._folder is not None
        world = (self._worlds, world_size, backend, str(self._folder / f"world-{self._worlds}"))
        # First all ranks form their world and import the test: a rank may die, and clocks start, when all are there.
        self._send(world_size, pickle.dumps((world, fn.__module__, "", b"")))
        outcomes = self._gather(world_size, START, GRACE)
        if all(outcome.name == "returned" for outcome in outcomes):
            self._send(world_size, pickle.dumps((world, fn.__module__, fn.__qualname__, pickle.dumps(args))))
            outcomes = self._gather(world_size, timeout, grace)
        if not all(outcome.intact for outcome in outcomes):
            self._world = None
        return outcomes

    def _send(self, world_size: int, task: bytes) -> None:
        for rank in range(world_size):
            self._workers[rank].pipe.send_bytes(task)

    def discard(self, ranks: Iterable[int]) -> None:
        """Throw away the workers of these ranks, and the world they formed with the others."""
        for rank in ranks:
            if rank in self._workers:
                self._workers.pop(rank).end()
        self._world = None

    def end(self) -> None:
        self.discard(list(self._workers))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _prepare(self, world_size: int, backend: str) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="cp_gdn_test_"))
            atexit.register(self.end)
        new = [rank for rank in range(world_size) if rank not in self._workers]
        for rank in new:
            self._workers[rank] = _Worker(rank, self._folder)
        for rank in new:
            if not self._workers[rank].pipe.poll(START):
                self.discard(range(world_size))
                raise RanksFailed(f"worker {rank} did not start within {START:g} s")
            self._workers[rank].pipe.recv_bytes()
        if new or self._world != (world_size, backend):
            self._world, self._worlds = (world_size, backend), self._worlds + 1

    def _gather(self, world_size: int, timeout: float, grace: float) -> list[Outcome]:
        start = time.monotonic()
        end = start + timeout
        pending: dict[Any, int] = {self._workers[rank].pipe: rank for rank in range(world_size)}
        outcomes: dict[int, Outcome] = {}
        while pending and time.monotonic() < end:
            for pipe in wait(list(pending), timeout=max(end - time.monotonic(), 0.0)):
                rank = pending.pop(pipe)
                outcomes[rank] = _outcome(pipe, time.monotonic() - start)
                if outcomes[rank].name != "returned":
                    end = min(end, time.monotonic() + grace)
        for rank in pending.values():
            stacks = self._workers[rank].what_it_does()
            outcomes[rank] = Outcome(name="hung", seconds=time.monotonic() - start, details=stacks)
        return [outcomes[rank] for rank in range(world_size)]


_POOL = _Pool()  # test code may have the global that the package may not: it is started lazily and kept


def _outcome(pipe: Any, seconds: float) -> Outcome:
    try:
        name, text, details, value, intact = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return Outcome(name="killed", seconds=seconds, intact=False)
    return Outcome(name=name, text=text, seconds=seconds, details=details, value=value, intact=intact)


def _describe(fn: Callable[..., Any], outcomes: Sequence[Outcome]) -> str:
    parts = [f"{fn.__module__}.{fn.__qualname__} on {len(outcomes)} ranks"]
    for rank, outcome in enumerate(outcomes):
        parts.append(f"--- rank {rank} {outcome.name} after {outcome.seconds:.1f} s {outcome.text}\n{outcome.details}")
    return "\n".join(parts)


def _serve(rank: int, pipe: Connection, stacks: Path) -> None:
    """A worker's life: take a task, form its world if that is new, run it, send back how it ended."""
    import torch  # here, not above: the test process itself need not pay for it before it uses it
    import torch.distributed as dist

    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        pipe.send_bytes(b"ready")
        current, group = -1, None
        while True:
            try:
                world, module, name, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            try:
                if world[0] != current:
                    _form_world(rank, *world[1:])
                    current, group = world[0], dist.group.WORLD
                test = importlib.import_module(module)
                value = getattr(test, name)(rank, world[1], *pickle.loads(args)) if name else None
                outcome = ("returned", "", "", value)
                pickle.dumps(outcome)  # what cannot travel is this rank's error
                del value
            except BaseException as error:
                outcome = (type(error).__name__, str(error), traceback.format_exc(), None)
                del error
            gc.collect()  # what the task left behind, before the next one looks at threads and tensors
            intact = dist.is_initialized() and dist.group.WORLD is group
            pipe.send_bytes(pickle.dumps((*outcome, intact)))


def _form_world(rank: int, world_size: int, backend: str, file: str) -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(file, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
