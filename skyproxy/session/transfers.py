"""Large tensors on their way: in pieces, on the bulk connection, beside the operations."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import RemoteError, SessionLostError
from skyproxy.protocol.messages import CancelTransfer, Chunk, Message
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.transport.base import Transport


class Downloads:
    """Chunks that arrive, written straight into the tensors that wait for them. Named by the request that asked."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._open: dict[int, tuple[torch.Tensor, memoryview]] = {}
        self._missing: dict[int, int] = {}

    def open(self, number: int, target: torch.Tensor) -> None:
        """Announces where a transfer lands. The target stays alive until its last chunk came, whoever waits or not."""
        view = torch_codec.byte_view(target)
        self._missing[number] = len(view)
        self._open[number] = (target, view)

    def sink(self, message: Message) -> memoryview | None:
        """Where a chunk's bytes go: straight into the tensor."""
        if not isinstance(message, Chunk):
            return None
        entry = self._open.get(message.transfer)
        if entry is None or message.total_bytes != len(entry[1]):
            return None
        return entry[1][message.offset :]

    def on_chunk(self, chunk: Chunk) -> None:
        if chunk.transfer not in self._open:
            return
        self._missing[chunk.transfer] -= len(chunk.buffers[0])
        if self._missing[chunk.transfer] <= 0:
            self.forget(chunk.transfer)
            waiter = self._waiters.take(chunk.transfer)
            if waiter is not None:
                waiter.set(None)

    def on_cancel(self, message: CancelTransfer) -> None:
        self.forget(message.transfer)
        waiter = self._waiters.take(message.transfer)
        if waiter is not None:
            waiter.fail(RemoteError(message.reason))

    def forget(self, number: int) -> None:
        """No more chunks come for this request."""
        self._open.pop(number, None)
        self._missing.pop(number, None)


class _Job:
    __slots__ = ("cancelled", "done", "keep_alive", "transfer", "view")

    def __init__(self, transfer: int, view: memoryview, keep_alive: object) -> None:
        self.transfer, self.view, self.keep_alive = transfer, view, keep_alive
        self.done = Waiter()
        self.cancelled = False


class Uploads:
    """Chunks that leave, written by one thread, so that Ctrl-C can never cut a chunk in two.

    Attributes:
        busy: whether a transfer is under way.
        last_progress: when the last chunk left, on the clock of `time.monotonic`.
    """

    def __init__(self, transport: Transport, chunk_bytes: int) -> None:
        self.busy = False
        self.last_progress = 0.0
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: SessionLostError | None = None
        self._lock = threading.Lock()

    def send(self, transfer: int, view: memoryview, keep_alive: Any, announce: Callable[[], object]) -> None:
        """Sends the bytes as one transfer and waits until they were read.

        On Ctrl-C the transfer is given up: the worker is told, and the value that waits for it is poisoned.

        Args:
            transfer: its number.
            view: the bytes.
            keep_alive: what owns them.
            announce: tells the worker that they come; called first.
        """
        job = _Job(transfer, view, keep_alive)
        try:
            announce()
            self._jobs.put(job)
            if self._ended is not None:
                raise SessionLostError(str(self._ended)) from self._ended
            job.done.wait()
        except BaseException:
            # Perhaps announced and not in the queue, perhaps already on its way: either way the worker must not wait.
            job.cancelled = True
            self._jobs.put(job)
            raise

    def run(self) -> None:
        """The writing thread."""
        while (job := self._jobs.get()) is not None:
            if job.done.done:
                continue  # a second time, because its sender was interrupted
            self.last_progress = time.monotonic()
            self.busy = True
            try:
                self._write(job)
                job.done.set(None)
            except Exception as error:
                job.done.fail(error)
            finally:
                self.busy = False

    def _write(self, job: _Job) -> None:
        total = len(job.view)
        for offset in range(0, total, self._chunk_bytes):
            if self._ended is not None:
                raise SessionLostError(str(self._ended)) from self._ended
            if job.cancelled:
                self._transport.send(CancelTransfer(job.transfer, "the upload was interrupted"))
                return
            piece = job.view[offset : offset + self._chunk_bytes]
            self._transport.send(Chunk(job.transfer, offset, total, (piece,)))
            self.last_progress = time.monotonic()

    def end(self, error: SessionLostError) -> None:
        """Fails what waits and ends the thread."""
        self._ended = error
        self._jobs.put(None)
        with self._lock:
            while True:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    self._jobs.put(None)
                    return
                if job is not None:
                    job.done.fail(error)
