"""A session over links that break: what its two ends make of every cut, and whether it outlives a worker's goodbye."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyproxy.errors import ConnectError, ProtocolError, SessionLostError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import (
    OPERATIONS,
    Ack,
    Hello,
    Message,
    Pong,
    Received,
    Reply,
    Sequence,
    Welcome,
)
from skyproxy.session import reconnecting
from skyproxy.session.reconnecting import ReconnectingBulk, ReconnectingOperations
from skyproxy.session.reconnector import Reconnector
from skyproxy.session.recorder import Recorder
from skyproxy.session.waiters import Waiter, Waiters
from skyproxy.transport.base import Transport
from skyproxy_server.lasting import LastingTransport
from skyproxy_server.named_batches import NamedBatches
from tests.session.breaking_links import EVERYTHING, LIMITS, Link, greeted

MOST_KEPT_BYTES = 600_000
LARGEST_ANSWER_BYTES = 8_000
MOST_OF_A_BATCH_BYTES = 6 * (LARGEST_ANSWER_BYTES + 1000)
GRACE_SECONDS = 600.0
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "_CONFIRM_EVERY", 8)
    monkeypatch.setattr(reconnecting, "_CONFIRM_BYTES", 2 * LARGEST_ANSWER_BYTES)


class Moment(threading.Event):
    """What pauses are waited on; none takes any time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


class Worker:
    """The worker's side of a session: its own classes, moved a step at a time in place of by its threads.

    Attributes:
        values: what it was told to add, in order.
        blocked: the thread of an answer that waits for its client, if one does.
    """

    def __init__(self, link: Link) -> None:
        self.lasting = LastingTransport(link, GRACE_SECONDS, MOST_KEPT_BYTES)
        self.link = link
        self.values: list[int] = []
        self.blocked: threading.Thread | None = None
        self.is_over = False
        self._named = NamedBatches()
        self._last = 0

    def _has_room(self) -> bool:
        """Whether the answers of a batch can be said without that this client, which is there, has confirmed too
        little: that one loses the right to come back, which is another test.
        """
        return self.link.is_broken or self.lasting.connection.kept_bytes + MOST_OF_A_BATCH_BYTES <= MOST_KEPT_BYTES

    def execute(self, count: int) -> None:
        for _ in range(count):
            if self.blocked is not None or self.is_over or not self._has_room():
                return
            try:
                message = self.lasting.recv(0)
            except TimeoutError:
                return
            except (ProtocolError, SessionLostError):
                self.is_over = True
                return
            batch = self._named.resolve(message)
            if batch is None:
                continue
            if not self.link.is_broken:
                self._run(batch.sequence, list(batch.stream))
            else:
                self._run_while_it_may(batch.sequence, list(batch.stream))

    def _run_while_it_may(self, sequence: Sequence, stream: list[Any]) -> None:
        """Without a client, the session waits where too many answers are kept."""
        thread = threading.Thread(target=self._run, args=(sequence, stream), daemon=True)
        thread.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while thread.is_alive() and self.lasting.connection.kept_bytes <= MOST_KEPT_BYTES:
            assert time.monotonic() < deadline
            thread.join(0.001)
        if self.lasting.connection.kept_bytes > MOST_KEPT_BYTES:
            self.blocked = thread
        else:
            thread.join(WAIT_SECONDS)

    def _run(self, sequence: Sequence, stream: list[Any]) -> None:
        assert sequence == self._last + 1, "a batch is executed twice, or left out"
        for at in commands.walk(stream, commands.width_table()):
            if stream[at] == commands.DO:
                self.values += stream[at + 2]
            else:
                request, _, (size,) = stream[at + 1 : at + 4]
                reply = Reply(request, [len(self.values), sum(self.values)], (memoryview(bytes(size)),))
                self.lasting.send(reply)
        self._last = sequence

    def acknowledge(self) -> None:
        is_full = self.lasting.connection.kept_bytes > MOST_KEPT_BYTES
        if self._last and self.blocked is None and not self.is_over and not (is_full and self.link.is_broken):
            self.lasting.send(Ack(Sequence(self._last)))

    def attach(self, link: Link, attempt: int, received: int) -> bool:
        taken = self.lasting.attach(link, attempt, received)
        if taken:
            self.link = link
            if self.blocked is not None:
                self.blocked.join(WAIT_SECONDS)
                assert not self.blocked.is_alive(), "an answer waits although its client is back"
                self.blocked = None
        return taken


