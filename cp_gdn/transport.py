"""How tensors move between the ranks of a Comm: one primitive, `exchange`, behind which everything is point to point.

Between two ranks messages are matched by order alone, on every transport (NCCL has no tags). All to all and all gather
are exchanges too: so ragged and empty pieces need no padding, every late message has a sender by number, and on gloo
no collective keeps a worker thread that a failure could not end.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from .failure import LinkError

Messages = Sequence[tuple[int, Tensor]]  # (peer inside the group, contiguous tensor), in the order of sending


class Flight(ABC):
    """Messages that were posted. Holds their tensors and handles until `wait` or its own end."""

    peers: tuple[int, ...]

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Fill the receive buffers (NCCL: in stream order). Raises LinkError; `timeout` in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stuck:
    """Messages that the device has reached and not finished, for `seconds` now."""

    doing: str
    peers: tuple[int, ...]
    seconds: float


class Transport(ABC):
    """The ranks of a group and the way tensors pass between them."""

    rank: int
    size: int
    kind: str
    monitored: bool  # whether ranks are processes, which need a thread that answers for them
    store: Store  # the side channel, already under this Comm's name
    host: int = -1  # the rank that usually hosts the store

    def open(self, timeout: float) -> None:  # noqa: B027 - nothing to open unless a transport says so
        """Connect to the peers, all of which are known to be here."""

    @abstractmethod
    def exchange(self, purpose: str, sends: Messages, recvs: Messages) -> Flight:
        """Post all messages, or raise LinkError. Peers are others, tensors are not empty."""

    def stuck(self) -> Stuck | None:
        """The oldest messages that the device waits for, where waiting does not block the host."""
        return None

    def enter_monitor(self) -> None:  # noqa: B027
        """Called once by the monitor thread before it looks at `stuck`."""

    @abstractmethod
    def abort(self) -> None:
        """End every message at once, on this rank and soon on its peers; from any thread, any number of times."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what `open` made, after messages on their way are through."""


class CopyWorld:
    """What the ranks of one process share: a slot per message and the store."""

    def __init__(self, size: int) -> None:
        self.size, self.store = size, PrefixStore("cp_gdn", HashStore())
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int, int], Future[_Parcel]] = {}
        self._aborted = False

    def slot(self, source: int, target: int, number: int) -> "Future[_Parcel]":
        """The place of the number-th message from source to target, made by whoever asks first."""
        with self._lock:
            slot = self._slots.setdefault((source, target, number), Future())
        if self._aborted:
            _fail(slot)
        return slot

    def take(self, source: int, target: int, number: int) -> None:
        with self._lock:
            self._slots.pop((source, target, number), None)

    def abort(self) -> None:
        self._aborted = True
        with self._lock:
            slots = list(self._slots.values())
        for slot in slots:
            _fail(slot)

    def leftover(self) -> list[str]:
        """Messages nobody took, in words."""
        with self._lock:
            return [f"message {n} from rank {a} to rank {b}" for a, b, n in sorted(self._slots)]


class CopyTransport(Transport):
    """One rank of a CopyWorld: a message is a copy."""

    kind, monitored = "copy", False

    def __init__(self, world: CopyWorld, rank: int) -> None:
        self.rank, self.size, self.store = rank, world.size, world.store
        self._world = world
        self._sent, self._received = [0] * world.size, [0] * world.size

    def exchange(self, purpose: str, sends: Messages, recvs: Messages) -> Flight:
        for peer, tensor in sends:
            slot = self._world.slot(self.rank, peer, self._sent[peer])
            self._sent[peer] += 1
            try:
                slot.set_result(_Parcel(purpose, tensor))
            except InvalidStateError:
                raise LinkError(f"{purpose!r} to rank {peer} was not taken, the group has failed") from None
        expected = []
        for peer, buffer in recvs:
            expected.append((peer, self._received[peer], buffer))
            self._received[peer] += 1
        return _CopyFlight(self._world, self.rank, purpose, expected)

    def abort(self) -> None:
        self._world.abort()

    def close(self) -> None:
        pass


class _Parcel:
    """A copy of a sent tensor; on a GPU with the event that says when the copy is there."""

    def __init__(self, purpose: str, tensor: Tensor) -> None:
        self.purpose, self.data = purpose, tensor.clone()
        self._made = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def put(self, buffer: Tensor) -> None:
        if self._made is not None:
            stream = torch.cuda.current_stream(buffer.device)
            stream.wait_event(self._made)
            self.data.record_stream(stream)
        buffer.copy_(self.data.view(buffer.shape))


class _CopyFlight(Flight):
    def __init__(self, world: CopyWorld, rank: int, purpose: str, recvs: list[tuple[int, int, Tensor]]) -> None:
        self.peers = tuple(dict.fromkeys(peer for peer, _, _ in recvs))
        self._world, self._rank, self._purpose, self._recvs = world, rank, purpose, recvs

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        for peer, number, buffer in self._recvs:
            try:
                parcel = self._world.slot(peer, self._rank, number).result(max(end - time.monotonic(), 0.0))
            except FutureTimeout:
                raise LinkError(f"{self._purpose!r} from rank {peer} did not come", peers=(peer,), late=True) from None
            self._world.take(peer, self._rank, number)
            got = (parcel.purpose, parcel.data.numel(), parcel.data.dtype)
            expected = (self._purpose, buffer.numel(), buffer.dtype)
            if got != expected:  # a process group would deliver the bytes, or hang
                raise LinkError(f"rank {peer} sent {got} where rank {self._rank} expected {expected}", peers=(peer,))
            parcel.put(buffer)
        self._recvs = []


def _fail(slot: "Future[_Parcel]") -> None:
    with suppress(InvalidStateError):  # its message is there already
        slot.set_exception(LinkError("the group has failed"))
