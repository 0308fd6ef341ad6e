"""Connections of a session that are made anew when they break, while the session goes on."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ProtocolError,
    SessionLostError,
    VersionMismatchError,
)
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import ANSWERS, BULK, OPERATIONS, Goodbye, Message, Received, Welcome
from skyproxy.session.outage import Outage
from skyproxy.settings import Settings
from skyproxy.transport.base import LinkDownError, PayloadSink, Transport

logger = logging.getLogger("skyproxy.session")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_SPREAD = (0.5, 1.5)
"""The clients of one network come back at different moments."""
_REFUSALS = 3
"""Refused connections in a row after which nothing listens there any more; a tunnel that is restarted takes less."""
_CONFIRM_EVERY = 64
_CONFIRM_BYTES = 256 << 10
_TRY_LATER = frozenset({"", "too-many-sessions"})
"""The reasons of refusals that another attempt may not meet."""
_WORKER_ENDED = frozenset({"shutdown", "crashed"})
"""The reasons of a worker's goodbye for which a protected session goes on with another one."""

T = TypeVar("T")


class Reopen(Protocol):
    """Opens one more connection of a session; `received` counts the answers that came on the one before."""

    def __call__(self, role: str, received: int) -> tuple[Transport, Welcome]:
        """Open the connection.

        Raises:
            ConnectError: it did not come about.
        """


class Fresh(NamedTuple):
    """A connection in place of one that broke.

    Attributes:
        link: the connection.
        welcome: what the worker said to it.
        start: where it belongs to a new session, which was restored: the batch of the snapshot; else None.
        recoveries: how many there were when it was made, where `start` is given.
    """

    link: Transport
    welcome: Welcome
    start: int | None = None
    recoveries: int = 0


class Recovery(Protocol):
    """Has another worker go on with a session whose worker is gone; see `session.protection`.

    Attributes:
        is_leaving: whether the session leaves its worker, which lives.
        patience_seconds: how long to try to reach a worker that does not refuse before another one is asked for.
    """

    is_leaving: bool
    patience_seconds: float

    @property
    def is_suspended(self) -> bool:
        """True if the session is without a worker now, and needs none."""

    def recover(self, reason: str, stop: threading.Event) -> tuple[Fresh, Fresh]:
        """Return the operations and the bulk connection of a session that was restored.

        Raises:
            SessionLostError: that is not possible.
        """

    def replay(self, start: int, before: Connection, link: Transport) -> None:
        """Send what the snapshot lacks of what had left on the connection before, and take note of it there."""

    def cut_bulk(self, recoveries: int) -> object:
        """Have the thread that reads the bulk connection notice that its worker is gone; see `cut_older`."""

    def cut_operations(self, recoveries: int) -> object:
        """The same for the operations connection."""


