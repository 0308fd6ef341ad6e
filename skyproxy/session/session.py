"""A session: its two connections, the threads that read them, and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from skyproxy.errors import ConfigurationError, ConnectError, LimitExceededError, ProtocolError, SessionLostError
from skyproxy.protocol.messages import (
    Ack,
    Batch,
    CancelTransfer,
    Challenge,
    Chunk,
    Failure,
    Known,
    Landed,
    Message,
    NamedBatch,
    PackedChunk,
    Ping,
    Pong,
    Repeat,
    Reply,
    Warned,
    Welcome,
)
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.crashes import has_crashed
from skyproxy.session.handover import Bring, Fresh, OpenAnew
from skyproxy.session.housekeeping import Housekeeping
from skyproxy.session.leaving import WorkerEndHandler
from skyproxy.session.offers import UploadDedup
from skyproxy.session.protection import Protection
from skyproxy.session.reading import ConnectionReader
from skyproxy.session.reconnecting import ReconnectingBulk, ReconnectingOperations
from skyproxy.session.reconnector import Reconnector
from skyproxy.session.recorder import Recorder
from skyproxy.session.requests import AFTER_END, Requests
from skyproxy.session.restoring import NewSession
from skyproxy.session.transfers import UploadQueue
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.shared_threads import SharedThreads

logger = logging.getLogger("skyproxy.session")

_LOOK_SECONDS = 0.01

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(Requests):
    """One client's conversation with one worker.

    Attributes:
        welcome: what the worker said of itself.
        auxiliary: connections that others opened for this session; counted here, and kept alive.
        often: see `Housekeeping`; called on the session's own thread.
        at_end: called with the reason when the session is over.
        explain_end: how the worker's process ended, and the end of its log; None while it lives, or where nobody knows.
        after_end: what the error for a lost session says of what comes next.
        protection: has another worker go on where this one ends; None where the session ends then.
        protecting: held by who begins a protection, or needs the one that there is for as long as something takes.
        open_anew: finds another worker; None where nobody can.
    """

    protection: Protection | None = None
    open_anew: OpenAnew | None = None

    def __init__(
        self,
        operations: Transport,
        bulk: Transport,
        welcome: Welcome,
        settings: Settings,
        on_end: Callable[[], None] = lambda: None,
        reconnector: Reconnector | None = None,
        threads: SharedThreads | None = None,
    ) -> None:
        """Begin a session whose connections are open.

        Args:
            operations, bulk: its connections.
            welcome: what the worker said.
            settings: limits and intervals.
            on_end: called when the session is over.
            reconnector: makes the connections anew when they break; None: the session ends with the first that does.
            threads: those of several sessions, in place of some for this alone.
        """
        self.welcome = welcome
        self.threads = threads
        self._reconnector = reconnector
        is_lasting = reconnector is not None and reconnector.resumes
        first_link = bulk
        if reconnector is not None:
            operations = ReconnectingOperations(operations, reconnector, settings)
            bulk = ReconnectingBulk(bulk, reconnector)
            bulk.on_back = self._on_bulk_back
            bulk.on_restored = self._on_bulk_restored
        self._operations = operations
        self._bulk = bulk
        self._on_end = on_end
        self.at_end: list[Callable[[SessionLostError], object]] = []
        self.explain_end: Callable[[], tuple[str, str] | None] = lambda: None
        self.after_end = AFTER_END
        offers = UploadDedup.agreed(welcome, settings)
        super().__init__(
            settings,
            Recorder(self._send_batch, lambda: self.queue, settings, self._wait_for_outcome),
            UploadQueue(first_link, settings.chunk_bytes, settings.show_progress, offers, lasting=is_lasting),
        )
        if is_lasting:
            self._downloads.confirm = bulk.post
        if welcome.limits.get("cancels"):
            self.cancelling.post = bulk.post
        self._housekeeping = Housekeeping(
            self.recorder, self._uploads, operations, bulk, settings, self._end, reconnector
        )
        self.auxiliary = self._housekeeping.auxiliary
        self.often = self._housekeeping.often
        self._housekeeping.on_leaving = WorkerEndHandler(self).on_notice
        self._closing = False
        self.protecting = threading.Lock()
        self._end_lock = threading.Lock()
        self._bulk.set_sink(self._downloads.sink)
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        _sessions.add(self)
        self._begin()

    # --- its state ---------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> SessionLostError | None:
        """The error that ended the session; None while it lives."""
        return self._ended

    @property
    def is_reachable(self) -> bool:
        """True if the session lives, and none of its connections is broken now."""
        reconnector = self._reconnector
        return self._ended is None and not (reconnector is not None and reconnector.outage.is_going_on)

    def outlives(self, error: ConnectError | SessionLostError) -> bool:
        """Tell whether the session would go on where one of its own connections met this error."""
        reconnector = self._reconnector
        return self._ended is None and reconnector is not None and reconnector.may_try_again(error)

    @property
    def is_foreign(self) -> bool:
        """True if the session belongs to the process that this one was forked from."""
        return self._process != os.getpid()

    def abandon_in_child(self) -> None:
        """Makes every use fail clearly after a fork. The connections belong to the parent; nothing is said on them."""
        self._ended = SessionLostError(
            "this process was forked from one with a sky session, which belongs to the parent. Move tensors to the CPU "
            "before forking, or start processes with the 'spawn' method."
        )
        self.recorder.abandon(self._ended)
        self._waiters = Waiters()
        self._waiters.end(self._ended)
        for transport in (self._operations, self._bulk, *self.auxiliary):
            transport.abandon()

    @property
    def round_trip_seconds(self) -> float:
        """The time that a message to the worker and back took, the quicker of the last two; 0 at first."""
        return self._housekeeping.round_trip_seconds

    @property
    def queue(self) -> tuple[int, int]:
        """Batches that left and are not executed yet, and their bytes, as far as the worker said."""
        connection = self._operations.connection
        return connection.last_sequence - connection.acked_sequence, connection.unacked_bytes

    @property
    def bytes_sent(self) -> int:
        return sum(item.bytes_sent for item in (self._operations, self._bulk, *self.auxiliary))

    @property
    def bytes_received(self) -> int:
        return sum(item.bytes_received for item in (self._operations, self._bulk, *self.auxiliary))

    # --- the connections ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the threads, or have those that sessions share do the work."""
        replies = self._reading(self._operations, self._handlers())
        bulk = self._reading(self._bulk, self._bulk_handlers())
        if self.threads is not None:
            self._uploads.start_with(self.threads)
            replies.share(self.threads)
            bulk.share(self.threads)
            self.threads.repeat(self._housekeeping.look_again)
            return
        bodies = (replies.run, bulk.run, self._uploads.run, self._housekeeping.run)
        for name, body in zip(("replies", "bulk", "uploads", "housekeeping"), bodies, strict=True):
            self._threads.append(threading.Thread(target=body, name=f"skyproxy-{name}", daemon=True))
            self._threads[-1].start()

    def _reading(
        self, transport: Transport, handlers: Mapping[type[Message], Callable[[Any], None]]
    ) -> ConnectionReader:
        housekeeping = self._housekeeping

        def take(message: Message) -> None:
            housekeeping.last_heard = time.monotonic()
            handlers[type(message)](message)

        return ConnectionReader(lambda: transport, take, self._on_unreadable, lambda: self._ended is not None)

    def _send_batch(self, batch: Batch | NamedBatch | Repeat) -> None:
        started_ns = time.time_ns() if self._trace is not None else 0
        if self.protection is not None:
            self.protection.note(batch)
        try:
            self._operations.send(batch)
            if self._trace is not None and started_ns:
                self._trace.add("send", batch.sequence, started_ns)
        except (ConfigurationError, LimitExceededError) as error:
            # What was recorded can never leave, and everything after it depends on it.
            self._end(f"a batch of operations cannot be sent: {error}")
            raise
        except SessionLostError as error:
            self._end(str(error).rstrip("."))
            raise (self._ended or error).again() from error

    def _handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        return {
            Ack: lambda message: self.recorder.ack(message.sequence),
            Reply: self._on_reply,
            Failure: self._on_failure,
            Warned: self._on_warned,
        }

    def _bulk_handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        return {
            Chunk: self._downloads.on_chunk,
            PackedChunk: self._downloads.on_packed_chunk,
            CancelTransfer: self._downloads.on_cancel,
            Known: self._uploads.on_known,
            Challenge: self._uploads.on_known,
            Landed: self._uploads.on_landed,
            Ping: lambda message: self._bulk.post(Pong(message.number)),
            Pong: self._housekeeping.on_pong,
        }

    def _on_bulk_back(self, link: Transport) -> None:
        self._uploads.go_on(link, self._downloads.landed_bytes())
        self.cancelling.send_again(link.post)

    def _on_bulk_restored(self, fresh: Fresh) -> None:
        protection, start, handover = self.protection, fresh.start, fresh.handover
        assert protection is not None
        assert start is not None
        assert handover is not None
        self._downloads.begin_anew()
        offers = UploadDedup.agreed(fresh.welcome, self.settings)

        def needed() -> list[object]:
            found = protection.log.jobs_after(start)
            handover.note_part()
            return found

        self._uploads.begin_anew(fresh.link, offers, needed)
        self.cancelling.send_again(fresh.link.post)
        handover.note_part()

    def _on_unreadable(self, error: Exception) -> bool:
        if isinstance(error, SessionLostError | ProtocolError):
            self._end(str(error))
        else:  # the last line of defence: whoever waits must learn of it
            logger.error("skyproxy: a reading thread failed", exc_info=error)
            self._end(f"an internal error on the client: {error!r}")
        return False

    def _ask_load(self) -> Waiter:
        return self._housekeeping.ask_load()

    def _on_reply(self, reply: Reply) -> None:
        if self._trace is not None:
            self._trace.replied(reply.request)
        waiter = self._waiters.take_answered(reply.request)
        if waiter is not None:
            waiter.set(reply.value, tuple(bytes(buffer) for buffer in reply.buffers))

    def _on_failure(self, failure: Failure) -> None:
        self._downloads.forget(failure.request)
        error = self._failures.answer(failure.error)
        waiter = self._waiters.take_answered(failure.request) if failure.request else None  # 0: news of a command
        if waiter is not None:
            waiter.fail(error)

    def _on_warned(self, warned: Warned) -> None:
        if self.protection is None or self.protection.told.is_news(warned):
            self._failures.on_warned(warned)

    # --- protection --------------------------------------------------------------------------------------------------

    def protect(self, log: BatchLog, name: str, open_anew: OpenAnew, every_seconds: float, every_steps: int) -> None:
        """Have another worker go on where this one ends; take the first snapshot.

        Args:
            log: an empty one.
            name: the name of the snapshots on the worker.
            open_anew: finds another worker.
            every_seconds, every_steps: see `Protection`.

        Raises:
            RemoteError: the worker takes no snapshot.
            SessionLostError: the session is over.
        """
        assert self._reconnector is not None
        protection = Protection(
            self.recorder, self._waiters, log, name, open_anew, every_seconds=every_seconds, every_steps=every_steps
        )
        operations, bulk = self._operations, self._bulk
        assert isinstance(operations, ReconnectingOperations)
        assert isinstance(bulk, ReconnectingBulk)
        protection.cut_bulk, protection.cut_operations = bulk.cut_older, operations.cut_older
        protection.cut_operations_if = operations.cut_if
        protection.on_recovered = self._on_recovered
        protection.suspension.is_awaited = lambda: self._uploads.is_awaited
        protection.stall_seconds = 2 * self.settings.snapshot_stall_seconds  # the worker gives up before
        self.protection = protection
        try:
            self._uploads.log = protection
            protection.snapshot()
            self.recorder.on_sent = protection.on_sent
            self._housekeeping.tick = self._tick
            self._reconnector.recovery = protection
            outage = self._reconnector.outage
            outage.patience_seconds = max(outage.patience_seconds, self.settings.reconnect_seconds)
        except BaseException:
            self.unprotect()
            raise

    def move(self, opened: NewSession, on_moved: Callable[[], object], bring: Bring) -> None:
        """Go on with the session on another worker as `Protection.move` does; it is protected already."""
        assert self.protection is not None
        self.protection.move(opened, on_moved, bring)

    @property
    def answers(self) -> int:
        """The answers that came on the connection that the worker knows."""
        return self._operations.connection.answers

    def _tick(self) -> None:
        protection = self.protection
        if protection is None:
            return
        protection.tick()
        is_over = protection.is_passing and protection.has_gone_on and self.is_reachable
        if is_over and self.protecting.acquire(blocking=False):
            try:
                if self.protection is protection:
                    self.unprotect()
            finally:
                self.protecting.release()

    @property
    def is_suspended(self) -> bool:
        """True if the session is without a worker now, until the next operation."""
        return self.protection is not None and self.protection.is_suspended

    def wake(self) -> None:
        """Have a worker go on with the session, if it is suspended; does not wait for that."""
        if self.protection is not None:
            self.protection.suspension.wake()

    def wait_until_awake(self) -> None:
        """Have a worker go on with the session, if it is suspended, and wait until it does.

        Raises:
            SessionLostError: the session is over.
        """
        while self.is_suspended:
            self.check()
            self.wake()
            time.sleep(_LOOK_SECONDS)
        self.check()

    def post_bulk(self, message: Pong) -> None:
        """Leave a message to be sent on the bulk connection."""
        self._bulk.post(message)

    def between_batches(self, action: Callable[[], object], timeout_seconds: float) -> bool:
        """As `Recorder.between_batches`."""
        return self.recorder.between_batches(action, timeout_seconds)

    def cut_all(self) -> None:
        """Leave the worker without a word: the session is suspended, and needs it no more."""
        for transport in list(self.auxiliary):
            transport.cut()
        self._bulk.cut()
        self._operations.cut()

    def unprotect(self, *, waits: bool = True) -> None:
        """Take no more snapshots, and have those that there are deleted: the session ends with its worker.

        While the session is suspended, this is put off until it goes on.

        Args:
            waits: whether to wait for a worker that is taking over now; the session ends otherwise.
        """
        protection = self.protection
        if protection is None:
            return
        if protection.is_suspended and self._ended is None:
            protection.is_passing = True
            return
        if waits:
            protection.wait_until_settled()
        if self._reconnector is not None:
            self._reconnector.recovery = None
        self.recorder.on_sent = None
        self._housekeeping.tick = lambda: None
        self._uploads.log = None
        self.protection = None
        protection.stop()
        if self.is_reachable:
            with contextlib.suppress(SessionLostError):
                self.do("delete_snapshot", protection.name)
                self.recorder.flush_unless_busy()

    def _on_recovered(self, welcome: Welcome) -> None:
        self.welcome, self._failures.loss = welcome, ""
        self.recorder.hidden_writes += 1

    # --- its end -----------------------------------------------------------------------------------------------------

    def _end(self, reason: str, before_closing: Callable[[], object] = lambda: None) -> None:
        if self._reconnector is not None:
            self._reconnector.stop()
        with self._end_lock:
            if self._ended is not None:
                return
            told = has_crashed(self._operations, self._bulk)  # it waits for us before it ends
            how, log = (None if self._closing or told else self.explain_end()) or ("", "")
            what = f"The worker is gone: {how}" if how else reason
            ended = SessionLostError(
                f"{what}.{self._failures.explain_loss(reason)} The tensors that lived there are gone; tensors on the "
                f"CPU are unharmed. {self.after_end}{log}"
            )
            ended.process_ended = bool(how) or told
            self._ended = ended
        self._housekeeping.stop()
        if self.protection is not None:
            self.protection.stop()
        self.recorder.end(self._ended)
        self._waiters.end(self._ended)
        self._uploads.end(self._ended)
        before_closing()
        for transport in (self._operations, self._bulk):
            with contextlib.suppress(Exception):
                transport.close()
        for observer in self.at_end:
            observer(self._ended)
        if not self._closing:
            logger.debug("skyproxy: session ended: %s", reason)
        self._on_end()

    def close(
        self, reason: str = "the session was closed", before_closing: Callable[[], object] = lambda: None
    ) -> None:
        """Ends the session; idempotent. Its tensors are gone.

        Args:
            reason: for the errors of those who wait.
            before_closing: called when nobody waits any more, and before the connections are closed in good order,
                which takes a busy worker a moment.
        """
        if self.is_foreign:
            return
        self._closing = True
        with contextlib.suppress(Warning):  # a filter may turn it into an error, which comes too late to be raised
            self._failures.warnings.show()
        self._end(reason, before_closing)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.settings.close_timeout_seconds)


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
