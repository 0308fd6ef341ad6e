"""Who may say what, when and in which order."""

from __future__ import annotations

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallEvent, CallStart
from skyproxy.protocol.connection import Connection, State
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    BULK,
    CLIENT,
    FUNCTIONS,
    JOBS,
    OPERATIONS,
    WORKER,
    Ack,
    Batch,
    CancelOperations,
    CancelTransfer,
    Challenge,
    Chunk,
    Continue,
    Failure,
    Goodbye,
    Hello,
    JobAnswer,
    JobRequest,
    Known,
    Landed,
    Message,
    NamedBatch,
    Offer,
    PackedChunk,
    Ping,
    Pong,
    Proof,
    Received,
    Repeat,
    Reply,
    RequestId,
    Sequence,
    Warned,
    Welcome,
)


def hello(kind: str = OPERATIONS) -> Hello:
    return Hello([1], kind, "" if kind in (OPERATIONS, JOBS) else "s1", {})


WELCOME = Welcome(1, "s1", {}, [], {})
BATCH = Batch(Sequence(1), [])
SAMPLES: list[Message] = [
    hello(),
    WELCOME,
    Goodbye("done", ""),
    BATCH,
    NamedBatch(Sequence(1), [], 1, []),
    Repeat(Sequence(1), 1, []),
    Ack(Sequence(0)),
    Reply(RequestId(1), None),
    Failure(RequestId(1), {}),
    Warned("UserWarning", "", {}),
    Chunk(1, 0, 2, (b"ab",)),
    PackedChunk(1, 0, 2, 2, 1, (b"x",)),
    CancelTransfer(1, ""),
    CancelOperations(1),
    Received(0),
    Landed(1, 0),
    Continue([], {}),
    Offer(1, 4, b"d" * 32),
    Known(1, True),
    Challenge(1, b"n"),
    Proof(1, b"p"),
    Ping(1),
    Pong(1),
    CallStart("c", {}, []),
    CallData("c", 0, 0, 0, (b"ab",)),
    CallEvent("c", 1, "started", {}, []),
    CallAck("c", 1, 0),
    CallCancel("c", ""),
    CallAttach("c", 0),
    JobRequest(RequestId(1), "list", {}),
    JobAnswer(RequestId(1), "", {}),
]
LEGAL = {
    (CLIENT, OPERATIONS): {Batch, NamedBatch, Repeat, Received, Goodbye},
    (WORKER, OPERATIONS): {Ack, Reply, Failure, Warned, Goodbye},
    (CLIENT, BULK): {
        Chunk,
        PackedChunk,
        CancelTransfer,
        CancelOperations,
        Landed,
        Continue,
        Offer,
        Proof,
        Ping,
        Pong,
        Goodbye,
    },
    (WORKER, BULK): {Chunk, PackedChunk, CancelTransfer, Landed, Known, Challenge, Ping, Pong, Goodbye},
    (CLIENT, FUNCTIONS): {CallStart, CallData, CallAck, CallCancel, CallAttach, Goodbye},
    (WORKER, FUNCTIONS): {CallData, CallEvent, Goodbye},
    (CLIENT, JOBS): {JobRequest, Goodbye},
    (WORKER, JOBS): {JobAnswer, Goodbye},
}


def opened(role: str, kind: str = OPERATIONS) -> Connection:
    connection = Connection(role)
    first, second = (
        (connection.on_send, connection.on_receive) if role == CLIENT else (connection.on_receive, connection.on_send)
    )
    first(hello(kind))
    second(WELCOME)
    return connection


def accepts(act: object, message: Message) -> bool:
    try:
        act(message)  # type: ignore[operator]
    except ProtocolError:
        return False
    return True


def test_every_message_has_a_sample() -> None:
    assert {type(message) for message in SAMPLES} == set(MESSAGES.values())