class Reconnector:
    """Opens a session's connections anew, again and again, while there is hope.

    Attributes:
        outage: what people are told.
        explain_end: how the worker's process ended; None while it lives, or where nobody knows.
        resumes: whether the worker keeps the session when a connection breaks.
        recovery: has another worker go on where this one is gone; None where the session ends then.
        recoveries: how often that was done.
    """

    def __init__(self, reopen: Reopen, where: str, patience_seconds: float, *, resumes: bool = True) -> None:
        """Make the reconnector of one session.

        Args:
            reopen: opens a connection.
            where: the worker's address, for people.
            patience_seconds: how long to try.
            resumes: whether the worker keeps the session when a connection breaks.
        """
        self.resumes = resumes
        self.recovery: Recovery | None = None
        self.recoveries = 0
        self._restored_bulk: Fresh | None = None
        self._recovered = threading.Condition()
        self.outage = Outage(where, patience_seconds)
        self.explain_end: Callable[[], tuple[str, str] | None] = lambda: None
        self._reopen = reopen
        self.patience_seconds = patience_seconds
        self._stop = threading.Event()

    @property
    def is_active(self) -> bool:
        """True if a connection that breaks is replaced at all."""
        return self.resumes or self.recovery is not None

    def outlives(self, goodbye: Goodbye | None) -> bool:
        """Return whether the session goes on although the worker has said this on a connection, if anything."""
        if goodbye is None:
            return True
        recovery = self.recovery
        if recovery is None:
            return False
        # The worker that the session leaves may end it there before all connections are cut.
        return recovery.is_leaving or recovery.is_suspended or goodbye.code_name in _WORKER_ENDED

    def stop(self) -> None:
        """End every attempt."""
        self._stop.set()
        with self._recovered:
            self._recovered.notify_all()

    def connect(self, role: str, link: Transport, recoveries: int, reason: str) -> Fresh:
        """Return a connection in place of one that broke.

        Args:
            role: its kind.
            link: the broken one.
            recoveries: how many there had been when that one was made.
            reason: why it broke.

        Raises:
            SessionLostError: the worker is gone, or has no such session any more, or did not answer in time.
        """
        self.outage.begin(reason)
        try:
            try:
                recovery = self.recovery
                if recovery is not None and recovery.is_suspended:
                    self.outage.give_up()  # this is not an outage
                    raise SessionLostError(reason)
                is_leaving = recovery is not None and recovery.is_leaving
                if is_leaving or not self.resumes or link.connection.goodbye is not None:
                    raise SessionLostError(reason)
                return self._connect(role, link.connection.answers, recoveries, reason)
            except SessionLostError as lost:
                if self.recovery is None or self._stop.is_set():
                    raise
                return self._recover(self.recovery, role, recoveries, str(lost).rstrip("."))
        except BaseException:
            self.outage.give_up()
            raise
        finally:
            self.outage.end()

    def _recover(self, recovery: Recovery, role: str, recoveries: int, reason: str) -> Fresh:
        """Go on with another worker: the thread of the operations sees to it, that of the bulk connection waits."""
        if role != OPERATIONS:
            recovery.cut_operations(recoveries)
            return self._wait_for_recovery(recoveries, reason)
        recovery.cut_bulk(recoveries)
        operations, bulk = recovery.recover(reason, self._stop)
        with self._recovered:
            self.recoveries += 1
            number = self.recoveries
            before, self._restored_bulk = self._restored_bulk, bulk._replace(recoveries=number)
            self._recovered.notify_all()
        recovery.cut_bulk(number - 1)  # one that came back meanwhile, to the session before
        if before is not None:  # nobody came for it
            before.link.close()
        return operations._replace(recoveries=number)

    def _wait_for_recovery(self, recoveries: int, reason: str) -> Fresh:
        with self._recovered:
            while self._restored_bulk is None or self.recoveries <= recoveries:
                if self._stop.is_set():
                    raise SessionLostError(reason)
                self._recovered.wait()
            fresh, self._restored_bulk = self._restored_bulk, None
            return fresh

    def _connect(self, role: str, received: int, recoveries: int, reason: str) -> Fresh:
        patience_seconds = self.patience_seconds
        if self.recovery is not None:
            patience_seconds = min(patience_seconds, self.recovery.patience_seconds)
        until = time.monotonic() + patience_seconds
        pause, refusals = _FIRST_PAUSE_SECONDS, 0
        while not self._stop.is_set():
            if self.recoveries > recoveries or self.explain_end() is not None:
                raise SessionLostError(reason)
            try:
                return Fresh(*self._reopen(role, received))
            except (AuthenticationError, VersionMismatchError, ConfigurationError) as problem:
                raise SessionLostError(
                    f"{reason}; and the worker no longer lets this client in: {problem}"
                ) from problem
            except ConnectError as problem:
                refusals = refusals + 1 if isinstance(problem.__cause__, ConnectionRefusedError) else 0
                if refusals >= _REFUSALS:
                    raise SessionLostError(f"{reason}; and nothing listens there any more") from problem
                if problem.code_name not in _TRY_LATER:
                    raise SessionLostError(f"{reason}; and then: {problem}") from problem
                if time.monotonic() >= until:
                    raise SessionLostError(
                        f"{reason}, and did not come back within {patience_seconds:g} s: {problem}"
                    ) from problem
                logger.debug("skyproxy: the %s connection is not back yet: %s", role, problem)
            self._stop.wait(pause * random.uniform(*_SPREAD))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise SessionLostError("the session was closed")


