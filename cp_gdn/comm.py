"""The group of a context: posts messages, waits for them, agrees on plans, and fails as one.

Between two ranks messages are matched by the order of posting alone, so all members must post alike: point-to-point
batches, all to all and all gather share one order. What is posted is a function of the plan; `record` lists it.
"""

import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from .board import Board, diagnose
from .failure import CommFailed, Failure, LinkError, PlanDisagreement, Progress, StoreLost
from .messages import Batch, Message, Pending, check_batch, check_counts, differences, pieces
from .monitor import Monitor
from .process_group import ProcessGroupTransport
from .transport import CopyTransport, CopyWorld, Flight, Transport

__all__ = ["Batch", "Comm", "CommFailed", "Message", "Pending", "PlanDisagreement"]

log = logging.getLogger("cp_gdn")
T = TypeVar("T")

# How torch leaves a recompute that has all it needs: raised while tensors are saved, and no failure.
_NO_FAILURES = tuple(filter(None, (getattr(torch.utils.checkpoint, "_StopRecomputationError", None),)))


class Guard:
    """What `Comm.guard` gives; a class of its own, since every call enters one and a generator's costs more."""

    def __init__(self, comm: "Comm", what: str) -> None:
        self._comm, self._what = comm, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (CommFailed, PlanDisagreement, *_NO_FAILURES)):
            self._comm.fail(f"{self._what}: {type(error).__name__}: {error}")  # every rank raises the others by itself


