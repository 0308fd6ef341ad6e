"""All sessions of a worker, each in a process of its own: who gets one, where connections go, what is told of them."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from skyproxy.errors import ConfigurationError, LimitExceededError
from skyproxy.protocol.messages import OPERATIONS, Hello, Welcome
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.stream import remaining
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server import audit, limits
from skyproxy_server.admission import refuse_session
from skyproxy_server.auth import FUNCTIONS, Identity, client_of
from skyproxy_server.blobs import BlobStore
from skyproxy_server.control_channel import Channel, ChannelClosedError
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.isolation.call_search import CallSearch
from skyproxy_server.isolation.cgroups import CgroupBounds, Cgroups
from skyproxy_server.isolation.lent_connection import LentConnection
from skyproxy_server.isolation.session_user import SessionUser
from skyproxy_server.isolation.session_users import SessionUsers, SessionUsersUnavailableError
from skyproxy_server.isolation.slots import Slots, mapped, new_memory
from skyproxy_server.isolation.snapshot_groups import SnapshotGroups
from skyproxy_server.isolation.spawner import Template, TemplateSetup
from skyproxy_server.isolation.supervised_session import FORK_SECONDS, REAP_SECONDS, Resume, SupervisedSession
from skyproxy_server.isolation.uploads import UploadDesk
from skyproxy_server.lasting import SECRET_BYTES
from skyproxy_server.status import MAX_SESSIONS

logger = logging.getLogger("skyproxy.server")

_REPORT_SECONDS = 0.3
_PREPARE_SECONDS = 5.0
"""The time that a session may take to let go of a broken connection. Its client waits no longer, and asks again."""
_CGROUP_BESIDE_BYTES = 256 << 20
"""The bytes that a session's cgroup may have beyond the session's bound: the kernel's memory for it, and what it copies
of the template's. The process itself is bounded exactly."""


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """Bounds on what one session may use.

    Attributes:
        memory_bytes: private memory in addition to what a new session has; 0: no bound of its own.
        gpu_fraction: the part of each GPU's memory; 0: no bound of its own.
        cpus: processors' time per time, with a cgroup only; 0: as much as there is.
    """

    memory_bytes: int = 0
    gpu_fraction: float = 0.0
    cpus: float = 0.0