class Reconnecting(Transport):
    """A connection whose link is replaced when it breaks. The thread that receives replaces it.

    Attributes:
        role: its kind.
    """

    role: str

    def __init__(self, link: Transport, reconnector: Reconnector) -> None:
        self._link = link
        self._reconnector = reconnector
        self._recoveries = reconnector.recoveries
        self._sink: PayloadSink | None = None
        self._changing = threading.RLock()
        self._over: SessionLostError | None = None
        self._past_bytes = [0, 0]
        self.was_closed = False

    was_closed: bool = False

    def recv(self, timeout_seconds: float | None = None) -> Message:
        while True:
            link = self._link
            try:
                return link.recv(timeout_seconds)
            except SessionLostError as error:
                self._replace(link, error)

    def recv_ready(self) -> Message | None:
        return self._link.recv_ready()

    @property
    def may_have_more(self) -> bool:
        return self._link.may_have_more

    def fileno(self) -> int:
        return self._link.fileno()

    def _replace(self, link: Transport, error: SessionLostError) -> None:
        """Put another link in the place of one that broke.

        Raises:
            SessionLostError: the session is over.
        """
        if not self._is_replaced(link):
            raise error
        try:
            if not link.cut():
                raise error
            recoveries = self._recoveries
            fresh = self._reconnector.connect(self.role, link, recoveries, str(error).rstrip("."))
            try:
                with self._changing:
                    self._past_bytes[0] += link.bytes_sent
                    self._past_bytes[1] += link.bytes_received
                    self._recoveries = recoveries if fresh.start is None else fresh.recoveries
                    fresh.link.set_sink(self._sink)
                    self._take(link, fresh)
                    self._link = fresh.link
                if self._reconnector.recoveries > self._recoveries:
                    fresh.link.cut()  # it came back to a session that another worker goes on with by now
            except BaseException:
                fresh.link.close()
                raise
            self._close_late(fresh.link, error)
        except ProtocolError as problem:
            self._over = SessionLostError(f"{str(error).rstrip('.')}; and then: {problem}")
            raise self._over from problem
        except SessionLostError as lost:
            self._over = lost
            raise

    def _is_replaced(self, link: Transport) -> bool:
        """Return whether there will be another link where this one breaks."""
        if self.was_closed or link.was_closed or self._over is not None:
            return False
        return self._reconnector.is_active and self._reconnector.outlives(link.connection.goodbye)

    def _close_late(self, fresh: Transport, error: SessionLostError) -> None:
        """Close a link that came after `close`; asked after it was assigned, so that `close` cannot miss it."""
        if self.was_closed:
            fresh.close()
            raise error

    def _take(self, link: Transport, fresh: Fresh) -> None:
        raise NotImplementedError

    def post(self, message: Message) -> None:
        self._link.post(message)

    def repeat(self, message: Message) -> None:
        self._link.repeat(message)

    def cut(self) -> bool:
        return self._link.cut()

    def cut_older(self, recoveries: int) -> None:
        """Cut the link, unless it belongs to a session that was restored after so many recoveries."""
        with self._changing:
            link = self._link if self._recoveries <= recoveries else None
        if link is not None:
            link.cut()

    def keep_alive(self) -> None:
        self._link.keep_alive()

    def set_sink(self, sink: PayloadSink | None) -> None:
        self._sink = sink
        self._link.set_sink(sink)

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True
        self._reconnector.stop()
        self._link.close(code_name, reason)

    def abandon(self) -> None:
        self.was_closed = True
        self._changing = threading.RLock()
        self._link.abandon()

    @property
    def connection(self) -> Connection:
        return self._link.connection

    @property
    def bytes_sent(self) -> int:
        return self._past_bytes[0] + self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._past_bytes[1] + self._link.bytes_received


