"""The sessions of a worker: who they are, their threads, their end."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.connection import State
from skyproxy.protocol.messages import Ack, Hello, Pong, Sequence, Welcome
from skyproxy.runtime.lifecycle import LIFECYCLE
from skyproxy.settings import SETTINGS, Settings
from skyproxy.torch_versions import software
from skyproxy.transport.base import Transport
from skyproxy_server import audit, function_controls
from skyproxy_server.activity import Activity
from skyproxy_server.admission import refuse_session
from skyproxy_server.auth import FUNCTIONS, OWNER, Identity, client_of
from skyproxy_server.blobs import Uploads
from skyproxy_server.cuda_staging import own_streams
from skyproxy_server.executor import Executor
from skyproxy_server.foreign_memory import only_one_session
from skyproxy_server.functions import output, terminal
from skyproxy_server.functions.connection import FunctionsConnection
from skyproxy_server.functions.registry import Calls
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.lasting import LastingTransport
from skyproxy_server.leaving import LEAVING, Leave
from skyproxy_server.named_batches import NamedBatches
from skyproxy_server.named_sessions import NamedSession, NamedSessions, NamedValueRequests
from skyproxy_server.session_report import (
    MemoryGauge,
    call_rows,
    failure_rows,
    queued_operations,
    running_op,
    running_place,
)
from skyproxy_server.snapshots.requests import SessionSnapshots
from skyproxy_server.snapshots.unused_names import save_unused
from skyproxy_server.status import MAX_SESSIONS
from skyproxy_server.transfers import Transfers
from skyproxy_server.usage import usage

logger = logging.getLogger("skyproxy.server")

_ACK_EVERY_BATCHES = 16
_ACK_DELAY_SECONDS = 0.002
_ROOM_SECONDS = 5.0
"""The time that a session without a connection has to free its memory for another one."""


_WITHOUT_A_MARK = 1 << 62
"""More than any mark's number: what is dropped up to this one is dropped for good."""


