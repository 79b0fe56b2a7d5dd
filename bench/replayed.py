"""One rank alone: messages recorded in a run of all ranks, then replayed as copies, so that its own work is timed."""

import torch
from torch.distributed import HashStore, PrefixStore

from cp_gdn.transport import Flight, Messages, Transport


class Recorder(Transport):
    """Another transport that remembers what came in, exchange after exchange."""

    kind, monitored = "recorder", False

    def __init__(self, link: Transport) -> None:
        self.rank, self.size, self.store, self.link = link.rank, link.size, link.store, link
        self.received: list[list[torch.Tensor]] = []

    def exchange(self, purpose: str, sends: Messages, recvs: Messages) -> Flight:
        return _Recorded(self.link.exchange(purpose, sends, recvs), self.received, recvs)

    def abort(self) -> None:
        self.link.abort()

    def close(self) -> None:
        self.link.close()


class _Recorded(Flight):
    def __init__(self, flight: Flight, received: list[list[torch.Tensor]], recvs: Messages) -> None:
        self.peers, self.flight, self.buffers = flight.peers, flight, [buffer for _, buffer in recvs]
        self.copies: list[torch.Tensor] = []
        received.append(self.copies)

    def wait(self, timeout: float) -> None:
        self.flight.wait(timeout)
        self.copies.extend(buffer.clone() for buffer in self.buffers)


class Player(Transport):
    """Gives what a `Recorder` remembered, in order; what is sent goes nowhere."""

    kind, monitored = "player", False

    def __init__(self, recorder: Recorder) -> None:
        self.rank, self.size, self.received = recorder.rank, recorder.size, recorder.received
        self.store = PrefixStore("replayed", HashStore())
        self.next = 0

    def rewind(self) -> None:
        """Back to the first message, before every call."""
        self.next = 0

    def exchange(self, purpose: str, sends: Messages, recvs: Messages) -> Flight:
        copies = self.received[self.next]
        self.next += 1
        return _Played([buffer for _, buffer in recvs], copies)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Played(Flight):
    peers = ()

    def __init__(self, buffers: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        self.buffers, self.copies = buffers, copies

    def wait(self, timeout: float) -> None:
        for buffer, copy in zip(self.buffers, self.copies, strict=True):
            buffer.copy_(copy.view(buffer.shape))
