"""Writes whole frames to a stream, one after another, from any thread, whatever Ctrl-C does.

A KeyboardInterrupt can strike the main thread after any call that it makes. Nothing here may depend on two such calls
both happening. So a frame is committed by one uninterrupted step; what is still to be written follows from the frames
in the queue and the counts that the system calls left in them; and whoever writes next, another sender or the outbox's
own thread, goes on from there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from operator import call
from queue import SimpleQueue
from threading import get_ident

from skyproxy import interrupts
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import Buffer, Message
from skyproxy.transport.shared_threads import SharedThreads
from skyproxy.transport.stream import ByteStream

_MAIN_THREAD = threading.main_thread().ident
"""The one thread that runs signal handlers."""


class Frame:
    """Bytes that may not be torn apart.

    Attributes:
        parts: the bytes; unchanged and alive until they were written.
        size: how many they are.
        counts: how many were written, a number for each write.
        done: a lock that is held until they were written, where somebody waits for that.
        on_written: called once they were.
    """

    __slots__ = ("counts", "done", "on_written", "parts", "size")

    def __init__(self, parts: list[Buffer], size: int, on_written: Callable[[], object] | None = None) -> None:
        self.parts = parts
        self.size = size
        self.counts: list[int] = []
        self.done: threading.Lock | None = None
        self.on_written = on_written

    def rest(self) -> list[Buffer]:
        """The bytes that were not written yet."""
        skip = sum(self.counts)
        parts: list[Buffer] = []
        for part in self.parts:
            if skip < len(part):
                parts.append(memoryview(part)[skip:] if skip else part)
            skip = max(skip - len(part), 0)
        return parts


class Outbox:
    """The writing half of a transport.

    Attributes:
        bytes_sent: the size of all frames of messages.
        error: what went wrong with the connection, or None.
        bounds: where the last frame that was begun starts and ends, in bytes since the outbox began. Whoever shares
            this memory, and knows how much was written, knows whether a frame of theirs would be understood now.
    """

    def __init__(
        self, stream: ByteStream, connection: Connection, name: str, threads: SharedThreads | None = None
    ) -> None:
        """Make the outbox of one stream.

        Args:
            stream: where the frames go.
            connection: says which message may be sent now.
            name: of the outbox's thread.
            threads: do its work in place of a thread of its own.
        """
        self.bytes_sent = 0
        self.error: OSError | None = None
        self.bounds = memoryview(bytearray(16)).cast("Q")
        self._stream = stream
        self._connection = connection
        self._name = name
        self._frames: deque[Frame] = deque()
        # Re-entrant, because the garbage collector can run a destructor that sends in the middle of `send`.
        self._lock = threading.RLock()
        self._busy = False
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._shares = threads is not None
        # Has the thread look for what is to be written: one call in C, as `send` needs it.
        self._ask = partial(self._orders.put, True) if threads is None else partial(threads.submit, self._write)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def send(self, frame: Frame, message: Message) -> None:
        """Writes a frame, after those that are waiting. Blocks while the peer is slower than we are.

        An interrupted call has either done nothing or leaves the frame to the outbox's thread, which writes it in full;
        `connection` tells which.

        Raises:
            ProtocolError: the message is not allowed now.
            OSError: the connection is gone.
        """
        if get_ident() == _MAIN_THREAD:
            if self._thread is None and not self._shares:
                self.start()
            if not self._stream.interruptible:
                frame.done = threading.Lock()
                frame.done.acquire()
        held: list[bool] = []
        try:
            # No bytecode, hence no interrupt, stands between taking the lock and knowing that we have it.
            held.extend(map(self._lock.acquire, (True,)))
            if self.error is not None:
                raise copy(self.error)
            nested = self._busy
            try:
                self._busy = True
                self._commit(frame, message)
                if not nested and frame.done is None:
                    self._flush()
            finally:
                self._busy = nested
        except OSError as exc:
            if not raised_by_handler(exc):
                self._fail(exc)
            raise
        finally:
            if held:
                try:
                    # Either we were interrupted, or we may not write ourselves: the thread goes on.
                    if self._frames and not self._busy:
                        self._ask()
                finally:
                    self._lock.release()
        if frame.done is not None and not nested:
            while not frame.done.acquire(timeout=interrupts.SIGNAL_LOOK_SECONDS):
                pass
            if self.error is not None:
                raise copy(self.error)

    def _commit(self, frame: Frame, message: Message) -> None:
        step = self._connection.prepare_send(message, frame.size)
        if step is None:
            if frame.done is not None:
                frame.done.release()
            return
        self.bytes_sent += frame.size
        note, entry = step
        # Both at once or neither: `deque` makes these two calls without returning to the interpreter.
        deque(map(call, (note, self._frames.append), (entry, frame)), 0)

    def _flush(self) -> None:
        frames = self._frames
        while frames:
            frame = frames[0]
            if not frame.counts:
                bounds = self.bounds
                bounds[0] = bounds[1]
                bounds[1] += frame.size
                self._stream.write(frame.parts, frame.counts)
            elif sum(frame.counts) < frame.size:
                self._stream.write(frame.rest(), frame.counts)
            else:
                frames.popleft()
                if frame.on_written is not None:
                    frame.on_written()
                if frame.done is not None:
                    frame.done.release()

    def finish(self) -> None:
        """Write what waits, on the calling thread.

        Raises:
            OSError: the connection is gone.
        """
        with self._lock:
            self._flush()

    def post(self, frame: Frame) -> None:
        """Leaves a frame of no message to the outbox's thread; never blocks."""
        if self._thread is None and not self._shares:
            self.start()
        self._frames.append(frame)
        self._ask()

    def nudge(self) -> None:
        """Has the outbox's thread look for what is to be written."""
        if self._thread is None and not self._shares:
            self.start()
        self._ask()

    @property
    def waiting_frames(self) -> int:
        """Frames that were not written in full yet."""
        return len(self._frames)

    def send_last(self, frames: list[tuple[Frame, Message | None]], timeout_seconds: float) -> bool:
        """Writes the last frames of a connection, if the peer takes them in time.

        Args:
            frames: each with its message, or None where it has none.
            timeout_seconds: how long all of it may take.

        Returns:
            Whether they were written.
        """
        if not self._lock.acquire(timeout=timeout_seconds):
            return False
        try:
            if self.error is not None or self._busy:
                return False
            for frame, message in frames:
                if message is None:
                    self._frames.append(frame)
                else:
                    self._commit(frame, message)
            last = frames[-1][0]
            last.done = threading.Lock()
            last.done.acquire()
        finally:
            self._lock.release()
        self.nudge()
        return last.done.acquire(timeout=timeout_seconds) and self.error is None

    def fence(self, error: OSError, timeout_seconds: float) -> bool:
        """Take no more frames and drop those that wait; return whether no thread is writing any more.

        The stream was shut down, so no writer waits in it.
        """
        self.abort(error)
        if not self._lock.acquire(timeout=timeout_seconds):
            return False
        try:
            self._fail(error)
        finally:
            self._lock.release()
        return True

    def abort(self, error: OSError) -> None:
        """Takes no more frames; `stop` then drops those that wait."""
        # Not the error itself: as long as the connection is known, its traceback would keep alive what senders hold.
        self.error = self.error or copy(error)

    def _fail(self, error: OSError) -> None:
        """Drops all frames and wakes whoever waits for them; the lock is held."""
        self.abort(error)
        while self._frames:
            frame = self._frames.popleft()
            if frame.done is not None:
                frame.done.release()

    def start(self) -> None:
        """Starts the outbox's thread, if it does not run."""
        with self._starting:
            if self._thread is None and not self._shares:
                thread = threading.Thread(target=self._drain, name=self._name, daemon=True)
                # The attribute first: otherwise an interrupt after the start would make a second thread, and lose one.
                self._thread = thread
                thread.start()

    def _drain(self) -> None:
        while self._orders.get():
            self._write()

    def _write(self) -> None:
        with self._lock:
            if self.error is not None:
                return
            try:
                self._flush()
                self._stream.pump()
            except OSError as exc:
                self._fail(exc)

    def stop(self, timeout_seconds: float) -> None:
        """Gives up what is unwritten and ends the outbox's thread.

        Args:
            timeout_seconds: how long to wait for each of the two; the stream was shut down, so no writer waits in it.
        """
        if self._lock.acquire(timeout=timeout_seconds):
            try:
                self._fail(ConnectionAbortedError("the connection was closed here"))
            finally:
                self._lock.release()
        thread = self._thread
        self._orders.put(False)
        if thread is not None and thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)
