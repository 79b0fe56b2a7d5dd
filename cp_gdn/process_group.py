"""The transport over torch.distributed: a duplicate of the user's group that belongs to one Comm alone.

The duplicate is made of backend objects of the same kinds (gloo, nccl) over the group's store under a name of its own.
Not dist.new_group(use_local_synchronization=True): that derives the name from how many groups a process is in, which
differs between members as soon as one of them is in more; a name used again meets the addresses of the group that had
it before; and a world bound to a device makes it split the world's communicator, in which all ranks must join.
"""

import ctypes
import logging
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from .failure import LinkError
from .transport import Flight, Messages, Stuck, Transport

log = logging.getLogger("cp_gdn")
_KINDS = ("gloo", "nccl")
# torch's own limit on messages, which ends the process without a reason: the monitor must come first.
_WATCHDOG = timedelta(hours=1)
_EARLY = 0.05  # s: waits are cut to whole milliseconds, so a deadline can seem not to have passed yet


class ProcessGroupTransport(Transport):
    """One rank of a duplicate of `group`."""

    monitored = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) < 0:
            raise ValueError("group: this process is not a member of it; make the Comm on members only")
        ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        self.host = ranks.index(0) if 0 in ranks else -1
        config = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        self._kinds = {device: kind for device, kind in config.items() if device in ("cpu", "cuda") and kind in _KINDS}
        if not self._kinds:
            raise ValueError(f"group: got backends {config}, expected one of {_KINDS} for cpu or cuda tensors")
        self.kind = "+".join(sorted(set(self._kinds.values())))
        store = group_store(group)
        # Members make their Comms in one order and a Comm opens on all of them or fails: so the count names it alike.
        number = (store.add("cp_gdn/made", 1) - 1) // self.size
        self.store = PrefixStore(f"cp_gdn/{number}", store)
        self._ranks = ranks
        self._backends: dict[str, Any] = {}
        self._flights: weakref.WeakSet[_HostFlight] = weakref.WeakSet()
        self._clock = _DeviceClock()
        self._watching = False
        self._lock = threading.Lock()

    def open(self, timeout: float) -> None:
        """Make the backends and pass one message between every pair, so that nothing is connected lazily later on."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        try:
            for kind in sorted(set(self._kinds.values())):
                self._backends[kind] = self._make(kind, timeout)
        except RuntimeError as error:
            raise LinkError(f"connecting failed: {error}") from error
        for device, kind in self._kinds.items():
            if kind == "nccl" or device == "cpu":
                where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
                token = torch.zeros(1, device=where)
                recvs = [(peer, torch.empty_like(token)) for peer in others]
                self.exchange("open", [(peer, token) for peer in others], recvs).wait(timeout)

    def _make(self, kind: str, timeout: float) -> Any:
        store = PrefixStore(f"{kind}/", self.store)
        if kind == "gloo":
            return dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timedelta(seconds=timeout))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG
        options.global_ranks_in_group = self._ranks
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def exchange(self, purpose: str, sends: Messages, recvs: Messages) -> Flight:
        if not sends and not recvs:
            return _HostFlight(self._backends, (), ())
        device = (sends or recvs)[0][1].device
        kind = self._kinds.get(device.type)
        if kind is None:
            raise ValueError(f"{purpose}: got tensors on {device}, but the group has only {self._kinds}")
        if kind == "nccl":
            return _DeviceFlight(self._clock, purpose, self._backends, sends, recvs)
        flight = (_StagedFlight if device.type == "cuda" else _HostFlight)(self._backends, sends, recvs)
        with self._lock:
            self._flights.add(flight)
        return flight

    def stuck(self) -> Stuck | None:
        return self._clock.oldest() if self._watching else None

    def enter_monitor(self) -> None:
        self._watching = "nccl" in self._kinds.values() and _relax_capture_mode()

    def abort(self) -> None:
        # gloo: pairs close, and so wake the peers, once nothing holds the backend or a work of it: no local name of a
        # frame either, which the traceback of an exception would keep.
        self._backends.pop("gloo", None)
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            flight.drop()
        nccl = self._backends.pop("nccl", None)
        if nccl is not None:
            _in_background(nccl.abort)

    def close(self) -> None:
        self._backends.pop("gloo", None)
        nccl = self._backends.pop("nccl", None)
        if nccl is not None:
            _in_background(nccl.shutdown)  # after what is on its way; its destructor would abort that


class _HostFlight(Flight):
    """gloo: every message has a handle of its own, and waiting blocks the host."""

    def __init__(self, backends: dict[str, Any], sends: Messages, recvs: Messages) -> None:
        self.peers = _peers(sends, recvs)
        self._works: list[tuple[int, Any]] = []
        self._keep: object = (sends, recvs)
        try:
            for peer, tensor in sends:
                self._works.append((peer, backends["gloo"].send([tensor], peer, 0)))
            for peer, buffer in recvs:
                self._works.append((peer, backends["gloo"].recv([buffer], peer, 0)))
        except (RuntimeError, KeyError) as error:
            self.drop()
            raise _broken(error, self.peers) from None

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._works:
            peer = self._works[0][0]
            try:
                self._works[0][1].wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))  # 0 would mean for ever
                del self._works[0]
            except (RuntimeError, IndexError) as error:  # IndexError: dropped by abort in another thread
                self.drop()
                raise _broken(error, (peer,), late=time.monotonic() > end - _EARLY) from None
        self._keep = None

    def drop(self) -> None:
        self._works.clear()


class _StagedFlight(_HostFlight):
    """gloo with CUDA tensors: through pinned memory, the copies in the order of the caller's stream."""

    def __init__(self, backends: dict[str, Any], sends: Messages, recvs: Messages) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a gloo group cannot send CUDA tensors while a graph is captured: use a nccl group, or do not capture"
            )
        out = [(peer, _pinned(tensor).copy_(tensor, non_blocking=True)) for peer, tensor in sends]
        into = [(peer, _pinned(buffer)) for peer, buffer in recvs]
        self._buffers = [buffer for _, buffer in recvs]
        self._pinned = [pinned for _, pinned in into]
        torch.cuda.current_stream((sends or recvs)[0][1].device).synchronize()
        super().__init__(backends, out, into)

    def wait(self, timeout: float) -> None:
        super().wait(timeout)
        for pinned, buffer in zip(self._pinned, self._buffers, strict=True):
            buffer.copy_(pinned, non_blocking=True)  # the pinned allocator keeps it until the copy is through
        self._pinned, self._buffers = [], []


