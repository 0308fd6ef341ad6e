"""A protected session against a model: arbitrary batches, answers, snapshots and ends of workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from skyproxy.errors import ConnectError, RemoteError, SessionLostError
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
    Warned,
    Welcome,
)
from skyproxy.session import worker_warnings
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.protection import Protection
from skyproxy.session.reconnecting import ReconnectingOperations, Reconnector
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
            self.answers.append(Reply(RequestId(request), {"snapshot": identity, "sequence": sequence}))

    def acknowledge(self) -> None:
        if self._last:
            self.answers.append(Ack(Sequence(self._last)))


class Link(Transport):
    """The client's end of a connection to such a worker; it carries what the test lets through."""

    was_closed = False

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
        if self.worker.is_dead:
            raise SessionLostError("the connection was closed")
        raise TimeoutError

    def cut(self) -> bool:
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
        self.failed_openings = 0
        reconnector = Reconnector(self._refuse, "nowhere", 0, resumes=False)
        self.operations = ReconnectingOperations(Link(self.workers[0]), reconnector, Settings())
        self.recorder = Recorder(self._send, lambda: (0, 0), Settings())
        self.log = BatchLog(1 << 20, 1 << 20)
        self.protection = Protection(self.recorder, self.waiters, self.log, "name", self._open_anew, every_seconds=1e9)
        assert self.protection.try_snapshot()
        self._let_all_through()
        reconnector.recovery = self.protection

    def _refuse(self, role: str, received: int) -> tuple[Transport, Welcome]:
        raise AssertionError("the session is not resumed")

    def _open_anew(self, reason: str, stop: threading.Event) -> NewSession:
        self.workers.append(Worker(self.volume))
        return NewSession(Link(self.workers[-1]), Link(self.workers[-1]), WELCOME)

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


TestProtectedSession = ProtectedSession.TestCase
TestProtectedSession.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_operations_that_end_one_worker_after_the_other_end_the_session() -> None:
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    session.recorder.append(commands.DO, "add", [1])
    session.recorder.flush()
    with pytest.raises(SessionLostError, match="over the same operations"):
        for _ in range(20):
            session.worker.is_dead = True
            session._read()
    assert len(session.workers) < 10


# --- the bound of the log --------------------------------------------------------------------------------------------


@pytest.fixture
def bounded() -> ProtectedSession:
    """A session whose log holds little, and whose recorder asks for snapshots as a real one does."""
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    session.log.max_bytes = 10_000
    session.recorder.on_sent = session.protection.on_sent
    return session


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


def test_at_three_quarters_of_the_bound_a_snapshot_is_asked_for(bounded: ProtectedSession) -> None:
    fill(bounded, 0.7)
    bounded._read()
    assert bounded.protection._pending is None
    fill(bounded, 0.75)
    bounded.recorder.append(commands.DO, "add", [1])
    bounded.added.append(1)
    bounded.recorder.flush()
    assert bounded.protection._pending is not None
    bounded._let_all_through()
    assert bounded.log.byte_count < 0.1 * bounded.log.max_bytes
    assert bounded.protection.snapshots == 2
    bounded.kill(0, True)
    bounded.teardown()


def test_at_the_bound_recording_waits_for_the_snapshot(bounded: ProtectedSession) -> None:
    over = threading.Event()
    sizes: list[int] = []

    def record() -> None:
        for _ in range(200):
            bounded.recorder.append(commands.DO, "add", [1])
            bounded.added.append(1)
            bounded.recorder.flush()
            sizes.append(bounded.log.byte_count)
        over.set()

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    through(bounded, over)
    thread.join()
    assert max(sizes) <= bounded.log.max_bytes
    assert bounded.protection.snapshots > 2
    bounded.kill(0, True)
    bounded.teardown()


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_where_no_snapshot_can_be_taken_the_session_goes_on_unprotected_and_says_so(
    bounded: ProtectedSession, capfd: pytest.CaptureFixture[str], hangs: bool
) -> None:
    bounded.worker.refuses = not hangs
    over = threading.Event()
    if hangs:
        bounded.protection.stall_seconds = 0.01
        bounded.worker.make_durable = lambda: None  # type: ignore[method-assign]

    def record() -> None:
        fill(bounded, 0.75)
        for _ in range(40):
            bounded.recorder.append(commands.DO, "add", [1])
            bounded.added.append(1)
            bounded.recorder.flush()
        over.set()

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not over.wait(0.001):
        bounded._read()
        bounded.worker.execute(1000)
        assert time.monotonic() < deadline
    thread.join()
    assert "is not protected until the next snapshot" in capfd.readouterr().err
    bounded.worker.refuses = False
    bounded.worker.__dict__.pop("make_durable", None)
    bounded._let_all_through()
    bounded.protection._retry_at = 0.0
    bounded.protection.tick()
    bounded._let_all_through()
    assert bounded.log.starts()
    bounded.kill(0, True)  # protected again
    bounded.teardown()


