"""Bytes of an encrypted connection, carried to and from a session's process: here a thread at a socket pair."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

from skyproxy.transport.tls import TlsStream
from skyproxy_server.isolation.relay import relay

PATIENCE_SECONDS = 30.0


class Relayed:
    """A client with TLS, the relay on a thread of its own, and the process's end of the socket pair.

    Attributes:
        client: the client's side.
        process: what the session's process has.
        left: set when the relay has told that the client has left.
        over: what the relay takes for the process's last word.
    """

    def __init__(self, contexts: tuple[ssl.SSLContext, ssl.SSLContext], goodbye_seconds: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            plain = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
        plain.settimeout(PATIENCE_SECONDS)
        made: list[TlsStream] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        handshake = threading.Thread(
            target=lambda: made.append(
                TlsStream(accepted, contexts[1], server_side=True, server_hostname=None, deadline=deadline)
            )
        )
        handshake.start()
        self.client = contexts[0].wrap_socket(plain, server_hostname="127.0.0.1")
        handshake.join(PATIENCE_SECONDS)
        (self.stream,) = made
        ours, self.process = socket.socketpair()
        self.process.settimeout(PATIENCE_SECONDS)
        # Readable once its other end is closed, as a pidfd is when its process has ended.
        self._alive, self._ended = os.pipe()
        self.left = threading.Event()
        self.over = False
        self._carried: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self._carried.append(
                relay(
                    self.stream,
                    ours,
                    self._alive,
                    is_over=lambda: self.over,
                    on_left=self.left.set,
                    goodbye_seconds=goodbye_seconds,
                )
            )
        )
        self._thread.start()

    def process_ends(self) -> None:
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1

    def carried(self) -> int:
        """How many bytes the relay says that it carried, once it has ended."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        (count,) = self._carried
        return count

    def end(self) -> None:
        self.process_ends()
        self.process.close()
        self.client.close()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self.stream.close()
        os.close(self._alive)


@pytest.fixture
def relayed(tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[Relayed]:
    made = Relayed(tls_contexts, PATIENCE_SECONDS)
    yield made
    made.end()


def received(sock: socket.socket, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = sock.recv(1 << 16)
        assert piece, f"the stream ended after {len(pieces)} of {count} bytes"
        pieces += piece
    return bytes(pieces)


def exchanged(sock: ssl.SSLSocket, data: bytes, count: int) -> bytes:
    """Send and receive on this thread alone: before 3.13, Python does not guard a TLS socket that two threads use."""
    unsent, pieces, deadline = memoryview(data), bytearray(), time.monotonic() + PATIENCE_SECONDS
    sock.setblocking(False)
    while unsent or len(pieces) < count:
        assert time.monotonic() < deadline, f"{len(unsent)} bytes were not sent, {count - len(pieces)} did not come"
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            unsent = unsent[sock.send(unsent[: 1 << 16]) if unsent else 0 :]
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            piece = sock.recv(1 << 16) if len(pieces) < count else b""
            assert piece or len(pieces) == count, "the stream ended"
            pieces += piece
    sock.settimeout(PATIENCE_SECONDS)
    return bytes(pieces)


def test_bytes_arrive_both_ways_as_they_were_sent(relayed: Relayed) -> None:
    there, back = random.Random(1).randbytes(3 << 20), random.Random(2).randbytes(3 << 20)
    got: list[bytes] = []
    threads = [
        threading.Thread(target=relayed.process.sendall, args=(back,)),
        threading.Thread(target=lambda: got.append(received(relayed.process, len(there)))),
    ]
    for thread in threads:
        thread.start()
    assert exchanged(relayed.client, there, len(back)) == back
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert got == [there]


def test_a_client_that_leaves_is_told_to_both(relayed: Relayed) -> None:
    relayed.client.sendall(b"last words")
    relayed.client.close()
    assert received(relayed.process, 10) == b"last words"
    assert relayed.process.recv(1) == b""
    assert relayed.left.wait(PATIENCE_SECONDS)
    relayed.over = True
    relayed.process.close()
    assert relayed.carried() == 0


def test_after_the_process_has_said_its_last_word_the_client_reads_the_end(relayed: Relayed) -> None:
    relayed.process.sendall(b"goodbye")
    relayed.over = True
    relayed.process.shutdown(socket.SHUT_WR)
    assert received(relayed.client, 7) == b"goodbye"
    assert relayed.client.recv(1) == b""
    relayed.client.close()
    assert relayed.carried() == 7


def test_where_the_process_ends_without_a_word_the_stream_stays_usable(relayed: Relayed) -> None:
    relayed.process.sendall(b"half of it")
    assert received(relayed.client, 10) == b"half of it"
    relayed.process.close()
    relayed.process_ends()
    assert relayed.carried() == 10
    relayed.stream.write([b"said by the supervisor"], [])
    assert received(relayed.client, 22) == b"said by the supervisor"


def test_a_process_that_ends_with_its_socket_open_elsewhere_ends_the_relay(relayed: Relayed) -> None:
    with relayed.process.dup():  # as a child that a function left behind would have it
        relayed.process_ends()
        assert relayed.carried() == 0


def test_a_client_that_does_not_end_its_side_is_not_waited_for_for_ever(
    tls_contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    relayed = Relayed(tls_contexts, goodbye_seconds=0.01)
    try:
        relayed.over = True
        relayed.process.shutdown(socket.SHUT_WR)
        assert relayed.carried() == 0  # with the client's side still open
    finally:
        relayed.end()


def test_who_does_not_read_stops_the_other_side(relayed: Relayed) -> None:
    relayed.process.settimeout(None)
    relayed.process.setblocking(False)
    sent = 0
    block = bytes(1 << 20)
    deadline = time.monotonic() + PATIENCE_SECONDS
    # The buffers of both sockets and the relay fill up; then the process can send nothing more.
    full_since: float | None = None
    while full_since is None or time.monotonic() - full_since < 0.5:
        assert time.monotonic() < deadline, f"{sent} bytes went to a client that reads nothing"
        try:
            sent += relayed.process.send(block)
            full_since = None
        except BlockingIOError:
            full_since = full_since or time.monotonic()
            time.sleep(0.005)
    assert sent < 64 << 20
    assert received(relayed.client, sent) == bytes(sent)