@pytest.mark.parametrize("kind", [OPERATIONS, BULK, FUNCTIONS, JOBS])
@pytest.mark.parametrize("role", [CLIENT, WORKER])
@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_legality_while_open(role: str, kind: str, message: Message) -> None:
    other = WORKER if role == CLIENT else CLIENT
    assert accepts(opened(role, kind).on_send, message) == (type(message) in LEGAL[role, kind])
    assert accepts(opened(role, kind).on_receive, message) == (type(message) in LEGAL[other, kind])


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_nothing_but_the_handshake_comes_first(message: Message) -> None:
    assert accepts(Connection(CLIENT).on_send, message) == isinstance(message, Hello | Goodbye)
    assert accepts(Connection(WORKER).on_receive, message) == isinstance(message, Hello | Goodbye)
    assert accepts(Connection(WORKER).on_send, message) == isinstance(message, Goodbye)
    assert accepts(Connection(CLIENT).on_receive, message) == isinstance(message, Goodbye)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_only_the_welcome_follows_the_hello(message: Message) -> None:
    client, worker = Connection(CLIENT), Connection(WORKER)
    client.on_send(hello())
    worker.on_receive(hello())
    assert accepts(worker.on_send, message) == isinstance(message, Welcome | Goodbye)
    assert accepts(client.on_receive, message) == isinstance(message, Welcome | Goodbye)
    early = Connection(CLIENT)
    early.on_send(hello())
    assert accepts(early.on_send, message) == isinstance(message, Goodbye)


def test_handshake_states() -> None:
    client = Connection(CLIENT)
    assert client.state is State.NEW
    client.on_send(hello(BULK))
    assert (client.state, client.kind) == (State.GREETED, BULK)
    client.on_receive(WELCOME)
    assert (client.state, client.welcome) == (State.OPEN, WELCOME)


@pytest.mark.parametrize(
    "bad",
    [
        Hello([1], "other", "", {}),
        Hello([1], OPERATIONS, "s1", {}),
        Hello([1], BULK, "", {}),
        Hello([1], FUNCTIONS, "", {}),
        Hello([1], JOBS, "s1", {}),
        Hello([1], JOBS, "", {}, 0, b"secret"),
    ],
)
def test_bad_hello(bad: Hello) -> None:
    with pytest.raises(ProtocolError, match="Hello"):
        Connection(WORKER).on_receive(bad)


@pytest.mark.parametrize("bad", [Welcome(2, "s1", {}, [], {}), Welcome(1, "other", {}, [], {})])
def test_bad_welcome(bad: Welcome) -> None:
    client = Connection(CLIENT)
    client.on_send(hello(BULK))
    with pytest.raises(ProtocolError, match="Welcome"):
        client.on_receive(bad)


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_batches_have_no_gaps(number: int) -> None:
    client, worker = opened(CLIENT), opened(WORKER)
    for sequence in (1, 2):
        client.on_send(Batch(Sequence(sequence), []))
        worker.on_receive(Batch(Sequence(sequence), []))
    with pytest.raises(ProtocolError, match=f"Batch {number} "):
        client.on_send(Batch(Sequence(number), []))
    with pytest.raises(ProtocolError, match=f"Batch {number} came after batch 2"):
        worker.on_receive(Batch(Sequence(number), []))
    client.on_send(Batch(Sequence(3), []))
    assert client.last_sequence == 3


def test_all_kinds_of_batches_share_one_numbering() -> None:
    client, worker = opened(CLIENT), opened(WORKER)
    batches = [Batch(Sequence(1), []), NamedBatch(Sequence(2), [], 1, []), Repeat(Sequence(3), 1, [])]
    for batch in batches:
        client.on_send(batch, 5)
        worker.on_receive(batch, 5)
    assert (client.last_sequence, client.unacked_bytes, worker.last_sequence) == (3, 15, 3)
    with pytest.raises(ProtocolError, match="Batch 3 "):
        client.on_send(Repeat(Sequence(3), 1, []))


def test_refused_batch_changes_nothing() -> None:
    client = opened(CLIENT)
    client.on_send(BATCH, 10)
    with pytest.raises(ProtocolError):
        client.on_send(Batch(Sequence(1), []), 10)
    assert (client.last_sequence, client.unacked_bytes) == (1, 10)


