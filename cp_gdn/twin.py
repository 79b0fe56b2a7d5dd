"""The twin: all ranks' plan in one process, a thread per rank, the exchange replaced by copies."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from .comm import Comm, CommFailed
from .transport import CopyTransport, CopyWorld

T = TypeVar("T")


def twin(world_size: int, fn: Callable[[Comm], T], *, timeout: float = 60.0) -> list[T]:
    """Run fn(comm) for every rank at once; returns the results in rank order.

    If a rank raises, the others end at once and its exception is raised here. A message nobody waited for is an error.
    """
    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, expected 1 or more")
    world = CopyWorld(world_size)
    comms = [Comm(CopyTransport(world, rank), timeout=timeout) for rank in range(world_size)]
    if torch.cuda.is_initialized():  # torch loads its linear algebra on first use, and not from several threads at once
        torch.linalg.solve_triangular(torch.eye(2, device="cuda"), torch.eye(2, device="cuda"), upper=False)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            # The backward of every rank in its own thread: a device's autograd thread, shared, would wait for itself.
            with torch.autograd.set_multithreading_enabled(False), comms[rank].guard("twin"):
                results[rank] = fn(comms[rank])
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(r,), name=f"twin rank {r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise _first(errors)
    leftover = world.leftover()
    if leftover:
        raise RuntimeError(f"messages that nobody waited for: {', '.join(leftover)}")
    return [results[rank] for rank in range(world_size)]


def _first(errors: dict[int, BaseException]) -> BaseException:
    """The exception that the others follow from, with the rank it was raised on."""
    own = {rank: error for rank, error in errors.items() if not isinstance(error, CommFailed)} or errors
    named = [error.rank for error in errors.values() if isinstance(error, CommFailed) and error.rank in own]
    rank = named[0] if named else min(own)
    if hasattr(own[rank], "add_note"):  # Python 3.11
        own[rank].add_note(f"raised on rank {rank} of the twin")
    return own[rank]
