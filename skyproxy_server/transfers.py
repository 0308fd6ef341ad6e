"""Large tensors on their way, on the worker's side of the bulk connection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import CancelTransfer, Chunk, Message, Ping, Pong
from skyproxy.transport.base import Transport


class Arrival:
    """Bytes that come from the client, in pieces."""

    def __init__(self, byte_count: int) -> None:
        self.target = torch.empty(byte_count, dtype=torch.uint8)
        self.view = torch_codec.byte_view(self.target)
        self.missing = byte_count
        self._done = threading.Event()
        self._error: str | None = None

    def finished(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Waits for the last piece.

        Raises:
            RuntimeError: the client gave the transfer up, or the connection ended.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(self._error)

    def count(self, byte_count: int) -> None:
        self.missing -= byte_count
        if self.missing <= 0:
            self._done.set()

    def fail(self, reason: str) -> None:
        if not self._done.is_set():
            self._error = reason
            self._done.set()


class Departure:
    """Bytes that go to the client, in pieces."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.tensor = tensor
        self._done = threading.Event()

    def finished(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Waits until the tensor may change again."""
        self._done.wait()

    def end(self) -> None:
        self._done.set()


class Transfers:
    """All transfers of a session. The executor announces them; the bulk connection's two threads move them."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._arrivals: dict[int, Arrival] = {}
        self._announced: set[int] = set()
        self._lock = threading.Lock()
        self._departures: queue.SimpleQueue[Departure | None] = queue.SimpleQueue()
        self._ended = False

    def arrival(self, number: int, byte_count: int) -> Arrival:
        """The arrival of this number; its first piece may have come before the command that announces it."""
        with self._lock:
            arrival = self._arrivals.get(number)
            if arrival is None:
                arrival = self._arrivals[number] = Arrival(byte_count)
            if len(arrival.view) != byte_count:
                raise ProtocolError(f"transfer {number} has {len(arrival.view)} bytes, {byte_count} were announced")
            self._announced.add(number)
            self._tidy(number, arrival)
            if self._ended:
                arrival.fail("the bulk connection ended")
            return arrival

    def depart(self, number: int, tensor: torch.Tensor) -> Departure:
        """Starts to send the bytes of a packed CPU tensor."""
        departure = Departure(number, tensor)
        self._departures.put(departure)
        return departure

    def _of_chunk(self, chunk: Chunk) -> Arrival:
        with self._lock:
            arrival = self._arrivals.get(chunk.transfer)
            if arrival is None:
                arrival = self._arrivals[chunk.transfer] = Arrival(chunk.total_bytes)
            if len(arrival.view) != chunk.total_bytes or chunk.offset > chunk.total_bytes:
                raise ProtocolError(f"a chunk of transfer {chunk.transfer} does not fit")
            return arrival

    def _tidy(self, number: int, arrival: Arrival) -> None:
        if arrival.finished() and number in self._announced:
            self._arrivals.pop(number, None)
            self._announced.discard(number)

    def sink(self, message: Message) -> memoryview | None:
        """Where a chunk's bytes go: straight into the tensor."""
        return self._of_chunk(message).view[message.offset :] if isinstance(message, Chunk) else None

    def receive(self, transport: Transport, load: Callable[[], dict[str, int]]) -> None:
        """Reads the bulk connection until it ends."""
        transport.set_sink(self.sink)
        while True:
            message = transport.recv()
            if isinstance(message, Chunk):
                arrival = self._of_chunk(message)
                arrival.count(len(message.buffers[0]))
                with self._lock:
                    self._tidy(message.transfer, arrival)
            elif isinstance(message, CancelTransfer):
                with self._lock:
                    cancelled = self._arrivals.get(message.transfer)
                    if cancelled is not None:
                        cancelled.fail(message.reason)
                        self._tidy(message.transfer, cancelled)
            elif isinstance(message, Ping):
                transport.send(Pong(message.number, load()))

    def send(self, transport: Transport) -> None:
        """Writes departures until `end`."""
        while (departure := self._departures.get()) is not None:
            try:
                view = torch_codec.byte_view(departure.tensor)
                for offset in range(0, len(view), self._chunk_bytes):
                    piece = view[offset : offset + self._chunk_bytes]
                    transport.send(Chunk(departure.number, offset, len(view), (piece,)))
            except SessionLostError:
                self.end()
            finally:
                departure.end()

    def end(self) -> None:
        """The bulk connection is gone: nobody waits any longer."""
        with self._lock:
            self._ended = True
            for arrival in self._arrivals.values():
                arrival.fail("the bulk connection ended")
        pending: list[Departure] = []
        while True:
            try:
                departure = self._departures.get_nowait()
            except queue.Empty:
                break
            if departure is not None:
                pending.append(departure)
        for departure in pending:
            departure.end()
        self._departures.put(None)