def test_the_very_same_batch_may_be_sent_again_and_counts_once() -> None:
    client = opened(CLIENT)
    client.on_send(BATCH, 10)
    assert client.prepare_send(BATCH, 10) is None
    client.on_send(BATCH, 10)
    assert (client.last_sequence, client.unacked_bytes) == (1, 10)


def test_a_prepared_batch_counts_once_committed() -> None:
    client = opened(CLIENT)
    step = client.prepare_send(BATCH, 10)
    assert step is not None
    assert (client.last_sequence, client.unacked_bytes) == (0, 0)
    commit, entry = step
    commit(entry)
    assert (client.last_sequence, client.unacked_bytes) == (1, 10)


def test_acks_free_bytes() -> None:
    client = opened(CLIENT)
    for sequence, size in ((1, 10), (2, 20), (3, 30)):
        client.on_send(Batch(Sequence(sequence), []), size)
    assert client.unacked_bytes == 60
    client.on_receive(Ack(Sequence(2)))
    assert (client.acked_sequence, client.unacked_bytes) == (2, 30)
    client.on_receive(Ack(Sequence(2)))
    client.on_receive(Ack(Sequence(3)))
    assert (client.acked_sequence, client.last_sequence, client.unacked_bytes) == (3, 3, 0)


@pytest.mark.parametrize("number", [1, 4, -1])
def test_acks_neither_go_back_nor_ahead(number: int) -> None:
    client, worker = opened(CLIENT), opened(WORKER)
    for sequence in (1, 2, 3):
        client.on_send(Batch(Sequence(sequence), []))
        worker.on_receive(Batch(Sequence(sequence), []))
    client.on_receive(Ack(Sequence(2)))
    worker.on_send(Ack(Sequence(2)))
    with pytest.raises(ProtocolError, match=f"Ack {number} "):
        client.on_receive(Ack(Sequence(number)))
    with pytest.raises(ProtocolError, match=f"Ack {number} "):
        worker.on_send(Ack(Sequence(number)))


@pytest.mark.parametrize(
    "bad",
    [
        Chunk(1, 0, 4, ()),
        Chunk(1, 0, 4, (b"ab", b"cd")),
        Chunk(1, -1, 4, (b"ab",)),
        Chunk(1, 3, 4, (b"ab",)),
        PackedChunk(1, 0, 4, 4, 1, ()),
        PackedChunk(1, 0, 4, 5, 1, (b"a",)),
        PackedChunk(1, 0, 4, 0, 1, (b"a",)),
        PackedChunk(1, 0, 4, 4, 0, (b"a",)),
        PackedChunk(1, 0, 4, 4, 17, (b"a",)),
        PackedChunk(1, 0, 1 << 30, (64 << 20) + 1, 1, (b"a",)),
    ],
)
def test_bad_chunk(bad: Message) -> None:
    with pytest.raises(ProtocolError, match="Chunk of transfer 1"):
        opened(WORKER, BULK).on_receive(bad)


def test_a_payload_is_checked_before_it_is_read() -> None:
    worker = opened(WORKER, BULK)
    worker.check_payload(Chunk(1, 2, 4), 2)
    with pytest.raises(ProtocolError, match="bytes 2 to 5 of 4"):
        worker.check_payload(Chunk(1, 2, 4), 3)
    with pytest.raises(ProtocolError, match="may not send Batch"):
        worker.check_payload(BATCH, 3)


def test_after_a_sent_goodbye_we_are_silent_and_still_listen() -> None:
    client = opened(CLIENT)
    client.on_send(BATCH)
    client.on_send(Goodbye("done", ""))
    with pytest.raises(ProtocolError, match="after a Goodbye"):
        client.on_send(Batch(Sequence(2), []))
    client.on_receive(Ack(Sequence(1)))