class ReconnectingOperations(Reconnecting):
    """The operations connection. What is recorded while it is broken is kept, and leaves when it is back."""

    role = OPERATIONS

    def __init__(self, link: Transport, reconnector: Reconnector, settings: Settings) -> None:
        super().__init__(link, reconnector)
        self._max_frame_bytes = settings.max_frame_bytes
        self._confirmed = 0
        self._unconfirmed_bytes = 0

    def send(self, message: Message) -> None:
        while True:
            link = self._link
            try:
                link.send(message)
                return
            except SessionLostError:
                if not self._is_replaced(link):
                    raise
            if self._keep(link, message):
                return

    def _keep(self, link: Transport, message: Message) -> bool:
        """Take note of a batch that cannot leave now; return False if the link was replaced, and it can."""
        size = sum(map(len, framing.encode(message, self._max_frame_bytes)))
        with self._changing:
            if self._over is not None:
                raise SessionLostError(str(self._over)) from self._over
            if self._link is not link:
                return False
            link.connection.hold(message, size)  # it may have been noted before the link broke: then nothing changes
            return True

    def _take(self, link: Transport, fresh: Fresh) -> None:
        if fresh.start is not None:
            assert self._reconnector.recovery is not None
            self._confirmed = self._unconfirmed_bytes = 0
            self._reconnector.recovery.replay(fresh.start, link.connection, fresh.link)
            return
        for batch in fresh.link.connection.continue_from(link.connection, fresh.welcome.received):
            fresh.link.repeat(batch)

    def recv(self, timeout_seconds: float | None = None) -> Message:
        message = super().recv(timeout_seconds)
        self._count(message)
        return message

    def recv_ready(self) -> Message | None:
        message = super().recv_ready()
        if message is not None:
            self._count(message)
        return message

    def _count(self, message: Message) -> None:
        if self._reconnector.resumes and type(message) in ANSWERS:
            self._confirm(sum(map(len, getattr(message, "buffers", ()))))

    def _confirm(self, byte_count: int) -> None:
        """Tell the worker, now and then, which answers it need not keep."""
        self._unconfirmed_bytes += byte_count
        count = self._link.connection.answers
        if count - self._confirmed >= _CONFIRM_EVERY or self._unconfirmed_bytes >= _CONFIRM_BYTES:
            self._confirmed, self._unconfirmed_bytes = count, 0
            self._link.post(Received(count))


class ReconnectingBulk(Reconnecting):
    """The bulk connection. What it carried when it broke is its users' to send again: `on_back` tells them.

    Attributes:
        on_back: called on the receiving thread when there is a link again, before anything is received on it.
        on_restored: called so, where the link belongs to a session that was restored.
    """

    role = BULK

    def __init__(self, link: Transport, reconnector: Reconnector) -> None:
        super().__init__(link, reconnector)
        self.on_back: Callable[[Transport], object] = lambda link: None
        self.on_restored: Callable[[Fresh], object] = lambda fresh: None

    @property
    def link(self) -> Transport:
        """The connection that there is now."""
        return self._link

    def send(self, message: Message) -> None:
        """As `Transport.send`.

        Raises:
            LinkDownError: the link is broken; `on_back` will be called.
        """
        link = self._link
        try:
            link.send(message)
        except SessionLostError as error:
            if not self._is_replaced(link):
                raise
            raise LinkDownError(str(error)) from error

    def _take(self, link: Transport, fresh: Fresh) -> None:
        if fresh.start is None:
            self.on_back(fresh.link)
        else:
            self.on_restored(fresh)