class ResumedSession(RuleBasedStateMachine):
    """Whatever breaks where: each batch is executed once, in order, and each question has its one answer."""

    def __init__(self) -> None:
        super().__init__()
        client, link = greeted(Hello([1], OPERATIONS, "", {}, 600), lambda: Welcome(1, "s", {}, [], {}, b"x" * 32))
        self.client, self.worker = client, Worker(link)
        self.failures: list[str] = []
        reconnector = Reconnector(self._reopen, "nowhere", WAIT_SECONDS)
        reconnector._stop = Moment()
        self.operations = ReconnectingOperations(client, reconnector, LIMITS)
        self.recorder = Recorder(self.operations.send, self._unacked, LIMITS)
        self.recorder.wait_for_news = self._wait
        self.waiters = Waiters()
        self.added: list[int] = []
        self.questions: list[tuple[Waiter, list[int]]] = []

    def _unacked(self) -> tuple[int, int]:
        connection = self.operations.connection
        return connection.last_sequence - connection.acked_sequence, connection.unacked_bytes

    def _reopen(self, role: str, received: int) -> tuple[Transport, Welcome]:
        """What the listener does with a client that comes back, one step of which may fail."""
        failure = self.failures.pop() if self.failures else ""
        if failure == "unreachable":
            raise ConnectError("no answer")
        try:
            attempt, batches = self.worker.lasting.prepare()
        except LookupError as error:
            refusal = ConnectError(f"no such session: {error}")
            refusal.code_name = "no-session"
            raise refusal from error
        if failure == "lost before the welcome":
            raise ConnectError("the connection was closed")
        welcome = Welcome(1, "s", {}, [], {}, b"", batches)
        hello = Hello([1], OPERATIONS, "s", {}, 600, self.worker.lasting.secret, received)
        client, link = greeted(hello, lambda: welcome)
        if failure == "another was faster":
            attempt -= 1
        if not self.worker.attach(link, attempt, received):
            raise ConnectError("the connection was closed")
        if failure == "lost behind the welcome":
            client.cut()
            raise ConnectError("the connection was closed")
        self.client = client
        return client, welcome

    def _wait(self, waiter: Waiter) -> None:
        for _ in range(500):
            if waiter.done:
                return
            self._let_all_through()
        raise AssertionError("the recorder waits for a worker that has nothing to do")

    def _let_all_through(self) -> None:
        for wire in (self.client._outgoing, self.client._incoming):
            wire.let_through(EVERYTHING)
        self.worker.execute(1000)
        self.worker.acknowledge()
        for wire in (self.client._outgoing, self.client._incoming):
            wire.let_through(EVERYTHING)
        self._read()

    def _read(self) -> None:
        try:
            while True:
                self._take(self.operations.recv(0))
        except TimeoutError:
            pass

    def _take(self, message: Message) -> None:
        if isinstance(message, Ack):
            self.recorder.ack(message.sequence)
        elif isinstance(message, Reply):
            waiter = self.waiters.take(message.request)
            assert waiter is not None, "an answer came twice"
            waiter.set(message.value)

    def _record(self, *command: object) -> None:
        self.recorder.append(*command)

    # --- what the program does ---------------------------------------------------------------------------------------

    @rule(times=st.integers(1, 6), number=st.integers(0, 3))
    def add(self, times: int, number: int) -> None:
        for _ in range(times):
            self.added.append(number)
            self._record(commands.DO, "add", [number])

    @rule(times=st.integers(1, 4), size=st.sampled_from([0, 10, 1000, LARGEST_ANSWER_BYTES]))
    def ask(self, times: int, size: int) -> None:
        for _ in range(times):
            request, waiter = self.waiters.open()
            self.questions.append((waiter, [len(self.added), sum(self.added)]))
            self._record(commands.CALL, request, "total", [size])

    @rule()
    def flush(self) -> None:
        self.recorder.flush()

    @rule()
    def read(self) -> None:
        self._read()

    # --- what the worker does ----------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def execute(self, count: int) -> None:
        self.worker.execute(count)

    @rule()
    def acknowledge(self) -> None:
        self.worker.acknowledge()

    # --- what the network does; it stalls by itself ------------------------------------------------------------------

    @rule(up=st.integers(0, 300), down=st.one_of(st.integers(0, 300), st.just(EVERYTHING)))
    def let_through(self, up: int, down: int) -> None:
        self.client._outgoing.let_through(up)
        self.client._incoming.let_through(down)

    @rule()
    def let_all_through(self) -> None:
        self._let_all_through()

    @rule(up=st.booleans(), down=st.booleans())
    def cut(self, up: bool, down: bool) -> None:
        """The link breaks, in the middle of a frame or between two; what had arrived may still be read, or not."""
        self.client._outgoing.cut(loses_what_arrived=up)
        self.client._incoming.cut(loses_what_arrived=down)

    @rule(count=st.integers(1, 6), down=st.integers(0, 300))
    def cut_while_answers_come(self, count: int, down: int) -> None:
        self.flush()
        self.client._outgoing.let_through(EVERYTHING)
        self.worker.execute(count)
        self.client._incoming.let_through(down)
        self.cut(False, False)

    @precondition(lambda self: len(self.failures) < 3)
    @rule(
        failure=st.sampled_from(
            ["unreachable", "lost before the welcome", "lost behind the welcome", "another was faster"]
        )
    )
    def fail_to_come_back(self, failure: str) -> None:
        self.failures.append(failure)

    @invariant()
    def nothing_is_done_twice_or_out_of_order(self) -> None:
        assert self.worker.values == self.added[: len(self.worker.values)]
        assert all(waiter.value == expected for waiter, expected in self.questions if waiter.done)

    @invariant()
    def the_bounds_are_kept(self) -> None:
        assert self._unacked()[0] <= LIMITS.max_in_flight_batches + 1
        kept = self.worker.lasting.connection.kept_bytes
        assert kept <= MOST_KEPT_BYTES + MOST_OF_A_BATCH_BYTES

    def teardown(self) -> None:
        """Over a network that holds, all of it arrives, and nothing is kept any longer."""
        self.failures.clear()
        self.recorder.flush()
        for _ in range(500):
            self._let_all_through()
            if self.worker.values == self.added and all(waiter.done for waiter, _ in self.questions):
                break
        assert self.worker.values == self.added
        assert [waiter.value for waiter, _ in self.questions] == [expected for _, expected in self.questions]
        self._let_all_through()
        assert self._unacked() == (0, 0)
        assert not self.recorder.sent_batches()
        self.client.post(Received(self.client.connection.answers))
        self._let_all_through()
        assert self.worker.lasting.connection.kept_bytes == 0
        assert len(self.waiters) == 0