def test_after_a_received_goodbye_only_goodbye_remains() -> None:
    client = opened(CLIENT)
    client.on_receive(Goodbye("shutdown", "upgrade"))
    assert client.goodbye == Goodbye("shutdown", "upgrade")
    assert not accepts(client.on_receive, Ack(Sequence(0)))
    assert not accepts(client.on_send, BATCH)
    assert accepts(client.on_send, Goodbye("done", ""))


def test_goodbye_reasons_are_ours_to_keep_and_theirs_to_extend() -> None:
    with pytest.raises(ProtocolError, match="'whatever'"):
        opened(CLIENT).on_send(Goodbye("whatever", ""))
    assert accepts(opened(CLIENT).on_receive, Goodbye("from-the-future", ""))


@pytest.mark.parametrize(
    "bad",
    [
        CallData("c", 0, 0, 0),
        CallData("c", 0, -1, 0, (b"a",)),
        CallData("c", 0, 0, -1, (b"a",)),
        CallEvent("c", 1, "other", {}, []),
        CallEvent("c", 0, "result", {}, []),
        CallEvent("c", 1, "unknown", {}, []),
    ],
    ids=repr,
)
def test_bad_news_of_a_call(bad: Message) -> None:
    with pytest.raises(ProtocolError, match=type(bad).__name__):
        opened(CLIENT, FUNCTIONS).on_receive(bad)


@pytest.mark.parametrize("target", [0, 1, 900])
@pytest.mark.parametrize("role", [CLIENT, WORKER])
def test_a_session_that_continues_another_one_counts_on_from_there(role: str, target: int) -> None:
    connection = opened(role)
    move = connection.on_send if role == CLIENT else connection.on_receive
    answer = connection.on_receive if role == CLIENT else connection.on_send
    move(Batch(Sequence(1), []), 100)
    connection.jump_to(target)
    assert (connection.last_sequence, connection.acked_sequence, connection.unacked_bytes) == (target, target, 0)
    with pytest.raises(ProtocolError):
        move(Batch(Sequence(target + 2), []))
    move(Batch(Sequence(target + 1), []), 50)
    assert connection.unacked_bytes == 50
    answer(Ack(Sequence(target + 1)))
    assert connection.unacked_bytes == 0


def test_an_ack_of_what_was_asked_before_the_other_session_may_come_late() -> None:
    connection = opened(CLIENT)
    for number in (1, 2):
        connection.on_send(Batch(Sequence(number), []), 100)
    connection.jump_to(900)
    connection.on_send(Batch(Sequence(901), []), 50)
    connection.on_receive(Ack(Sequence(1)))
    connection.on_receive(Ack(Sequence(2)))
    again = opened(CLIENT)  # taken up where that connection broke
    again.continue_from(connection, 900)
    again.on_receive(Ack(Sequence(1)))
    assert (again.acked_sequence, again.unacked_bytes) == (900, 50)
    for impossible in (3, 899, 902):
        with pytest.raises(ProtocolError):
            connection.on_receive(Ack(Sequence(impossible)))


def test_only_an_open_operations_connection_counts_from_elsewhere() -> None:
    for connection in (Connection(CLIENT), opened(CLIENT, BULK)):
        with pytest.raises(ProtocolError):
            connection.jump_to(3)
    with pytest.raises(ProtocolError):
        opened(WORKER).jump_to(-1)


@pytest.mark.parametrize(
    "bad",
    [
        JobRequest(RequestId(1), "other", {}),
        JobRequest(RequestId(1), "data", {}),
        JobRequest(RequestId(1), "list", {}, (b"x",)),
    ],
)
def test_bad_job_request(bad: JobRequest) -> None:
    with pytest.raises(ProtocolError, match="JobRequest"):
        opened(WORKER, JOBS).on_receive(bad)


@pytest.mark.parametrize("bad", [JobAnswer(RequestId(1), "other", {}), JobAnswer(RequestId(1), "", {}, (b"x", b"y"))])
def test_bad_job_answer(bad: JobAnswer) -> None:
    with pytest.raises(ProtocolError, match="JobAnswer"):
        opened(CLIENT, JOBS).on_receive(bad)
