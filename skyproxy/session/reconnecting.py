"""Connections of a session that are made anew when they break, while the session goes on."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

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
from skyproxy.protocol.messages import ANSWERS, BULK, OPERATIONS, Message, Received, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.base import LinkDownError, PayloadSink, Transport

logger = logging.getLogger("skyproxy.session")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_SPREAD = (0.5, 1.5)
"""The clients of one network come back at different moments."""
_REFUSALS = 3
"""Refused connections in a row after which nothing listens there any more; a tunnel that is restarted takes less."""
_QUIET_SECONDS = 1.0
"""An outage that is over sooner is not worth a line."""
_CONFIRM_EVERY = 64
_CONFIRM_BYTES = 256 << 10
_TRY_LATER = frozenset({"", "too-many-sessions"})
"""The reasons of refusals that another attempt may not meet."""

T = TypeVar("T")


class Reopen(Protocol):
    """Opens one more connection of a session; `received` counts the answers that came on the one before."""

    def __call__(self, role: str, received: int) -> tuple[Transport, Welcome]:
        """Raises:
        ConnectError: it did not come about.
        """


class Outage:
    """The one line that tells people of a broken session, for all its connections."""

    def __init__(self, where: str, patience_seconds: float) -> None:
        """Args:
        where: the worker's address.
        patience_seconds: how long somebody will try.
        """
        self._where = where
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._broken = 0
        self._began = 0.0
        self._timer: threading.Timer | None = None
        self._was_told = False

    @property
    def is_going_on(self) -> bool:
        """True if any connection is broken now."""
        return self._broken > 0

    def begin(self, reason: str) -> None:
        """Count a connection that broke; tell people, unless it is back soon."""
        with self._lock:
            self._broken += 1
            if self._broken == 1:
                self._began, self._was_told = time.monotonic(), False
                self._timer = threading.Timer(_QUIET_SECONDS, self._tell, (reason,))
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Count one that is back, or given up."""
        with self._lock:
            self._broken -= 1
            if self._broken or self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            if self._was_told:
                self._say(f"connected again after {time.monotonic() - self._began:.1f} s; nothing was lost.")

    def give_up(self) -> None:
        """Say nothing more: the error says it."""
        with self._lock:
            self._was_told = False
            if self._timer is not None:
                self._timer.cancel()

    def _tell(self, reason: str) -> None:
        with self._lock:
            if self._broken and self._timer is not None:
                self._was_told = True
                self._say(
                    f"the connection to {self._where} is broken ({reason.rstrip('.')}). Trying to restore it for up "
                    f"to {self._patience_seconds:g} s; Ctrl-C ends a wait, and cancels what is queued."
                )

    @staticmethod
    def _say(text: str) -> None:
        if sys.stderr is not None:
            print(f"skyproxy: {text}", file=sys.stderr, flush=True)


class Reconnector:
    """Opens a session's connections anew, again and again, while there is hope.

    Attributes:
        outage: what people are told.
        explain_end: how the worker's process ended; None while it lives, or where nobody knows.
    """

    def __init__(self, reopen: Reopen, where: str, patience_seconds: float) -> None:
        """Args:
        reopen: opens a connection.
        where: the worker's address, for people.
        patience_seconds: how long to try.
        """
        self.outage = Outage(where, patience_seconds)
        self.explain_end: Callable[[], tuple[str, str] | None] = lambda: None
        self._reopen = reopen
        self._patience_seconds = patience_seconds
        self._stop = threading.Event()

    def stop(self) -> None:
        """End every attempt."""
        self._stop.set()

    def connect(self, role: str, received: int, reason: str) -> tuple[Transport, Welcome]:
        """Return a connection in place of one that broke.

        Args:
            role: its kind.
            received: answers that came on the broken one.
            reason: why it broke.

        Raises:
            SessionLostError: the worker is gone, or has no such session any more, or did not answer in time.
        """
        self.outage.begin(reason)
        try:
            return self._connect(role, received, reason)
        except BaseException:
            self.outage.give_up()
            raise
        finally:
            self.outage.end()

    def _connect(self, role: str, received: int, reason: str) -> tuple[Transport, Welcome]:
        until = time.monotonic() + self._patience_seconds
        pause, refusals = _FIRST_PAUSE_SECONDS, 0
        while not self._stop.is_set():
            if self.explain_end() is not None:
                raise SessionLostError(reason)
            try:
                return self._reopen(role, received)
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
                        f"{reason}, and did not come back within {self._patience_seconds:g} s: {problem}"
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

    def _replace(self, link: Transport, error: SessionLostError) -> None:
        """Put another link in the place of one that broke.

        Raises:
            SessionLostError: the session is over.
        """
        if self.was_closed or link.was_closed or link.connection.goodbye is not None:
            raise error
        try:
            if not link.cut():
                raise error
            fresh, welcome = self._reconnector.connect(self.role, link.connection.answers, str(error).rstrip("."))
            try:
                with self._changing:
                    self._past_bytes[0] += link.bytes_sent
                    self._past_bytes[1] += link.bytes_received
                    fresh.set_sink(self._sink)
                    self._take(link, fresh, welcome)
                    self._link = fresh
            except BaseException:
                fresh.close()
                raise
            self._close_late(fresh, error)
        except ProtocolError as problem:
            self._over = SessionLostError(f"{str(error).rstrip('.')}; and then: {problem}")
            raise self._over from problem
        except SessionLostError as lost:
            self._over = lost
            raise

    def _close_late(self, fresh: Transport, error: SessionLostError) -> None:
        """Close a link that came after `close`; asked after it was assigned, so that `close` cannot miss it."""
        if self.was_closed:
            fresh.close()
            raise error

    def _take(self, link: Transport, fresh: Transport, welcome: Welcome) -> None:
        raise NotImplementedError

    def post(self, message: Message) -> None:
        self._link.post(message)

    def repeat(self, message: Message) -> None:
        self._link.repeat(message)

    def cut(self) -> bool:
        return self._link.cut()

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
                if self.was_closed or link.was_closed or link.connection.goodbye is not None or self._over is not None:
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
            link.connection.on_send(message, size)  # it may have noted it before it broke: then nothing changes
            return True

    def _take(self, link: Transport, fresh: Transport, welcome: Welcome) -> None:
        for batch in fresh.connection.continue_from(link.connection, welcome.received):
            fresh.repeat(batch)

    def recv(self, timeout_seconds: float | None = None) -> Message:
        message = super().recv(timeout_seconds)
        if type(message) in ANSWERS:
            self._confirm(sum(map(len, getattr(message, "buffers", ()))))
        return message

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
    """

    role = BULK

    def __init__(self, link: Transport, reconnector: Reconnector) -> None:
        super().__init__(link, reconnector)
        self.on_back: Callable[[Transport], object] = lambda link: None

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
            if self.was_closed or link.was_closed or link.connection.goodbye is not None or self._over is not None:
                raise
            raise LinkDownError(str(error)) from error

    def _take(self, link: Transport, fresh: Transport, welcome: Welcome) -> None:
        self.on_back(fresh)
