"""A WebSocket transport over real sockets, in the clear and over TLS."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from skyproxy.errors import LimitExceededError, ProtocolError, SessionLostError
from skyproxy.protocol import framing
from skyproxy.protocol.messages import (
    BULK,
    CLIENT,
    WORKER,
    Ack,
    Batch,
    Chunk,
    Hello,
    Message,
    Ping,
    Pong,
    Reply,
    RequestId,
    Sequence,
    Welcome,
)
from skyproxy.settings import Settings
from skyproxy.transport import websocket_frames as ws
from skyproxy.transport import websocket_transport
from skyproxy.transport.masking import mask
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport

pytestmark = pytest.mark.timeout(30)


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Runs `work` on a thread; the returned function waits and gives its result or raises its error."""
    results: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> object:
        thread.join(20)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
        return results[0]

    return wait


def masked(body: bytes, key: bytes) -> bytes:
    return ws.frame_header(ws.BINARY, len(body), key) + mask(body, key)


def test_both_directions(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    sizes = [0, 10, 40_000, 70_000, 500_000]
    for sequence, size in enumerate(sizes, 1):
        sent = Batch(Sequence(sequence), [size], (bytes(size), b"tail"))
        wait = in_thread(lambda sent=sent: client.send(sent))
        assert worker.recv(5) == sent
        wait()
        answer = Reply(RequestId(sequence), "x", (b"y" * size,))
        wait = in_thread(lambda answer=answer: worker.send(answer))
        assert client.recv(5) == answer
        wait()
    worker.send(Ack(Sequence(len(sizes))))
    assert client.recv(5) == Ack(Sequence(len(sizes)))
    assert client.connection.unacked_bytes == 0
    assert client.bytes_received > sum(sizes)
    assert client.bytes_sent > sum(sizes)


def test_a_quarter_gibibyte_lands_in_its_place(make_pair) -> None:
    client, worker = make_pair(BULK)
    total, chunk = 256 << 20, 1 << 20
    pattern = random.Random(0).randbytes(chunk)
    place = bytearray(total)
    worker.set_sink(lambda message: memoryview(place)[message.offset :])

    def upload() -> None:
        for offset in range(0, total, chunk):
            client.send(Chunk(1, offset, total, (pattern,)))

    wait = in_thread(upload)
    for _ in range(total // chunk):
        message = worker.recv(10)
        assert isinstance(message, Chunk)
        assert len(message.buffers[0]) == chunk
    wait()
    view = memoryview(place)
    assert all(view[offset : offset + chunk] == pattern for offset in range(0, total, chunk))


def test_sending_and_receiving_at_once(make_pair, tls: bool) -> None:
    client, worker = make_pair(BULK, tls=tls)
    rng = random.Random(3)
    sizes = [rng.choice((1, 200, 17_000, 300_000, 1 << 20)) for _ in range(60)]

    def send(transport: WebSocketTransport, fill: bytes) -> None:
        for number, size in enumerate(sizes):
            transport.send(Chunk(number, 0, size, (fill * size,)))

    def receive(transport: WebSocketTransport, fill: bytes) -> None:
        for number, size in enumerate(sizes):
            assert transport.recv(10) == Chunk(number, 0, size, (fill * size,))

    waits = [
        in_thread(lambda: send(worker, b"w")),
        in_thread(lambda: receive(client, b"w")),
        in_thread(lambda: receive(worker, b"c")),
        in_thread(lambda: send(client, b"c")),
    ]
    for wait in waits:
        wait()


def test_many_threads_keep_messages_whole(make_pair, tls: bool) -> None:
    client, worker = make_pair(BULK, tls=tls)

    def send(number: int) -> None:
        for _ in range(40):
            client.send(Chunk(number, 0, 50_000, (bytes([number]) * 50_000,)))

    waits = [in_thread(lambda number=number: send(number)) for number in range(4)]
    for _ in range(160):
        message = worker.recv(10)
        assert isinstance(message, Chunk)
        assert bytes(message.buffers[0]) == bytes([message.transfer]) * 50_000
    for wait in waits:
        wait()


def test_a_timeout_harms_nothing(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    with pytest.raises(TimeoutError):
        worker.recv(0.02)
    with pytest.raises(TimeoutError):
        worker.recv(0)
    client.send(Batch(Sequence(1), []))
    assert worker.recv(5) == Batch(Sequence(1), [])


def test_a_timeout_in_the_middle_of_a_message_harms_nothing() -> None:
    raw, accepted = socket.socketpair()
    worker = WebSocketTransport(PlainStream(accepted), "worker", Settings(close_timeout_seconds=0.1))
    key = b"abcd"
    hello = Hello([1], BULK, "s", {})
    chunk = Chunk(1, 0, 100_000, (bytes(range(250)) * 400,))
    try:
        for message in (hello, chunk):
            body = b"".join(framing.encode(message, 1 << 20))
            data = masked(body, key)
            third = len(data) // 3
            for piece in (data[:1], data[1:third], data[third:-1]):
                raw.sendall(piece)
                with pytest.raises(TimeoutError):
                    worker.recv(0.02)
            raw.sendall(data[-1:])
            assert worker.recv(5) == message
            if message is hello:
                worker.send(Welcome(1, "s", {}, [], {}))
    finally:
        raw.close()
        worker.close()


def test_pings_of_the_websocket_are_answered(make_pair) -> None:
    client, worker = make_pair()
    client.keep_alive()
    client.send(Batch(Sequence(1), []))
    assert worker.recv(5) == Batch(Sequence(1), [])
    # The pong is no message; it only has to arrive and to be swallowed.
    before = client.bytes_received
    with pytest.raises(TimeoutError):
        client.recv(0.2)
    assert client.bytes_received == before + 2


def test_the_peer_learns_why(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    worker.send(Reply(RequestId(1), "last words"))
    wait = in_thread(lambda: worker.close("shutdown", "the pod is drained"))
    assert client.recv(5) == Reply(RequestId(1), "last words")
    with pytest.raises(SessionLostError, match=r"shutdown.*the pod is drained"):
        client.recv(5)
    with pytest.raises(SessionLostError, match="the pod is drained"):
        client.send(Batch(Sequence(1), []))
    with pytest.raises(SessionLostError, match="the pod is drained"):
        client.recv(5)
    wait()


def test_close_is_quick_when_the_peer_listens_and_leaves_no_thread(make_pair, tls: bool) -> None:
    before = set(threading.enumerate())
    client, worker = make_pair(tls=tls, settings=Settings(close_timeout_seconds=600.0))

    def receive() -> None:
        with pytest.raises(SessionLostError):
            worker.recv()

    wait = in_thread(receive)
    client.close()
    client.close("done", "twice")
    wait()
    worker.close()
    assert set(threading.enumerate()) <= before


def test_a_second_close_waits_for_the_first(make_pair) -> None:
    client, worker = make_pair(settings=Settings(close_timeout_seconds=10.0))
    first = in_thread(lambda: worker.close("shutdown", "really"))
    while not worker._closed:
        time.sleep(0)
    second = in_thread(worker.close)
    with pytest.raises(SessionLostError, match="really"):
        client.recv(5)
    first()
    second()
    assert worker._stream._socket.fileno() == -1


def test_close_wakes_a_receiver_whose_peer_is_deaf(make_pair, tls: bool) -> None:
    client, _deaf = make_pair(tls=tls)
    receiving = threading.Event()

    def receive() -> None:
        receiving.set()
        with pytest.raises(SessionLostError, match="closed"):
            client.recv()

    wait = in_thread(receive)
    receiving.wait(5)
    client.close()
    wait()


def test_close_wakes_a_sender_whose_peer_does_not_read(make_pair, tls: bool) -> None:
    client, _deaf = make_pair(BULK, tls=tls, buffer_bytes=8192)

    def send_for_ever() -> None:
        with pytest.raises(SessionLostError):
            while True:
                client.send(Chunk(1, 0, 1 << 20, (bytes(1 << 20),)))

    wait = in_thread(send_for_ever)
    time.sleep(0.1)  # long enough to fill the socket; too short would only make the test easier
    client.close()
    wait()


def test_the_end_of_the_stream_is_a_lost_session(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    worker._stream.shutdown()
    with pytest.raises(SessionLostError, match="The worker is gone"):
        client.recv(5)
    with pytest.raises(SessionLostError, match="The worker is gone"):
        client.send(Batch(Sequence(1), []))


def test_a_broken_connection_keeps_nothing_of_its_senders_alive(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    worker._stream.shutdown()
    client._stream.shutdown()

    class Held:
        pass

    def send() -> weakref.ref[Held]:
        held = Held()
        for _ in range(2):  # the first finds out, the second is told
            with contextlib.suppress(SessionLostError):
                client.send(Batch(Sequence(1), []))
        return weakref.ref(held)

    assert send()() is None
    with pytest.raises(SessionLostError, match="The worker is gone"):
        client.send(Batch(Sequence(1), []))


@pytest.mark.parametrize(("start", "piece"), [(b"", ws.frame_header(ws.PING, 0)), (b"\x02\x00", b"\x00\x00")])
def test_a_peer_that_sends_nothings_without_end_is_not_waited_for_longer(start: bytes, piece: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    client = WebSocketTransport(PlainStream(ours), CLIENT, Settings(close_timeout_seconds=0.2))

    def flood() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(start)
            while True:
                theirs.sendall(piece * 5_000)

    wait = in_thread(flood)
    try:
        with pytest.raises(TimeoutError):
            client.recv(0.05)
    finally:
        theirs.shutdown(socket.SHUT_RDWR)
        wait()
        theirs.close()
        client.close()


def test_what_was_being_read_goes_with_its_transport() -> None:
    ours, theirs = socket.socketpair()
    worker = WebSocketTransport(PlainStream(ours), WORKER, Settings(close_timeout_seconds=0.2))
    theirs.sendall(ws.frame_header(ws.BINARY, 1000, bytes(4)) + framing.PREFIX.pack(Hello.code, 993))
    theirs.close()
    with pytest.raises(SessionLostError):
        worker.recv(5)
    worker.close()
    left = weakref.ref(worker)
    gc.disable()
    try:
        del worker
        assert left() is None
    finally:
        gc.enable()


def test_a_killed_peer_is_noticed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code = f"import socket,time; s=socket.create_connection(('127.0.0.1',{port})); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code]) as peer:
            accepted, _ = listening.accept()
            client = WebSocketTransport(PlainStream(accepted), CLIENT, Settings(close_timeout_seconds=0.2))

            def receive() -> None:
                with pytest.raises(SessionLostError):
                    client.recv()

            wait = in_thread(receive)
            peer.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
            wait()
            client.close()


def test_a_peer_that_breaks_the_rules_is_told_and_cut_off(make_pair) -> None:
    client, worker = make_pair()
    client.connection._batches.append(client.connection._batches[0]._replace(sequence=6))
    client.send(Batch(Sequence(7), []))
    wait = in_thread(lambda: client.recv(5))
    with pytest.raises(ProtocolError, match="Batch 7 came after batch 0"):
        worker.recv(5)
    with pytest.raises(SessionLostError, match=r"protocol.*Batch 7 came after batch 0"):
        wait()
    with pytest.raises(SessionLostError):
        worker.recv(5)


def test_what_must_not_be_sent_is_not(make_pair) -> None:
    client, worker = make_pair()
    with pytest.raises(ProtocolError, match="may not send Ping"):
        client.send(Ping(1))
    with pytest.raises(LimitExceededError):
        client.send(Batch(Sequence(1), [], (bytes(65 << 20),)))
    client.send(Batch(Sequence(1), ["fine"]))
    assert worker.recv(5) == Batch(Sequence(1), ["fine"])


def test_the_same_batch_sent_again_goes_once(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    first = Batch(Sequence(1), [1])
    client.send(first)
    client.send(first)
    client.send(Batch(Sequence(2), [2]))
    assert [worker.recv(5), worker.recv(5)] == [first, Batch(Sequence(2), [2])]


def test_the_sender_may_reuse_its_buffer_at_once(make_pair, tls: bool) -> None:
    client, worker = make_pair(BULK, tls=tls)
    for sender, receiver in ((client, worker), (worker, client)):
        mine = bytearray(b"a" * 300_000)
        wait = in_thread(lambda receiver=receiver: receiver.recv(5))
        sender.send(Chunk(1, 0, len(mine), (mine,)))
        mine[:] = b"b" * len(mine)
        received = wait()
        assert isinstance(received, Chunk)
        assert bytes(received.buffers[0]) == b"a" * 300_000


def test_small_buffers_are_lent_until_the_next_call(make_pair) -> None:
    client, worker = make_pair()
    client.send(Batch(Sequence(1), [], (b"first",)))
    client.send(Batch(Sequence(2), [], (b"other",)))
    first = worker.recv(5)
    assert isinstance(first, Batch)
    kept = bytes(first.buffers[0])
    worker.recv(5)
    assert kept == b"first"


def test_a_flood_of_pings_does_not_fill_our_memory(make_pair) -> None:
    client, worker = make_pair(buffer_bytes=8192)
    for _ in range(3000):
        worker.keep_alive()
    assert worker._outbox.waiting_frames < 100
    client.send(Batch(Sequence(1), []))
    assert worker.recv(5) == Batch(Sequence(1), [])


def test_a_peer_that_asks_and_does_not_read_the_answers_does_not_fill_our_memory(
    make_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_transport, "_MOST_WAITING_FRAMES", 1000)
    client, worker = make_pair(kind=BULK, buffer_bytes=8192)
    with pytest.raises(ProtocolError, match="has not read 1000 answers"):
        for number in range(100_000):
            client.post(Pong(number))
    assert client._outbox.waiting_frames <= 1001
    assert worker.recv(5) == Pong(0)


def messages_of(transport: WebSocketTransport, count: int) -> list[Message]:
    return [transport.recv(5) for _ in range(count)]


def test_bytes_that_came_with_the_upgrade_are_read_first() -> None:
    raw, accepted = socket.socketpair()
    hello = Hello([1], BULK, "s", {})
    data = masked(b"".join(framing.encode(hello, 1 << 20)), b"wxyz")
    worker = WebSocketTransport(PlainStream(accepted), "worker", Settings(close_timeout_seconds=0.1), data[:9])
    raw.sendall(data[9:])
    assert messages_of(worker, 1) == [hello]
    raw.close()
    worker.close()
