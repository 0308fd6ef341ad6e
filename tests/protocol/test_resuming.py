"""A session that goes on over connections that break: whatever is lost, everything arrives once and in order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skyproxy.errors import ProtocolError
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import (
    CLIENT,
    OPERATIONS,
    WORKER,
    Ack,
    Batch,
    Goodbye,
    Hello,
    Message,
    Received,
    Reply,
    RequestId,
    Sequence,
    Welcome,
)

SECRET = b"s" * 32


def pair(first: bool = True, received: int = 0, answers: int = 0) -> tuple[Connection, Connection]:
    """Both ends of a connection that is open: the first of its session, or a later one."""
    client, worker = Connection(CLIENT), Connection(WORKER)
    hello = Hello([1], OPERATIONS, "", {}, 600) if first else Hello([1], OPERATIONS, "s", {}, 600, SECRET, answers)
    welcome = Welcome(1, "s", {}, [], {}, SECRET if first else b"", received)
    for act in (client.on_send, worker.on_receive):
        act(hello)
    worker.on_send(welcome)
    client.on_receive(welcome)
    if first:
        worker.keep_answers()
    return client, worker


class BrokenSession(RuleBasedStateMachine):
    """A client and a worker on a network that loses whatever is under way when it breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.worker = pair()
        self.up: list[Message] = []
        self.down: list[Message] = []
        self.executed: list[int] = []
        self.heard: list[int] = []
        self.sent = self.asked = 0
        self.is_down = False

    @rule(size=st.integers(0, 100))
    def record(self, size: int) -> None:
        """Send a batch; while the connection is down it is kept."""
        self.sent += 1
        batch = Batch(Sequence(self.sent), [self.sent])
        self.client.on_send(batch, size)
        if not self.is_down:
            self.up.append(batch)

    @rule()
    def execute(self) -> None:
        """The worker takes what came next, and answers a batch."""
        if self.up:
            message = self.up.pop(0)
            self.worker.on_receive(message)
            if isinstance(message, Batch):
                self.executed.append(message.sequence)
                self.asked += 1
                reply = Reply(RequestId(self.asked), self.asked, (memoryview(bytearray(b"x")),))
                self.answer(reply)

    def answer(self, message: Message) -> None:
        self.worker.on_send(message, 10)
        if not self.is_down:
            self.down.append(message)

    @rule()
    def acknowledge(self) -> None:
        """The worker says what it has executed."""
        self.answer(Ack(Sequence(len(self.executed))))

    @rule()
    def listen(self) -> None:
        """The client takes what came next."""
        if self.down:
            message = self.down.pop(0)
            self.client.on_receive(message)
            if isinstance(message, Reply):
                self.heard.append(message.request)

    @rule()
    def confirm(self) -> None:
        """The client says which answers it has."""
        message = Received(self.client.answers)
        self.client.on_send(message)
        if not self.is_down:
            self.up.append(message)

    @rule()
    def break_off(self) -> None:
        """What is under way is lost."""
        self.is_down = True
        self.up, self.down = [], []

    @rule()
    def come_back(self) -> None:
        """Another connection, over which the lost is said again."""
        self.break_off()
        client, worker = pair(False, self.worker.last_sequence, self.client.answers)
        self.up = list(client.continue_from(self.client, self.worker.last_sequence))
        self.down = list(worker.continue_from(self.worker, self.client.answers))
        self.client, self.worker, self.is_down = client, worker, False

    @invariant()
    def nothing_is_done_twice_or_out_of_order(self) -> None:
        assert self.executed == list(range(1, len(self.executed) + 1))
        assert self.heard == list(range(1, len(self.heard) + 1))
        assert self.client.unacked_bytes >= 0
        assert self.worker.kept_bytes <= 10 * self.asked

    def teardown(self) -> None:
        """On a network that holds, all of it arrives."""
        self.come_back()
        while self.up or self.down:
            self.execute()
            self.listen()
        assert len(self.executed) == self.sent
        assert self.heard == list(range(1, self.sent + 1))
        self.acknowledge()
        self.confirm()
        self.listen()
        self.execute()
        assert self.client.unacked_bytes == 0
        assert self.worker.kept_bytes == 0


