"""Two transports that are joined in memory, for tests: real frames and real rules, no sockets."""

from __future__ import annotations

import threading
from collections import deque

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection, State
from skyproxy.protocol.messages import CLIENT, OPERATIONS, WORKER, Goodbye, Hello, Message, Welcome
from skyproxy.protocol.versions import PROTOCOL_VERSION
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.base import PayloadSink, Transport


class _Pipe:
    """Frames in one direction; `put` waits while `max_frames` are under way."""

    def __init__(self, max_frames: int) -> None:
        self._frames: deque[bytes] = deque()
        self._max_frames = max_frames
        self._changed = threading.Condition()
        self._closed = False

    def put(self, frame: bytes) -> bool:
        """Adds a frame; False when the pipe was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._frames) < self._max_frames)
            if not self._closed:
                self._frames.append(frame)
                self._changed.notify_all()
            return not self._closed

    def get(self, timeout_seconds: float | None) -> bytes | None:
        """The next frame; None when the pipe was closed and is empty."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._frames, timeout_seconds):
                raise TimeoutError(f"No message came within {timeout_seconds} s.")
            if not self._frames:
                return None
            self._changed.notify_all()
            return self._frames.popleft()

    def close(self, last_frame: bytes | None = None) -> None:
        """Lets nothing more in but `last_frame`, which fits even when the pipe is full."""
        with self._changed:
            if not self._closed and last_frame is not None:
                self._frames.append(last_frame)
            self._closed = True
            self._changed.notify_all()


class MemoryTransport(Transport):
    """One end of a pair; see `memory_transport_pair`."""

    was_closed: bool = False

    def __init__(self, role: str, incoming: _Pipe, outgoing: _Pipe, settings: Settings) -> None:
        self._connection = Connection(role)
        self._incoming = incoming
        self._outgoing = outgoing
        self._settings = settings
        self._sink: PayloadSink | None = None
        self._closed = False
        self._bytes_sent = 0
        self._bytes_received = 0
        # Re-entrant, because a destructor that runs in the middle of `send` may send, too.
        self._sending = threading.RLock()

    def send(self, message: Message) -> None:
        frame = b"".join(framing.encode(message, self._settings.max_frame_bytes))
        with self._sending:
            if self._closed or self._connection.state is State.ENDED:
                raise self._loss_error()
            step = self._connection.prepare_send(message, len(frame))
            if step is None:
                return
            if not self._outgoing.put(frame):
                raise self._loss_error()
            commit, entry = step
            commit(entry)
            self._bytes_sent += len(frame)

    def post(self, message: Message) -> None:
        self._connection.on_send(message)
        self._outgoing.put(b"".join(framing.encode(message, self._settings.max_frame_bytes)))

    def repeat(self, message: Message) -> None:
        self._outgoing.put(b"".join(framing.encode(message, self._settings.max_frame_bytes)))

    def recv(self, timeout_seconds: float | None = None) -> Message:
        if self._closed:
            raise self._loss_error()
        frame = self._incoming.get(timeout_seconds)
        if frame is None:
            raise self._loss_error()
        self._bytes_received += len(frame)
        try:
            message = self._decode(frame)
            self._connection.on_receive(message, len(frame))
        except ProtocolError as exc:
            self.close("protocol", str(exc))
            raise
        if isinstance(message, Goodbye):
            self.close()
            raise self._loss_error()
        return message

    def _decode(self, frame: bytes) -> Message:
        # A bytearray, for receivers of real transports may write into what they get.
        message = framing.decode(bytearray(frame), self._settings.max_frame_bytes)
        buffers: tuple[memoryview, ...] = getattr(message, "buffers", ())
        if self._sink is None or len(buffers) != 1 or not buffers[0]:
            return message
        head = framing.decode_head(frame, self._settings.max_frame_bytes)
        size = head.buffer_lengths[0]
        without = head.complete()
        self._connection.check_payload(without, size)
        target = self._sink(without)
        if target is None:
            return message
        if len(target) < size:
            raise ProtocolError(
                f"{type(message).__name__} carries {size:,} bytes, and there is room for {len(target):,}."
            )
        target[:size] = buffers[0]
        return head.complete([target[:size]])

    def set_sink(self, sink: PayloadSink | None) -> None:
        self._sink = sink

    def keep_alive(self) -> None:
        pass

    def abandon(self) -> None:
        self._closed = True

    def cut(self) -> bool:
        self._closed = True
        self._outgoing.close()
        self._incoming.close()
        with self._sending:
            return True

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True
        if self._closed:
            return
        self._closed = True
        last: bytes | None = None
        if self._connection.state is not State.ENDED:
            goodbye = Goodbye(code_name, reason)
            self._connection.on_send(goodbye)
            last = b"".join(framing.encode(goodbye, self._settings.max_frame_bytes))
        self._outgoing.close(last)
        self._incoming.close()

    def _loss_error(self) -> SessionLostError:
        goodbye = self._connection.goodbye
        if goodbye is not None:
            return SessionLostError(f"The peer ended the connection ({goodbye.code_name}): {goodbye.reason}")
        return SessionLostError("This connection is closed." if self._closed else "The peer closed the connection.")

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_received


def memory_transport_pair(
    kind: str = OPERATIONS,
    *,
    handshake: bool = True,
    session: str = "memory",
    settings: Settings = SETTINGS,
    max_queued_frames: int = 1024,
) -> tuple[MemoryTransport, MemoryTransport]:
    """A client's and a worker's transport, joined.

    Args:
        kind: "operations", "bulk" or "functions".
        handshake: whether Hello and Welcome were exchanged already; without, the caller sends them.
        session: the name of the session in that handshake.
        settings: the limits of both ends.
        max_queued_frames: how many frames may be under way in one direction before `send` waits.

    Returns:
        The client's end and the worker's end.
    """
    up, down = _Pipe(max_queued_frames), _Pipe(max_queued_frames)
    client = MemoryTransport(CLIENT, incoming=down, outgoing=up, settings=settings)
    worker = MemoryTransport(WORKER, incoming=up, outgoing=down, settings=settings)
    if handshake:
        client.send(Hello([PROTOCOL_VERSION], kind, "" if kind == OPERATIONS else session, {}))
        worker.recv()
        devices = [{"type": "cpu", "index": 0, "name": "cpu", "total_memory_bytes": 0}]
        worker.send(Welcome(PROTOCOL_VERSION, session, {}, devices, {}))
        client.recv()
    return client, worker
