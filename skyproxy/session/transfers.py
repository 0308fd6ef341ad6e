"""Large tensors on their way: in pieces, on the bulk connection, beside the operations."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import (
    CancelTransfer,
    Challenge,
    Continue,
    Known,
    Landed,
    Offer,
    Proof,
)
from skyproxy.session.batch_log import KeptUpload
from skyproxy.session.offers import UploadDedup, UploadMode
from skyproxy.session.progress import TransferWatch
from skyproxy.session.trace import SessionTrace
from skyproxy.session.transfer_groups import current_group
from skyproxy.session.waiters import Waiter
from skyproxy.transport.base import Transport
from skyproxy.transport.packing import ChunkWriter
from skyproxy.transport.shared_threads import SharedThreads

_RETAINED_BYTES = 32 << 20
"""Bytes of uploads that were written, of which the worker has not told yet that they came: copies, so that the program
can go on. Beyond that, an upload ends when the worker has it."""
_CONFIRMED_WITHIN_SECONDS = 0.005
"""The time within which a worker that is near confirms: sooner than a copy is made."""
_AWAITED_EVERY = 64
_REMEMBERED_CANCELS = 1000


class _Job:
    __slots__ = (
        "again",
        "asked",
        "begun",
        "cancelled",
        "confirmed",
        "done",
        "given_up",
        "is_kept",
        "keep_alive",
        "offered",
        "retained",
        "sent_bytes",
        "together",
        "total",
        "transfer",
        "view",
        "width",
    )

    def __init__(self, transfer: int, view: memoryview, width: int, keep_alive: object, together: bool) -> None:
        self.transfer, self.view, self.width, self.keep_alive = transfer, view, width, keep_alive
        self.together = together
        self.done = Waiter()
        self.cancelled = False
        self.sent_bytes = 0
        self.total = len(view)
        # Of a session that outlives its connections: the bytes that the worker told to have; the size of the copy that
        # `view` has become; whether the worker is being asked how far it is, and has said so; whether what precedes the
        # chunks was said.
        self.confirmed = 0
        self.retained = 0
        self.asked = False
        self.again = False
        self.begun = False
        self.offered = False
        # Of a protected session: whether `view` is the log's own; whether the worker was told that no more comes.
        self.is_kept = False
        self.given_up = False

    @property
    def gives_up(self) -> bool:
        """True if whoever waited for it was interrupted."""
        return self.cancelled and not self.done.done

    def begin_anew(self) -> None:
        """Another worker has nothing of it."""
        self.confirmed = self.sent_bytes = 0
        self.asked = self.begun = self.offered = False
        self.again = True


class UploadLog(Protocol):
    """Keeps the bytes of uploads, for another worker."""

    def keep_upload(self, transfer: int, view: memoryview) -> KeptUpload | None:
        """Copy the bytes of an upload that is about to be announced; None where there are too many."""

    def note_upload(self, transfer: int, kept: KeptUpload | None) -> None:
        """Take note that it was announced."""


class _Restart(NamedTuple):
    """Another worker goes on with the session, on this connection, and needs these uploads from their first byte."""

    link: Transport
    offers: UploadDedup
    jobs: Callable[[], Iterable[object]]


_MOST_JOBS = 100_000
"""Uploads and answers about them that wait for the thread that writes; a program with more threads there is not."""


class UploadQueue:
    """Chunks that leave, written by one thread, so that Ctrl-C can never cut a chunk in two.

    Where the worker may have the bytes already, it is asked first. Nobody waits for its answer but the upload itself:
    the thread goes on with the next ones.

    Attributes:
        busy: whether a transfer is under way.
        writer: what sends the chunks.
        last_progress: when the last chunk left, on the clock of `time.monotonic`.
        offers: decides which uploads the worker is asked about.
        trace: where the time of each is noted, else None.
        lasting: whether the connection is made anew when it breaks. Then an upload is kept until the worker has it.
        log: keeps a copy of every upload, in a protected session; else None.
    """

    def __init__(
        self,
        transport: Transport,
        chunk_bytes: int,
        show_progress: bool = False,
        offers: UploadDedup | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        self.lasting = lasting
        self.log: UploadLog | None = None
        self._unconfirmed: dict[int, _Job] = {}
        self._cancelled: deque[int] = deque(maxlen=_REMEMBERED_CANCELS)
        self._retained_bytes = 0
        self._is_near = True
        self._since_awaited = 0
        self.busy = False
        self.trace: SessionTrace | None = None
        self.offers = offers or UploadDedup(0, keeps=False, had_blobs=False)
        self.writer = ChunkWriter(transport)
        self._show_progress = show_progress
        self.last_progress = 0.0
        self._transport = self._link = transport
        self._chunk_bytes = chunk_bytes
        self._jobs: queue.SimpleQueue[_Job | Known | Challenge | _Restart | None] = queue.SimpleQueue()
        self._asked: dict[int, _Job] = {}
        self._ended: SessionLostError | None = None
        self._lock = threading.RLock()
        self._start: Callable[[], None] | None = None

    def start_with(self, threads: SharedThreads) -> None:
        """Have `run` begin with the first upload, on a thread that is made then: most sessions of pools have none."""
        begun = threading.Lock()

        def start() -> None:
            if begun.acquire(blocking=False):
                self._start = None
                threading.Thread(target=self.run, name="skyproxy-uploads", daemon=True).start()

        # By a helper, which no Ctrl-C interrupts halfway.
        self._start = partial(threads.submit, start)

    def _put(self, item: _Job | Known | Challenge | _Restart) -> None:
        self._jobs.put(item)
        start = self._start
        if start is not None:
            start()

    def send(
        self, transfer: int, view: memoryview, width: int, keep_alive: object, announce: Callable[[], object]
    ) -> None:
        """Sends the bytes as one transfer and waits until they were read; inside `together`, its end waits.

        On Ctrl-C the transfer is cancelled: the worker is told, and the value that waits for it is poisoned.

        Args:
            transfer: its number.
            view: the bytes.
            width: the size of an element.
            keep_alive: what owns them.
            announce: tells the worker that they come; called first.
        """
        group, log = current_group(), self.log
        kept = log.keep_upload(transfer, view) if log is not None else None
        if kept is not None:
            view, keep_alive = memoryview(kept.values), None
        job = _Job(transfer, view, width, keep_alive, group is not None)
        if kept is not None:
            kept.job, job.is_kept = job, True
        try:
            if group is not None:
                group.add(self, job)  # before anything is announced: whatever strikes after that, the group cancels it
            announce()
            if self.log is not None:  # another one, perhaps: protection may have begun, or begun anew
                self.log.note_upload(transfer, kept if self.log is log else None)
            self._put(job)
            if self._ended is not None:
                raise self._ended.again()
            if group is None:
                with TransferWatch("upload", lambda: (job.sent_bytes, len(view)), self._show_progress) as watch:
                    watch.wait(job.done)
        except BaseException:
            self.give_up(job)
            raise

    @property
    def is_awaited(self) -> bool:
        """True if somebody waits for an upload that the worker has not said to have."""
        with self._lock:
            return any(not job.done.done for job in self._unconfirmed.values())

    def give_up(self, job: _Job) -> None:
        """Sends no more of a transfer, and tells the worker."""
        # It may be announced and not queued, or already on its way: either way the worker must not wait for it.
        job.cancelled = True
        self._put(job)

    def run(self) -> None:
        """The writing thread."""
        while (item := self._jobs.get()) is not None:
            if isinstance(item, _Restart):
                self._restart(item)
            else:
                self._attend_to(item)
        for job in (*self._asked.values(), *self._unconfirmed.values()):
            job.done.fail(self._ended or SessionLostError("the session ended"))
        self.offers.end()

    def _attend_to(self, item: _Job | Known | Challenge) -> None:
        asked = self._asked.pop(item.transfer, None)
        job = item if isinstance(item, _Job) else asked
        if job is None or (job.done.done and not job.again):
            return  # it comes a second time, because its sender was interrupted
        if item is job and job.begun and not job.again and not job.cancelled:
            return  # it has gone on already
        self.last_progress = time.monotonic()
        self.busy = True
        try:
            if self.lasting or self.log is not None:
                self._attend_while_linked(job, item)
            else:
                self._carry_on(job, item)
        except Exception as error:
            self._asked.pop(job.transfer, None)
            self._forget(job)
            self._settle(job, self._ended or error)
        finally:
            self.busy = False

    def _carry_on(self, job: _Job, item: _Job | Known | Challenge) -> None:
        """Do the next thing for an upload."""
        if isinstance(item, Known):
            self.offers.note_answer(job.total, item.known)
            if item.known:
                job.sent_bytes = job.total
                self._forget(job)
                self._settle(job)
                return
        elif isinstance(item, Challenge):
            self._asked[job.transfer] = job
            proof = self.offers.proof(job.view, item.nonce, lambda: not job.gives_up)
            if not job.gives_up:
                self._link.send(Proof(job.transfer, proof))
                return
            self._asked.pop(job.transfer, None)
        elif not job.offered and self._ask(job):
            return
        self._write(job)

    # --- a connection that is made anew ------------------------------------------------------------------------------

    def _attend_while_linked(self, job: _Job, item: _Job | Known | Challenge) -> None:
        """The same on the connection that there is now. If it breaks, the upload waits for the next one."""
        while True:
            with self._lock:
                if job.asked:  # the answer says how to go on
                    return
                if self._ended is not None:
                    raise self._ended.again()
                self._unconfirmed[job.transfer] = job
                job.again, job.begun = False, True
                # What is written belongs to this connection, not to a later one, which continues elsewhere.
                link = self._link = self._transport
                self.writer.use(link)
            try:
                self._carry_on(job, item)
                return
            except SessionLostError:
                # Where nobody asked and there is another link, the old one was broken before the first byte.
                if self._goes_on_later(job, link):
                    return

    def _goes_on_later(self, job: _Job, link: Transport) -> bool:
        """Return whether the worker is asked about an upload, or will be on the next connection."""
        with self._lock:
            return job.asked or self._transport is link

    def go_on(self, link: Transport, downloads: dict[int, int]) -> None:
        """Use another connection from now on, and ask the worker what it has; called by the reading thread.

        Args:
            link: the connection.
            downloads: what has come of those that are not complete.
        """
        with self._lock:
            self._transport = link
            for job in self._unconfirmed.values():
                job.asked = True
            uploads, cancelled = list(self._unconfirmed), list(self._cancelled)
        with contextlib.suppress(SessionLostError):  # it has broken; the thread that reads it finds out
            link.send(Continue(uploads, downloads))
            for transfer in cancelled:
                link.send(CancelTransfer(transfer, "the upload was interrupted"))

    def begin_anew(self, link: Transport, offers: UploadDedup, jobs: Callable[[], Iterable[object]]) -> None:
        """Use the connection to another worker from now on; called by the reading thread.

        Args:
            link: the connection.
            offers: what that worker is asked about.
            jobs: gives the uploads that it needs, of those that were begun.
        """
        self._put(_Restart(link, offers, jobs))

    def _restart(self, restart: _Restart) -> None:
        self.offers.end()
        with self._lock:
            # An upload that is not queued yet is not among them: it will use this connection.
            jobs = [job for job in restart.jobs() if isinstance(job, _Job)]
            self._transport, self.offers = restart.link, restart.offers
            needed = {job.transfer for job in jobs}
            complete = [job for number, job in self._unconfirmed.items() if number not in needed]
            self._asked.clear()
            self._unconfirmed.clear()
            self._retained_bytes = 0
            for job in jobs:
                job.begin_anew()
        for job in complete:  # the snapshot has it
            job.sent_bytes = job.total
            self._settle(job)
        for job in jobs:
            self._attend_to(job)

    def on_landed(self, message: Landed) -> None:
        """The worker has so much of an upload; called by the reading thread."""
        with self._lock:
            job = self._unconfirmed.get(message.transfer)
            if job is None:
                return
            job.confirmed = max(job.confirmed, min(message.byte_count, job.total))
            was_asked, job.asked = job.asked, False
            is_whole = job.confirmed >= job.total
            job.again = job.again or was_asked
            self._asked.pop(message.transfer, None)
        if is_whole:
            self._forget(job)
            job.sent_bytes = job.total
            self._settle(job)
        elif was_asked:
            self._put(job)

    def _forget(self, job: _Job) -> None:
        with self._lock:
            if self._unconfirmed.pop(job.transfer, None) is not None:
                self._retained_bytes -= job.retained
                job.retained = 0

    def _note_written(self, job: _Job) -> None:
        """All bytes of an upload have left: let the program go on as soon as they need not be read again."""
        if not self.lasting:
            self._forget(job)
            self._settle(job)
            return
        if job.is_kept:  # kept until the worker confirms the upload, in case the connection breaks, or confirms its end
            self._settle(job)
            return
        if job.together or job.done.done:
            return  # a group waits for all of its uploads in the end
        self._since_awaited += 1
        if self._is_near or self._since_awaited >= _AWAITED_EVERY:
            self._since_awaited = 0
            self._is_near = job.done.done_within(_CONFIRMED_WITHIN_SECONDS)
            if self._is_near:
                return
        with self._lock:
            start = job.confirmed
            rest = job.total - start
            if job.transfer not in self._unconfirmed or self._retained_bytes + rest > _RETAINED_BYTES:
                return  # it ends when the worker says so
            job.view = memoryview(bytes(job.view[start - (job.total - len(job.view)) :]))
            job.retained, job.keep_alive = rest, None
            self._retained_bytes += rest
        self._settle(job)

    def _settle(self, job: _Job, error: BaseException | None = None) -> None:
        """Let whoever waits for an upload go on; two threads may find at a time that it can."""
        with self._lock:
            if error is None:
                job.done.set(None)
            else:
                job.done.fail(error)

    # --- questions and bytes -----------------------------------------------------------------------------------------

    def on_known(self, message: Known | Challenge) -> None:
        """The worker's answer; called by the reading thread.

        Raises:
            ProtocolError: there are more than anybody asked for.
        """
        if self._jobs.qsize() > _MOST_JOBS:
            raise ProtocolError(f"more than {_MOST_JOBS} answers about uploads wait to be read")
        self._put(message)

    def _ask(self, job: _Job) -> bool:
        """Says what precedes the chunks; whether that is a question, whose answer decides."""
        job.offered = True
        plan = UploadMode.PLAIN if job.cancelled else self.offers.plan(len(job.view), job.together)
        if plan is UploadMode.PLAIN:
            return False
        digest = self.offers.digest(job.view, lambda: not job.gives_up) if plan is UploadMode.QUERY else b""
        if job.gives_up:
            return False
        if digest:
            self._asked[job.transfer] = job
        self._link.send(Offer(job.transfer, len(job.view), digest))
        return bool(digest)

    def _write(self, job: _Job) -> None:
        total = job.total
        started_ns = time.time_ns()
        base = total - len(job.view)  # what the worker is known to have, and we no longer have
        for offset in range(job.confirmed if self.lasting else 0, total, self._chunk_bytes):
            if self._ended is not None:
                raise self._ended.again()
            if job.given_up or job.gives_up:
                job.given_up = True
                self._link.send(CancelTransfer(job.transfer, "the upload was interrupted"))
                self._cancelled.append(job.transfer)
                self._forget(job)
                self._settle(job)
                return
            piece = job.view[offset - base : offset - base + self._chunk_bytes]
            self.writer.send(job.transfer, offset, total, piece, job.width)
            job.sent_bytes = offset + len(piece)
            self.last_progress = time.monotonic()
        if self.trace is not None:
            self.trace.add("upload", job.transfer, started_ns, total)
        self._note_written(job)

    def end(self, error: SessionLostError) -> None:
        """Fails what waits and ends the thread."""
        self._ended = error
        if self._start is not None:
            self.offers.end()  # nothing was ever sent, and `run` does not do it
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
