"""GPUs through NCCL while they train: one raises or is killed, and all end in time with the reason."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cp_gdn import Comm, CommFailed
from cp_gdn.backends.hopper import HopperBackend
from cp_gdn.backends.hopper_backward import HopperKernels
from cp_gdn.backends.torch_backend import TorchBackend
from tests.dist import pool
from tests.gpu.nccl_cases import WORLDS, Case, context, hopper, inputs, local, place, step

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("world", WORLDS)]
TIMEOUT = 5.0  # s
DEADLINE = 30.0  # s

STAGES: dict[tuple[str, str], tuple[Any, str]] = {
    ("hopper", "forward"): (HopperBackend, "replay"),
    ("hopper", "backward"): (HopperKernels, "_gradients"),
    ("torch", "forward"): (TorchBackend, "replay"),
    ("torch", "backward"): (TorchBackend, "adjoint_replay"),
}
"""Where a rank fails: messages are under way in the forward, and have been taken in a backward."""


def raising(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("out of memory, on purpose")


def dying(*_: Any, **__: Any) -> Any:
    os._exit(9)


WAYS = {"raises": raising, "is killed": dying}


def last_rank_fails(rank: int, world: int, kind: str, case: Case, way: str, where: str) -> None:
    """Train until the failure comes; the device is waited for after every step, as reading a loss does."""
    device, comm = place(rank, kind), Comm(timeout=TIMEOUT)
    ctx = context(comm, case, device)
    mine = local(ctx, inputs(case, device))
    step(ctx, mine)
    since = time.monotonic()
    try:
        if rank == world - 1:
            with patch.object(*STAGES[case.backend, where], WAYS[way]):
                step(ctx, mine)
        while True:
            step(ctx, mine)
            if device.type == "cuda":
                torch.cuda.synchronize()
    except CommFailed as error:
        assert time.monotonic() - since < DEADLINE
        with pytest.raises(CommFailed, match=str(error.rank)):
            step(ctx, mine)
        raise


def assert_all_end(outcomes: list[pool.Outcome], way: str) -> None:
    *others, culprit = outcomes
    last = len(others)
    assert culprit.name == ("ArithmeticError" if way == "raises" else "killed"), culprit
    for other in others:
        assert other.name == "CommFailed", other
        if way == "raises":
            assert f"by rank {last}: chunk_gated_delta_rule" in other.text
            assert "ArithmeticError: out of memory, on purpose" in other.text
        else:
            assert f"by rank {last}: rank {last} gave no sign of life" in other.text


CASES = [
    pytest.param("hopper", "raises", "forward", "ring", marks=hopper),
    pytest.param("hopper", "is killed", "backward", "a2a", marks=hopper),
    ("torch", "raises", "backward", "a2a"),
    ("torch", "is killed", "forward", "ring"),
]


@pytest.mark.parametrize(("backend", "way", "where", "exchange"), CASES)
def test_when_one_rank_fails_all_end_in_time_and_name_it(
    backend: str, way: str, where: str, exchange: str, world: int
) -> None:
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    case = Case(lengths=(9000, 700), exchange=exchange, segments=2, backend=backend, dtype=dtype)
    ended = pool.run_failing(world, last_rank_fails, "cuda", case, way, where, backend="nccl", deadline=45.0)
    assert_all_end(ended, way)
