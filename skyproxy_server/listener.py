"""Listens, and brings each connection to the point where a session can use it. One thread a connection."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from skyproxy.errors import (
    LimitExceededError,
    ProtocolError,
    SessionLostError,
    VersionMismatchError,
)
from skyproxy.protocol.messages import BULK, JOBS, OPERATIONS, WORKER, Hello, Welcome
from skyproxy.protocol.versions import choose_version
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.stream import ByteStream, PlainStream, remaining
from skyproxy.transport.tls import TlsStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server import audit
from skyproxy_server.addresses import check_encrypted, listen
from skyproxy_server.auth import Authenticator, Identity, TokenCheck
from skyproxy_server.jobs.connection import JobsConnection
from skyproxy_server.jobs.store import Jobs
from skyproxy_server.status import status_report
from skyproxy_server.upgrade import Upgrader

logger = logging.getLogger("skyproxy.server")

NO_JOBS = "this worker runs no jobs"
_SPARE_CONNECTIONS = 16
"""Beyond `max_connections`, so that a full worker still answers health questions and says that it is full."""


class ConnectionHandler(Protocol):
    """The host's handler of an accepted connection."""

    @property
    def welcome(self) -> Welcome:
        """The client's welcome; the listener fills in the version."""

    def run(self) -> None:
        """Uses the connection, on the calling thread, until it ends. The listener closes the transport afterwards."""


class SessionHost(Protocol):
    """The sessions of this worker, as the listener sees them. Calls come from the connection's own thread."""

    def open_session(self, hello: Hello, transport: Transport) -> ConnectionHandler:
        """A new session whose operations travel on `transport`.

        Raises:
            LimitExceededError: there are too many sessions.
        """

    def resume_session(self, hello: Hello, transport: Transport) -> ConnectionHandler:
        """Give a session another operations connection, for its own one broke.

        Raises:
            LookupError: there is no such session, or the client may not have it.
        """

    def join_bulk(self, session_id: str, transport: Transport) -> ConnectionHandler:
        """Gives a session its bulk connection.

        Raises:
            LookupError: there is no such session.
        """

    def join_functions(self, session_id: str, transport: Transport) -> ConnectionHandler:
        """Gives a session a functions connection, in place of the one that it had.

        Raises:
            LookupError: there is no such session, or this worker runs no functions.
        """

    def end_refused(self, refusal: Callable[[Identity], str]) -> None:
        """End what has no connection, kept sessions and what others left behind, where its client is refused now.

        Args:
            refusal: why a client is refused; an empty text where it is not.
        """

    def activity(self) -> Mapping[str, object]:
        """Return what this worker is and does, for JSON: sessions, calls_running, idle_seconds, devices, software."""

    def session_rows(self, client: Identity | None = None) -> list[dict[str, object]]:
        """Return what the web view shows of the sessions; with a client, of its own ones."""