def test_an_upload_that_is_larger_than_the_log_may_be_is_mended_by_a_snapshot(bounded: ProtectedSession) -> None:
    assert bounded.protection.keep_upload(1, memoryview(bytes(10_001))) is None
    bounded.recorder.append(commands.DO, "add", [1])
    bounded.added.append(1)
    bounded.protection.note_upload(1, None)
    start = bounded.log.starts()[0]
    hole = bounded.log.hole_after(start - 1)
    assert hole is not None
    assert "SKYPROXY_MAX_LOG_BYTES" in hole.reason
    bounded.recorder.flush()
    bounded._let_all_through()
    assert bounded.protection.snapshots == 2
    assert bounded.log.hole_after(bounded.log.starts()[0]) is None


# --- what is told once -----------------------------------------------------------------------------------------------


def test_a_warning_that_comes_again_is_no_news(bounded: ProtectedSession) -> None:
    told = bounded.protection.told
    place: dict[str, int] = {"sequence": 7, "position": 3}
    first = Warned("UserWarning", "careful", place)
    assert [told.is_news(first), told.is_news(first)] == [True, False]
    others = [
        Warned("UserWarning", "careful", {**place, "sequence": 8}),
        Warned("UserWarning", "careful", {**place, "graph": 1}),
        Warned("UserWarning", "very careful", place),
        Warned("UserWarning", "careful", None),  # type: ignore[arg-type]  # a worker may send anything
    ]
    assert all(map(told.is_news, others))
    for number in range(worker_warnings._TOLD_WARNINGS + 1):
        told.is_news(Warned("UserWarning", "careful", {"sequence": number, "position": 0}))
    assert len(told._told) <= worker_warnings._TOLD_WARNINGS


# --- a worker that does not answer -----------------------------------------------------------------------------------


def test_another_worker_goes_on_for_one_that_does_not_answer_and_does_not_refuse(bounded: ProtectedSession) -> None:
    attempts: list[str] = []

    def silence(role: str, received: int) -> tuple[Transport, Welcome]:
        attempts.append(role)
        raise ConnectError("no answer within 10 s")

    reconnector = bounded.operations._reconnector
    reconnector._reopen, reconnector.patience_seconds, reconnector.resumes = silence, 1e9, True
    bounded.protection.patience_seconds = 0.0
    bounded.recorder.append(commands.DO, "add", [1])
    bounded.added.append(1)
    bounded.recorder.flush()
    bounded.kill(0, True)
    reconnector.resumes = False
    assert (attempts, len(bounded.workers)) == ([OPERATIONS], 2)
    bounded.teardown()


# --- an end while another worker takes over --------------------------------------------------------------------------


def test_who_ends_the_protection_waits_for_a_worker_that_is_taking_over(bounded: ProtectedSession) -> None:
    protection, opened, goes_on = bounded.protection, threading.Event(), threading.Event()
    open_anew, settled = protection._open_anew, threading.Event()

    def slow(reason: str, stop: threading.Event) -> NewSession:
        opened.set()
        assert goes_on.wait(60)
        return open_anew(reason, stop)

    protection._open_anew = slow
    protection.wait_until_settled()  # at once: nothing happens

    def wait() -> None:
        protection.wait_until_settled()
        settled.set()

    bounded.worker.is_dead = True
    reading = threading.Thread(target=bounded._read, daemon=True)
    reading.start()
    assert opened.wait(60)
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    goes_on.set()
    reading.join(60)
    assert not settled.is_set()  # the bulk connection and the uploads are still missing
    protection.note_part()
    assert not settled.is_set()
    protection.note_part()
    assert settled.wait(60)
    waiting.join()
    bounded.teardown()
