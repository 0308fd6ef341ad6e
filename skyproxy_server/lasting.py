"""A session's operations connection that may break and be replaced, on the worker's side. No torch here."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.connection import Connection, State
from skyproxy.protocol.messages import ANSWERS, Ack, Message
from skyproxy.transport.base import PayloadSink, Transport

SECRET_BYTES = 32


class LastingTransport(Transport):
    """The operations connection of a session that is kept for a while without one.

    What the worker says while there is none is kept and said later. The thread that receives waits for the next link,
    as long as the grace lasts.

    Attributes:
        secret: what proves who may take the session up again; empty once nobody can.
        grace_seconds: how long the session is kept without a connection.
    """

    was_closed: bool = False

    def __init__(
        self,
        link: Transport,
        grace_seconds: float,
        max_kept_bytes: int,
        on_detach: Callable[[], object] = lambda: None,
        secret: bytes = b"",
    ) -> None:
        """Make a connection that outlives its first link.

        Args:
            link: the connection that opened the session.
            grace_seconds: how long the session is kept without one.
            max_kept_bytes: what the answers may hold that are kept.
            on_detach: called when there is no link any more.
            secret: what the client was told to come back with; a new one by default.
        """
        self.secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._link = link
        self.grace_seconds = grace_seconds
        self._max_kept_bytes = max_kept_bytes
        self._on_detach = on_detach
        self._last_ack: Ack | None = None
        self._sending = threading.RLock()
        self._changed = threading.Condition()
        self._attempt = 0
        self._detached_at: float | None = None
        self._is_over = False
        self._repeated_bytes = 0
        link.connection.keep_answers()

    @property
    def detached_at(self) -> float | None:
        """Since when there is no link, on the clock of `time.monotonic`; None while there is one."""
        return self._detached_at

    @property
    def is_over(self) -> bool:
        """True if nobody can take it up again, also where whoever uses it has not looked since."""
        since = self._detached_at
        return self._is_over or (since is not None and time.monotonic() - since >= self.grace_seconds)

    # --- links -------------------------------------------------------------------------------------------------------

    def prepare(self) -> tuple[int, int]:
        """Cut the link, for its client has come on another connection.

        Returns:
            The number of this attempt, for `attach`, and the newest batch that came.

        Raises:
            LookupError: the session is over, or cannot be taken up.
        """
        with self._changed:
            if self._is_over or not self.secret:
                raise LookupError("the session is over")
            self._attempt += 1
            attempt, link = self._attempt, self._link
        if not link.cut():
            raise LookupError("the connection before is still used")
        self._detach(link)
        with self._changed:
            # The clock starts again: the client that knows the secret is on its way.
            if self._detached_at is not None:
                self._detached_at = time.monotonic()
        return attempt, link.connection.last_sequence

    def give_up_link(self) -> None:
        """Cut the link of a client that says nothing; its session is kept for as long as without one."""
        with self._changed:
            link, attempt = self._link, self._attempt
        if link.cut():
            with self._changed:
                if attempt != self._attempt:
                    return  # it is on its way
            self._detach(link)

    def attach(self, link: Transport, attempt: int, received: int) -> bool:
        """Go on with this connection; return False if another one was faster, or the session is over.

        Args:
            link: it has been welcomed.
            attempt: what `prepare` gave.
            received: how many answers the client has.

        Raises:
            ProtocolError: the client cannot have so many.
        """
        with self._sending, self._changed:
            if self._is_over or attempt != self._attempt or link.connection.state is not State.OPEN:
                return False
            for message in link.connection.continue_from(self._link.connection, received):
                link.repeat(message)
            self._repeated_bytes = link.connection.kept_bytes
            # Not one of what was asked before a snapshot was loaded: the client counts from elsewhere since then.
            if self._last_ack is not None and self._last_ack.sequence >= link.connection.acked_sequence:
                link.repeat(self._last_ack)
            self._link = link
            self._detached_at = None
            self._changed.notify_all()
            return True

    def wait_while_used(self, link: Transport) -> None:
        """Wait until this connection is not the session's any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._link is not link or self._detached_at is not None)

    def expire(self) -> None:
        """End a session that has no link."""
        with self._changed:
            if self._detached_at is not None:
                self._end()

    def end(self) -> None:
        """End a session whose link is broken, noticed here or not."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self.secret = b""
        self._changed.notify_all()

    def _detach(self, link: Transport) -> None:
        with self._changed:
            if self._link is not link or self._detached_at is not None or self._is_over:
                return
            self._detached_at = time.monotonic()
            self._changed.notify_all()
        self._on_detach()

    def _lose(self, link: Transport, error: SessionLostError) -> None:
        """Take note that a link is gone.

        Raises:
            SessionLostError: it was ended on purpose, or nobody may take the session up.
        """
        with self._changed:
            if self._is_over:
                raise error
            if self._link is not link or self._detached_at is not None:
                return  # it was replaced, or somebody is about to
            if not self.secret or link.was_closed or link.connection.state is State.ENDED:
                self._end()
                raise error
        link.cut()
        self._detach(link)

    def _wait_for_link(self, link: Transport, error: SessionLostError, timeout_seconds: float | None = None) -> None:
        """Wait until another link has replaced this one.

        Raises:
            SessionLostError: the grace is over.
            TimeoutError: the timeout was shorter.
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            while self._link is link and not self._is_over and self._detached_at is not None:
                now, end = time.monotonic(), self._detached_at + self.grace_seconds
                if now >= end:
                    self._end()
                    break
                if until is not None and now >= until:
                    raise TimeoutError("no connection came in time")
                self._changed.wait((end if until is None else min(end, until)) - now)
            if self._is_over:
                raise error

    # --- what the session uses ---------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """As `Transport.send`; what cannot leave now is kept. Waits where too much is."""
        with self._sending:
            link = self._link
            connection = link.connection
            if type(message) is Ack:
                self._last_ack = message
            try:
                link.send(message)
            except SessionLostError as error:
                self._lose(link, error)
                # It may have been noted before the link broke.
                if type(message) in ANSWERS and connection.last_answer is not message:
                    connection.on_send(message, 64 + sum(len(item) for item in getattr(message, "buffers", ())))
            if connection.kept_bytes <= self._max_kept_bytes:
                return
            if self._detached_at is None:
                # One that has just come back has been told as much as may be kept, and could not yet say that it came.
                if connection.kept_bytes > self._max_kept_bytes + self._repeated_bytes:
                    self._give_up(connection)
                return
        self._wait_for_link(link, SessionLostError("the session was not taken up again"))

    def _give_up(self, connection: Connection) -> None:
        """Keep nothing any more: the client does not say what it has."""
        self.secret = b""
        connection.drop_answers()

    def recv(self, timeout_seconds: float | None = None) -> Message:
        while True:
            link = self._link
            try:
                return link.recv(timeout_seconds)
            except SessionLostError as error:
                self._lose(link, error)
                self._wait_for_link(link, error, timeout_seconds)
            except ProtocolError:
                with self._changed:
                    self._end()
                raise

    def post(self, message: Message) -> None:
        self._link.post(message)

    def repeat(self, message: Message) -> None:
        self._link.repeat(message)

    def cut(self) -> bool:
        return self._link.cut()

    def keep_alive(self) -> None:
        self._link.keep_alive()

    def set_sink(self, sink: PayloadSink | None) -> None:
        self._link.set_sink(sink)

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True
        with self._changed:
            self._end()
        self._link.close(code_name, reason)

    def abandon(self) -> None:
        self._link.abandon()

    @property
    def connection(self) -> Connection:
        return self._link.connection

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._link.bytes_received

    @property
    def bytes_unread(self) -> int:
        return self._link.bytes_unread
