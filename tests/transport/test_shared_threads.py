"""The threads that the connections of a pool share."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import CLIENT, Ack, Batch, Goodbye, Message, Reply, RequestId, Sequence
from skyproxy.session.reading import ConnectionReader
from skyproxy.settings import Settings
from skyproxy.transport import websocket_frames as ws
from skyproxy.transport.shared_threads import Lane, SharedThreads, shared_threads
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from tests.integration.programs import wait_for

pytestmark = [
    pytest.mark.skipif(not hasattr(select, "epoll"), reason="the system cannot wait like that"),
    pytest.mark.timeout(60),
]
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def threads() -> SharedThreads:
    found = shared_threads()
    assert found is not None
    return found


class Listening:
    """One end of a pair of sockets, whose bytes it notes."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.heard = b""
        self.read_by: set[str] = set()
        self.has_heard = threading.Event()
        self.is_broken = threading.Event()

    def fileno(self) -> int:
        return self.ours.fileno()

    def receive(self) -> bool:
        self.read_by.add(threading.current_thread().name)
        try:
            data = self.ours.recv(3)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError
        self.heard += data
        if self.heard.endswith(b"."):
            self.has_heard.set()
        return True

    def broken(self) -> None:
        self.is_broken.set()


@pytest.fixture
def listening(threads: SharedThreads) -> Iterator[list[Listening]]:
    made = [Listening() for _ in range(40)]
    for one in made:
        threads.watch(one)
    yield made
    for one in made:
        one.theirs.close()
        assert one.is_broken.wait(PATIENCE_SECONDS)
        one.ours.close()


def test_one_thread_reads_all_connections(listening: list[Listening]) -> None:
    before = threading.active_count()
    for number, one in enumerate(listening):
        one.theirs.sendall(b"x" * 200 + str(number).encode() + b".")
    for number, one in enumerate(listening):
        assert one.has_heard.wait(PATIENCE_SECONDS)
        assert one.heard == b"x" * 200 + str(number).encode() + b"."
    assert set().union(*(one.read_by for one in listening)) == {"skyproxy-shared"}
    assert threading.active_count() <= before


def test_what_was_there_before_it_was_watched_is_read(threads: SharedThreads) -> None:
    one = Listening()
    one.theirs.sendall(b"early.")
    threads.watch(one)
    assert one.has_heard.wait(PATIENCE_SECONDS)
    one.theirs.close()
    assert one.is_broken.wait(PATIENCE_SECONDS)


def test_a_stream_that_is_closed_here_is_noticed_although_no_event_tells(threads: SharedThreads) -> None:
    one = Listening()
    threads.watch(one)
    one.theirs.sendall(b".")
    assert one.has_heard.wait(PATIENCE_SECONDS)
    PlainStream(one.ours).close()
    assert one.is_broken.wait(PATIENCE_SECONDS)
    one.theirs.close()


def test_threads_sleep_until_something_is_to_do() -> None:
    """They do not look whether something is, however many connections they read; all helpers busy is something."""
    own = SharedThreads()
    one = Listening()
    own.watch(one)
    wait_for(lambda: own._sleeps_until == math.inf, "it sleeps while a connection is open")
    release = threading.Event()
    for _ in own._helpers:
        own.submit(lambda: release.wait(PATIENCE_SECONDS))
    wait_for(lambda: own._sleeps_until < math.inf, "it counts ticks while all helpers are busy")
    done = threading.Event()
    own.submit(done.set)
    assert done.wait(PATIENCE_SECONDS), "one helper more has come"
    release.set()
    wait_for(lambda: own._sleeps_until == math.inf, "it sleeps when they are not")
    one.theirs.close()
    assert one.is_broken.wait(PATIENCE_SECONDS)
    one.ours.close()


def test_one_that_is_closed_before_it_is_watched_is_broken(threads: SharedThreads) -> None:
    one = Listening()
    one.ours.close()
    threads.watch(one)
    assert one.is_broken.wait(PATIENCE_SECONDS)


def test_jobs_that_wait_for_each_other_hold_up_nobody_else(threads: SharedThreads) -> None:
    meeting = threading.Barrier(12)  # more than there are helpers: each waits until all have begun
    ended = [threading.Event() for _ in range(12)]

    def meet(done: threading.Event) -> None:
        meeting.wait(PATIENCE_SECONDS)
        done.set()

    for done in ended:
        threads.submit(lambda done=done: meet(done))
    assert all(done.wait(PATIENCE_SECONDS) for done in ended)


