"""The thread that answers for a rank while its main thread computes or waits, and ends what nobody else can end.

It looks at the store every 0.25 s and answers roll calls. Once the group has failed it closes this rank's duplicate
group, so that peers blocked on this rank wake up. Under NCCL, where nothing blocks the host, it also watches the
deadlines on the device, and ends the process if the main thread has not come back 30 s after a failure.
It does not hold the Comm.
"""

import os
import sys
import threading
import time
from contextlib import suppress

from .board import Board, diagnose
from .failure import Failure, LinkError, Progress, StoreLost
from .transport import Transport

POLL = 0.25  # s between two looks: 1 request per rank, and small against ROLL_PATIENCE
LAST_CALL = 30.0  # s the main thread has to raise a failure before the process is ended


class Monitor:
    """Watches `board` and `link` for one Comm until stopped."""

    def __init__(self, board: Board, link: Transport, progress: Progress, timeout: float) -> None:
        self._board, self._link, self._progress, self._timeout = board, link, progress, timeout
        self._store_lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cp_gdn monitor {board.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: none must be left inside the store when the interpreter goes down."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        on_device = "nccl" in self._link.kind
        if on_device:
            self._link.enter_monitor()
        failure = None
        while failure is None and not self._stop.wait(POLL):
            failure = self._look()
            if self._store_lost and not on_device:
                return  # the next wait that breaks says so; at the end of a job the store's host just leaves first
        if failure is not None:
            self._progress.failed = failure
            self._link.abort()
            if on_device:
                self._last_call(failure)

    def _look(self) -> Failure | None:
        stuck = self._link.stuck()
        status = self._progress.status(device_waits=stuck.peers if stuck else ())
        if stuck and stuck.seconds > self._timeout:
            error = LinkError(stuck.doing, peers=stuck.peers, late=True)
            failure = diagnose(self._board, status, error, self._timeout)
            with suppress(StoreLost):
                failure = self._board.report(failure)
            return failure
        try:
            return None if self._store_lost else self._board.attend(status)
        except StoreLost:
            self._store_lost = True
            return None

    def _last_call(self, failure: Failure) -> None:
        end = time.monotonic() + LAST_CALL
        while time.monotonic() < end:
            if self._stop.wait(POLL) or self._progress.raised:
                return
        print(
            f"cp_gdn: {failure.error()}\ncp_gdn: rank {self._board.rank} is stuck, {LAST_CALL:g} s later: ending it",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
