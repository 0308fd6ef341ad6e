"""The process of one session: its connections come from the supervisor, everything else is a worker's as ever."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import BULK, OPERATIONS, WORKER, Hello, Welcome
from skyproxy.runtime.lifecycle import close_at_once
from skyproxy.settings import SETTINGS
from skyproxy.transport.base import Transport
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server import audit, limits
from skyproxy_server.allowed_ops import WITH_FUNCTIONS, open_ops
from skyproxy_server.auth import Identity
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.endings import LOST_STATUS
from skyproxy_server.graph_checks import trust_clients
from skyproxy_server.isolation import call_names
from skyproxy_server.isolation.session_user import SessionUser, become_for_session
from skyproxy_server.isolation.slots import OVER, SLOT_BOUNDS, SLOT_BYTES, mapped
from skyproxy_server.isolation.uploads import SharedUploads
from skyproxy_server.isolation.visits import Visitor, Visits
from skyproxy_server.listener import ConnectionHandler
from skyproxy_server.program_log import log_to_stderr
from skyproxy_server.snapshots.leases import describe_worker
from skyproxy_server.worker_host import WorkerHost
from skyproxy_server.worker_session import WorkerSession

logger = logging.getLogger("skyproxy.server")

_LOOK_SECONDS = 0.25
_PAUSE_SECONDS = 0.002
_SAVE_AGAIN_SECONDS = 5.0
_CLEANUP_SECONDS = 30.0
"""The time that interrupted functions have at least to clean up before their process ends."""


class _BorrowedStream(PlainStream):
    """A connection that the supervisor lent to this process; tells it once this side has said its last word."""

    def __init__(self, sock: socket.socket, mark: memoryview) -> None:
        super().__init__(sock)
        self._mark = mark

    def shutdown_write(self) -> None:
        self._mark[0] = OVER
        super().shutdown_write()


class SessionProcess:
    """The part of a session's process that carries out the supervisor's orders.

    Args:
        control: the channel to the supervisor.
        marks: memory that both processes share, with a slot for each connection.
        start: the session's name, the devices, who the client is, and what it may do.
        uploads: the supervisor's store; None where nothing is kept.
    """

    def __init__(
        self, control: ControlChannel, marks: memoryview, start: dict[str, Any], uploads: SharedUploads | None
    ) -> None:
        self._control = control
        self._marks = marks
        self._session: str = start["session"]
        self._client = Identity.from_plain(start["client"])
        self._uploads = uploads
        self._host = WorkerHost(
            devices=start["devices"],
            settings=SETTINGS,
            blobs=uploads,
            functions=start["functions"],
            snapshots=start["snapshots"] or None,
        )
        self._visits: Visits | None = None
        if self._host.calls is not None:
            self._visits = self._host.calls.elsewhere = Visits(self._host.calls, control.send, SETTINGS)
        self._visitors: set[Visitor] = set()
        self._operations_over = threading.Event()
        self._over_since = 0.0
        self._is_saving = False
        self._left_in_order = False
        self._tells_rows = False
        self._transports: set[WebSocketTransport] = set()
        self._lock = threading.Lock()
        if start["snapshots"]:
            # They end with this process, so they are saved before; the supervisor is what people know of this worker.
            self._host.keep_names(self._client.name, describe_worker(start["supervisor"]))
        else:
            self._host.named = None
        self._host.on_session_end = self._on_session_end
        self._host.on_context_lost = partial(_end_at_once, LOST_STATUS)
        os.register_at_fork(after_in_child=self._abandon_in_child)

    def _abandon_in_child(self) -> None:
        """Let go of all connections in a process that a function forks; they would outlive the session in it."""
        self._control.abandon()
        if self._uploads is not None:
            self._uploads.abandon()
        if self._visits is not None:
            self._visits.abandon()
        for visitor in list(self._visitors):
            visitor.abandon()
        for transport in list(self._transports):
            transport.abandon()

    def run(self) -> None:
        """Carry out orders until the session is over and nobody comes back for its calls; or the supervisor says so."""
        begun = False
        while not (self._operations_over.is_set() and not self._is_needed()):
            try:
                order, descriptors = self._control.receive(self._patience(begun))
            except TimeoutError:
                if not begun:
                    return  # the client has left before we got its connection
                continue
            except ChannelClosedError:
                return  # from here on, the kernel ends us with the supervisor
            if order["order"] == "connection":
                begun = True
                self._take(socket.socket(fileno=descriptors[0]), order)
            elif order["order"] == "report":
                self._control.send({"report": order["number"], **self._report(order.get("rows") is True)})
            elif order["order"] == "close":
                self._close(order["code"], order["reason"])
            elif order["order"] == "prepare":
                # Not here: whoever uses the connection that is to be cut may take a moment to leave it.
                threading.Thread(target=self._prepare, args=(order,), name="skyproxy-prepare", daemon=True).start()
            elif order["order"] == "leave":
                self._host.announce_leaving(order["milliseconds"] / 1000)
            elif order["order"] in ("save", "let-go"):
                # Not here: the volume may hang.
                threading.Thread(target=self._save_names, args=(order,), name="skyproxy-saving", daemon=True).start()
            elif order["order"] == "expire":
                self._host.end_lasting()
            elif order["order"] in ("has-call", "visit", "found"):
                self._on_calls(order, descriptors)
        self._await_goodbyes()

    def _patience(self, begun: bool) -> float | None:
        if not begun:
            return SETTINGS.handshake_timeout_seconds
        return _LOOK_SECONDS if self._operations_over.is_set() else None

    def _await_goodbyes(self) -> None:
        """Give connections the time that they have to end in order."""
        deadline = time.monotonic() + 2 * SETTINGS.close_timeout_seconds
        while self._transports and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    def _is_needed(self) -> bool:
        """Return whether names are being saved, functions run, or results wait that the client may still ask for from
        another session.

        For as long as a worker keeps calls; then those that nobody listens to were interrupted, and get as long again.
        """
        calls = self._host.calls
        if calls is None or self._is_saving:
            return self._is_saving
        over_seconds, grace_seconds = time.monotonic() - self._over_since, SETTINGS.call_grace_seconds
        if over_seconds < grace_seconds:
            return calls.running > 0 or calls.is_awaited(told=not self._left_in_order)
        return calls.is_listened_to() or (calls.running > 0 and over_seconds < 2 * grace_seconds + _CLEANUP_SECONDS)

    def _on_calls(self, order: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Another session of our client looks for a call, or was looked for."""
        calls = self._host.calls
        if calls is None or self._visits is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif order["order"] == "has-call":
            mark = order["mark"]
            own = next((name for name in calls.names() if call_names.mark(name) == mark), None)
            answer = call_names.proof(own) if own is not None else b""
            self._control.send({"has": order["search"], "proof": answer})
        elif order["order"] == "found":
            self._visits.found(order["find"], descriptors)
        else:
            visitor = Visitor(calls, order["mark"], descriptors, SETTINGS)
            self._visitors.add(visitor)
            threading.Thread(target=self._receive, args=(visitor,), name="skyproxy-visitor", daemon=True).start()

    def _receive(self, visitor: Visitor) -> None:
        try:
            visitor.run()
        finally:
            self._visitors.discard(visitor)

    def _report(self, rows_wanted: bool) -> dict[str, object]:
        self._tells_rows = self._tells_rows or rows_wanted
        activity = self._host.activity()
        if self._tells_rows:
            activity["row"] = next(iter(self._host.session_rows()), None)
        rows = [
            {**row, "used_memory_bytes": limits.private_bytes()} if row["type"] == "cpu" else row
            for row in activity["devices"]
        ]
        sessions = int(not self._operations_over.is_set())
        return {**activity, "devices": rows, "sessions": sessions, "leaving": self._host.leaving()}

    def _take(self, sock: socket.socket, order: dict[str, Any]) -> None:
        """Begin to serve a connection. In the order in which they come: the others join what the first one opens."""
        start = order["slot"] * SLOT_BYTES
        mark = self._marks[start : start + SLOT_BYTES]
        hello, welcome = Hello(*order["hello"]), Welcome(*order["welcome"])
        connection = Connection(WORKER)
        connection.on_receive(hello)
        connection.on_send(welcome)
        transport = WebSocketTransport(_BorrowedStream(sock, mark), WORKER, SETTINGS, order["received"], connection)
        transport.identity = self._client
        transport.share_bounds(mark[SLOT_BOUNDS].cast("Q"))
        with self._lock:
            self._transports.add(transport)
        served: ConnectionHandler | None = None
        if hello.role == OPERATIONS and not hello.session:
            served = self._host.open_session(hello, transport, self._session, welcome.secret)
        arguments = (served, transport, hello, order)
        threading.Thread(target=self._serve, args=arguments, name="skyproxy-connection", daemon=True).start()

    def _serve(
        self, served: ConnectionHandler | None, transport: WebSocketTransport, hello: Hello, order: dict[str, object]
    ) -> None:
        try:
            # On this thread: a connection that replaces another one cuts that first.
            (served or self._handler_of(hello, transport, order)).run()
        except LookupError:
            transport.close("no-such-session", "The worker has no such session; it may have ended.")
        except (SessionLostError, ProtocolError) as error:
            logger.debug("a connection ended: %s", error)
        except Exception:
            logger.exception("a connection ended by an internal error")
        finally:
            transport.close()
            with self._lock:
                self._transports.discard(transport)
            if served is not None and not served.welcome.secret:
                self._on_over(transport)

    def _on_session_end(self, session: WorkerSession) -> None:
        """The session is over; one that lasts, long after the connection that opened it."""
        self._is_saving = True
        if session.lasting is not None:
            self._on_over(session.lasting)
        try:
            self._keep_names()
        finally:
            self._is_saving = False

    def _keep_names(self) -> None:
        """Save what is under names, before this process ends; on a full volume, try for as long as calls are kept."""
        deadline = time.monotonic() + SETTINGS.call_grace_seconds
        while not self._host.save_released() and time.monotonic() < deadline:
            time.sleep(_SAVE_AGAIN_SECONDS)
        self._host.close()

    def _save_names(self, order: dict[str, Any]) -> None:
        """The worker ends: save what no client uses, or let go of it."""
        answer: dict[str, object] = {"saved": order["number"], "count": 0, "failed": 0}
        if order["order"] == "save":
            answer["count"] = self._host.save_named()
            answer["failed"] = self._host.named_sessions()
        else:
            self._host.close()
        with contextlib.suppress(ChannelClosedError):
            self._control.send(answer)

    def _on_over(self, transport: Transport) -> None:
        self._left_in_order = transport.connection.goodbye is not None
        self._over_since = time.monotonic()
        self._operations_over.set()
        self._wake()

    def _prepare(self, order: dict[str, Any]) -> None:
        """Tell the supervisor how far the session has come, for its client is there again."""
        answer: dict[str, object] = {"prepared": order["number"]}
        try:
            answer["attempt"], answer["received"] = self._host.prepare_resume(
                self._session, order["secret"], self._client
            )
        except LookupError as error:
            logger.info("session %s is not taken up: %s", self._session[:8], error)
        with contextlib.suppress(ChannelClosedError):
            self._control.send(answer)

    def _handler_of(self, hello: Hello, transport: WebSocketTransport, order: dict[str, Any]) -> ConnectionHandler:
        if hello.role == OPERATIONS:
            return self._host.resumed(self._session, transport, order["attempt"], order["welcome"][-1])
        if hello.role == BULK:
            return self._host.join_bulk(self._session, transport)
        return self._host.join_functions(self._session, transport)

    def _wake(self) -> None:
        """Have the main thread look, which waits for orders: the supervisor sends it one."""
        try:
            activity = self._host.activity()
            self._control.send(
                {"over": True, "commands": activity["commands"], "idle_seconds": activity["idle_seconds"]}
            )
        except ChannelClosedError:
            pass

    def _close(self, code_name: str, reason: str) -> None:
        with self._lock:
            transports = list(self._transports)
        for transport in transports:
            closing = (code_name, reason)
            threading.Thread(target=transport.close, args=closing, name="skyproxy-closer", daemon=True).start()


