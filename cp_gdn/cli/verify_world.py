"""Runs a case as real processes, as the twin in this process, and on one rank."""

import functools
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, spawn

import cp_gdn
from cp_gdn.cli.ranks import group_backend, start_group
from cp_gdn.cli.verify_case import Case, RankResults, run_rank

EXCHANGES = ("ring", "a2a")
DEADLINE_S = 300.0

WorldResults = dict[str, list[RankResults]]
"""Per exchange the results of every rank."""


class WorldFailed(RuntimeError):
    """A process of the world failed or did not end in time."""


def run_processes(case: Case) -> WorldResults:
    """Both exchanges over real process groups: one spawned process per rank, results through files."""
    with tempfile.TemporaryDirectory(prefix="cp_gdn-verify-") as folder:
        spawned = spawn(_rank_main, args=(case, folder), nprocs=case.world, join=False)
        _join(spawned)
        # Files that these ranks wrote into a folder of their own, so classes of this package may be in them.
        ranks = [torch.load(Path(folder, f"rank{rank}.pt"), weights_only=False) for rank in range(case.world)]
    return {exchange: [results[exchange] for results in ranks] for exchange in EXCHANGES}


def _rank_main(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    store = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": case.world}
    start_group(group_backend(case.device, case.world), case.device, rank, **store)
    comm = cp_gdn.Comm()
    results = {exchange: run_rank(case, comm, exchange) for exchange in EXCHANGES}
    torch.save(results, Path(folder, f"rank{rank}.pt"))
    comm.close()
    dist.destroy_process_group()


def _join(spawned: ProcessContext) -> None:
    """Wait for every rank; the first failure ends the others, and its traceback is in the error."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not spawned.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise WorldFailed(f"the ranks did not end within {DEADLINE_S:.0f} s")
    except ProcessException as error:
        raise WorldFailed(str(error)) from error
    finally:
        for process in spawned.processes:
            process.kill()


def run_twin(case: Case) -> WorldResults:
    """Both exchanges with all ranks in this process, messages replaced by copies."""
    return {name: cp_gdn.twin(case.world, functools.partial(run_rank, case, exchange=name)) for name in EXCHANGES}


def run_one_rank(case: Case) -> RankResults:
    """The whole pack on one rank."""
    return cp_gdn.twin(1, lambda comm: run_rank(case, comm, "auto"))[0]


def check_case(case: Case) -> None:
    """Plan the case without running it, and compile its kernels: raises what `build_context` raises."""
    for exchange in EXCHANGES:
        cp_gdn.twin(case.world, functools.partial(case.context, exchange=exchange))
