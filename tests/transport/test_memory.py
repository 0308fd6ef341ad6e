"""The joined pair behaves like two ends of a network connection."""

from __future__ import annotations

import threading

import pytest

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import BULK, Ack, Batch, Chunk, Hello, Message, Reply, RequestId, Sequence, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.memory import memory_transport_pair

pytestmark = pytest.mark.timeout(10)


def test_messages_cross_in_order() -> None:
    client, worker = memory_transport_pair()
    sent = [Batch(Sequence(1), [1, 2.5, "x"]), Batch(Sequence(2), [], (b"abc", b"d"))]
    for batch in sent:
        client.send(batch)
    assert [worker.recv(), worker.recv()] == sent
    worker.send(Ack(Sequence(2)))
    assert client.recv() == Ack(Sequence(2))
    assert client.connection.unacked_bytes == 0
    assert client.bytes_sent == worker.bytes_received


def test_the_sender_may_reuse_its_buffer() -> None:
    client, worker = memory_transport_pair()
    mine = bytearray(b"first")
    client.send(Batch(Sequence(1), [], (mine,)))
    mine[:] = b"later"
    received = worker.recv()
    assert isinstance(received, Batch)
    assert bytes(received.buffers[0]) == b"first"


def test_rules_hold() -> None:
    client, worker = memory_transport_pair()
    with pytest.raises(ProtocolError, match="Batch 5"):
        client.send(Batch(Sequence(5), []))
    with pytest.raises(ProtocolError, match="may not send Batch"):
        worker.send(Batch(Sequence(1), []))
    client.send(Batch(Sequence(1), []))
    assert worker.recv() == Batch(Sequence(1), [])


def test_handshake_can_be_left_to_the_caller() -> None:
    client, worker = memory_transport_pair(handshake=False)
    hello = Hello([1], "operations", "", {})
    client.send(hello)
    assert worker.recv() == hello
    worker.send(Welcome(1, "s", {}, [], {}))
    assert isinstance(client.recv(), Welcome)


def test_timeout_harms_nothing() -> None:
    client, worker = memory_transport_pair()
    with pytest.raises(TimeoutError):
        worker.recv(timeout_seconds=0.01)
    client.send(Batch(Sequence(1), []))
    assert worker.recv(timeout_seconds=1) == Batch(Sequence(1), [])


def test_the_peer_learns_why_the_connection_ended() -> None:
    client, worker = memory_transport_pair()
    client.send(Batch(Sequence(1), []))
    worker.send(Reply(RequestId(1), 7))
    worker.close("shutdown", "the pod is drained")
    worker.close()
    assert client.recv() == Reply(RequestId(1), 7)
    with pytest.raises(SessionLostError, match=r"shutdown.*the pod is drained"):
        client.recv()
    with pytest.raises(SessionLostError, match="the pod is drained"):
        client.send(Batch(Sequence(2), []))
    with pytest.raises(SessionLostError, match="closed"):
        worker.recv()


def test_close_wakes_a_blocked_receiver() -> None:
    client, _worker = memory_transport_pair()
    caught: list[BaseException] = []

    def receive() -> None:
        try:
            client.recv()
        except SessionLostError as exc:
            caught.append(exc)

    thread = threading.Thread(target=receive)
    thread.start()
    client.close()
    thread.join(5)
    assert len(caught) == 1


def test_a_full_pair_makes_the_sender_wait() -> None:
    client, worker = memory_transport_pair(max_queued_frames=2)
    done = threading.Event()

    def fill() -> None:
        for number in range(1, 6):
            client.send(Batch(Sequence(number), []))
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert not done.wait(0.05)
    assert [worker.recv().sequence for _ in range(5)] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    thread.join(5)
    assert done.is_set()


def test_payloads_land_in_the_sink() -> None:
    client, worker = memory_transport_pair(BULK)
    place = bytearray(8)
    asked: list[Message] = []

    def sink(message: Message) -> memoryview:
        asked.append(message)
        assert isinstance(message, Chunk)
        return memoryview(place)[message.offset :]

    worker.set_sink(sink)
    client.send(Chunk(1, 2, 8, (b"abc",)))
    received = worker.recv()
    assert asked == [Chunk(1, 2, 8)]
    assert place == b"\0\0abc\0\0\0"
    assert received == Chunk(1, 2, 8, (b"abc",))


def test_a_payload_beyond_the_sink_breaks_the_rules() -> None:
    client, worker = memory_transport_pair(BULK)
    worker.set_sink(lambda message: memoryview(bytearray(2)))
    client.send(Chunk(1, 0, 8, (b"abc",)))
    with pytest.raises(ProtocolError, match="room for 2"):
        worker.recv()
    with pytest.raises(SessionLostError, match="protocol"):
        client.recv()


def test_frames_are_bounded() -> None:
    client, _ = memory_transport_pair(settings=Settings(max_frame_bytes=1000))
    with pytest.raises(Exception, match="limit is 1,000"):
        client.send(Batch(Sequence(1), [], (bytes(1000),)))