def main(descriptors: Sequence[int], start: dict[str, Any]) -> NoReturn:
    """Be a session's process, from the fork to its end.

    Args:
        descriptors: the channel to the supervisor, the shared memory, where output goes, and the channel to the store
            of uploads.
        start: see `SessionProcess`; the process that must be our parent; and our bounds.
    """
    control = ControlChannel(socket.socket(fileno=descriptors[0]))
    status = 1
    try:
        limits.end_with(start["supervisor"])
        limits.hide_memory()
        if start["user"] is not None:
            become_for_session(SessionUser.from_plain(start["user"]), start["supervisor"])
        limits.gain_no_privileges()
        limits.adopt_orphans()
        limits.set_name(f"skyproxy-{start['session'][:6]}")
        os.setsid()
        for stream in (1, 2):
            os.dup2(descriptors[2], stream)
        os.close(descriptors[2])
        log_to_stderr(start["log_level"])
        # The supervisor notes when a session begins and ends: it sees the end of every one.
        logging.getLogger(audit.NAME).addFilter(lambda record: not str(record.args).startswith("('session-"))
        if start["functions"]:
            open_ops(WITH_FUNCTIONS)
            trust_clients()
        _reseed()
        _apply_bounds(start)
        shared = memoryview(mapped(descriptors[1]))
        os.close(descriptors[1])
        uploads: SharedUploads | None = None
        if len(descriptors) > 3:
            uploads = SharedUploads(ControlChannel(socket.socket(fileno=descriptors[3])), start["blob_bytes"])
        process = SessionProcess(control, shared, start, uploads)
        control.send({"up": os.getpid()})
        process.run()
        status = 0
    except BaseException:
        logging.getLogger("skyproxy.server").exception("the session's process ended by an internal error")
    finally:
        _end_at_once(status)


def _end_at_once(status: int) -> NoReturn:
    try:
        close_at_once()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # At once: daemon threads may be in the middle of native code, and there is nothing that they must finish.
        os._exit(status)


def _reseed() -> None:
    """Draw seeds of our own: whatever was loaded before the fork would draw the same numbers in each session."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _apply_bounds(start: dict[str, Any]) -> None:
    if start.get("memory_bytes"):
        limits.bound_memory(start["memory_bytes"])
    fraction = start.get("gpu_fraction")
    if fraction and any(row["type"] == "cuda" for row in start["devices"]):
        import torch

        indices = [row["index"] for row in start["devices"] if row["type"] == "cuda"]

        # When CUDA is used for the first time: until then the session has no context on the device.
        def bound() -> None:
            for index in indices:
                torch.cuda.set_per_process_memory_fraction(fraction, index)

        torch.cuda._lazy_call(bound)