class Listener:
    """A listening port and its connections; `serve` makes one.

    Attributes:
        port: the port that we listen on.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        token: str | Authenticator,
        host: SessionHost,
        *,
        ssl_context: ssl.SSLContext | Callable[[], ssl.SSLContext] | None,
        allowed_origins: Sequence[str],
        settings: Settings,
        has_page: bool = False,
        jobs: Jobs | str = NO_JOBS,
        on_ending: Callable[[], object] = lambda: None,
    ) -> None:
        self.port: int = listening[0].getsockname()[1]
        self._listening = listening
        self._host = host
        self._ssl_context = ssl_context
        self._settings = settings
        self._stopping = threading.Event()
        self._tokens: Authenticator = TokenCheck(token) if isinstance(token, str) else token
        self._jobs = jobs
        self._upgrader = Upgrader(
            self._tokens,
            allowed_origins,
            is_ready=self._is_ready,
            activity=self.activity,
            status=lambda client: status_report(client, self.activity, host.session_rows, self._job_rows),
            has_page=has_page,
            pause=self._stopping.wait,
            on_ending=on_ending,
        )
        self._draining = False
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._transports: set[WebSocketTransport] = set()
        self._sockets: set[socket.socket] = set()
        self._pending: dict[socket.socket, str] = {}
        """Connections that did not show the token yet, the oldest first, and where they come from."""
        self._wake_read, self._wake_write = socket.socketpair()
        _listeners.add(self)
        self._acceptor = threading.Thread(target=self._accept, name="skyproxy-listener", daemon=True)
        self._acceptor.start()
        if not isinstance(token, str):
            threading.Thread(target=self._watch_tokens, name="skyproxy-tokens", daemon=True).start()

    @property
    def connections(self) -> int:
        """Connections that are past their handshake."""
        return len(self._transports)

    def _is_ready(self) -> bool:
        return not self._draining and len(self._transports) < self._settings.max_connections

    def activity(self) -> Mapping[str, object]:
        """Return what the worker does: its sessions and its jobs."""
        activity = self._host.activity()
        return activity if isinstance(self._jobs, str) else self._jobs.add_jobs_to(activity)

    def _job_rows(self, client: Identity | None) -> list[dict[str, object]]:
        return [] if isinstance(self._jobs, str) else self._jobs.rows(client, tails=True)

    # --- accepting ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in (*self._listening, self._wake_read):
                selector.register(listening, selectors.EVENT_READ)
            while not self._stopping.is_set():
                for key, _ in selector.select():
                    if key.fileobj is not self._wake_read:
                        self._accept_one(key.fileobj)  # type: ignore[arg-type]

    def _accept_one(self, listening: socket.socket) -> None:
        try:
            sock, peer = listening.accept()
        except OSError as exc:  # the client has left again, or we are out of descriptors
            logger.warning("a connection could not be accepted: %s", exc)
            self._stopping.wait(0.05)
            return
        with self._lock:
            self._make_room(peer[0])
            spare = self._settings.max_pending_connections + _SPARE_CONNECTIONS
            full = len(self._threads) >= self._settings.max_connections + spare
            if not full:
                thread = threading.Thread(
                    target=self._serve, args=(sock, f"{peer[0]}:{peer[1]}"), name="skyproxy-connection", daemon=True
                )
                self._threads.add(thread)
                self._sockets.add(sock)
                self._pending[sock] = peer[0]
        if full:
            logger.warning("a connection from %s was dropped: there are too many", peer[0])
            sock.close()
            return
        try:
            thread.start()
        except RuntimeError as exc:  # the machine has no thread for us now; it may later
            logger.warning("a connection from %s was dropped: %s", peer[0], exc)
            sock.close()
            with self._lock:
                self._threads.discard(thread)
                self._sockets.discard(sock)
                self._pending.pop(sock, None)

    def _make_room(self, address: str) -> None:
        """Ends the oldest unfinished handshakes where there are too many; an honest one takes milliseconds."""
        limits = self._settings
        own = [sock for sock, place in self._pending.items() if place == address]
        going = own[: max(len(own) - limits.max_pending_connections_per_address + 1, 0)]
        if not going and len(self._pending) >= limits.max_pending_connections:
            going = [next(iter(self._pending))]
        for sock in going:
            del self._pending[sock]
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def _watch_tokens(self) -> None:
        """Takes note of new tokens, and ends what belongs to those that are revoked or have expired."""
        while not self._stopping.wait(self._settings.token_poll_seconds):
            try:
                self._tokens.refresh()
            except Exception:  # without this thread, no token would be revoked any more
                logger.exception("the tokens could not be looked at; they are left as they were")
            with self._lock:
                transports = list(self._transports)
            for transport in transports:
                reason = self._tokens.refusal(transport.identity)
                if reason:
                    audit.note(transport.identity, "ended", reason=reason)
                    # Not here: a peer that does not answer would keep the closing thread waiting.
                    words = ("bad-token", reason)
                    threading.Thread(target=transport.close, args=words, name="skyproxy-closer", daemon=True).start()
                    with self._lock:
                        self._transports.discard(transport)
            self._host.end_refused(self._tokens.refusal)
            if not isinstance(self._jobs, str):
                self._jobs.end_refused(self._tokens.refusal)

    # --- one connection ----------------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket, peer: str) -> None:
        began = time.monotonic()
        deadline = began + self._settings.handshake_timeout_seconds
        token_deadline = min(deadline, began + self._settings.token_timeout_seconds)
        try:
            stream = self._stream(sock, token_deadline)
            admitted: list[Identity] = []
            received = self._upgrader.upgrade(stream, peer, token_deadline, admitted.append)
            with self._lock:
                self._pending.pop(sock, None)
            if received is None:
                return
            transport = WebSocketTransport(stream, WORKER, self._settings, received)
            identity = transport.identity = dataclasses.replace(admitted[0], address=peer.rpartition(":")[0])
            with self._lock:
                others = [item.identity for item in self._transports if item.identity.name == identity.name]
                self._transports.add(transport)
            try:
                self._refuse_too_many(identity, others)
                self._greet(transport, peer, deadline)
            except LimitExceededError as exc:
                audit.note(identity, "refused", reason=str(exc))
                transport.recv(remaining(deadline))  # its greeting, so that it reads our answer
                transport.close("too-many-sessions", str(exc))
            finally:
                transport.close()
                with self._lock:
                    self._transports.discard(transport)
        except (SessionLostError, TimeoutError, EOFError, OSError) as exc:
            logger.debug("the connection from %s ended early: %s", peer, exc)
        except ProtocolError as exc:
            logger.warning("the connection from %s was closed: %s", peer, exc)
        except Exception:
            logger.exception("the connection from %s ended by an internal error", peer)
        finally:
            sock.close()
            with self._lock:
                self._pending.pop(sock, None)
                self._sockets.discard(sock)
                self._threads.discard(threading.current_thread())

    def _refuse_too_many(self, identity: Identity, others: Sequence[Identity]) -> None:
        """Refuse a client that has as many connections as it may.

        Raises:
            LimitExceededError: so many connections have this token, or come with it from this address.
        """
        most = identity.bounds.connections
        if most is not None and len(others) >= most:
            raise LimitExceededError(f"the token {identity.name} already has {len(others)} connections, its limit")
        most = self._settings.max_connections_per_client
        if sum(other.address == identity.address for other in others) >= most:
            raise LimitExceededError(
                f"{identity.address} already has {most} connections, its limit; SKYPROXY_MAX_CONNECTIONS_PER_CLIENT "
                "raises it"
            )

    def _stream(self, sock: socket.socket, deadline: float) -> ByteStream:
        context = self._ssl_context() if callable(self._ssl_context) else self._ssl_context
        if context is None:
            return PlainStream(sock)
        return TlsStream(sock, context, server_side=True, server_hostname=None, deadline=deadline)

    def _greet(self, transport: WebSocketTransport, peer: str, deadline: float) -> None:
        hello = transport.recv(remaining(deadline))
        assert isinstance(hello, Hello), "the rules allow nothing else here"
        served: ConnectionHandler
        try:
            version = choose_version(hello.versions)
            if self._draining:
                transport.close("shutdown", "The worker is shutting down.")
                return
            if hello.role == OPERATIONS and hello.session:
                served = self._host.resume_session(hello, transport)
            elif hello.role == OPERATIONS:
                served = self._host.open_session(hello, transport)
            elif hello.role == JOBS:
                served = JobsConnection(self._jobs, transport, self._settings)
            elif hello.role == BULK:
                served = self._host.join_bulk(hello.session, transport)
            else:
                served = self._host.join_functions(hello.session, transport)
        except VersionMismatchError as exc:
            transport.close("version", str(exc))
        except LimitExceededError as exc:
            audit.note(transport.identity, "refused", reason=str(exc))
            transport.close("too-many-sessions", str(exc))
        except LookupError:
            transport.close("no-such-session", "The worker has no such session; it may have ended.")
        else:
            welcome = dataclasses.replace(served.welcome, version=version)
            logger.info("%s connected (%s of session %s)", peer, hello.role, welcome.session[:8])
            # `run` even when the welcome cannot be sent any more: it is where the session ends properly.
            try:
                transport.send(welcome)
            except SessionLostError as exc:
                logger.debug("%s left before its welcome: %s", peer, exc)
            served.run()
            logger.info("%s disconnected (%s of session %s)", peer, hello.role, welcome.session[:8])

    # --- the end -----------------------------------------------------------------------------------------------------

    def abandon_in_child(self) -> None:
        """After a fork, in the child: lets go of all sockets, or they would stay open when the worker itself dies."""
        for sock in (*self._listening, *self._sockets):
            if sock.fileno() >= 0:
                os.close(sock.detach())

    def refuse_new(self) -> None:
        """Take no sessions any more; those that there are go on."""
        self._draining = True

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stops taking sessions, lets those that run end for a while, and ends the others. Idempotent.

        Args:
            drain_seconds: how long sessions may go on; health questions are answered meanwhile, and new sessions not.
        """
        self._draining = True
        with self._closing:
            if not self._stopping.is_set():
                self._close(drain_seconds)

    def _close(self, drain_seconds: float) -> None:
        deadline = time.monotonic() + drain_seconds
        while self._transports and time.monotonic() < deadline:
            self._stopping.wait(0.05)
        self._stopping.set()
        self._wake_write.send(b"x")
        self._acceptor.join()
        for sock in self._listening:
            sock.close()
        with self._lock:
            transports, threads = list(self._transports), list(self._threads)
        # All at once: each takes up to its timeout when the peer does not answer.
        words = ("shutdown", "The worker is shutting down.")
        closers = [
            threading.Thread(target=item.close, args=words, name="skyproxy-closer", daemon=True) for item in transports
        ]
        for closer in closers:
            closer.start()
        deadline = time.monotonic() + 2 * self._settings.close_timeout_seconds
        for closer in closers:
            closer.join(remaining(deadline))
        with self._lock:
            for sock in self._sockets:
                # Those still in their handshake.
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        for thread in threads:
            thread.join(remaining(deadline))
        self._wake_read.close()
        self._wake_write.close()


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for listener in list(_listeners):
        listener.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def serve(
    host: str,
    port: int,
    token: str | Authenticator,
    session_host: SessionHost,
    ssl_context: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
    on_ready: Callable[[int], None] | None = None,
    *,
    insecure: bool = False,
    allowed_origins: Sequence[str] = (),
    settings: Settings = SETTINGS,
    has_page: bool = False,
    jobs: Jobs | str = NO_JOBS,
    on_ending: Callable[[], object] = lambda: None,
) -> Listener:
    """Starts to listen; the work happens on the listener's threads.

    Args:
        host: the address to listen on; a name may stand for several.
        port: the port, 0 for a free one.
        token: what clients must know; or what knows several tokens, and tells who has which.
        session_host: makes sessions of connections. Its transports have an attribute `identity`.
        ssl_context: the certificate, or what gives the present one; without one the connections are not encrypted.
        on_ready: is told the port once connections are accepted.
        insecure: allows unencrypted connections from other machines.
        allowed_origins: web pages that may connect; without, no browser may.
        settings: limits and timeouts.
        has_page: serves the page of the web view, which shows nothing without a token.
        jobs: those of this worker; a text says why there are none.
        on_ending: called when whoever started this worker says that it is ended for good.

    Raises:
        ConfigurationError: other machines could connect without encryption, or the address cannot be used.
    """
    check_encrypted(host, encrypted=ssl_context is not None, insecure=insecure)
    listening = listen(host, port)
    listener = Listener(
        listening,
        token,
        session_host,
        ssl_context=ssl_context,
        allowed_origins=allowed_origins,
        settings=settings,
        has_page=has_page,
        jobs=jobs,
        on_ending=on_ending,
    )
    logger.info("listening on %s port %d", host, listener.port)
    if on_ready is not None:
        on_ready(listener.port)
    return listener