class WorkerSession:
    """One client's session: its values, and the thread that executes.

    Attributes:
        client: whose it is.
        lasting: its operations connection, where that may be replaced; else None.
        calls: where its functions run; None for a client that may run none.
    """

    def __init__(
        self,
        transport: Transport,
        devices: list[DeviceRow],
        settings: Settings,
        activity: Activity,
        blobs: Uploads | None = None,
        calls: Calls | None = None,
        identity: str = "",
        grace_seconds: float = 0.0,
        on_detach: Callable[[], object] = lambda: None,
        secret: bytes = b"",
        make_room: Callable[[WorkerSession], bool] = lambda session: False,
    ) -> None:
        self.identity = identity or secrets.token_hex(16)
        self.client = client_of(transport)
        self.lasting: LastingTransport | None = None
        if grace_seconds > 0:
            most = settings.max_kept_answer_bytes
            self.lasting = LastingTransport(transport, grace_seconds, most, on_detach, secret)
        self._transport = transport = self.lasting or transport
        self._activity = activity
        self._transfers = Transfers(
            settings.chunk_bytes,
            moved=activity.touch,
            blobs=blobs,
            user=self.identity,
            owner="" if self.client.name == OWNER.name else self.client.name,
            most_blob_bytes=self.client.bounds.blob_bytes,
        )
        self._transfers.lasting = self.lasting is not None
        self._executor = Executor(devices, transport.send, self._transfers, settings)
        self._executor.state.identity, self._executor.state.calls = self.identity, calls
        self._executor.make_room = lambda: make_room(self)
        self._transfers.on_cancel_operations = self._executor.state.cancellation.ask
        self.calls = calls
        self._leave = Leave()
        self._transfers.on_load = self._leave.on_load
        self._over = threading.Event()
        self._farewell = "the session ended"
        self._executing = 0
        self._settings = settings
        self._has_jumped = False
        self._thread_id: int | None = None
        self._began_at = time.monotonic()
        self._memory = MemoryGauge()
        self._bulk: Transport | None = None
        self._has_lost_bulk = False
        self._bulk_running = threading.Lock()
        self._taking_bulk = threading.Lock()
        self._functions: FunctionsConnection | None = None
        self._ended = False

    @property
    def executing(self) -> bool:
        """True if a batch is being executed now."""
        return bool(self._executing)

    @property
    def is_detached(self) -> bool:
        """True if it has no operations connection now, and is kept for a while."""
        return self.lasting is not None and self.lasting.detached_at is not None

    @property
    def is_deserted(self) -> bool:
        """True if its client is not heard now.

        While operations run, nobody reads their connection, and so nobody sees its end behind all that is queued. The
        bulk connection is always read: of a program that was killed, it is the one that ends at once.
        """
        return self.is_detached or self._has_lost_bulk

    @property
    def commands_done(self) -> int:
        """The number of commands that were executed, up to the latest whole batch."""
        return self._executor.commands_done

    def row(self) -> dict[str, object]:
        """Return what the web view shows of it; reads counters, and never waits for the session."""
        state, now = self._executor.state, time.monotonic()
        links = [link for link in (self._transport, self._bulk) if link is not None]
        place = running_place(self._thread_id) if self._executing else None
        return {
            "session": self.identity[:8],
            "client": self.client.name,
            "address": self.client.address,
            "seconds": round(now - self._began_at, 1),
            "state": "detached" if self.is_detached else "running" if self._executing else "idle",
            "running": running_op(state, place),
            "queued_operations": queued_operations(state, place),
            "queued_bytes": sum(link.bytes_unread for link in links),
            "commands": self.commands_done,
            "tensors": len(state.values.slots) - 1,
            "tensor_bytes": self._memory.read(state.values.slots),
            "bytes_received": sum(link.bytes_received for link in links),
            "bytes_sent": sum(link.bytes_sent for link in links),
            "is_profiled": state.profile is not None,
            "calls": call_rows(self.calls.running_names(self.identity), now) if self.calls is not None else [],
            "failures": failure_rows(state.reports.recent),
        }

    def knows(self, secret: bytes) -> bool:
        """Return whether this is the secret of a session that may be taken up, in a time that tells nothing of it."""
        own = self.lasting.secret if self.lasting is not None else b""
        return hmac.compare_digest(own, secret) and bool(own)

    def take_bulk(self, transport: Transport, secret: bytes = b"") -> bool:
        """Attach the bulk connection; return False if one is attached, and the secret does not allow another."""
        with self._taking_bulk:
            before = self._bulk
            if before is not None and not (self.knows(secret) and before.cut()):
                return False
            self._bulk = transport
            return True

    def use_names(self, store: NamedSessions) -> None:
        """Let the client put values where they outlive this session."""
        self._executor.state.names = NamedValueRequests(store, self.client.name, self)

    def use_snapshots(self, root: Path | str) -> None:
        """Let the client save what the session is in a place of the worker's."""
        self._executor.state.snapshots = SessionSnapshots(root, self.client.name, self._jump, self._settings)

    def _jump(self, sequence: int) -> None:
        self._transport.connection.jump_to(sequence)
        self._has_jumped = True

    def announce_leaving(self, seconds: float) -> bool:
        """Tell the client that the worker ends after so many seconds; return whether it can be told."""
        bulk = self._bulk
        if bulk is None or self.is_detached or self._executor.state.snapshots is None:
            return False
        self._leave.ask()
        bulk.post(Pong(0, {**self._load(), LEAVING: max(int(seconds * 1000), 1)}))
        return True

    @property
    def is_leaving(self) -> bool:
        """True if the client was told that the worker ends, and is to be waited for."""
        return self._leave.is_awaited and not self.is_detached

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        """End the session, and tell its client why; what is not begun is dropped. Return whether it is over in time."""
        self._farewell = reason  # of whichever connection the client reads first
        # Whoever waits for its end would wait for all that is queued, whose results nobody sees any more.
        self._executor.state.cancellation.ask(_WITHOUT_A_MARK)
        self._transport.close("done", reason)
        return self._over.wait(timeout_seconds)

    def expire(self, reason: str, timeout_seconds: float = 0.0) -> bool:
        """End the session if it has no connection; return whether it is over in time."""
        if self.lasting is None or not self.is_detached:
            return False
        audit.note(self.client, "ended", reason=reason, session=self.identity[:8])
        self.lasting.expire()
        return self._over.wait(timeout_seconds)

    def take_functions(self, connection: FunctionsConnection) -> None:
        """From now on this is the session's functions connection; the one before, if any, is over."""
        before, self._functions = self._functions, connection
        if before is not None:
            before.close()
        if self._ended:  # after the assignment, so that `end` cannot miss it
            connection.close()

    def bind_call(self, call: str) -> None:
        """A call without tensor arguments may begin, for its client knows that every operation before it was done.

        On the thread of the functions connection, which so need not wait for this one.
        """
        state = self._executor.state
        state.random.take_over()
        if self.calls is not None:
            self.calls.bind(self.identity, call, [], state.streams)

    def run(self) -> None:
        """Reads and executes until the client leaves. Runs on the connection's thread."""
        transport, executor, state = self._transport, self._executor, self._executor.state
        self._thread_id = threading.get_ident()
        named = NamedBatches()
        unacked = last = 0
        # Below autograd and its bookkeeping: ops run as fast as in inference mode, but give ordinary tensors.
        with torch._C._AutoDispatchBelowADInplaceOrView(), own_streams(state.devices) as state.streams:
            try:
                while True:
                    try:
                        message = transport.recv(_ACK_DELAY_SECONDS if unacked else None)
                    except TimeoutError:
                        transport.send(Ack(Sequence(last)))
                        unacked = 0
                        continue
                    batch = named.resolve(message)
                    if batch is not None:
                        self._executing = 1
                        with state.modes:
                            if state.profile is None:
                                executor.run(batch)
                            else:
                                with state.profile.batch(batch.sequence):
                                    executor.run(batch)
                        self._executing = 0
                        self._activity.touch()
                        last = batch.sequence
                        unacked += 1
                        if self._has_jumped:  # the client counts from elsewhere, and knows that this one is done
                            self._has_jumped, unacked = False, 0
                        if unacked >= _ACK_EVERY_BATCHES:
                            transport.send(Ack(Sequence(last)))
                            unacked = 0
            except SessionLostError:
                return
            except ProtocolError as error:
                logger.warning("session %s ended: %s", self.identity[:8], error)
                transport.close("protocol", str(error))
            except Exception as error:
                logger.exception("session %s ended by an internal error", self.identity[:8])
                transport.close("protocol", f"internal error on the worker: {error!r:.500}")
            finally:
                self.end()

    def run_bulk(self, transport: Transport) -> None:
        """Moves the session's large tensors. Runs on the bulk connection's thread, and one more for sending."""
        with self._bulk_running:  # the one before was cut, and its threads are about to end
            self._run_bulk(transport)

    def _load(self) -> dict[str, int]:
        place = running_place(self._thread_id) if self._executing else None
        position = place[1] if place is not None else -1
        return {"executing": self._executing, "sequence": self._executor.state.reports.sequence, "position": position}

    def _run_bulk(self, transport: Transport) -> None:
        sender = threading.Thread(
            target=self._transfers.sender(transport), name=f"skyproxy-bulk-{self.identity[:8]}", daemon=True
        )
        sender.start()
        is_over = True
        self._has_lost_bulk = False
        try:
            self._transfers.receive(transport, self._load)
        except SessionLostError:
            self._has_lost_bulk = transport.connection.state is not State.ENDED  # without a goodbye
            is_over = self.lasting is None or transport.was_closed or transport.connection.state is State.ENDED
        except ProtocolError as error:
            logger.warning("bulk connection of session %s ended: %s", self.identity[:8], error)
            transport.close("protocol", str(error))
        finally:
            if is_over:
                self._transfers.end()
            else:
                transport.cut()
                self._transfers.detach()
            sender.join(5.0)
            if is_over:
                self._transport.close("done", "the bulk connection ended")

    def end(self) -> None:
        """Forgets every value. The session's calls go on for a while."""
        self._ended = True
        if self.calls is not None:
            self.calls.session_ended(self.identity)
        self._transfers.end()
        self._executor.end()
        if self._bulk is not None:
            self._bulk.close("done", self._farewell)
        if self._functions is not None:
            self._functions.close()
        self._over.set()


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
        named: what outlives sessions; None where nothing does.
    """

    def __init__(
        self,
        devices: list[DeviceRow],
        settings: Settings = SETTINGS,
        activity: Activity | None = None,
        blobs: Uploads | None = None,
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
        self._unused: list[NamedSession] = []
        self._met: list[NamedSession] = []
        self._unsaved = 0
        self.on_session_end: Callable[[WorkerSession], object] = lambda session: None
        if functions:
            self.calls = Calls(devices, settings, self._activity)
            LIFECYCLE.make_way = self._make_way
            function_controls.install()
            output.install()
            terminal.install()

    def open_session(self, hello: Hello, transport: Transport, identity: str = "", secret: bytes = b"") -> _Operations:
        """A new session whose operations travel on `transport`.

        Args:
            hello: the client's first message.
            transport: the session's operations connection.
            identity: the session's name, where somebody else has given it one.
            secret: what the client takes it up again with, likewise.

        Raises:
            LimitExceededError: there are too many sessions.
        """
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

    def end_lasting(self) -> None:
        """End the sessions that last: whoever lends them connections will lend no others."""
        with self._lock:
            found = [session.lasting for session in self._sessions.values() if session.lasting is not None]
        for lasting in found:
            lasting.end()

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
        """As `leaving.LeavingHost` has it, and so on."""
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
        known = {id(one) for one in self._met}
        due = {id(one): one for one in (*self._unused, *self.named.released()) if id(one) not in known}
        self._met += due.values()
        failed = save_unused(due.values(), self.named, self._snapshots, self._devices, self._settings)
        self._unsaved += len(failed)
        return len(due) - len(failed)

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
        limits = {"functions": int(session.calls is not None), "cancels": 1, "direct_calls": 1, "payload_files": 1}
        if session.calls is not None and session.calls.can_isolate:
            limits["isolates"] = 1
        if self._snapshots is not None:
            limits["snapshots"] = 1
        if self._blobs is not None:
            limits.update(blob_bytes=self._blobs.max_bytes, blobs=len(self._blobs))
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