TestBrokenSession = BrokenSession.TestCase
TestBrokenSession.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def some_traffic() -> tuple[Connection, Connection]:
    """A session in which three batches and three answers went, and one of each is confirmed."""
    client, worker = pair()
    for number in (1, 2, 3):
        batch, reply = Batch(Sequence(number), []), Reply(RequestId(number), None)
        client.on_send(batch, 10)
        worker.on_receive(batch, 10)
        worker.on_send(reply, 10)
        client.on_receive(reply, 10)
    worker.on_send(Ack(Sequence(1)))
    client.on_receive(Ack(Sequence(1)))
    client.on_send(Received(1))
    worker.on_receive(Received(1))
    return client, worker


@pytest.mark.parametrize("received", [-1, 0, 4, 1 << 60])
def test_a_peer_that_has_what_was_never_sent_or_less_than_it_told_is_refused(received: int) -> None:
    for before, fresh in zip(some_traffic(), pair(False), strict=True):
        with pytest.raises(ProtocolError, match="continues after"):
            fresh.continue_from(before, received)


def test_what_the_peer_has_is_not_said_again() -> None:
    before = some_traffic()
    fresh = pair(False)
    assert [m.sequence for m in fresh[0].continue_from(before[0], 2)] == [3]  # type: ignore[attr-defined]
    assert [m.request for m in fresh[1].continue_from(before[1], 1)] == [2, 3]  # type: ignore[attr-defined]
    assert (fresh[0].last_sequence, fresh[0].acked_sequence, fresh[1].kept_bytes) == (3, 1, 20)


def test_an_ended_session_is_not_taken_up() -> None:
    before, fresh = some_traffic()[0], pair(False)[0]
    before.on_send(Goodbye("done", ""))
    with pytest.raises(ProtocolError, match="never ended"):
        fresh.continue_from(before, 3)


def test_a_kept_answer_has_memory_of_its_own() -> None:
    _, worker = pair()
    memory = bytearray(b"before")
    reply = Reply(RequestId(1), None, (memoryview(memory),))
    worker.on_send(reply)
    assert worker.last_answer is reply
    memory[:] = b"after!"
    (kept,) = pair(False)[1].continue_from(worker, 0)
    assert [bytes(item) for item in kept.buffers] == [b"before"]  # type: ignore[attr-defined]


def test_an_answer_is_kept_only_where_somebody_may_come_back() -> None:
    _, worker = pair()
    worker.drop_answers()
    for number in range(5):
        worker.on_send(Reply(RequestId(number), None), 10)
    assert (worker.answers, worker.kept_bytes) == (5, 0)


@pytest.mark.parametrize("count", [-1, 0, 4])
def test_a_confirmation_of_what_was_not_said_is_refused(count: int) -> None:
    _, worker = some_traffic()
    with pytest.raises(ProtocolError, match="Received"):
        worker.on_receive(Received(count))


@pytest.mark.parametrize(
    "change",
    [{"secret": b""}, {"session": ""}, {"secret": b"s" * 65}, {"received": -1}, {"grace_seconds": -1}],
    ids=str,
)
def test_a_hello_that_cannot_be_meant_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"session": "s", "grace_seconds": 600, "secret": SECRET, "received": 0, **change}
    with pytest.raises(ProtocolError, match="Hello"):
        Connection(WORKER).on_receive(Hello([1], OPERATIONS, software={}, **fields))


def test_no_secret_is_in_what_a_message_prints() -> None:
    secret = random.Random(0).randbytes(32)
    for message in (Hello([1], OPERATIONS, "s", {}, 600, secret), Welcome(1, "s", {}, [], {}, secret)):
        assert repr(secret)[2:-1] not in repr(message)
