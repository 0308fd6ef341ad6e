"""All sessions of a worker's process, and the connections that its listener hands on to them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from skyproxy.errors import LimitExceededError
from skyproxy.protocol.messages import Hello, Welcome
from skyproxy.runtime import child_processes
from skyproxy.runtime.lifecycle import LIFECYCLE
from skyproxy.settings import SETTINGS, Settings
from skyproxy.snapshots import hashes
from skyproxy.snapshots.stores import open_store
from skyproxy.torch_versions import software
from skyproxy.transport.base import Transport
from skyproxy_server import audit, function_controls
from skyproxy_server.activity import Activity
from skyproxy_server.admission import refuse_session
from skyproxy_server.auth import FUNCTIONS, Identity, client_of
from skyproxy_server.blobs import UploadStore
from skyproxy_server.foreign_memory import only_one_session
from skyproxy_server.functions import output, terminal
from skyproxy_server.functions.connection import FunctionsConnection
from skyproxy_server.functions.registry import Calls
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.lasting import LastingTransport
from skyproxy_server.lost_context import CONTEXT, break_off
from skyproxy_server.named_sessions import NamedSession, NamedSessions
from skyproxy_server.silence import SilenceWatch
from skyproxy_server.snapshots.keeping import NameKeeper
from skyproxy_server.snapshots.unused_names import save_unused
from skyproxy_server.status import MAX_SESSIONS
from skyproxy_server.usage import usage
from skyproxy_server.worker_session import WorkerSession

logger = logging.getLogger("skyproxy.server")

_ROOM_SECONDS = 5.0
"""The time that a session without a connection has to free its memory for another one."""


class _Operations:
    """The operations connection of a session, as the listener runs it."""

    def __init__(self, welcome: Welcome, session: WorkerSession, link: Transport, forget: Callable[[], None]) -> None:
        self.welcome = welcome
        self._session = session
        self._link = link
        self._forget = forget

    def run(self) -> None:
        lasting = self._session.lasting
        if lasting is None:
            self._run()
            return
        # A thread of its own, for it outlives this connection.
        threading.Thread(target=self._run, name=f"skyproxy-session-{self._session.identity[:8]}", daemon=True).start()
        lasting.wait_while_used(self._link)

    def _run(self) -> None:
        try:
            self._session.run()
        finally:
            self._forget()


class _Resumed:
    """A further operations connection of a session, as the listener runs it."""

    def __init__(self, welcome: Welcome, lasting: LastingTransport, link: Transport, attempt: int) -> None:
        self.welcome = welcome
        self._lasting = lasting
        self._link = link
        self._attempt = attempt

    def run(self) -> None:
        hello = self._link.connection.hello
        assert hello is not None, "the listener has read it"
        if self._lasting.attach(self._link, self._attempt, hello.received):
            self._lasting.wait_while_used(self._link)


class _Bulk:
    """The bulk connection of a session, as the listener runs it."""

    def __init__(self, welcome: Welcome, session: WorkerSession, transport: Transport) -> None:
        self.welcome = welcome
        self._session = session
        self._transport = transport

    def run(self) -> None:
        self._session.run_bulk(self._transport)


class _Functions:
    """The functions connection of a session, as the listener runs it."""

    def __init__(self, welcome: Welcome, connection: FunctionsConnection) -> None:
        self.welcome = welcome
        self._connection = connection

    def run(self) -> None:
        self._connection.run()


class WorkerHost:
    """All sessions of this process; what the listener hands connections to.

    Args:
        devices: what this worker offers.
        settings: limits.
        activity: what is told of every use.
        blobs: where uploads are kept; None keeps none.
        functions: whether clients may run functions. Then the process's output streams are replaced by some that
            know whose function prints.
        snapshots: the folder, or the address, where snapshots of sessions lie; None where there are none.

    Attributes:
        calls: the functions of all clients; None if there may be none.
        on_session_end: called with each session that is over.
        on_context_lost: called when the CUDA context of the process is lost, and all clients know; ends the process.
        named: what outlives sessions; None where nothing does.
    """

    def __init__(
        self,
        devices: list[DeviceRow],
        settings: Settings = SETTINGS,
        activity: Activity | None = None,
        blobs: UploadStore | None = None,
        *,
        functions: bool = False,
        snapshots: Path | str | None = None,
    ) -> None:
        self._devices = devices
        self._snapshots = snapshots
        self._blobs = blobs
        self._settings = settings
        self._software = software(torch.__version__)
        self._activity = activity or Activity()
        self._sessions: dict[str, WorkerSession] = {}
        self._commands_of_the_past = 0
        self._sessions_ever = 0
        self._lock = threading.Lock()
        self.calls: Calls | None = None
        self.named: NamedSessions | None = NamedSessions(settings)
        self._keeper: NameKeeper | None = None
        self._unused: list[NamedSession] = []
        self._met: list[NamedSession] = []
        self._unsaved = 0
        self._saving = threading.Lock()
        self._silence = SilenceWatch(settings.client_silence_seconds, self._lasting_clients)
        self.on_session_end: Callable[[WorkerSession], object] = lambda session: None
        self.on_context_lost: Callable[[], object] = lambda: None
        CONTEXT.on_lost = self._break_off
        if functions:
            self.calls = Calls(devices, settings, self._activity)
            LIFECYCLE.make_way = self._make_way
            function_controls.install()
            output.install()
            child_processes.install()
            terminal.install()

    def keep_names(self, owner: str | None = None, where: str = "") -> None:
        """Keep other workers of the same volume from the named sessions that are here, and delete what has expired.

        Args:
            owner: the name of the only token whose sessions are here; None where those of all may be.
            where: what people call this worker; by default its process.
        """
        if self.named is not None and self._snapshots is not None:
            root = open_store(self._snapshots)
            self._keeper = NameKeeper(root, self.named, self._settings, self._save_one, owner, where)
            self._keeper.start()

    def close(self) -> None:
        """Let go of what other workers may have now."""
        if self._keeper is not None:
            self._keeper.end()

    def open_session(self, hello: Hello, transport: Transport, identity: str = "", secret: bytes = b"") -> _Operations:
        """A new session whose operations travel on `transport`.

        Args:
            hello: the client's first message.
            transport: the session's operations connection.
            identity: the session's name, where somebody else has given it one.
            secret: what the client takes it up again with, likewise.

        Raises:
            LimitExceededError: there are too many sessions, or the process is about to end.
        """
        if CONTEXT.is_lost:
            raise LimitExceededError("This process of the worker ends, for its CUDA context is lost; try again.")
        client = client_of(transport)
        calls = self.calls if client.may(FUNCTIONS) else None
        session = WorkerSession(
            transport,
            self._devices,
            self._settings,
            self._activity,
            self._blobs,
            calls,
            identity,
            grace_seconds=min(hello.grace_seconds, self._settings.session_grace_seconds),
            on_detach=self._limit_detached,
            secret=secret,
            make_room=self._make_room,
            on_context_lost=lambda origin, words: CONTEXT.lose(words, partial(self._break_off, origin=origin)),
        )
        if self.named is not None:
            session.use_names(self.named)
        if self._snapshots is not None:
            session.use_snapshots(self._snapshots)
        with self._lock:
            # Those without a connection have a bound of their own.
            others = [other.client for other in self._sessions.values() if not other.is_detached]
            refuse_session(client, others, self._settings)
            self._sessions[session.identity] = session
            self._sessions_ever += 1
            only_one_session(self._sessions_ever == 1 and calls is not None)
        if session.lasting is not None:
            self._silence.begin()
        self._activity.touch()
        logger.info("session %s opened by %s", session.identity[:8], hello.software)
        audit.note(client, "session-begin", session=session.identity[:8])
        welcome = self._welcome(session)
        if session.lasting is not None:
            welcome = dataclasses.replace(welcome, secret=session.lasting.secret)
        return _Operations(welcome, session, transport, lambda: self._forget(session.identity))

    def resume_session(self, hello: Hello, transport: Transport) -> _Resumed:
        """Take up a session whose operations connection broke; one that still seems to work is cut.

        Raises:
            LookupError: there is no such session, or the client does not show that it is its own. Which of the two, is
                not told.
        """
        attempt, received = self.prepare_resume(hello.session, hello.secret, client_of(transport))
        return self.resumed(hello.session, transport, attempt, received)

    def prepare_resume(self, session_id: str, secret: bytes, client: Identity) -> tuple[int, int]:
        """Cut the operations connection of a session whose client comes on another one.

        Returns:
            The number of this attempt, for `resumed`, and the newest batch that came.

        Raises:
            LookupError: as `resume_session`.
        """
        with self._lock:
            session = self._session_of(session_id, client)
        if session is None or session.lasting is None or not session.knows(secret):
            audit.note(client, "refused", reason="no such session to take up", session=session_id[:8])
            raise LookupError("no session of this name, or not this client's")
        return session.lasting.prepare()

    def resumed(self, session_id: str, transport: Transport, attempt: int, received: int) -> _Resumed:
        """Give a session the operations connection that was prepared for.

        Raises:
            LookupError: it has ended since.
        """
        with self._lock:
            session = self._own_session(session_id, transport)
        if session is None or session.lasting is None:
            raise LookupError("the session is over")
        logger.info("session %s is taken up again", session.identity[:8])
        welcome = dataclasses.replace(self._welcome(session), received=received)
        return _Resumed(welcome, session.lasting, transport, attempt)

    def _break_off(self, words: str, origin: WorkerSession | None = None) -> None:
        """End the process without a CUDA context; see `lost_context.break_off`."""
        with self._lock:
            sessions = list(self._sessions.values())  # held from here on, so that nobody frees what they have
        try:
            break_off(sessions, origin, words, 2 * self._settings.close_timeout_seconds)
        finally:
            self.on_context_lost()

    def end_lasting(self) -> None:
        """End the sessions that last: whoever lends them connections will lend no others."""
        with self._lock:
            found = [session.lasting for session in self._sessions.values() if session.lasting is not None]
        for lasting in found:
            lasting.end()

    def _lasting_clients(self) -> list[tuple[str, WorkerSession]]:
        with self._lock:
            return [(name, one) for name, one in self._sessions.items() if one.lasting is not None]

    def _limit_detached(self) -> None:
        """End the session that is longest without a connection, where too many are."""
        with self._lock:
            detached = [
                (session.lasting.detached_at, session.lasting)
                for session in self._sessions.values()
                if session.lasting is not None and session.lasting.detached_at is not None
            ]
        detached.sort(key=lambda entry: entry[0])
        for _, lasting in detached[: max(len(detached) - self._settings.max_detached_sessions, 0)]:
            lasting.expire()

    def _make_room(self, session: WorkerSession) -> bool:
        """End one session that the same client left without a connection; return whether there was one.

        Never another client's: who fills the memory would end the sessions of whoever has no connection just then.
        """
        with self._lock:
            own = [one for one in self._sessions.values() if one.client.name == session.client.name]
        return any(one.expire("its client needs the memory", _ROOM_SECONDS) for one in own if one is not session)

    def _make_way(self, session_id: str, holders: Collection[str]) -> bool:
        """End what the client of a session left of others without a connection; return whether there was any."""
        with self._lock:
            asking = self._sessions.get(session_id)
            held = [self._sessions[name] for name in holders if name in self._sessions]
        if asking is None:
            return False
        own = [one for one in held if one.client.name == asking.client.name]
        ended = [one.expire("another pool of its client needs this worker", _ROOM_SECONDS) for one in own]
        return any(ended)

    def end_refused(self, refusal: Callable[[Identity], str]) -> None:
        """End the sessions that wait for a client who is refused now."""
        with self._lock:
            detached = [session for session in self._sessions.values() if session.is_detached]
        for session in detached:
            reason = refusal(session.client)
            if reason:
                session.expire(reason)

    def join_bulk(self, session_id: str, transport: Transport) -> _Bulk:
        """Gives a session its bulk connection.

        Raises:
            LookupError: there is no such session, or it has one already.
        """
        with self._lock:
            session = self._own_session(session_id, transport)
        hello = transport.connection.hello
        if session is None or not session.take_bulk(transport, hello.secret if hello is not None else b""):
            raise LookupError("no session of this name waits for a bulk connection")
        return _Bulk(self._welcome(session), session, transport)

    def announce_leaving(self, seconds: float) -> int:
        """See `leaving.LeavingHost`, as for the methods below."""
        with self._lock:
            sessions = list(self._sessions.values())
        # Before: a session that is suspended has no connection either, and takes what is under its names with it.
        self._unused = self.named.unused() if self.named is not None else []
        return sum(session.announce_leaving(seconds) for session in sessions)

    def leaving(self) -> int:
        """The sessions whose clients were told that the worker ends, and are waited for."""
        with self._lock:
            return sum(session.is_leaving for session in self._sessions.values())

    def staying(self) -> int:
        """The sessions with a connection."""
        with self._lock:
            return sum(not session.is_detached for session in self._sessions.values())

    def detached(self) -> int:
        """The sessions without one."""
        with self._lock:
            return sum(session.is_detached for session in self._sessions.values())

    def named_sessions(self) -> int:
        """The named sessions that cannot be saved."""
        if self.named is None:
            return 0
        return self._unsaved if self._snapshots is not None else len(self.named.unused())

    def save_named(self) -> int:
        """Save the named sessions that no client uses, each once."""
        if self.named is None or self._snapshots is None:
            return 0
        with self._saving:
            known = {id(one) for one in self._met}
            found = [one for one in (*self._unused, *self.named.released()) if one.values]  # else it was given away
            due = {id(one): one for one in found if id(one) not in known}
            self._met += due.values()
            failed = save_unused(due.values(), self.named, self._snapshots, self._devices, self._settings)
            self._unsaved += len(failed)
        return len(due) - len(failed)

    def save_released(self) -> bool:
        """Save the named sessions that no session uses any more; return False if one could not be, and stays."""
        saved = [self._save_one(one) for one in self.named.released()] if self.named is not None else []
        return all(saved)

    def _save_one(self, session: NamedSession) -> bool:
        """Save one for whoever wants it next; nothing, where it is saved already."""
        if self.named is None or self._snapshots is None:
            return False
        with self._saving:
            self._met = [one for one in self._met if one.values]  # the others have gone on elsewhere
            if not session.values or any(session is one for one in self._met):
                return True
            if save_unused([session], self.named, self._snapshots, self._devices, self._settings):
                return False
            self._met.append(session)
        return True

    def activity(self) -> dict[str, Any]:
        """Return what this worker is and does, as its operator wants to know it."""
        with self._lock:
            sessions = list(self._sessions.values())
            commands = self._commands_of_the_past + sum(session.commands_done for session in sessions)
        idle = 0.0 if any(session.executing for session in sessions) else self._activity.idle_seconds
        return {
            "sessions": sum(not session.is_detached for session in sessions),
            "detached": self.detached(),
            "named": self.named_sessions(),
            "calls_running": self._activity.calls_running,
            "idle_seconds": round(idle, 3),
            "commands": commands,
            "devices": [{**row, **usage(row)} for row in self._devices],
            "software": self._software,
        }

    def session_rows(self, client: Identity | None = None) -> list[dict[str, object]]:
        """Return what the web view shows of the sessions; with a client, of its own ones."""
        with self._lock:
            sessions = list(self._sessions.values())
        return [one.row() for one in sessions if client is None or one.client.name == client.name][:MAX_SESSIONS]

    def join_functions(self, session_id: str, transport: Transport) -> _Functions:
        """Gives a session a functions connection, in place of the one that it had.

        Raises:
            LookupError: there is no such session, or this worker runs no functions.
        """
        with self._lock:
            session = self._own_session(session_id, transport)
        if session is None or session.calls is None:
            raise LookupError("no session of this name, or no functions")
        connection = FunctionsConnection(session.calls, session_id, transport, self._settings, session.bind_call)
        session.take_functions(connection)
        return _Functions(self._welcome(session), connection)

    def _own_session(self, session_id: str, transport: Transport) -> WorkerSession | None:
        """The session of this name, if it belongs to the client at the other end."""
        return self._session_of(session_id, client_of(transport))

    def _session_of(self, session_id: str, client: Identity) -> WorkerSession | None:
        session = self._sessions.get(session_id)
        return session if session is not None and session.client.name == client.name else None

    def _welcome(self, session: WorkerSession) -> Welcome:
        limits = {
            "functions": int(session.calls is not None),
            "cancels": 1,
            "companions": 1,
            "direct_calls": 1,
            "payload_files": 1,
        }
        if session.calls is not None:
            limits["passes_payloads"] = 1
        if session.calls is not None and session.calls.can_isolate:
            limits["isolates"] = 1
        if self._snapshots is not None:
            limits["snapshots"] = 1
            limits["blake3"] = int(hashes.fastest() == hashes.BLAKE3)
        if self._blobs is not None:
            limits.update(blob_bytes=self._blobs.max_bytes, blobs=int(len(self._blobs) > 0))
        if session.lasting is not None:
            limits["grace_seconds"] = int(session.lasting.grace_seconds)
        return Welcome(0, session.identity, self._software, list(map(dict, self._devices)), limits)

    def _forget(self, identity: str) -> None:
        with self._lock:
            leaving = self._sessions.get(identity)
        if leaving is not None and self.named is not None:
            self.named.release(leaving)  # before: an end of the worker saves what nobody uses
        with self._lock:
            ended = self._sessions.pop(identity, None)
            self._commands_of_the_past += ended.commands_done if ended is not None else 0
        logger.info("session %s closed", identity[:8])
        if ended is not None:
            audit.note(ended.client, "session-end", session=identity[:8])
            self.on_session_end(ended)
