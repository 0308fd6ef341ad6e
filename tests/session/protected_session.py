"""A protected session in memory, with workers that keep what they were given and a volume that outlives them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from skyproxy.errors import RemoteError, SessionLostError
from skyproxy.protocol import commands
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import (
    CLIENT,
    OPERATIONS,
    Ack,
    Batch,
    Failure,
    Hello,
    Message,
    Reply,
    RequestId,
    Sequence,
    Welcome,
)
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.protection import Protection
from skyproxy.session.reconnecting import ReconnectingOperations
from skyproxy.session.reconnector import Reconnector
from skyproxy.session.recorder import Recorder
from skyproxy.session.restoring import NewSession
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy_server.named_batches import NamedBatches

KEPT_SNAPSHOTS = 2
WELCOME = Welcome(1, "a" * 32, {}, [], {"snapshots": 1}, b"")


class Volume:
    """Snapshots that outlive workers."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[int, list[int]]] = {}

    def write(self, sequence: int, values: list[int]) -> str:
        identity = f"{sequence}-{len(values)}"
        self.kept.pop(identity, None)
        self.kept[identity] = (sequence, list(values))
        while len(self.kept) > KEPT_SNAPSHOTS:
            self.kept.pop(next(iter(self.kept)))
        return identity


class Worker:
    """Executes batches in order: its state is what was added, in order."""

    def __init__(self, volume: Volume) -> None:
        self.values: list[int] = []
        self.inbox: deque[Message] = deque()
        self.answers: deque[Message] = deque()
        self.saving: list[tuple[int, int, list[int]]] = []
        self.refuses = False
        self.is_dead = False
        self._volume = volume
        self._named = NamedBatches()
        self._last = 0

    def execute(self, count: int) -> None:
        for _ in range(min(count, len(self.inbox))):
            batch = self._named.resolve(self.inbox.popleft())
            assert batch is not None
            self._last = batch.sequence
            self._run(list(batch.stream))

    def _run(self, stream: list[Any]) -> None:
        for at in commands.walk(stream, commands.width_table()):
            if stream[at] == commands.DO:
                self.values += stream[at + 2]
            elif stream[at] == commands.CALL:
                self._call(*stream[at + 1 : at + 4])

    def _call(self, request: RequestId, name: str, arguments: list[Any]) -> None:
        if name == "total":
            self.answers.append(Reply(request, [len(self.values), sum(self.values)]))
        elif name == "save_snapshot" and self.refuses:
            self.answers.append(Failure(request, {"type": "SnapshotNotNowError", "message": "not now"}))
        elif name == "save_snapshot":
            self.saving.append((request, self._last, list(self.values)))
        elif name == "list_snapshots":
            rows = [{"snapshot": each, "sequence": sequence} for each, (sequence, _) in self._volume.kept.items()]
            self.answers.append(Reply(request, rows))
        elif name == "load_snapshot":
            wanted = arguments[1]
            sequence, values = self._volume.kept[wanted]
            self.values, self._last = list(values), 0  # the batch that asked is never acknowledged
            self.answers.append(Reply(request, {"snapshot": wanted, "sequence": sequence, "bytes": 0}))

    def make_durable(self) -> None:
        while self.saving:
            request, sequence, values = self.saving.pop(0)
            identity = self._volume.write(sequence, values)
            saved = {"snapshot": identity, "sequence": sequence, "bytes": 0, "written_bytes": 0}
            self.answers.append(Reply(RequestId(request), saved))

    def acknowledge(self) -> None:
        if self._last:
            self.answers.append(Ack(Sequence(self._last)))


class Link(Transport):
    """The client's end of a connection to such a worker; it carries what the test lets through."""

    was_closed = is_cut = False

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._connection = Connection(CLIENT)
        self._connection.on_send(Hello([1], OPERATIONS, "", {}))
        self._connection.on_receive(WELCOME)

    @property
    def bytes_sent(self) -> int:
        return 0

    @property
    def bytes_received(self) -> int:
        return 0

    @property
    def connection(self) -> Connection:
        return self._connection

    def send(self, message: Message) -> None:
        if self.worker.is_dead:
            raise SessionLostError("the connection was closed")
        step = self._connection.prepare_send(message, 10)
        if step is not None:
            step[0](step[1])
            self.worker.inbox.append(message)
        if isinstance(message, Batch) and message.stream[2:3] in (["list_snapshots"], ["load_snapshot"]):
            self.worker.execute(1)

    def repeat(self, message: Message) -> None:
        self.worker.inbox.append(message)

    def recv(self, timeout_seconds: float | None = None) -> Message:
        if self.worker.answers:
            message = self.worker.answers.popleft()
            self._connection.on_receive(message)
            return message
        if self.worker.is_dead or self.is_cut:
            raise SessionLostError("the connection was closed")
        raise TimeoutError

    def cut(self) -> bool:
        self.is_cut = True
        return True

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True