class ProcessHost:
    """All sessions of a worker, each in a process of its own; what the listener hands connections to.

    Args:
        setup: what sessions can do.
        bounds: what each may use.
        settings: limits.
        blobs: where uploads are kept, in a backend of `isolation.uploads`; None keeps none.
        cgroups: where each session's cgroup is made, ours from now on; None makes none.
        users: whom sessions run as, one each; None: as the worker's own user.

    Attributes:
        spared: gives, inside a `with` block, what tells children of ours that belong to no session.
    """

    def __init__(
        self,
        setup: TemplateSetup,
        bounds: SessionBounds = SessionBounds(),
        settings: Settings = SETTINGS,
        blobs: BlobStore | None = None,
        cgroups: Cgroups | None = None,
        users: SessionUsers | None = None,
    ) -> None:
        self._setup = setup
        self._bounds = bounds
        self._settings = settings
        self._blobs = blobs
        self._cgroups = cgroups
        self._users = users
        self._template = Template(setup)
        if users is not None:
            users.sweep = self._template.sweep
        self._groups = SnapshotGroups(setup.snapshots)
        self._forking = threading.Lock()
        self._lock = threading.Lock()
        self._sessions: dict[str, SupervisedSession] = {}
        self._starting: list[Identity] = []
        self._calls = CallSearch(self._others_of)
        self._commands_of_the_past = 0
        self._last_use = time.monotonic()
        self._devices: list[DeviceRow] = []
        self._software: dict[str, str] = {}
        self._closing = False
        self.spared: Callable[[], AbstractContextManager[Callable[[int], bool]]] = lambda: nullcontext(_is_nobody)

    def start(self, stop: threading.Event | None = None) -> list[DeviceRow]:
        """Get ready to take sessions; the devices of this worker.

        Raises:
            ConfigurationError: sessions cannot do what was asked for.
        """
        limits.adopt_orphans()
        try:
            with ExitStack() as trial:
                user = trial.enter_context(self._users.trial()) if self._users is not None else None
                found = self._template.start(stop, user)
        except ChannelClosedError as error:
            raise ConfigurationError(f"No session can be started: {error}. See the output above.") from error
        if self._users is not None and not self._users.are_usable(found.get("user_obstacle", "")):
            self._users = None
        self._devices, self._software = found["devices"], found["software"]
        return self._devices

    @property
    def has_users(self) -> bool:
        """True if each session runs as a user of its own."""
        return self._users is not None

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
            session = self._start_session(secrets.token_hex(16), client, self._resume(hello))
        finally:
            with self._lock:
                self._starting.remove(client)
        session.claim(OPERATIONS)
        audit.note(client, "session-begin", session=session.identity[:8])
        logger.info("session %s opened by %s, in process %d", session.identity[:8], hello.software, session.pid)
        return self._lent(session, hello, transport)

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
        return self._lent(session, hello, transport, attempt, received)

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
        if not self._runs_functions(client_of(transport)):
            raise LookupError("no functions")
        return self._join(session_id, transport)

    def _join(self, session_id: str, transport: Transport) -> LentConnection:
        assert isinstance(transport, WebSocketTransport)
        hello = transport.connection.hello
        assert hello is not None, "the listener has read it"
        session = self._own_session(session_id, client_of(transport))
        if session is None or not session.claim(hello.role, hello.secret):
            raise LookupError("no session of this name waits for such a connection")
        return self._lent(session, hello, transport)

    def _own_session(self, session_id: str, client: Identity) -> SupervisedSession | None:
        """The session of this name. Whoever has another token has not been given the name, but may have seen it."""
        with self._lock:
            session = self._sessions.get(session_id)
        return session if session is not None and session.client.name == client.name else None

    def _lent(
        self, session: SupervisedSession, hello: Hello, transport: Transport, attempt: int = 0, received: int = 0
    ) -> LentConnection:
        assert isinstance(transport, WebSocketTransport)
        offers = {"functions": int(self._runs_functions(session.client)), "cancels": 1}
        offers["isolates"] = offers["functions"]
        if self._blobs is not None:
            offers.update(blob_bytes=self._blobs.max_bytes, blobs=len(self._blobs))
        if self._snapshots():
            offers["snapshots"] = 1
        if session.resume.grace_seconds:
            offers["grace_seconds"] = int(session.resume.grace_seconds)
        # The secret is told once, to whoever opened the session.
        secret = session.resume.secret if hello.role == OPERATIONS and not hello.session else b""
        welcome = Welcome(0, session.identity, self._software, list(map(dict, self._devices)), offers, secret, received)
        return LentConnection(
            welcome, hello, session, transport, self._settings, attempt, on_detach=self._limit_detached
        )

    def _snapshots(self) -> str:
        """The place of snapshots that sessions can write to; empty for none."""
        return self._setup.snapshots if self._users is None else self._groups.location()

    def _with_group(self, user: SessionUser, client: Identity) -> SessionUser:
        """Return a user who is in the group of its client's snapshots, too."""
        try:
            group = self._groups.group_of(client.name) if self._groups.location() else None
        except OSError as error:
            logger.warning("a session can keep no snapshots: %s", error)
            return user
        return user if group is None else replace(user, groups=(*user.groups, group))

    def _runs_functions(self, client: Identity) -> bool:
        return self._setup.functions and client.may(FUNCTIONS)

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
            idle = min(idle, float(report["idle_seconds"]))
            calls += int(report["calls_running"])
            for row in report["devices"]:
                if "used_memory_bytes" in row:
                    used.setdefault((row["type"], row["index"]), []).append(row["used_memory_bytes"])
        return {
            "sessions": sum(session.is_open and session.detached_at is None for session in sessions),
            "processes": len(sessions),
            "memory_bytes": sum(limits.resident_bytes(pid) for pid in (os.getpid(), self._template.pid, *pids)),
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
        told = self._attached() if self._snapshots() else []
        for session in told:
            session.announce_leaving(seconds)
        return len(told)

    def leaving(self) -> int:
        """The sessions whose clients were told so, and are waited for; one that does not answer is among them."""
        asked = [(session, session.ask()) for session in self._attached()]
        deadline = time.monotonic() + _REPORT_SECONDS
        reports = [session.answer(number, deadline) for session, number in asked]
        return sum(report is None or int(report.get("leaving", 0)) > 0 for report in reports)

    def staying(self) -> int:
        """The sessions with a connection."""
        return len(self._attached())

    def detached(self) -> int:
        """The sessions without one."""
        with self._lock:
            return sum(session.is_open and session.detached_at is not None for session in self._sessions.values())

    def named_sessions(self) -> int:
        """None are kept here."""
        return 0

    def save_named(self) -> int:
        """None are kept here."""
        return 0

    def _attached(self) -> list[SupervisedSession]:
        with self._lock:
            return [one for one in self._sessions.values() if one.is_open and one.detached_at is None]

    # --- processes -------------------------------------------------------------------------------------------------

    def _start_session(self, identity: str, client: Identity, resume: Resume) -> SupervisedSession:
        with self._forking:
            for last in (False, True):
                try:
                    return self._fork(identity, client, resume)
                except SessionUsersUnavailableError as error:
                    logger.warning("session %s could not be started: %s", identity[:8], error)
                    break
                except (ChannelClosedError, TimeoutError, OSError) as error:
                    logger.warning("session %s could not be started: %s", identity[:8], error)
                    if last or self._closing:
                        break
                    with suppress(ChannelClosedError, ConfigurationError):
                        self._template.restart()
        raise LimitExceededError("this worker cannot start a process for another session now; see its log")

    def _fork(self, identity: str, client: Identity, resume: Resume) -> SupervisedSession:
        with ExitStack() as theirs, ExitStack() as ours:
            control, end = Channel.pair()
            ours.callback(control.close)
            theirs.enter_context(end)
            uploads: tuple[Channel, UploadDesk] | None = None
            memory = new_memory()
            theirs.callback(os.close, memory)
            descriptors = [end.fileno(), memory]
            if self._blobs is not None:
                channel, end = Channel.pair()
                ours.callback(channel.close)
                theirs.enter_context(end)
                descriptors.append(end.fileno())
                uploads = channel, UploadDesk(self._blobs, identity, client)
            user: SessionUser | None = None
            if self._users is not None:
                user = self._users.claim(identity)
                ours.callback(self._users.release, identity)
                user = self._with_group(user, client)
            memory_bytes = _least(self._bounds.memory_bytes, client.bounds.memory_bytes)
            order = {
                "session": identity,
                "supervisor": os.getpid(),
                "devices": self._devices,
                "client": client.to_plain(),
                "functions": self._runs_functions(client),
                "snapshots": self._snapshots(),
                "log_level": self._setup.log_level,
                "memory_bytes": memory_bytes,
                "gpu_fraction": self._bounds.gpu_fraction,
                "blob_bytes": self._blobs.max_bytes if self._blobs is not None else 0,
                "user": user.to_plain() if user is not None else None,
            }
            self._template.fork(order, descriptors)
            slots = Slots(mapped(memory))
            theirs.close()  # so that the channel ends where the process does not come up
            first, _ = control.receive(FORK_SECONDS)
            self._put_into_cgroup(identity, int(first["up"]), memory_bytes, ours)
            session = SupervisedSession(
                identity, client, int(first["up"]), control, slots, uploads, self._forget, self._on_message, resume
            )
            ours.pop_all()
        self._template.worked()
        with self._lock:
            self._sessions[identity] = session
        return session

    def _put_into_cgroup(self, identity: str, pid: int, memory_bytes: int, failing: ExitStack) -> None:
        """Bound what a session's process and its children use together, before it has a byte of its client."""
        if self._cgroups is None:
            return
        failing.callback(self._cgroups.remove, identity)
        if memory_bytes:
            # What is kept of its uploads counts there, too, and what it changes of the template's memory.
            memory_bytes += _CGROUP_BESIDE_BYTES + (self._blobs.max_bytes if self._blobs is not None else 0)
        self._cgroups.add(identity, pid, CgroupBounds(memory_bytes, self._bounds.cpus))

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

    def _others_of(self, session: SupervisedSession) -> list[SupervisedSession]:
        """The sessions, those that are over included, whose calls a session's client may have."""
        with self._lock:
            sessions = list(self._sessions.values())
        if not self._runs_functions(session.client):
            return []
        return [other for other in sessions if other is not session and other.client.name == session.client.name]

    def _forget(self, session: SupervisedSession) -> None:
        ending = session.ending
        if ending.is_failure and not self._closing:
            logger.error("session %s: its process %s", session.identity[:8], ending.how)
        else:
            logger.info("session %s closed", session.identity[:8])
        self._calls.forget(session)
        with self._lock:
            self._sessions.pop(session.identity, None)
            self._commands_of_the_past += session.commands
            self._last_use = max(self._last_use, time.monotonic() - session.idle_seconds)
        audit.note(session.client, "session-end", session=session.identity[:8])
        self._kill_orphans()
        if self._cgroups is not None:
            self._cgroups.remove(session.identity)
        if self._users is not None:
            self._users.release(session.identity)

    def _kill_orphans(self) -> None:
        """End what sessions that are over have started and not ended: such processes are our children now."""
        with self._forking, self._lock, self.spared() as is_spared:  # no process that stays is on its way to us
            known = {self._template.pid, *(session.pid for session in self._sessions.values())}
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
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.kill("the worker is shutting down")
        deadline = time.monotonic() + REAP_SECONDS
        for session in sessions:
            session.ended.wait(remaining(deadline))
        with self._forking:
            self._template.end()
        if self._users is not None:
            self._users.close()
        if self._cgroups is not None:
            self._cgroups.close()


def _is_nobody(pid: int) -> bool:
    return False


def _least(first: int, second: int | None) -> int:
    """The smaller of two bounds, of which 0 and None are none."""
    return min((bound for bound in (first, second) if bound), default=0)


def _usage(row: Mapping[str, object], reported: Sequence[int]) -> dict[str, int]:
    """A device's memory in use: of the CPU that of all sessions together, of a GPU what its driver tells."""
    if row["type"] == "cpu":
        return {"used_memory_bytes": sum(reported)}
    return {"used_memory_bytes": max(reported)} if reported else {}