def test_helpers_that_are_not_needed_end_although_jobs_come_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns: each gets one of the regular jobs before it has waited for long."""
    monkeypatch.setattr("skyproxy.transport.shared_threads._IDLE_SECONDS", 0.5)
    own = SharedThreads()
    usual = len(own._helpers)
    release = threading.Event()
    for _ in range(usual + 8):
        own.submit(lambda: release.wait(PATIENCE_SECONDS))
    wait_for(lambda: len(own._helpers) == usual + 8, "there is one for each")
    end = threading.Event()
    for _ in range(40):  # as of many connections, at the same moment
        own.repeat(lambda: None if end.wait(0.005) else 0.05)
    release.set()
    try:
        wait_for(lambda: len(own._helpers) == usual, "the others have ended", PATIENCE_SECONDS)
    finally:
        end.set()


def test_a_job_that_fails_harms_no_other(threads: SharedThreads, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    threads.submit(lambda: 1 // 0)
    threads.submit(done.set)
    assert done.wait(PATIENCE_SECONDS)


def test_a_function_is_called_again_until_it_says_never(threads: SharedThreads) -> None:
    answers = iter([0.0, 0.001, 0.06, None])
    done = threading.Event()
    calls: list[float | None] = []

    def look() -> float | None:
        calls.append(next(answers))
        if calls[-1] is None:
            done.set()
        return calls[-1]

    threads.repeat(look)
    assert done.wait(PATIENCE_SECONDS)
    assert calls == [0.0, 0.001, 0.06, None]


@pytest.mark.parametrize("shares", [False, True])
def test_a_lane_keeps_the_order_of_each_sender(threads: SharedThreads, shares: bool) -> None:
    seen: list[tuple[int, int]] = []
    rests: list[int] = []
    done = threading.Event()

    def at_rest() -> None:
        rests.append(len(seen))
        if len(seen) == 4000:
            done.set()

    lane = Lane(seen.append, at_rest, threads if shares else None)
    own = threading.Thread(target=lane.run)
    if not shares:
        own.start()

    def send(sender: int) -> None:
        for number in range(1000):
            lane.put((sender, number))

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(PATIENCE_SECONDS)
    assert done.wait(PATIENCE_SECONDS)
    lane.put(None)
    if not shares:
        own.join(PATIENCE_SECONDS)
        assert not own.is_alive()
    assert rests[-1] == 4000
    for sender in range(4):
        assert [number for who, number in seen if who == sender] == list(range(1000))


def test_a_forked_child_has_threads_of_its_own(threads: SharedThreads) -> None:
    answer, told = os.pipe()
    child = os.fork()
    if not child:
        done = threading.Event()
        own = shared_threads()
        assert own is not None
        own.submit(done.set)
        os.write(told, b"yes" if own is not threads and done.wait(PATIENCE_SECONDS) else b"no")
        os._exit(0)
    os.close(told)
    assert os.read(answer, 10) == b"yes"
    os.close(answer)
    os.waitpid(child, 0)


# --- transports, as that thread reads them ---


def until(receive: Callable[[], Message | None]) -> Message:
    """Ask until there is a message."""
    while (message := receive()) is None:
        pass
    return message


def test_what_has_not_come_in_whole_is_not_waited_for(make_pair, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    client.send(Batch(Sequence(1), [], ()))
    assert worker.recv(5) == Batch(Sequence(1), [], ())
    assert client.recv_ready() is None
    large = Reply(RequestId(1), "x", (b"y" * 3_000_000,))
    sending = threading.Thread(target=worker.send, args=(large,))
    sending.start()  # more than the sockets hold: it comes in parts
    assert until(client.recv_ready) == large
    sending.join(PATIENCE_SECONDS)
    worker.send(Ack(Sequence(1)))
    assert until(client.recv_ready) == Ack(Sequence(1))
    assert client.recv_ready() is None


def test_the_end_of_a_connection_is_left_to_who_may_wait(make_pair) -> None:
    client, worker = make_pair()
    closing = threading.Thread(target=worker.close, args=("shutdown", "that is all"))
    closing.start()
    with pytest.raises(SessionLostError):
        until(client.recv_ready)
    assert client.fileno() >= 0, "nothing was closed, which could take a while"
    with pytest.raises(SessionLostError, match="that is all"):
        client.recv(5)
    closing.join(PATIENCE_SECONDS)
    assert client.fileno() == -1
    assert client.connection.goodbye == Goodbye("shutdown", "that is all")


def test_a_broken_rule_is_told_by_recv(make_pair) -> None:
    client, worker = make_pair()
    assert isinstance(worker.stream, PlainStream)
    worker.stream._socket.sendall(b"\xff" * 20)  # no frame begins so
    with pytest.raises(SessionLostError):
        until(client.recv_ready)
    with pytest.raises(ProtocolError):
        client.recv(5)


@pytest.mark.parametrize(("start", "piece"), [(b"", ws.frame_header(ws.PING, 0)), (b"\x02\x00", b"\x00\x00")])
def test_a_peer_that_sends_nothings_without_end_holds_up_no_other_connection(
    threads: SharedThreads, listening: list[Listening], start: bytes, piece: bytes
) -> None:
    ours, theirs = socket.socketpair()
    client = WebSocketTransport(PlainStream(ours), CLIENT, Settings(close_timeout_seconds=0.2))
    turns: list[bool] = []

    class Reader(ConnectionReader):
        def receive(self) -> bool:
            turns.append(super().receive())
            return turns[-1]

    heard: list[Message] = []
    over = threading.Event()
    reader = Reader(lambda: client, heard.append, lambda error: False, over.is_set)
    begun = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(start)
            while True:
                theirs.sendall(piece * 5_000)
                begun.set()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        assert begun.wait(PATIENCE_SECONDS)
        reader.share(threads)
        wait_for(lambda: turns, "a turn of it")
        for one in listening:
            one.theirs.sendall(b".")
        for one in listening:
            assert one.has_heard.wait(PATIENCE_SECONDS)
        assert flooding.is_alive()
        assert not heard
        assert turns[0] is True, "there is more of them"
    finally:
        over.set()
        theirs.shutdown(socket.SHUT_RDWR)
        flooding.join(PATIENCE_SECONDS)
        theirs.close()
        client.close()


def test_a_transport_that_shares_threads_has_none(make_pair) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    client, worker = make_pair(shares_threads=True)
    names = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    assert not [name for name in names if "client" in name]
    client.keep_alive()  # left to a helper
    client.post(Goodbye("done", ""))
    with pytest.raises(SessionLostError, match="goodbye"):
        worker.recv(5)