class Comm:
    """The ranks of one process group. Make it once per group, on every member and in the same order; contexts share it.

    `group`: a process group, None for the default one (a Comm of size 1 if torch.distributed is not initialised), or a
    Transport. `timeout`: seconds a rank may keep another one waiting. It works on a duplicate of the group, connected
    here, and the user's group is never touched, closed or aborted. One thread at a time may use it.
    """

    def __init__(self, group: dist.ProcessGroup | Transport | None = None, *, timeout: float = 25.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout: got {timeout!r}, expected a number of seconds above 0")
        self._link = _transport(group)
        self.rank, self.size, self._timeout = self._link.rank, self._link.size, timeout
        self._board = Board(
            self._link.store, self.rank, self.size, monitored=self._link.monitored, host=self._link.host
        )
        self._progress = Progress(self.size)
        self._logs: list[list[Message]] = []
        self._agreements = 0
        self._closed = False
        self._monitor: Monitor | None = None
        if self._link.monitored:
            self._monitor = Monitor(self._board.for_thread(), self._link, self._progress, timeout)
        # Neither the thread nor the link knows the Comm: one that is dropped, or lives at exit, ends them here.
        self._end = weakref.finalize(self, _end, self._monitor, self._link)
        if self._link.monitored:
            self._open()

    @property
    def kind(self) -> str:
        """How messages go: "nccl", "gloo", "gloo+nccl" (by device), or "copy" inside one process."""
        return self._link.kind

    @classmethod
    def alone(cls) -> "Comm":
        """A Comm of this process only, whether torch.distributed is initialised or not."""
        return cls(CopyTransport(CopyWorld(1), 0))

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, size={self.size}, {self._link.kind})"

    # Messages

    def post(self, batch: Batch) -> Pending[list[Tensor]]:
        """Post the batch; `wait()` gives the received tensors in the order of `recvs`. Empty messages are not sent."""
        check_batch(batch, self.rank, self.size)
        out = [torch.empty(shape, dtype=batch.dtype, device=batch.device) for _, shape in batch.recvs]
        sends = [(peer, tensor) for peer, tensor in batch.sends]
        recvs = [(peer, buffer) for (peer, _), buffer in zip(batch.recvs, out, strict=True)]
        return self._post(batch.purpose, sends, recvs, out)

    def all_to_all(
        self, purpose: str, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Pending[Tensor]:
        """Piece r of the 1-D `send` goes to rank r; `wait()` gives the received pieces in rank order, 1-D."""
        for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
            check_counts(f"{purpose}: {name}", counts, self.size)
        if send.dim() != 1 or send.numel() != sum(send_counts):
            raise ValueError(
                f"{purpose}: send: got shape {tuple(send.shape)}, expected ({sum(send_counts)},) as counted"
            )
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise ValueError(
                f"{purpose}: rank {self.rank} keeps {send_counts[self.rank]} elements by send_counts, "
                f"but {recv_counts[self.rank]} by recv_counts"
            )
        out = send.new_empty(sum(recv_counts))
        outgoing, incoming = pieces(send.detach(), send_counts), pieces(out, recv_counts)
        incoming[self.rank].copy_(outgoing[self.rank])
        return self._post(purpose, self._to_others(outgoing), self._to_others(incoming), out)

    def all_gather(self, purpose: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of every rank in rank order. rows: [counts[rank], ...], the counts of all ranks known to all."""
        check_counts(f"{purpose}: counts", counts, self.size)
        if rows.dim() == 0 or rows.shape[0] != counts[self.rank]:
            raise ValueError(f"{purpose}: rows: got shape {tuple(rows.shape)}, expected {counts[self.rank]} rows")
        out = rows.new_empty((sum(counts), *rows.shape[1:]))
        incoming, own = pieces(out, counts), rows.detach().contiguous()
        incoming[self.rank].copy_(own)
        return self._post(purpose, self._to_others([own] * self.size), self._to_others(incoming), out).wait()

    def all_reduce_sum(self, purpose: str, x: Tensor) -> Tensor:
        """The sum over ranks, added in rank order on every rank: the same bits everywhere and on every transport."""
        parts = self.all_gather(purpose, x.reshape(1, -1), [1] * self.size)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.view(x.shape)

    @contextmanager
    def record(self) -> Iterator[list[Message]]:
        """List every message posted inside, in order: of a call, its sends and then its receives."""
        messages: list[Message] = []
        self._logs.append(messages)
        try:
            yield messages
        finally:
            self._logs = [entry for entry in self._logs if entry is not messages]

    # Agreement and failure

    def agree(self, what: str, fields: Mapping[str, str]) -> None:
        """Raise PlanDisagreement on every rank unless all give the same fields. Through the store, no CUDA call."""
        if self.size == 1:
            self._check()
            return
        differing = differences(self._shared(what, fields))
        if differing:
            raise PlanDisagreement(
                f"{what}: the ranks of this group did not give the same values; nothing was sent.\n{differing}"
            )

    def share(self, what: str, value: str) -> list[str]:
        """Every rank's ``value`` in rank order, on every rank. Through the store, no CUDA call.

        Raises PlanDisagreement if another rank is in another call.
        """
        if self.size == 1:
            self._check()
            return [value]
        values = self._shared(what, {"value": value})
        differing = differences([{"call": each["call"]} for each in values])
        if differing:
            raise PlanDisagreement(f"{what}: the ranks of this group are in different calls.\n{differing}")
        return [each["value"] for each in values]

    def _shared(self, what: str, fields: Mapping[str, str]) -> list[dict[str, str]]:
        """Every rank's call and fields."""
        self._check()
        self._agreements += 1
        mine = json.dumps({"call": what, **fields})
        return [json.loads(each) for each in self._collect(f"agree/{self._agreements}", f"agreeing on {what}", mine)]

    def guard(self, what: str) -> "Guard":
        """Around work that the other ranks count on: an exception inside fails the whole group, with its text."""
        self._check()
        return Guard(self, what)

    def fail(self, reason: str) -> None:
        """Tell the others that this rank failed and why, then close the duplicate group. For one rank: does nothing."""
        if self.size == 1 or self._closed or self._progress.failed is not None:
            return
        log.error("cp_gdn: rank %d of %d failed: %s", self.rank, self.size, reason)
        self._settle(Failure(rank=self.rank, reason=reason))

    def close(self) -> None:
        """End the thread and give the duplicate group back. Each rank for itself, any number of times."""
        self._closed = True
        self._end()

    def _open(self) -> None:
        # The store first: it says who has not come, and a late or dead rank must not leave others in connecting.
        self._collect("open", "making the Comm", "")
        with self._watch("opening the Comm", self._progress.meet_all(self.rank)):
            self._link.open(self._timeout)

    def _collect(self, key: str, doing: str, value: str) -> list[str]:
        with self._watch(doing, self._progress.meet_all(self.rank)):
            values = self._board.collect(key, value, self._timeout)
            if self._agreements > 1:
                self._board.forget(f"agree/{self._agreements - 1}")
            return values

    def _post(
        self, purpose: str, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]], out: T
    ) -> Pending[T]:
        """The one place where messages leave: drops empty ones, counts and lists the others, posts them."""
        self._check()
        sends = [(peer, tensor.detach().contiguous()) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, buffer) for peer, buffer in recvs if buffer.numel()]
        listed = (("send", sends, self._progress.sent), ("recv", recvs, self._progress.received))
        for direction, messages, counts in listed:
            for peer, tensor in messages:
                counts[peer] += 1
                for entry in self._logs:
                    entry.append(
                        Message(
                            direction=direction, peer=peer, purpose=purpose, numel=tensor.numel(), dtype=tensor.dtype
                        )
                    )
        with self._watch(f"posting {purpose!r}", ()):
            flight = self._link.exchange(purpose, sends, recvs)
        return Pending(self._wait, flight, purpose, out)

    def _wait(self, flight: Flight, purpose: str) -> None:
        self._check()
        with self._watch(f"waiting in {purpose!r}", flight.peers):
            flight.wait(self._timeout)
        self._check()  # NCCL: what a failure aborted looks finished

    @contextmanager
    def _watch(self, doing: str, waits: Sequence[int]) -> Iterator[None]:
        """Say what this rank is doing, and turn a broken or late message into the failure behind it."""
        self._progress.enter(doing, waits)
        try:
            yield
        except LinkError as error:
            known = self._progress.failed
            self._settle(known or diagnose(self._board, self._progress.status(), error, self._timeout))
            raise self._failed() from error
        except CommFailed as error:  # the board said so
            self._settle(Failure(rank=error.rank, reason=error.reason))
            raise
        finally:
            self._progress.leave()

    def _settle(self, failure: Failure) -> None:
        """Make the failure, or the first one of the group if that was another, the one of this Comm, for good."""
        with suppress(StoreLost):  # every rank finds that out by itself
            failure = self._board.report(failure)
        self._progress.failed, self._progress.raised = failure, True
        self._link.abort()

    def _failed(self) -> CommFailed:
        self._progress.raised = True
        failure = self._progress.failed
        assert failure is not None
        return failure.error()

    # Checks

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("this Comm is closed; make a new one with Comm(group) on every member")
        if self._progress.failed is not None:
            raise self._failed()

    def _to_others(self, pieces: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        return [(peer, piece) for peer, piece in enumerate(pieces) if peer != self.rank]


def _transport(group: dist.ProcessGroup | Transport | None) -> Transport:
    if isinstance(group, Transport):
        return group
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return CopyTransport(CopyWorld(1), 0)
    return ProcessGroupTransport(group)


def _end(monitor: Monitor | None, link: Transport) -> None:
    if monitor is not None:
        monitor.stop()
    link.close()