class ProtectedSession(RuleBasedStateMachine):
    """Whatever happens: what the program asked for was done once, in order, and each question has its one answer."""

    @initialize()
    def begin(self) -> None:
        self.volume = Volume()
        self.workers = [Worker(self.volume)]
        self.added: list[int] = []
        self.questions: list[tuple[Waiter, list[int]]] = []
        self.waiters = Waiters()
        reconnector = Reconnector(self._refuse, "nowhere", 0, resumes=False)
        self.operations = ReconnectingOperations(Link(self.workers[0]), reconnector, Settings())
        self.recorder = Recorder(self._send, lambda: (0, 0), Settings())
        self.log = BatchLog(1 << 20, 1 << 20)
        self.protection = Protection(self.recorder, self.waiters, self.log, "name", self._open_anew, every_seconds=1e9)
        self.protection.cut_operations_if = self.operations.cut_if
        assert self.protection.try_snapshot()
        self._let_all_through()
        reconnector.recovery = self.protection

    def _refuse(self, role: str, received: int) -> tuple[Transport, Welcome]:
        raise AssertionError("the session is not resumed")

    def _open_anew(self, reason: str, stop: threading.Event) -> NewSession:
        self.workers.append(Worker(self.volume))
        return NewSession(Link(self.workers[-1]), Link(self.workers[-1]), WELCOME)

    def note_rest(self) -> None:
        """Be the bulk connection and the uploads: another worker has what it needs of them."""
        handover = self.protection._handover
        assert handover is not None
        handover.note_part()
        assert not handover.is_complete
        handover.note_part()

    def _send(self, batch: Any) -> None:
        self.protection.note(batch)
        self.operations.send(batch)

    @property
    def worker(self) -> Worker:
        return self.workers[-1]

    def _read(self) -> None:
        try:
            while True:
                message = self.operations.recv(0)
                if isinstance(message, Ack):
                    self.recorder.ack(message.sequence)
                elif isinstance(message, Reply):
                    waiter = self.waiters.take(message.request)
                    if waiter is not None:
                        assert not waiter.done
                        waiter.set(message.value)
                elif isinstance(message, Failure):
                    waiter = self.waiters.take(message.request)
                    if waiter is not None:
                        waiter.fail(RemoteError(message.error["message"]))
        except TimeoutError:
            self.protection.tick()

    def _let_all_through(self) -> None:
        while True:
            self._read()
            if not (self.worker.inbox or self.worker.saving or self.worker.answers):
                return
            self.worker.execute(1000)
            self.worker.make_durable()
            self.worker.acknowledge()

    @rule(times=strategies.integers(1, 12), number=strategies.integers(0, 3))
    def add(self, times: int, number: int) -> None:
        for _ in range(times):
            self.recorder.emit((commands.DO, "add", [number]))
            self.added.append(number)

    @rule()
    def flush(self) -> None:
        self.recorder.flush()

    @rule()
    def ask(self) -> None:
        request, waiter = self.waiters.open()
        self.recorder.emit((commands.CALL, request, "total", []))
        self.questions.append((waiter, [len(self.added), sum(self.added)]))
        self.recorder.flush()

    @rule(count=strategies.integers(1, 6))
    def execute(self, count: int) -> None:
        self.worker.execute(count)

    @rule()
    def acknowledge(self) -> None:
        self.worker.acknowledge()

    @rule()
    def read(self) -> None:
        self._read()

    @rule(refuses=strategies.booleans())
    def snapshot(self, refuses: bool) -> None:
        self.worker.refuses = refuses
        self.protection.try_snapshot()

    @rule()
    def write(self) -> None:
        self.worker.make_durable()

    @rule(lost=strategies.integers(0, 5), is_written=strategies.booleans())
    def kill(self, lost: int, is_written: bool) -> None:
        """The worker ends; its last answers may not have left."""
        if is_written:
            self.worker.make_durable()
        self.worker.is_dead = True
        for _ in range(min(lost, len(self.worker.answers))):
            self.worker.answers.pop()
        self.protection._progress.begin_anew()  # that one gives up in the end is another test
        self._read()

    def teardown(self) -> None:
        if not hasattr(self, "recorder"):
            return
        self.recorder.flush()
        self._let_all_through()
        assert self.worker.values == self.added
        assert [waiter.value for waiter, _ in self.questions] == [expected for _, expected in self.questions]
        assert all(waiter.done for waiter, _ in self.questions)
        assert self.protection._pending is None  # else nobody would ask for another snapshot


def fill(session: ProtectedSession, share: float) -> None:
    """Record until the log has reached a part of its bound."""
    while session.log.byte_count < share * session.log.max_bytes:
        session.recorder.append(commands.DO, "add", [1])
        session.added.append(1)
        session.recorder.flush()


def through(session: ProtectedSession, until: threading.Event) -> None:
    """Be the worker and the thread that reads, until something has happened."""
    deadline = time.monotonic() + 60
    while not until.wait(0.001):
        session._let_all_through()
        assert time.monotonic() < deadline
