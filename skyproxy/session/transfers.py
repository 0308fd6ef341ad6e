"""Large tensors on their way: in pieces, on the bulk connection, beside the operations."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import RemoteError, SessionLostError
from skyproxy.protocol.messages import CancelTransfer, Challenge, Chunk, Known, Message, Offer, PackedChunk, Proof
from skyproxy.session.offers import Offers, Plan
from skyproxy.session.progress import Watch
from skyproxy.session.trace import SessionTrace
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.transport.base import Transport
from skyproxy.transport.packing import ChunkWriter, unpack

_WAITING_BYTES = 64 << 20
"""What a group of uploads may hold in memory before it waits for the first of them."""


class Downloads:
    """Chunks that arrive, written straight into the tensors that wait for them. Named by the request that asked.

    Attributes:
        packed_chunks: how many came compressed.
        trace: where the time of each is noted, else None.
    """

    def __init__(self, waiters: Waiters) -> None:
        self.packed_chunks = 0
        self.trace: SessionTrace | None = None
        self._waiters = waiters
        self._open: dict[int, tuple[torch.Tensor, memoryview]] = {}
        self._missing: dict[int, int] = {}

    def open(self, number: int, target: torch.Tensor) -> None:
        """Announces where a transfer lands. The target stays alive until its last chunk came, whoever waits or not."""
        view = torch_codec.byte_view(target)
        if self.trace is not None:
            self.trace.download_begins(number)
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
        self._landed(chunk.transfer, len(chunk.buffers[0]))

    def on_packed_chunk(self, chunk: PackedChunk) -> None:
        """A piece that came compressed.

        Raises:
            ProtocolError: it cannot be unpacked.
        """
        self.packed_chunks += 1
        entry = self._open.get(chunk.transfer)
        if entry is None:
            return
        raw = unpack(chunk)
        if chunk.total_bytes == len(entry[1]):  # then it fits; the connection has looked at that
            entry[1][chunk.offset : chunk.offset + len(raw)] = raw
        self._landed(chunk.transfer, len(raw))

    def _landed(self, number: int, byte_count: int) -> None:
        if number not in self._open:
            return
        self._missing[number] -= byte_count
        if self._missing[number] <= 0:
            if self.trace is not None:
                self.trace.download_ends(number, len(self._open[number][1]))
            self.forget(number)
            waiter = self._waiters.take(number)
            if waiter is not None:
                waiter.set(None)

    def missing_bytes(self, target: object) -> int:
        """What has not come yet of the transfer that lands in this tensor."""
        for number, (tensor, _) in list(self._open.items()):
            if tensor is target:
                return self._missing.get(number, 0)
        return 0

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
    __slots__ = ("cancelled", "done", "keep_alive", "sent_bytes", "together", "transfer", "view", "width")

    def __init__(self, transfer: int, view: memoryview, width: int, keep_alive: object, together: bool) -> None:
        self.transfer, self.view, self.width, self.keep_alive = transfer, view, width, keep_alive
        self.together = together
        self.done = Waiter()
        self.cancelled = False
        self.sent_bytes = 0


class Group:
    """Transfers of one thread that overlap and share a progress bar; see `together`.

    Attributes:
        expected_bytes: all that will move, as far as is known.
    """

    def __init__(self, text: str, expected_bytes: int, shown: bool) -> None:
        self.expected_bytes = expected_bytes
        self._watch = Watch(text, self._figures, shown)
        self._pending: deque[tuple[Uploads, _Job]] = deque()
        self._pending_bytes = 0
        self._done_bytes = 0
        self._arrived_bytes: Callable[[], int] = lambda: 0

    def _figures(self) -> tuple[int, int]:
        done = self._done_bytes + self._arrived_bytes() + sum(job.sent_bytes for _, job in self._pending)
        return done, max(self.expected_bytes, self._done_bytes + self._pending_bytes)

    def add(self, uploads: Uploads, job: _Job) -> None:
        """Takes an upload that is about to begin. Waits for earlier ones, but for the last, while they hold much."""
        size = len(job.view)
        while len(self._pending) > 1 and self._pending_bytes + size > _WAITING_BYTES:
            self._finish_first()
        self._pending_bytes += size
        self._pending.append((uploads, job))

    def _finish_first(self) -> None:
        _, job = self._pending[0]
        self._watch.wait(job.done)
        self._pending.popleft()
        self._pending_bytes -= len(job.view)
        self._done_bytes += len(job.view)

    def wait_for_download(self, waiter: Waiter, size: int, missing_bytes: Callable[[], int]) -> Any:
        """The answer of a waiter whose bytes arrive."""
        self._arrived_bytes = lambda: size - missing_bytes()
        try:
            return self._watch.wait(waiter)
        finally:
            self._arrived_bytes = lambda: 0
            self._done_bytes += size

    def finish(self) -> None:
        """Waits until the bytes of all uploads were read."""
        while self._pending:
            self._finish_first()

    def give_up(self) -> None:
        """Cancels every upload that is not through."""
        for uploads, job in self._pending:
            uploads.give_up(job)

    def close(self) -> None:
        self._watch.close()


class _Current(threading.local):
    group: Group | None = None


_current = _Current()


@contextlib.contextmanager
def together(text: str, expected_bytes: int, shown: bool) -> Iterator[Group]:
    """Uploads that this thread begins inside the block do not wait for one another; all are waited for at its end.

    Where the block ends by an exception, Ctrl-C included, those that are not through are given up.

    Args:
        text: for the progress bar.
        expected_bytes: how many bytes will move, for that too.
        shown: whether there may be one.
    """
    outer = _current.group
    group = Group(text, expected_bytes, shown)
    try:
        _current.group = group
        yield group
        group.finish()
    except BaseException:
        group.give_up()
        raise
    finally:
        _current.group = outer
        group.close()


def wait_for_download(waiter: Waiter, size: int, missing_bytes: Callable[[], int], shown: bool) -> Any:
    """The answer of a waiter whose bytes arrive on the bulk connection, with a progress bar if that takes long."""
    if _current.group is not None:
        return _current.group.wait_for_download(waiter, size, missing_bytes)
    with Watch("download", lambda: (size - missing_bytes(), size), shown) as watch:
        return watch.wait(waiter)


class Uploads:
    """Chunks that leave, written by one thread, so that Ctrl-C can never cut a chunk in two.

    Where the worker may have the bytes already, it is asked first. Nobody waits for its answer but the upload itself:
    the thread goes on with the next ones.

    Attributes:
        busy: whether a transfer is under way.
        writer: what sends the chunks.
        last_progress: when the last chunk left, on the clock of `time.monotonic`.
        offers: decides which uploads the worker is asked about.
        trace: where the time of each is noted, else None.
    """

    def __init__(
        self, transport: Transport, chunk_bytes: int, show_progress: bool = False, offers: Offers | None = None
    ) -> None:
        self.busy = False
        self.trace: SessionTrace | None = None
        self.offers = offers or Offers(0, keeps=False, had_blobs=False)
        self.writer = ChunkWriter(transport)
        self._show_progress = show_progress
        self.last_progress = 0.0
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._jobs: queue.SimpleQueue[_Job | Known | Challenge | None] = queue.SimpleQueue()
        self._asked: dict[int, _Job] = {}
        self._ended: SessionLostError | None = None
        self._lock = threading.Lock()

    def send(
        self, transfer: int, view: memoryview, width: int, keep_alive: Any, announce: Callable[[], object]
    ) -> None:
        """Sends the bytes as one transfer and waits until they were read; inside `together`, its end waits.

        On Ctrl-C the transfer is given up: the worker is told, and the value that waits for it is poisoned.

        Args:
            transfer: its number.
            view: the bytes.
            width: the size of an element.
            keep_alive: what owns them.
            announce: tells the worker that they come; called first.
        """
        group = _current.group
        job = _Job(transfer, view, width, keep_alive, group is not None)
        try:
            if group is not None:
                group.add(self, job)  # before anything is announced: then whatever strikes, the group gives it up
            announce()
            self._jobs.put(job)
            if self._ended is not None:
                raise SessionLostError(str(self._ended)) from self._ended
            if group is None:
                with Watch("upload", lambda: (job.sent_bytes, len(view)), self._show_progress) as watch:
                    watch.wait(job.done)
        except BaseException:
            self.give_up(job)
            raise

    def give_up(self, job: _Job) -> None:
        """Sends no more of a transfer, and tells the worker."""
        # Perhaps announced and not in the queue, perhaps already on its way: either way the worker must not wait.
        job.cancelled = True
        self._jobs.put(job)

    def run(self) -> None:
        """The writing thread."""
        while (item := self._jobs.get()) is not None:
            self._attend_to(item)
        for job in self._asked.values():
            job.done.fail(self._ended or SessionLostError("the session ended"))
        self.offers.end()

    def _attend_to(self, item: _Job | Known | Challenge) -> None:
        asked = self._asked.pop(item.transfer, None)
        job = item if isinstance(item, _Job) else asked
        if job is None or job.done.done:
            return  # it comes a second time, because its sender was interrupted
        self.last_progress = time.monotonic()
        self.busy = True
        try:
            if isinstance(item, Known):
                self.offers.answered(len(job.view), item.known)
                if item.known:
                    job.sent_bytes = len(job.view)
                    job.done.set(None)
                    return
            elif isinstance(item, Challenge):
                self._asked[job.transfer] = job
                self._transport.send(Proof(job.transfer, self.offers.proof(job.view, item.nonce)))
                return
            elif self._ask(job):
                return
            self._write(job)
            job.done.set(None)
        except Exception as error:
            self._asked.pop(job.transfer, None)
            job.done.fail(self._ended or error)
        finally:
            self.busy = False

    def on_known(self, message: Known | Challenge) -> None:
        """The worker's answer; called by the reading thread."""
        self._jobs.put(message)

    def _ask(self, job: _Job) -> bool:
        """Says what precedes the chunks; whether that is a question, whose answer decides."""
        plan = Plan.PLAIN if job.cancelled else self.offers.plan(len(job.view), job.together)
        if plan is Plan.PLAIN:
            return False
        digest = self.offers.digest(job.view) if plan is Plan.ASK else b""
        if digest:
            self._asked[job.transfer] = job
        self._transport.send(Offer(job.transfer, len(job.view), digest))
        return bool(digest)

    def _write(self, job: _Job) -> None:
        total = len(job.view)
        started_ns = time.time_ns()
        for offset in range(0, total, self._chunk_bytes):
            if self._ended is not None:
                raise SessionLostError(str(self._ended)) from self._ended
            if job.cancelled:
                self._transport.send(CancelTransfer(job.transfer, "the upload was interrupted"))
                return
            piece = job.view[offset : offset + self._chunk_bytes]
            self.writer.send(job.transfer, offset, total, piece, job.width)
            job.sent_bytes = offset + len(piece)
            self.last_progress = time.monotonic()
        if self.trace is not None:
            self.trace.add("upload", job.transfer, started_ns, total)

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
                if isinstance(job, _Job):
                    job.done.fail(error)