class ResumedOverAFoolishProxy(ResumedSession):
    """The same, where something in between says a message twice, cuts one short, or exchanges two: what is executed is
    executed once all the same, and no answer is taken for another's. Whichever end sees a rule broken ends the session.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def _read(self) -> None:
        try:
            super()._read()
        except (ProtocolError, SessionLostError) as error:
            self._end(error)

    def _take(self, message: Message) -> None:
        if not isinstance(message, Reply) or message.request in self.waiters.open_numbers():
            super()._take(message)

    def _end(self, error: Exception) -> None:
        self.error = error
        self.recorder.end(SessionLostError(str(error)))

    def _record(self, *command: object) -> None:
        try:
            super()._record(*command)
        except SessionLostError as error:
            self._end(error)

    @rule()
    def flush(self) -> None:
        try:
            self.recorder.flush()
        except SessionLostError as error:
            self._end(error)

    @rule(is_up=st.booleans(), change=st.sampled_from(["twice", "short", "exchanged"]), count=st.integers(1, 40))
    def spoil(self, is_up: bool, change: str, count: int) -> None:
        wire = self.client._outgoing if is_up else self.client._incoming
        wire.let_through(EVERYTHING)
        first = wire.take()
        if first is None:
            return
        second = wire.take()
        frames = {"twice": [first, first, second], "short": [first[:-count], second], "exchanged": [second, first]}
        for frame in frames[change]:
            if frame is not None:
                wire.put(frame)
        rest, wire.arrived = bytes(wire.arrived), bytearray()
        wire.let_through(EVERYTHING)
        wire.arrived += rest

    def teardown(self) -> None:
        self.failures.clear()
        for _ in range(3):
            self.flush()
            self._let_all_through()
        self.nothing_is_done_twice_or_out_of_order()


TestResumedSession = ResumedSession.TestCase
TestResumedOverAFoolishProxy = ResumedOverAFoolishProxy.TestCase
TestResumedSession.settings = TestResumedOverAFoolishProxy.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_connection_that_comes_back_to_a_session_which_another_worker_goes_on_with_is_cut() -> None:
    """The worker before would end the session on it, a moment later, and so this program's."""
    fresh = Mock(spec=Transport)

    def reopen(role: str, received: int) -> tuple[Transport, Welcome]:
        reconnector.recoveries += 1  # the thread of the operations, meanwhile
        return fresh, Mock()

    broken = Mock(spec=Transport, was_closed=False, bytes_sent=1, bytes_received=1)
    broken.connection = Mock(goodbye=None, answers=0)
    broken.recv.side_effect = SessionLostError("cut")
    reconnector = Reconnector(reopen, "there", 1.0)
    bulk = ReconnectingBulk(broken, reconnector)
    fresh.recv.return_value = Pong(0)
    assert bulk.recv() == Pong(0)
    fresh.cut.assert_called_once()


def test_what_a_connection_ended_with_holds_nothing_of_those_who_used_it() -> None:
    for problem in (SessionLostError("gone"), ProtocolError("nonsense")):
        broken = Mock(spec=Transport, was_closed=False, bytes_sent=1, bytes_received=1)
        broken.connection = Mock(goodbye=None, answers=0)
        broken.recv.side_effect = SessionLostError("cut")
        bulk = ReconnectingBulk(broken, Reconnector(Mock(side_effect=problem), "there", 1.0))
        with pytest.raises(SessionLostError):
            bulk.recv()
        assert bulk._over is not None
        assert bulk._over.__traceback__ is None
