"""The operations connection of a session that may be replaced, on transports in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import (
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
from skyproxy.transport.memory import MemoryTransport, memory_transport_pair
from skyproxy_server.lasting import LastingTransport

SOON_SECONDS = 20


def link(session: LastingTransport | None = None, received: int = 0) -> tuple[MemoryTransport, MemoryTransport]:
    """A client's and a worker's end, greeted: of a new session, or of one that is taken up."""
    client, worker = memory_transport_pair(handshake=False)
    secret = session.secret if session is not None else b""
    client.send(Hello([1], OPERATIONS, "s" if secret else "", {}, 600, secret, received))
    worker.recv(SOON_SECONDS)
    worker.send(Welcome(1, "s", {}, [], {}, b"" if secret else b"secret"))
    client.recv(SOON_SECONDS)
    return client, worker


def reply(number: int, size: int = 1) -> Reply:
    return Reply(RequestId(number), None, (b"x" * size,))


class Kept:
    """A session that is kept for long, and its client's end."""

    def __init__(self, grace_seconds: float = 600.0, max_kept_bytes: int = 1 << 20) -> None:
        self.client, self.worker = link()
        self.detached = threading.Event()
        self.session = LastingTransport(self.worker, grace_seconds, max_kept_bytes, self.detached.set)
        self.threads: list[threading.Thread] = []

    def later(self, body: object) -> threading.Thread:
        thread = threading.Thread(target=body, daemon=True)  # type: ignore[arg-type]
        self.threads.append(thread)
        thread.start()
        return thread

    def come_back(self, received: int) -> MemoryTransport:
        """The client connects again: its new end."""
        client, worker = link(self.session, received)
        attempt, self.has = self.session.prepare()
        assert self.session.attach(worker, attempt, received)
        return client

    def close(self) -> None:
        self.session.close()
        for thread in self.threads:
            thread.join(SOON_SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.close()


def numbers(client: MemoryTransport, count: int) -> list[int]:
    """The requests of so many replies that come next."""
    got: list[Message] = [client.recv(SOON_SECONDS) for _ in range(count)]
    assert all(isinstance(message, Reply) for message in got)
    return [message.request for message in got]  # type: ignore[attr-defined]


def test_answers_that_were_on_their_way_come_on_the_next_connection(kept: Kept) -> None:
    for number in (1, 2, 3):
        kept.session.send(reply(number))
    assert numbers(kept.client, 1) == [1]
    kept.client.cut()
    kept.session.send(reply(4))
    assert kept.detached.is_set()
    client = kept.come_back(received=1)
    assert numbers(client, 3) == [2, 3, 4]
    kept.session.send(reply(5))
    assert numbers(client, 1) == [5]


def test_a_client_that_comes_again_wins_over_its_old_connection(kept: Kept) -> None:
    """The old one still seems to work: nobody told the worker that its client has another address now."""
    kept.client.send(Batch(Sequence(1), []))
    assert isinstance(kept.session.recv(SOON_SECONDS), Batch)
    got: list[Message] = []
    kept.later(lambda: got.append(kept.session.recv(SOON_SECONDS)))
    client = kept.come_back(received=0)
    assert kept.has == 1
    with pytest.raises(SessionLostError):
        kept.client.recv(SOON_SECONDS)
    client.connection.continue_from(kept.client.connection, kept.has)
    client.send(Batch(Sequence(2), []))
    kept.threads[-1].join(SOON_SECONDS)
    assert [message.sequence for message in got] == [2]  # type: ignore[attr-defined]


def test_the_latest_ack_is_said_again(kept: Kept) -> None:
    kept.client.send(Batch(Sequence(1), []))
    kept.session.recv(SOON_SECONDS)
    kept.client.cut()
    kept.session.send(Failure(RequestId(0), {}))
    kept.session.send(Ack(Sequence(1)))
    client, worker = link(kept.session)
    attempt, has = kept.session.prepare()
    client.connection.continue_from(kept.client.connection, has)
    assert kept.session.attach(worker, attempt, 0)
    # In this order: with the ack the client forgets the lines of the batch.
    assert [type(client.recv(SOON_SECONDS)) for _ in range(2)] == [Failure, Ack]


def test_an_ack_of_what_came_before_a_snapshot_was_loaded_is_not_said_again(kept: Kept) -> None:
    kept.client.send(Batch(Sequence(1), []))
    kept.session.recv(SOON_SECONDS)
    kept.session.send(Ack(Sequence(1)))
    kept.client.recv(SOON_SECONDS)
    for side in (kept.client, kept.session):
        side.connection.jump_to(70)
    kept.client.cut()
    client, worker = link(kept.session)
    attempt, has = kept.session.prepare()
    assert has == 70
    client.connection.continue_from(kept.client.connection, has)
    assert kept.session.attach(worker, attempt, 0)
    kept.session.send(Failure(RequestId(0), {}))
    assert type(client.recv(SOON_SECONDS)) is Failure


def test_without_a_client_the_session_ends_when_the_grace_does() -> None:
    kept = Kept(grace_seconds=0.05)
    kept.client.cut()
    with pytest.raises(SessionLostError):
        kept.session.recv()
    assert kept.session.secret == b""
    with pytest.raises(LookupError):
        kept.session.prepare()
    kept.close()


def test_a_timeout_is_one_while_there_is_no_connection_too(kept: Kept) -> None:
    kept.client.cut()
    with pytest.raises(TimeoutError):
        kept.session.recv(0.01)
    assert kept.session.detached_at is not None


def test_a_client_that_says_goodbye_does_not_come_back(kept: Kept) -> None:
    kept.client.close()
    with pytest.raises(SessionLostError):
        kept.session.recv(SOON_SECONDS)
    assert not kept.detached.is_set()
    with pytest.raises(LookupError):
        kept.session.prepare()


def test_a_connection_that_the_worker_closed_is_not_replaced(kept: Kept) -> None:
    kept.worker.close("bad-token", "the token was revoked")
    with pytest.raises(SessionLostError):
        kept.session.recv(SOON_SECONDS)
    with pytest.raises(LookupError):
        kept.session.prepare()


def test_what_breaks_the_rules_ends_the_session(kept: Kept) -> None:
    kept.client._outgoing.put(b"\x00nonsense")
    with pytest.raises(ProtocolError):
        kept.session.recv(SOON_SECONDS)
    with pytest.raises(LookupError):
        kept.session.prepare()


def test_of_two_that_come_the_latter_is_taken(kept: Kept) -> None:
    first, second = link(kept.session), link(kept.session)
    old, _ = kept.session.prepare()
    new, _ = kept.session.prepare()
    assert not kept.session.attach(first[1], old, 0)
    assert kept.session.attach(second[1], new, 0)
    kept.session.send(reply(1))
    assert numbers(second[0], 1) == [1]


def test_a_client_that_claims_what_it_cannot_have_is_refused_and_the_session_stays(kept: Kept) -> None:
    kept.session.send(reply(1))
    _, worker = link(kept.session, 7)
    attempt, _ = kept.session.prepare()
    with pytest.raises(ProtocolError):
        kept.session.attach(worker, attempt, 7)
    assert numbers(kept.come_back(received=0), 1) == [1]


def test_a_busy_session_waits_while_too_much_is_kept() -> None:
    kept = Kept(max_kept_bytes=1000)
    kept.client.cut()
    said = threading.Semaphore(0)

    def speak() -> None:
        for number in (1, 2, 3):
            kept.session.send(reply(number, 600))
            said.release()

    kept.later(speak)
    assert said.acquire(timeout=SOON_SECONDS)
    assert kept.detached.wait(SOON_SECONDS)
    while kept.session.connection.answers < 2:
        assert kept.threads[0].is_alive()
    assert not said.acquire(blocking=False)  # the second stands there
    client = kept.come_back(received=0)
    assert numbers(client, 3) == [1, 2, 3]
    kept.close()


def test_nothing_is_kept_for_a_client_that_never_says_what_it_has() -> None:
    kept = Kept(max_kept_bytes=1000)
    for number in range(1, 4):
        kept.session.send(reply(number, 600))
    assert numbers(kept.client, 3) == [1, 2, 3]
    assert kept.session.connection.kept_bytes == 0
    with pytest.raises(LookupError):
        kept.session.prepare()
    kept.client.cut()
    with pytest.raises(SessionLostError):
        kept.session.recv()
    kept.close()


def test_a_session_without_a_connection_can_be_ended(kept: Kept) -> None:
    kept.session.expire()
    assert kept.session.secret  # it has one
    kept.client.cut()
    ended = threading.Event()

    def listen() -> None:
        with pytest.raises(SessionLostError):
            kept.session.recv()
        ended.set()

    kept.later(listen)
    assert kept.detached.wait(SOON_SECONDS)
    kept.session.expire()
    assert ended.wait(SOON_SECONDS)


def test_a_client_that_comes_back_to_many_answers_may_come_back_again() -> None:
    """It is told as much as may be kept, and could not yet say that any of it came."""
    kept = Kept(max_kept_bytes=1000)
    kept.client.cut()
    said = threading.Event()

    def speak() -> None:
        for number in (1, 2, 3):
            kept.session.send(reply(number, 600))
        said.set()

    kept.later(speak)
    while kept.session.connection.answers < 2:
        assert kept.threads[0].is_alive()
    client = kept.come_back(received=0)
    assert said.wait(SOON_SECONDS)
    assert numbers(client, 3) == [1, 2, 3]
    assert kept.session.secret  # it may come back
    kept.session.send(reply(4, 600))
    assert not kept.session.secret  # it says nothing for too long
    kept.close()
