"""The supervisor's side of session processes: starts them, brings them connections, and knows how each one ends."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

from skyproxy.errors import ConfigurationError, LimitExceededError
from skyproxy.protocol.messages import BULK, OPERATIONS, Hello, Welcome
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.stream import PlainStream, remaining
from skyproxy.transport.tls import TlsStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server import audit
from skyproxy_server.admission import refuse_session
from skyproxy_server.auth import FUNCTIONS, Identity, client_of
from skyproxy_server.blobs import BlobStore
from skyproxy_server.isolation import limits
from skyproxy_server.isolation.channel import Channel, ChannelClosedError
from skyproxy_server.isolation.endings import Ending
from skyproxy_server.isolation.relay import relay
from skyproxy_server.isolation.sockets import bytes_written
from skyproxy_server.isolation.uploads import UploadDesk

logger = logging.getLogger("skyproxy.server")

SLOTS = 64
"""Connections that one session may have at a time; for each, the session's process has a slot of memory that we share:
whether it has said its last word there, and where the frame that it writes begins and ends."""
SLOT_BYTES = 32
SLOT_BOUNDS = slice(8, 24)
OVER = 1

_FORK_SECONDS = 10.0
_LOAD_SECONDS = 300.0
_REPORT_SECONDS = 0.3
_REAP_SECONDS = 5.0
_MAX_RECEIVED_BYTES = 64 << 10
_RESTART_PAUSES_SECONDS = (0.0, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """What one session may use.

    Attributes:
        memory_bytes: private memory in addition to what a new session has; 0: no bound of its own.
        gpu_fraction: the part of each GPU's memory; 0: no bound of its own.
    """

    memory_bytes: int = 0
    gpu_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class TemplateSetup:
    """What the template loads.

    Attributes:
        device: the choice of devices, as `inventory` knows it.
        functions: whether clients may run functions.
        allow_ops: operators and namespaces that clients may call beside the usual ones.
        log_level: how much sessions log.
    """

    device: str = "auto"
    functions: bool = True
    allow_ops: Sequence[str] = field(default_factory=tuple)
    log_level: str = "INFO"


class Template:
    """The process that sessions are forked from; started again where it ends."""

    def __init__(self, setup: TemplateSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._failures = 0

    @property
    def pid(self) -> int:
        """Its process id; 0 where it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self, stop: threading.Event | None = None) -> dict[str, Any]:
        """Start it, and wait until it has loaded what sessions need.

        Args:
            stop: ends the wait.

        Returns:
            "devices" and "software" of this worker.

        Raises:
            ConfigurationError: it cannot do what was asked for.
            ChannelClosedError: it ended, or took too long.
        """
        self.end()
        channel, theirs = Channel.pair()
        with theirs:
            command = [sys.executable, "-P", "-m", "skyproxy_server.isolation.template"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
        self._channel = channel
        setup = self._setup
        channel.send(
            {
                "device": setup.device,
                "functions": setup.functions,
                "allow_ops": list(setup.allow_ops),
                "log_level": setup.log_level,
            }
        )
        deadline = time.monotonic() + _LOAD_SECONDS
        while True:
            try:
                answer, _ = channel.receive(0.2)
                break
            except TimeoutError:
                if (stop is not None and stop.is_set()) or time.monotonic() > deadline:
                    self.end()
                    raise ChannelClosedError("the template did not get ready") from None
        if "refused" in answer:
            self.end()
            raise ConfigurationError(answer["refused"])
        return answer

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Have a session's process forked.

        Raises:
            ChannelClosedError: there is no template.
        """
        if self._channel is None:
            raise ChannelClosedError("there is no template")
        self._channel.send(order, descriptors, wait=False)

    def restart(self) -> None:
        """Start it again after it failed; each time in a row with a longer pause before.

        Raises:
            ChannelClosedError, ConfigurationError: it does not come up.
        """
        pause = _RESTART_PAUSES_SECONDS[min(self._failures, len(_RESTART_PAUSES_SECONDS) - 1)]
        self._failures += 1
        logger.error("the process that sessions are made from does not answer; it is started again")
        time.sleep(pause)
        self.start()

    def worked(self) -> None:
        """Take note that it did what it was asked for."""
        self._failures = 0

    def end(self) -> None:
        """End it; sessions go on without it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """The environment of all processes that run clients' operations: without the token."""
    return {name: value for name, value in os.environ.items() if name != "SKYPROXY_TOKEN"}


class SupervisedSession:
    """A session's process, seen from the supervisor.

    Attributes:
        identity: the session's name.
        client: whose it is.
        pid: its process.
        pidfd: readable once the process has ended.
        ended: set when it has ended; then `ending` says how.
        commands: how many commands it has executed, as far as is known.
    """

    def __init__(
        self,
        identity: str,
        client: Identity,
        pid: int,
        control: Channel,
        marks: mmap.mmap,
        uploads: tuple[Channel, UploadDesk] | None,
        on_end: Callable[[SupervisedSession], None],
    ) -> None:
        self.identity = identity
        self.client = client
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.ended = threading.Event()
        self.ending = Ending()
        self.commands = 0
        self.idle_seconds = 0.0
        self.is_open = True
        self._control = control
        self._marks = marks
        self._uploads = uploads
        self._on_end = on_end
        self._why = ""
        self._lock = threading.Lock()
        self._slots = set(range(SLOTS))
        self._answered = threading.Condition(self._lock)
        self._asked = 0
        self._report: dict[str, Any] | None = None
        self._roles: set[str] = set()
        self._begun = threading.Event()
        self._users = 1
        threading.Thread(target=self._watch, name=f"skyproxy-watch-{identity[:8]}", daemon=True).start()

    # --- connections ---------------------------------------------------------------------------------------------

    def claim(self, role: str) -> bool:
        """Reserve the one connection of this role that a session may have; False if it has had it, or is over.

        Whoever has claimed one calls `release` when the connection is over.
        """
        with self._lock:
            if not self.is_open or role in self._roles:
                return False
            if role in (OPERATIONS, BULK):
                self._roles.add(role)
            self._users += 1
            return True

    def take_slot(self) -> int | None:
        """A byte of the shared memory for a new connection; None where the session has too many."""
        with self._lock:
            slot = self._slots.pop() if self._slots else None
        if slot is not None:
            self._marks[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        return slot

    def give_slot(self, slot: int) -> None:
        with self._lock:
            self._slots.add(slot)

    def is_over(self, slot: int) -> bool:
        """Whether the process has said its last word on a connection."""
        return self._marks[slot * SLOT_BYTES] == OVER

    def is_between_frames(self, slot: int, written: int) -> bool:
        """Whether no frame is cut after the first `written` bytes of what the process has sent on a connection."""
        start = slot * SLOT_BYTES
        return written in struct.unpack("QQ", self._marks[start + SLOT_BOUNDS.start : start + SLOT_BOUNDS.stop])

    def hand_over(self, descriptor: int, slot: int, hello: Hello, welcome: Welcome, received: bytes) -> None:
        """Give the process a copy of a connection: that of the operations first, whatever comes first.

        Raises:
            ChannelClosedError: it takes none any more.
        """
        if hello.role != OPERATIONS and not self._begun.wait(_FORK_SECONDS):
            raise ChannelClosedError("the session has no operations connection")
        order = {
            "order": "connection",
            "role": hello.role,
            "slot": slot,
            "hello": list(astuple(hello)),
            "welcome": list(astuple(welcome)),
            "received": received,
        }
        try:
            self._control.send(order, [descriptor], wait=False)
        finally:
            if hello.role == OPERATIONS:
                self._begun.set()

    def close_connections(self, code_name: str, reason: str) -> None:
        """Have the process say goodbye to its client."""
        with suppress(ChannelClosedError):
            self._control.send({"order": "close", "code": code_name, "reason": reason}, wait=False)

    # --- reports -------------------------------------------------------------------------------------------------

    def ask(self) -> int:
        """Ask for a report; returns the number that it will have."""
        with self._lock:
            self._asked += 1
            number = self._asked
        with suppress(ChannelClosedError):
            self._control.send({"order": "report", "number": number}, wait=False)
        return number

    def answer(self, number: int, deadline: float) -> dict[str, Any] | None:
        """The report of this number or a later one; None where it does not come before `deadline`."""
        with self._answered:
            self._answered.wait_for(
                lambda: self.ended.is_set() or (self._report is not None and self._report["report"] >= number),
                remaining(deadline),
            )
            report = self._report
        return report if report is not None and report["report"] >= number else None

    # --- the end -------------------------------------------------------------------------------------------------

    def kill(self, reason: str) -> None:
        """End the process now, whatever it does; its client is told why."""
        with self._lock:
            if self.ended.is_set():
                return
            self._why = self._why or reason
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def _watch(self) -> None:
        answers: dict[int, tuple[Channel, Callable[[], None]]] = {
            self._control.fileno(): (self._control, self._on_message)
        }
        if self._uploads is not None:
            channel, desk = self._uploads
            answers[channel.fileno()] = channel, partial(desk.answer, channel)
        poll = select.poll()
        for descriptor in (self.pidfd, *answers):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self.pidfd in ready:
                break
            for descriptor in ready:
                try:
                    answers[descriptor][1]()
                except TimeoutError:
                    continue
                except (ChannelClosedError, KeyError, TypeError, ValueError) as error:
                    poll.unregister(descriptor)
                    logger.debug("session %s: a channel of it ended: %s", self.identity[:8], error)
                    # Without its channels nobody could tell it anything; it may be ending by itself.
                    if not self._is_ending():
                        self.kill("it broke its control channel")
        self._reap()

    def _is_ending(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(_REAP_SECONDS * 1e3))

    def _on_message(self) -> None:
        message, descriptors = self._control.receive(0)
        for descriptor in descriptors:
            os.close(descriptor)
        if message.get("over") and self.is_open:
            with self._lock:
                self.is_open = False
                self.commands = int(message["commands"])
                self.idle_seconds = float(message["idle_seconds"])
            self._control.send({"order": "wake"}, wait=False)
        elif 0 < int(message["report"]) <= self._asked:
            with self._answered:
                self._report = message
                self.commands = int(message["commands"])
                self._answered.notify_all()
        else:
            raise ValueError("a message that nobody asked for")

    def _reap(self) -> None:
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        # Before the process is waited for: until then its number, which is its group's too, belongs to nobody else.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        with self._answered:
            self.ending = Ending.of(result, self._why)
            self.is_open = False
            self.ended.set()
            self._answered.notify_all()
        self._control.close()
        if self._uploads is not None:
            channel, desk = self._uploads
            channel.close()
            desk.close()
        self._on_end(self)
        self.release()

    def release(self) -> None:
        """Let go of it; with the last user go the descriptors."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self.pidfd)
            self._marks.close()


class _LentConnection:
    """A connection of a session's process, as the listener runs it."""

    def __init__(
        self,
        welcome: Welcome,
        hello: Hello,
        session: SupervisedSession,
        transport: WebSocketTransport,
        settings: Settings,
    ) -> None:
        self.welcome = welcome
        self._hello = hello
        self._session = session
        self._transport = transport
        self._settings = settings
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
        slot = session.take_slot()
        if slot is None or welcome is None:
            transport.close("too-many-sessions", "the session has too many connections")
            session.release()
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
                    session.hand_over(theirs.fileno(), slot, self._hello, welcome, received)
                self._carried = relay(
                    stream,
                    ours,
                    session.pidfd,
                    is_over=lambda: session.is_over(slot),
                    on_left=self._await_process,
                    goodbye_seconds=self._settings.close_timeout_seconds,
                )
            else:
                assert isinstance(stream, PlainStream)
                self._before = bytes_written(stream.fileno())
                session.hand_over(stream.fileno(), slot, self._hello, welcome, received)
                self._await_end(stream)
        except (ChannelClosedError, OSError) as error:
            logger.debug("a connection of session %s could not be lent: %s", session.identity[:8], error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._finish(slot)
            self._over.set()
            session.give_slot(slot)
            session.release()

    def _close(self, code_name: str, reason: str) -> None:
        """Have the process say goodbye, and wait until the connection is over, but not for ever."""
        self._session.close_connections(code_name, reason)
        if not self._over.wait(2 * self._settings.close_timeout_seconds):
            self._session.kill(reason.rstrip(".") or "its connection was to be closed, and it did not answer")

    def _await_end(self, stream: PlainStream) -> None:
        """Wait until the connection is over on both sides, or the process has ended."""
        session = self._session
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLRDHUP)
        poll.register(session.pidfd, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if session.pidfd in events or events[stream.fileno()] & ~select.POLLRDHUP:
                return
            poll.modify(stream.fileno(), 0)  # from now on: until the process has ended its side, too
            self._await_process()

    def _await_process(self) -> None:
        """The client has left: the process notices and ends its side, unless it hangs."""
        if self._hello.role == OPERATIONS and self._timer is None:
            self._timer = threading.Timer(
                self._settings.call_grace_seconds, self._session.kill, ("its client is gone, and it hangs",)
            )
            self._timer.daemon = True
            self._timer.start()

    def _finish(self, slot: int) -> None:
        session, transport = self._session, self._transport
        if not session.is_over(slot) and _has_ended(session.pidfd) and session.ended.wait(_REAP_SECONDS):
            ending = session.ending
            if ending.is_failure and session.is_between_frames(slot, self._written()):
                transport.take_back()
                transport.close("crashed", ending.for_client())
                return
        transport.retire()

    def _written(self) -> int:
        if self._carried is not None:
            return self._carried
        stream = self._transport.stream
        return bytes_written(stream.fileno()) - self._before if isinstance(stream, PlainStream) else -1


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class ProcessHost:
    """All sessions of a worker, each in a process of its own; what the listener hands connections to.

    Args:
        setup: what sessions can do.
        bounds: what each may use.
        settings: limits.
        blobs: where uploads are kept, on a shelf of `isolation.uploads`; None keeps none.
    """

    def __init__(
        self,
        setup: TemplateSetup,
        bounds: SessionBounds = SessionBounds(),
        settings: Settings = SETTINGS,
        blobs: BlobStore | None = None,
    ) -> None:
        self._setup = setup
        self._bounds = bounds
        self._settings = settings
        self._blobs = blobs
        self._template = Template(setup)
        self._forking = threading.Lock()
        self._lock = threading.Lock()
        self._sessions: dict[str, SupervisedSession] = {}
        self._starting: list[Identity] = []
        self._commands_of_the_past = 0
        self._last_use = time.monotonic()
        self._devices: list[dict[str, Any]] = []
        self._software: dict[str, str] = {}
        self._closing = False

    def start(self, stop: threading.Event | None = None) -> list[dict[str, Any]]:
        """Get ready to take sessions; the devices of this worker.

        Raises:
            ConfigurationError: sessions cannot do what was asked for.
        """
        limits.adopt_orphans()
        try:
            found = self._template.start(stop)
        except ChannelClosedError as error:
            raise ConfigurationError(f"No session can be started: {error}. See the output above.") from error
        self._devices, self._software = found["devices"], found["software"]
        return self._devices

    # --- what the listener asks for --------------------------------------------------------------------------------

    def open_session(self, hello: Hello, transport: Transport) -> _LentConnection:
        """A new session, in a new process.

        Raises:
            LimitExceededError: there are too many sessions, or none can be started now.
        """
        client = client_of(transport)
        with self._lock:
            others = [*self._starting, *(session.client for session in self._sessions.values())]
            refuse_session(client, others, self._settings)
            self._starting.append(client)
            self._last_use = time.monotonic()
        try:
            session = self._start_session(secrets.token_hex(16), client)
        finally:
            with self._lock:
                self._starting.remove(client)
        session.claim(OPERATIONS)
        audit.note(client, "session-begin", session=session.identity[:8])
        logger.info("session %s opened by %s, in process %d", session.identity[:8], hello.software, session.pid)
        return self._lent(session, hello, transport)

    def join_bulk(self, session_id: str, transport: Transport) -> _LentConnection:
        """Give a session its bulk connection.

        Raises:
            LookupError: there is no such session, or it has one already.
        """
        return self._join(session_id, transport)

    def join_functions(self, session_id: str, transport: Transport) -> _LentConnection:
        """Give a session a functions connection, in place of the one that it had.

        Raises:
            LookupError: there is no such session, or this worker runs no functions.
        """
        if not self._runs_functions(client_of(transport)):
            raise LookupError("no functions")
        return self._join(session_id, transport)

    def _join(self, session_id: str, transport: Transport) -> _LentConnection:
        assert isinstance(transport, WebSocketTransport)
        hello = transport.connection.hello
        assert hello is not None, "the listener has read it"
        with self._lock:
            session = self._sessions.get(session_id)
        # Whoever knows a session's name has not been given it by another token's client, but may have seen it.
        own = session is not None and session.client.name == client_of(transport).name
        if session is None or not own or not session.claim(hello.role):
            raise LookupError("no session of this name waits for such a connection")
        return self._lent(session, hello, transport)

    def _lent(self, session: SupervisedSession, hello: Hello, transport: Transport) -> _LentConnection:
        assert isinstance(transport, WebSocketTransport)
        offers = {"functions": int(self._runs_functions(session.client))}
        if self._blobs is not None:
            offers.update(blob_bytes=self._blobs.max_bytes, blobs=len(self._blobs))
        welcome = Welcome(0, session.identity, self._software, self._devices, offers)
        return _LentConnection(welcome, hello, session, transport, self._settings)

    def _runs_functions(self, client: Identity) -> bool:
        return self._setup.functions and client.may(FUNCTIONS)

    def activity(self) -> Mapping[str, Any]:
        """What this worker is and does, as its operator wants to know it. A session that does not answer is busy."""
        with self._lock:
            sessions = list(self._sessions.values())
            commands = self._commands_of_the_past
            idle = time.monotonic() - self._last_use
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
            "sessions": sum(session.is_open for session in sessions),
            "calls_running": calls,
            "idle_seconds": round(idle, 3),
            "commands": commands,
            "devices": [{**row, **_usage(row, used.get((row["type"], row["index"]), []))} for row in self._devices],
            "software": self._software,
        }

    # --- processes -------------------------------------------------------------------------------------------------

    def _start_session(self, identity: str, client: Identity) -> SupervisedSession:
        with self._forking:
            for last in (False, True):
                try:
                    return self._fork(identity, client)
                except (ChannelClosedError, TimeoutError, OSError) as error:
                    logger.warning("session %s could not be started: %s", identity[:8], error)
                    if last or self._closing:
                        break
                    with suppress(ChannelClosedError, ConfigurationError):
                        self._template.restart()
        raise LimitExceededError("this worker cannot start a process for another session now; see its log")

    def _fork(self, identity: str, client: Identity) -> SupervisedSession:
        with ExitStack() as theirs, ExitStack() as ours:
            control, end = Channel.pair()
            ours.callback(control.close)
            theirs.enter_context(end)
            uploads: tuple[Channel, UploadDesk] | None = None
            memory = os.memfd_create("skyproxy-marks")
            theirs.callback(os.close, memory)
            os.ftruncate(memory, SLOTS * SLOT_BYTES)
            descriptors = [end.fileno(), memory]
            if self._blobs is not None:
                channel, end = Channel.pair()
                ours.callback(channel.close)
                theirs.enter_context(end)
                descriptors.append(end.fileno())
                uploads = channel, UploadDesk(self._blobs, identity, client)
            order = {
                "session": identity,
                "supervisor": os.getpid(),
                "devices": self._devices,
                "client": client.to_plain(),
                "functions": self._runs_functions(client),
                "log_level": self._setup.log_level,
                "memory_bytes": _least(self._bounds.memory_bytes, client.bounds.memory_bytes),
                "gpu_fraction": self._bounds.gpu_fraction,
                "blob_bytes": self._blobs.max_bytes if self._blobs is not None else 0,
            }
            self._template.fork(order, descriptors)
            marks = mmap.mmap(memory, SLOTS * SLOT_BYTES)
            theirs.close()  # so that the channel ends where the process does not come up
            first, _ = control.receive(_FORK_SECONDS)
            session = SupervisedSession(identity, client, int(first["up"]), control, marks, uploads, self._forget)
            ours.pop_all()
        self._template.worked()
        with self._lock:
            self._sessions[identity] = session
        return session

    def _forget(self, session: SupervisedSession) -> None:
        ending = session.ending
        if ending.is_failure and not self._closing:
            logger.error("session %s: its process %s", session.identity[:8], ending.how)
        else:
            logger.info("session %s closed", session.identity[:8])
        with self._lock:
            self._sessions.pop(session.identity, None)
            self._commands_of_the_past += session.commands
            self._last_use = max(self._last_use, time.monotonic() - session.idle_seconds)
        audit.note(session.client, "session-end", session=session.identity[:8])
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """End what sessions that are over have started and not ended: such processes are our children now."""
        with self._forking, self._lock:  # no session's process is on its way to us
            known = {self._template.pid, *(session.pid for session in self._sessions.values())}
            for pid in set(limits.children_of_this_process()) - known:
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
        deadline = time.monotonic() + _REAP_SECONDS
        for session in sessions:
            session.ended.wait(remaining(deadline))
        with self._forking:
            self._template.end()


def _least(first: int, second: int | None) -> int:
    """The smaller of two bounds, of which 0 and None are none."""
    return min((bound for bound in (first, second) if bound), default=0)


def _usage(row: Mapping[str, Any], reported: Sequence[int]) -> dict[str, int]:
    """A device's memory in use: of the CPU that of all sessions together, of a GPU what its driver tells."""
    if row["type"] == "cpu":
        return {"used_memory_bytes": sum(reported)}
    return {"used_memory_bytes": max(reported)} if reported else {}
