"""One end of a WebSocket: one reader, many writers. `websocket.py` and the server's listener make them."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from skyproxy.errors import ConfigurationError, ProtocolError, SessionLostError
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection, State
from skyproxy.protocol.messages import CLIENT, Buffer, Goodbye, Message
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport import websocket_frames as ws
from skyproxy.transport.base import PayloadSink, Transport
from skyproxy.transport.masking import address, load_numpy, mask, mask_parts
from skyproxy.transport.outbox import Frame, Outbox
from skyproxy.transport.shared_threads import SharedThreads
from skyproxy.transport.stream import ByteStream, remaining
from skyproxy.transport.tls import TlsStream

_JOINED_BYTES = 32 << 10
"""Frames up to this size are joined into one piece; larger buffers are not copied once more."""
_MAX_PARTS = 64
_KEPT_SCRATCH_BYTES = 4 << 20
_WAITING_PONGS = 16
_MOST_WAITING_FRAMES = 100_000
"""Short messages that a peer has not read: some tens of MB, and more than any slow link makes wait."""
_REASON_BYTES = 512
_LATE_READS = 4
"""Reads of what is there already when the time is up: with more, a peer that pings without end is waited for."""
_READY_READS = 16
"""The same of `recv_ready`: then it is another connection's turn."""
_RETIRE_SECONDS = 0.5
_CUT_SECONDS = 20.0
"""The time that a thread may take to leave a stream that was shut down under it: nothing, but machines are busy."""


