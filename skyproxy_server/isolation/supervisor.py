"""All sessions of a worker, each in a process of its own: who gets one, where connections go, what is told of them."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from skyproxy.errors import LimitExceededError
from skyproxy.protocol.messages import OPERATIONS, Hello, Welcome
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.stream import remaining
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server import audit, limits
from skyproxy_server.admission import refuse_session
from skyproxy_server.auth import Identity, client_of
from skyproxy_server.blobs import BlobStore
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.isolation.call_search import CallSearch
from skyproxy_server.isolation.cgroups import Cgroups
from skyproxy_server.isolation.lent_connection import LentConnection
from skyproxy_server.isolation.priorities import Priorities
from skyproxy_server.isolation.session_starter import SessionBounds, SessionStarter, Watchers
from skyproxy_server.isolation.session_users import SessionUsers
from skyproxy_server.isolation.spawner import TemplateSetup
from skyproxy_server.isolation.supervised_session import REAP_SECONDS, Resume, SupervisedSession
from skyproxy_server.lasting import SECRET_BYTES
from skyproxy_server.status import MAX_SESSIONS

logger = logging.getLogger("skyproxy.server")

_REPORT_SECONDS = 0.3
_LET_GO_SECONDS = 1.0
"""The time that processes have, at the end of the worker, to take back their word on named sessions."""
_PREPARE_SECONDS = 5.0
"""The time that a session may take to let go of a broken connection. Its client waits no longer, and asks again."""


class ProcessHost:
    """All sessions of a worker, each in a process of its own; what the listener hands connections to.

    Args:
        setup: what sessions can do.
        bounds: what each may use.
        settings: limits.
        blobs: where uploads are kept, in a backend of `isolation.uploads`; None keeps none.
        cgroups: where each session's cgroup is made, ours from now on; None makes none.
        users: whom sessions run as, one each; None: as the worker's own user.
        priorities: makes sessions that compute give way to those that wait; None: the kernel treats all alike.

    Attributes:
        spared: gives, inside a `with` block, what tells children of ours that belong to no session.
    """

    def __init__(
        self,
        setup: TemplateSetup,
        bounds: SessionBounds,
        settings: Settings = SETTINGS,
        blobs: BlobStore | None = None,
        cgroups: Cgroups | None = None,
        users: SessionUsers | None = None,
        priorities: Priorities | None = None,
    ) -> None:
        self._settings = settings
        self._blobs = blobs
        self._priorities = priorities
        watchers = Watchers(self._remember, self._forget, self._on_message)
        self._starter = SessionStarter(setup, bounds, blobs, cgroups, users, watchers)
        self._lock = threading.Lock()
        self._sessions: dict[str, SupervisedSession] = {}
        self._starting: list[Identity] = []
        self._calls = CallSearch(self._sessions_of_same_client)
        self._commands_of_the_past = 0
        self._last_use = time.monotonic()
        self._devices: list[DeviceRow] = []
        self._software: dict[str, str] = {}
        self._closing = False
        self._leave_until = 0.0
        self._unsaved = 0
        self.spared: Callable[[], AbstractContextManager[Callable[[int], bool]]] = lambda: nullcontext(_is_nobody)

    def start(self, stop: threading.Event | None = None) -> list[DeviceRow]:
        """Get ready to take sessions; the devices of this worker.

        Raises:
            ConfigurationError: sessions cannot do what was asked for.
        """
        limits.adopt_orphans()
        self._devices, self._software = self._starter.start(stop)
        return self._devices

    @property
    def has_users(self) -> bool:
        """True if each session runs as a user of its own."""
        return self._starter.has_users

    # --- what the listener asks for --------------------------------------------------------------------------------

    def open_session(self, hello: Hello, transport: Transport) -> LentConnection:
        """A new session, in a new process.

        Raises:
            LimitExceededError: there are too many sessions, or none can be started now.
        """
        client = client_of(transport)
        with self._lock:
            # Processes that are left of sessions that are over keep nobody out; they have a bound of their own.
            going = [session for session in self._sessions.values() if session.is_open and session.detached_at is None]
            others = [*self._starting, *(session.client for session in going)]
            refuse_session(client, others, self._settings)
            self._starting.append(client)
            self._last_use = time.monotonic()
        try:
            session = self._starter.start_session(secrets.token_hex(16), client, self._resume(hello))
        finally:
            with self._lock:
                self._starting.remove(client)
        session.claim(OPERATIONS)
        audit.note(client, "session-begin", session=session.identity[:8])
        logger.info("session %s opened by %s, in process %d", session.identity[:8], hello.software, session.pid)
        return self._lend(session, hello, transport)

    def resume_session(self, hello: Hello, transport: Transport) -> LentConnection:
        """Give a session another operations connection, for its own one broke.

        Raises:
            LookupError: there is no such session, or the client does not show that it is its own. Which, is not told.
            LimitExceededError: its process does not answer now.
        """
        client = client_of(transport)
        session = self._own_session(hello.session, client)
        if session is None or not session.resume.is_known(hello.secret) or not session.claim(OPERATIONS, hello.secret):
            audit.note(client, "refused", reason="no such session to take up", session=hello.session[:8])
            raise LookupError("no session of this name, or not this client's")
        prepared: tuple[int, int] | None = None
        try:
            prepared = session.prepare(_PREPARE_SECONDS)
            if prepared is None:
                raise LookupError("the session is over")
        except TimeoutError as error:
            raise LimitExceededError(str(error)) from error
        finally:
            if prepared is None:
                session.operations_left(self._settings.call_grace_seconds, self._limit_detached)
                session.release()
        attempt, received = prepared
        logger.info("session %s is taken up again", session.identity[:8])
        return self._lend(session, hello, transport, attempt, received)

    def _resume(self, hello: Hello) -> Resume:
        grace_seconds = min(hello.grace_seconds, self._settings.session_grace_seconds)
        return Resume(grace_seconds, secrets.token_bytes(SECRET_BYTES)) if grace_seconds > 0 else Resume()

    def _limit_detached(self) -> None:
        """End the session that is longest without a connection, where too many are."""
        with self._lock:
            found = [(session.detached_at, session) for session in self._sessions.values()]
        detached = sorted(((at, item) for at, item in found if at is not None), key=lambda entry: entry[0])
        for _, session in detached[: max(len(detached) - self._settings.max_detached_sessions, 0)]:
            session.expire(self._settings.call_grace_seconds)

    def end_refused(self, refusal: Callable[[Identity], str]) -> None:
        """End the processes that wait for a client who is refused now, or run what it left behind."""
        with self._lock:
            alone = [item for item in self._sessions.values() if not item.is_open or item.detached_at is not None]
        for session in alone:
            reason = refusal(session.client)
            if reason:
                session.kill(reason)

    def join_bulk(self, session_id: str, transport: Transport) -> LentConnection:
        """Give a session its bulk connection.

        Raises:
            LookupError: there is no such session, or it has one already.
        """
        return self._join(session_id, transport)

    def join_functions(self, session_id: str, transport: Transport) -> LentConnection:
        """Give a session a functions connection, in place of the one that it had.

        Raises:
            LookupError: there is no such session, or this worker runs no functions.
        """
        if not self._starter.runs_functions(client_of(transport)):
            raise LookupError("no functions")
        return self._join(session_id, transport)

    def _join(self, session_id: str, transport: Transport) -> LentConnection:
        assert isinstance(transport, WebSocketTransport)
        hello = transport.connection.hello
        assert hello is not None, "the listener has read it"
        session = self._own_session(session_id, client_of(transport))
        if session is None or not session.claim(hello.role, hello.secret):
            raise LookupError("no session of this name waits for such a connection")
        return self._lend(session, hello, transport)

    def _own_session(self, session_id: str, client: Identity) -> SupervisedSession | None:
        """The session of this name. Whoever has another token has not been given the name, but may have seen it."""
        with self._lock:
            session = self._sessions.get(session_id)
        return session if session is not None and session.client.name == client.name else None

    def _lend(
        self, session: SupervisedSession, hello: Hello, transport: Transport, attempt: int = 0, received: int = 0
    ) -> LentConnection:
        assert isinstance(transport, WebSocketTransport)
        offers = {"functions": int(self._starter.runs_functions(session.client)), "cancels": 1, "companions": 1}
        offers["isolates"] = offers["passes_payloads"] = offers["functions"]
        if self._blobs is not None:
            offers.update(blob_bytes=self._blobs.max_bytes, blobs=int(len(self._blobs) > 0))
        if self._starter.snapshots():
            offers["snapshots"] = 1
        if session.resume.grace_seconds:
            offers["grace_seconds"] = int(session.resume.grace_seconds)
        # The secret is told once, to whoever opened the session.
        secret = session.resume.secret if hello.role == OPERATIONS and not hello.session else b""
        welcome = Welcome(0, session.identity, self._software, list(map(dict, self._devices)), offers, secret, received)
        return LentConnection(
            welcome, hello, session, transport, self._settings, attempt, on_detach=self._limit_detached
        )

    def activity(self) -> Mapping[str, object]:
        """Return what this worker is and does, as its operator wants to know it. A session that does not answer is
        busy.
        """
        with self._lock:
            sessions = list(self._sessions.values())
            commands = self._commands_of_the_past
            idle = time.monotonic() - self._last_use
        pids = [session.pid for session in sessions]
        asked = [(session, session.ask()) for session in sessions]
        deadline = time.monotonic() + _REPORT_SECONDS
        reports = [(session, session.answer(number, deadline)) for session, number in asked]
        used: dict[tuple[str, int], list[int]] = {}
        calls = 0
        for session, report in reports:
            commands += session.commands
            if report is None:
                idle = 0.0 if session.is_open else idle
                continue
            idle = min(idle, report.idle_seconds)
            calls += report.calls_running
            for device, byte_count in report.used_bytes.items():
                used.setdefault(device, []).append(byte_count)
        return {
            "sessions": sum(session.is_open and session.detached_at is None for session in sessions),
            "processes": len(sessions),
            "memory_bytes": sum(limits.resident_bytes(pid) for pid in (os.getpid(), self._starter.template_pid, *pids)),
            "detached": self.detached(),
            "named": self.named_sessions(),
            "calls_running": calls,
            "idle_seconds": round(idle, 3),
            "commands": commands,
            "devices": [{**row, **_usage(row, used.get((row["type"], row["index"]), []))} for row in self._devices],
            "software": self._software,
        }

    def session_rows(self, client: Identity | None = None) -> list[dict[str, Any]]:
        """Return what the web view shows of the sessions; with a client, of its own ones."""
        with self._lock:
            sessions = [one for one in self._sessions.values() if client is None or one.client.name == client.name]
        asked = [(session, session.ask(rows=True)) for session in sessions[:MAX_SESSIONS]]
        deadline = time.monotonic() + _REPORT_SECONDS
        for session, number in asked:
            session.answer(number, deadline)
        return [session.row for session, _ in asked]

    def announce_leaving(self, seconds: float) -> int:
        """Tell the clients that the worker ends; return how many."""
        if not self._starter.snapshots():
            return 0
        self._leave_until = time.monotonic() + seconds
        told = self._attached_sessions()
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:  # also those without a connection, which look for what they have under names
            session.announce_leaving(seconds)
        return len(told)

    def leaving(self) -> int:
        """The sessions whose clients were told so, and are waited for; one that does not answer is among them."""
        asked = [(session, session.ask()) for session in self._attached_sessions()]
        deadline = time.monotonic() + _REPORT_SECONDS
        reports = [session.answer(number, deadline) for session, number in asked]
        return sum(report is None or report.leaving > 0 for report in reports)

    def staying(self) -> int:
        """The sessions with a connection."""
        return len(self._attached_sessions())

    def detached(self) -> int:
        """The sessions without one."""
        with self._lock:
            return sum(session.is_open and session.detached_at is not None for session in self._sessions.values())

    def named_sessions(self) -> int:
        """The named sessions that could not be saved."""
        return self._unsaved

    def save_named(self) -> int:
        """Have each process save what it has under names, and no client uses; return how many they say they saved in
        the time that is left for leaving.
        """
        if not self._starter.snapshots():
            return 0
        answers = self._ask_for_names(self._leave_until)
        self._unsaved = sum(failed for _, failed in answers)
        return sum(saved for saved, _ in answers)

    def _ask_for_names(self, deadline: float, *, lets_go: bool = False) -> list[tuple[int, int]]:
        with self._lock:
            sessions = list(self._sessions.values())
        asked = [(session, session.save_names(lets_go=lets_go)) for session in sessions]
        answers = [session.saved_names(number, deadline) for session, number in asked]
        return [answer for answer in answers if answer is not None]

    def _attached_sessions(self) -> list[SupervisedSession]:
        with self._lock:
            return [one for one in self._sessions.values() if one.is_open and one.detached_at is None]

    # --- processes -------------------------------------------------------------------------------------------------

    def _remember(self, session: SupervisedSession) -> None:
        with self._lock:
            if not session.ended.is_set():  # else it is forgotten already, or about to be
                self._sessions[session.identity] = session
                if self._priorities is not None:
                    self._priorities.begin(session)

    def _on_message(self, session: SupervisedSession, message: dict[str, object]) -> bool:
        if "over" in message:
            self._bound_lingering(session)
            return True
        return self._calls.on_message(session, message)

    def _bound_lingering(self, session: SupervisedSession) -> None:
        """End the processes that have been left the longest of a client who leaves more than it may have sessions."""
        client = session.client
        most = client.bounds.sessions
        most = self._settings.max_sessions_per_client if most is None else most
        with self._lock:
            left = [other for other in self._sessions.values() if not other.is_open]  # in the order of their beginning
        own = [other for other in left if other.client.name == client.name]
        # Of this client's in any case: whoever leaves many takes nothing from others.
        count = max(len(own) - most, len(left) - self._settings.max_sessions)
        for other in own[: max(count, 0)]:
            other.kill("its client has left too many functions and results behind")

    def _sessions_of_same_client(self, session: SupervisedSession) -> list[SupervisedSession]:
        """The sessions, those that are over included, whose calls a session's client may have."""
        with self._lock:
            sessions = list(self._sessions.values())
        if not self._starter.runs_functions(session.client):
            return []
        return [other for other in sessions if other is not session and other.client.name == session.client.name]

    def _forget(self, session: SupervisedSession) -> None:
        ending = session.ending
        if ending.is_failure and not self._closing:
            logger.error("session %s: its process %s", session.identity[:8], ending.description)
        else:
            logger.info("session %s closed", session.identity[:8])
        self._calls.forget(session)
        with self._lock:
            self._sessions.pop(session.identity, None)
            if self._priorities is not None:
                self._priorities.end(session)
            self._commands_of_the_past += session.commands
            self._last_use = max(self._last_use, time.monotonic() - session.idle_seconds)
        audit.note(session.client, "session-end", session=session.identity[:8])
        self._kill_orphans()
        self._starter.clear(session.identity)

    def _kill_orphans(self) -> None:
        """End what sessions that are over have started and not ended: such processes are our children now."""
        with self._starter.forking, self._lock, self.spared() as is_spared:  # no process that stays is on its way to us
            known = {self._starter.template_pid, *(session.pid for session in self._sessions.values())}
            for pid in set(limits.children_of_this_process()) - known:
                if is_spared(pid):
                    continue
                logger.warning("process %d, which a session left behind, is ended", pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def close(self) -> None:
        """End all sessions and the template."""
        self._closing = True
        self._starter.refuse_more()
        if self._priorities is not None:
            self._priorities.close()
        with self._lock:
            sessions = list(self._sessions.values())
        if self._starter.snapshots():  # a worker on another machine need not wait for signs of life then
            self._ask_for_names(time.monotonic() + _LET_GO_SECONDS, lets_go=True)
        for session in sessions:
            session.kill("the worker is shutting down")
        deadline = time.monotonic() + REAP_SECONDS
        for session in sessions:
            session.ended.wait(remaining(deadline))
        self._starter.close()


def _is_nobody(pid: int) -> bool:
    return False


def _usage(row: Mapping[str, object], reported: Sequence[int]) -> dict[str, int]:
    """A device's memory in use: of the CPU that of all sessions together, of a GPU what its driver tells."""
    if row["type"] == "cpu":
        return {"used_memory_bytes": sum(reported)}
    return {"used_memory_bytes": max(reported)} if reported else {}
