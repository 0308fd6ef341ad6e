"""A connection that the supervisor lends to a session's process, from the welcome to its end."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable

from skyproxy.protocol.messages import OPERATIONS, Hello, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.tls import TlsStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server.control_channel import ChannelClosedError
from skyproxy_server.isolation.relay import relay
from skyproxy_server.isolation.sockets import bytes_written
from skyproxy_server.isolation.supervised_session import REAP_SECONDS, SupervisedSession

logger = logging.getLogger("skyproxy.server")

_MAX_RECEIVED_BYTES = 64 << 10


class LentConnection:
    """A connection of a session's process, as the listener runs it."""

    def __init__(
        self,
        welcome: Welcome,
        hello: Hello,
        session: SupervisedSession,
        transport: WebSocketTransport,
        settings: Settings,
        attempt: int = 0,
        on_detach: Callable[[], object] = lambda: None,
    ) -> None:
        self.welcome = welcome
        self._hello = hello
        self._session = session
        self._transport = transport
        self._settings = settings
        self._attempt = attempt
        self._on_detach = on_detach
        self._timer: threading.Timer | None = None
        self._over = threading.Event()
        self._before = 0
        """Bytes that were written before the process had the connection."""
        self._carried: int | None = None
        """Bytes of the process that were relayed; None where the process has the client's socket itself."""

    def run(self) -> None:
        """Lend the connection to the session's process, and see to its end."""
        session, transport = self._session, self._transport
        welcome = transport.connection.welcome
        slot = session.slots.take()
        if slot is None or welcome is None:
            transport.close("too-many-sessions", "the session has too many connections")
            self._leave()
            return
        try:
            received = transport.lend(self._close)
            if len(received) > _MAX_RECEIVED_BYTES:
                transport.take_back()
                transport.close("protocol", f"{len(received)} bytes came before the welcome")
                return
            stream = transport.stream
            if isinstance(stream, TlsStream):
                ours, theirs = socket.socketpair()
                with theirs:
                    session.hand_over(theirs.fileno(), slot, self._hello, welcome, received, self._attempt)
                self._carried = relay(
                    stream,
                    ours,
                    session.pidfd,
                    is_over=lambda: session.slots.is_over(slot),
                    on_left=self._await_process,
                    goodbye_seconds=self._settings.close_timeout_seconds,
                )
            else:
                assert isinstance(stream, PlainStream)
                # A descriptor of our own: a supervisor that ends closes the stream meanwhile.
                with socket.socket(fileno=os.dup(stream.fileno())) as watched:
                    self._before = bytes_written(watched.fileno())
                    session.hand_over(watched.fileno(), slot, self._hello, welcome, received, self._attempt)
                    self._await_end(watched.fileno())
        except (ChannelClosedError, OSError) as error:
            logger.debug("a connection of session %s could not be lent: %s", session.identity[:8], error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._finish(slot)
            self._over.set()
            session.slots.give(slot)
            self._leave()

    def _leave(self) -> None:
        if self._hello.role == OPERATIONS:
            self._session.operations_left(self._settings.call_grace_seconds, self._on_detach)
        self._session.release()

    def _close(self, code_name: str, reason: str) -> None:
        """Have the process say goodbye, and wait until the connection is over, but not forever."""
        self._session.close_connections(code_name, reason)
        patience = 2 * self._settings.close_timeout_seconds
        # When its token ends, a client's functions end, too.
        if not self._over.wait(patience) or (code_name == "bad-token" and not self._session.ended.wait(patience)):
            self._session.kill(reason.rstrip(".") or "its connection was to be closed, and it did not answer")

    def _await_end(self, connection: int) -> None:
        """Wait until the connection is over on both sides, or the process has ended."""
        session = self._session
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.register(session.pidfd, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if session.pidfd in events or events[connection] & ~select.POLLRDHUP:
                return
            poll.modify(connection, 0)  # from now on: until the process has ended its side, too
            self._await_process()

    def _await_process(self) -> None:
        """The client has left: the process notices and ends its side, unless it hangs."""
        if self._hello.role == OPERATIONS and self._timer is None:
            # A durable session gets as long again: its client may come back, which the session then notices.
            patience = self._settings.call_grace_seconds + self._session.resume.grace_seconds
            self._timer = threading.Timer(patience, self._session.kill, ("its client is gone, and it hangs",))
            self._timer.daemon = True
            self._timer.start()

    def _finish(self, slot: int) -> None:
        session, transport = self._session, self._transport
        if not session.slots.is_over(slot) and _has_ended(session.pidfd) and session.ended.wait(REAP_SECONDS):
            ending = session.ending
            if ending.is_failure and session.slots.is_between_frames(slot, self._written_bytes()):
                transport.take_back()
                transport.close("crashed", ending.for_client())
                return
        transport.retire()

    def _written_bytes(self) -> int:
        if self._carried is not None:
            return self._carried
        stream = self._transport.stream
        return bytes_written(stream.fileno()) - self._before if isinstance(stream, PlainStream) else -1


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