class _DeviceFlight(Flight):
    """NCCL: waiting orders the current stream behind the messages; the clock sees when the device really waits."""

    def __init__(
        self, clock: "_DeviceClock", purpose: str, backends: dict[str, Any], sends: Messages, recvs: Messages
    ) -> None:
        self.peers = _peers(sends, recvs)
        self._clock, self._purpose = clock, purpose
        self._keep: object = (sends, recvs)
        self._device = (sends or recvs)[0][1].device
        try:
            # One group call, on the group's communicator: a message outside of one gets a lazy one of its own.
            backends["nccl"]._start_coalescing()
            for peer, tensor in sends:
                backends["nccl"].send([tensor], peer, 0)
            for peer, buffer in recvs:
                backends["nccl"].recv([buffer], peer, 0)
            self._work: Any = backends["nccl"]._end_coalescing()
        except (RuntimeError, KeyError) as error:
            raise _broken(error, self.peers) from None

    def wait(self, timeout: float) -> None:
        stream = torch.cuda.current_stream(self._device)
        watched = not torch.cuda.is_current_stream_capturing()
        reached = stream.record_event() if watched else None
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _broken(error, self.peers) from None
        if reached is not None:
            self._clock.add(_Mark(self._purpose, self.peers, reached, stream.record_event()))
        self._work = self._keep = None


@dataclass(slots=True)
class _Mark:
    purpose: str
    peers: tuple[int, ...]
    reached: torch.cuda.Event
    done: torch.cuda.Event
    since: float = 0.0


class _DeviceClock:
    """How long the device has been waiting for messages: it starts when a stream gets there, not when the host does."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[_Mark] = queue.SimpleQueue()
        self._marks: list[_Mark] = []  # the monitor thread's own

    def add(self, mark: _Mark) -> None:
        self._new.put(mark)

    def oldest(self) -> Stuck | None:
        while not self._new.empty():
            self._marks.append(self._new.get())
        self._marks = [mark for mark in self._marks if not mark.done.query()]
        now = time.monotonic()
        for mark in self._marks:
            if not mark.since and mark.reached.query():
                mark.since = now
        waiting = [mark for mark in self._marks if mark.since]
        if not waiting:
            return None
        first = min(waiting, key=lambda mark: mark.since)
        return Stuck(doing=f"in {first.purpose!r} on the device", peers=first.peers, seconds=now - first.since)


def _peers(sends: Messages, recvs: Messages) -> tuple[int, ...]:
    return tuple(dict.fromkeys(peer for peer, _ in (*recvs, *sends)))


def _broken(error: Exception, peers: tuple[int, ...], *, late: bool = False) -> LinkError:
    """What torch says without the place in its sources before and the advice behind."""
    text = re.sub(r"^\[\S+\] ", "", str(error).split("\n", 1)[0]).split(". This is typically", 1)[0]
    closed = isinstance(error, (KeyError, IndexError))
    return LinkError("the duplicate group is closed" if closed else text, peers=peers, late=late)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def group_store(group: dist.ProcessGroup) -> Store:
    """The store that a group was made with."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def _in_background(end: Callable[[], None]) -> None:
    """Run it, but do not wait for ever: NCCL ends a communicator after the last graph that was captured with it."""
    thread = threading.Thread(target=end, name="cp_gdn closing nccl", daemon=True)
    thread.start()
    thread.join(timeout=5.0)


def _relax_capture_mode() -> bool:
    """Let this thread query events while another one captures a graph, which a query would make invalid otherwise."""
    relaxed = ctypes.c_int(2)
    try:
        ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    except AttributeError:
        log.warning("cp_gdn: this torch hides the CUDA runtime, so late messages on the device are not noticed")
        return False
    return True