class WebSocketTransport(Transport):
    """One end of a WebSocket, after its HTTP upgrade.

    Attributes:
        identity: who is at the other end, on a worker: what its listener knows of the client's token.
        was_closed: whether it was ended on purpose, by `close`.
    """

    identity: Any = None
    was_closed: bool = False

    def __init__(
        self,
        stream: ByteStream,
        role: str,
        settings: Settings = SETTINGS,
        received: bytes = b"",
        connection: Connection | None = None,
        threads: SharedThreads | None = None,
    ) -> None:
        """Begin to speak on a stream whose upgrade is done.

        Args:
            stream: the connected stream; it belongs to the transport from now on.
            role: `CLIENT` or `WORKER`.
            settings: limits.
            received: what came in after the upgrade already.
            connection: how far the connection has come, where somebody else began it.
            threads: write what its senders may not write themselves; by default a thread of its own does.
        """
        self._connection = Connection(role) if connection is None else connection
        self._stream = stream
        self._settings = settings
        self._masks = role == CLIENT
        self._peer = "worker" if role == CLIENT else "client"
        self._outbox = Outbox(stream, self._connection, f"skyproxy-{role}-outbox", threads)
        self._reader = ws.MessageReader(
            self._connection,
            masked=not self._masks,
            max_frame_bytes=settings.max_frame_bytes,
            on_control=partial(_on_control, weakref.ref(self)),
            received=received,
        )
        self._steps = self._reader.steps()
        self._target: memoryview | None = None
        self._is_behind = False
        self._left: Exception | Goodbye | None = None
        # Held by whoever reads; re-entrant, because the reader itself closes a connection whose peer breaks the rules.
        self._reading = threading.RLock()
        self._closing = threading.Lock()
        self._finished = threading.Event()
        self._closed = False
        self._ended: str | None = None
        self._bytes_received = 0
        self._borrower: Callable[[str, str], object] | None = None
        self._scratch: list[bytearray] = []
        load_numpy()
        if isinstance(stream, TlsStream):
            stream.on_output = self._outbox.nudge
        if role == CLIENT:
            # Before the first message, so that no interrupt finds it half started.
            self._outbox.start()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        parts = framing.encode(message, self._settings.max_frame_bytes)
        if self._closed or self._ended is not None:
            raise self._loss_error()
        try:
            self._outbox.send(self._frame(parts), message)
        except ProtocolError:
            if self._connection.state is State.ENDED:
                raise self._loss_error() from None
            raise
        except OSError as exc:
            if raised_by_handler(exc):
                raise
            raise self._loss_error(exc) from exc

    def post(self, message: Message) -> None:
        if self._closed or self._ended is not None or self._outbox.error is not None:
            return
        if self._outbox.waiting_frames > _MOST_WAITING_FRAMES:
            raise ProtocolError(f"The peer has not read {_MOST_WAITING_FRAMES} answers, and asks for more.")
        parts = framing.encode(message, self._settings.max_frame_bytes)
        self._connection.on_send(message)
        self._outbox.post(self._frame(parts))

    def repeat(self, message: Message) -> None:
        self._outbox.post(self._frame(framing.encode(message, self._settings.max_frame_bytes)))

    def _frame(self, parts: list[Buffer]) -> Frame:
        size = sum(map(len, parts)) if len(parts) > 1 else len(parts[0])
        if size > _JOINED_BYTES:
            return self._large_frame(parts, size)
        payload = b"".join(parts) if len(parts) > 1 else parts[0]
        return self._small_frame(ws.BINARY, payload)

    def _small_frame(self, opcode: int, payload: Buffer) -> Frame:
        size = len(payload)
        if self._masks:
            key = os.urandom(4)
            data = ws.frame_header(opcode, size, key) + mask(payload, key)
        else:
            data = ws.frame_header(opcode, size) + payload
        return Frame([data], len(data))

    def _large_frame(self, parts: list[Buffer], size: int) -> Frame:
        if self._masks:
            return self._large_masked_frame(parts, size)
        header = ws.frame_header(ws.BINARY, size)
        total = len(header) + size
        if len(parts) > _MAX_PARTS or threading.current_thread() is threading.main_thread():
            # On the main thread the call can end by an interrupt before the frame is written, and the borrow with it.
            return Frame([b"".join((header, *parts))], total)
        return Frame([header, *parts], total)

    def _large_masked_frame(self, parts: list[Buffer], size: int) -> Frame:
        key = os.urandom(4)
        header = ws.frame_header(ws.BINARY, size, key)
        needed = len(header) + size + 8
        scratch = self._scratch.pop() if self._scratch else bytearray()
        if len(scratch) < needed:
            scratch = bytearray(needed)
        view = memoryview(scratch)
        # The payload keeps its alignment, else the XOR would be several times slower.
        large = max(range(len(parts)), key=lambda index: len(parts[index]))
        before = len(header) + sum(map(len, parts[:large]))
        start = (address(memoryview(parts[large])) - address(view) - before) % 8
        end = start + len(header) + size
        view[start : start + len(header)] = header
        mask_parts(parts, key, view[start + len(header) : end])
        keep: Callable[[], object] | None = None
        if len(scratch) <= _KEPT_SCRATCH_BYTES and not self._scratch:
            keep = partial(self._scratch.append, scratch)
        return Frame([view[start:end]], end - start, keep)

    def keep_alive(self) -> None:
        if not self._closed and self._outbox.waiting_frames < _WAITING_PONGS:
            self._outbox.post(self._small_frame(ws.PING, b""))

    # --- receiving ---------------------------------------------------------------------------------------------------

    def recv(self, timeout_seconds: float | None = None) -> Message:
        with self._reading:
            left, self._left = self._left, None
            if self._closed or (self._ended is not None and left is None):
                raise self._loss_error()
            try:
                if isinstance(left, Exception):
                    raise left
                message = left or self._next_message(timeout_seconds)
            except ProtocolError as exc:
                self._ended = f"it violated the protocol: {exc}"
                self._end("protocol", str(exc))
                raise
            except OSError as exc:
                if raised_by_handler(exc):
                    raise
                if self._ended is None:
                    self._ended = _reason(exc)
                self._outbox.abort(exc)
                self._end("done", "")
                raise self._loss_error() from exc
            if message is None:
                raise TimeoutError(f"No message came within {timeout_seconds} s.")
            if type(message) is Goodbye:
                # The peer waits for our end before it closes; it should not have to wait for our user.
                self._ended = "it said goodbye"
                self._end("done", "")
                raise self._loss_error()
            return message

    def recv_ready(self) -> Message | None:
        # Whoever closes the connection holds the lock while it waits for the peer.
        if self._closed or self._left is not None or not self._reading.acquire(blocking=False):
            raise self._loss_error()
        try:
            message = self._next_message(0.0)
            if type(message) is Goodbye:
                self._left = message
        except (ProtocolError, OSError) as exc:
            self._left = exc
        finally:
            self._reading.release()
        if self._left is not None:  # what follows waits for the peer
            raise self._loss_error()
        return message

    @property
    def is_behind(self) -> bool:
        return self._is_behind

    @property
    def may_have_more(self) -> bool:
        return not (self._stream.keeps_nothing and self._reader.is_empty)

    def fileno(self) -> int:
        return self._stream.fileno()

    def _next_message(self, timeout_seconds: float | None) -> Message | None:
        """The next message; None when it did not come in time.

        Raises:
            OSError: the connection is gone.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        steps, receive = self._steps, self._stream.recv_into
        target, late_reads = self._target, 0
        most_late_reads = _LATE_READS if timeout_seconds else _READY_READS
        while True:
            if target is None:
                item = next(steps, None)
            else:
                left = None if deadline is None else remaining(deadline)
                late_reads += left == 0.0
                self._is_behind = late_reads > most_late_reads
                count = -1 if self._is_behind else receive(target, left) if target else 0
                if count < 0:
                    return None
                if count == 0 and target:
                    raise ConnectionResetError("the connection was closed")
                self._bytes_received += count
                self._target = None
                try:
                    item = steps.send(count)
                except StopIteration:
                    item = None
            if item is None:
                raise ConnectionResetError(self._ended or "the connection was closed")
            if type(item) is not memoryview:
                return item
            self._target = target = item

    def _on_control(self, opcode: int, payload: bytes) -> None:
        if opcode == ws.PING:
            # Only the latest ping needs an answer; a peer that asks without listening must not fill our memory.
            if self._outbox.waiting_frames < _WAITING_PONGS:
                self._outbox.post(self._small_frame(ws.PONG, payload))
        elif opcode == ws.CLOSE:
            code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
            text = payload[2:].decode("utf-8", "replace")
            self._ended = f"it closed the WebSocket with code {code}" + (f" ({text})" if text else "")
            self._outbox.post(self._small_frame(ws.CLOSE, payload[:2]))

    def set_sink(self, sink: PayloadSink | None) -> None:
        self._reader.sink = sink

    # --- lending -----------------------------------------------------------------------------------------------------

    def lend(self, on_close: Callable[[str, str], object]) -> bytes:
        """Leave the stream to somebody else, who goes on with the WebSocket; nothing is read or sent here meanwhile.

        Call it between two messages, on the thread that receives.

        Args:
            on_close: what `close` does from now on.

        Returns:
            What was received and not read yet.

        Raises:
            OSError: the connection is gone.
        """
        self._outbox.finish()
        self._borrower = on_close
        if isinstance(self._stream, TlsStream):
            self._stream.on_output = lambda: None
        return self._reader.take_rest()

    def take_back(self) -> None:
        """Own the stream again, which its borrower left between two frames: `close` says goodbye on it."""
        self._borrower = None

    def retire(self) -> None:
        """Let go of a lent stream whose connection is over, without a word to the peer."""
        self._closed = True
        self._borrower = lambda code_name, reason: None
        self._stream.shutdown()
        self._outbox.stop(_RETIRE_SECONDS)
        self._stream.close()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True
        borrower = self._borrower
        if borrower is not None:
            borrower(code_name, reason)
            return
        self._end(code_name, reason)
        # Another thread may be at it already. Its socket must not be taken from it before the goodbye is out.
        self._finished.wait(2 * self._settings.close_timeout_seconds + 1.0)

    def cut(self) -> bool:
        self._closed = True
        self._stream.shutdown()
        if not self._outbox.fence(ConnectionAbortedError("the connection was cut"), _CUT_SECONDS):
            return False
        if not self._reading.acquire(timeout=_CUT_SECONDS):
            return False
        self._reading.release()
        if self._closing.acquire(blocking=False):
            try:
                self._outbox.stop(_RETIRE_SECONDS)
                self._stream.close()
            finally:
                self._finished.set()
        return True

    def _end(self, code_name: str, reason: str) -> None:
        if not self._closing.acquire(blocking=False):
            return
        self._closed = True
        deadline = time.monotonic() + self._settings.close_timeout_seconds
        try:
            if self._say_goodbye(code_name, reason, deadline):
                self._stream.shutdown_write()
                self._await_end(deadline)
        finally:
            # Wakes whoever still reads or writes; only then may the file descriptor go.
            self._stream.shutdown()
            patience = max(remaining(deadline), 0.2)
            self._outbox.stop(patience)
            if self._reading.acquire(timeout=patience):
                try:
                    self._stream.close()
                finally:
                    self._reading.release()
            self._finished.set()

    def abandon(self) -> None:
        # No lock: threads that do not exist here may hold them. Closing our copy leaves the parent's open.
        self._closed = True
        self._stream.close()

    def _say_goodbye(self, code_name: str, reason: str, deadline: float) -> bool:
        """Return whether the peer was told, in time, that we leave."""
        if self._outbox.error is not None:
            return False
        frames: list[tuple[Frame, Message | None]] = []
        if self._connection.state is not State.ENDED or self._connection.goodbye is not None:
            goodbye = Goodbye(code_name, reason[:_REASON_BYTES])
            frames.append((self._frame(framing.encode(goodbye, self._settings.max_frame_bytes)), goodbye))
        frames.append((self._small_frame(ws.CLOSE, (1000).to_bytes(2, "big")), None))
        try:
            return self._outbox.send_last(frames, remaining(deadline))
        except (ProtocolError, ConfigurationError):
            return False

    def _await_end(self, deadline: float) -> None:
        """Waits until the peer has closed as well: closing over unread bytes could cost it our last words."""
        if not self._reading.acquire(timeout=remaining(deadline)):
            return
        try:
            trash = memoryview(bytearray(64 << 10))
            while self._stream.recv_into(trash, remaining(deadline)) > 0:
                pass
        except OSError:
            pass
        finally:
            self._reading.release()

    def _loss_error(self, error: OSError | None = None) -> SessionLostError:
        goodbye = self._connection.goodbye
        if goodbye is not None and goodbye.code_name == "crashed":
            return SessionLostError(f"The session is lost: {goodbye.reason.rstrip('.')}")
        if goodbye is not None:
            reason = f"it said goodbye ({goodbye.code_name})" + (f": {goodbye.reason}" if goodbye.reason else "")
        elif self._ended is not None:
            reason = self._ended
        elif self._closed:
            return SessionLostError(f"The connection to the {self._peer} was closed here.")
        else:
            reason = _reason(error or self._outbox.error or ConnectionResetError("the connection was closed"))
        return SessionLostError(f"The {self._peer} is gone: {reason}")

    @property
    def stream(self) -> ByteStream:
        """The stream below."""
        return self._stream

    def share_bounds(self, bounds: memoryview) -> None:
        """Keep the bounds of the frame that is being written in this memory; see `Outbox`."""
        self._outbox.bounds = bounds

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def bytes_sent(self) -> int:
        return self._outbox.bytes_sent

    @property
    def bytes_unread(self) -> int:
        return self._stream.unread_bytes()

    @property
    def bytes_received(self) -> int:
        return self._bytes_received


def _on_control(transport: weakref.ref[WebSocketTransport], opcode: int, payload: bytes) -> None:
    """Tell a transport of a control frame: its reader, which knows the way to it, does not keep it alive.

    With it would stay what it was reading when the connection broke, until the collector runs.
    """
    if (own := transport()) is not None:
        own._on_control(opcode, payload)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
