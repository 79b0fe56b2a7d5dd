"""Work of the device that a call is queued behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CYCLES = 200_000_000
"""Clock cycles, 0.1 s at 2 GHz: more than a step takes a host that has nothing else to do."""
LONGEST = 512
"""Times as much, 50 s."""


def behind_work(call: Callable[[], Any]) -> Any:
    """What ``call`` gives while the device is still busy with what was queued before; AssertionError if it never is.

    A call that waits for the device finds it idle however long the work was; a host that is slow, because others keep
    it busy, is in time for longer work. So no length is a guess: work that was over is made eight times as long.
    """
    times = 1
    while True:
        torch.cuda.synchronize()
        queued = torch.cuda.Event()
        torch.cuda._sleep(times * CYCLES)
        queued.record()
        found = call()
        if not queued.query():
            return found
        assert times < LONGEST, f"the device was idle after {times * CYCLES} cycles"
        times *= 8
