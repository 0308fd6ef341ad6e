"""Two ends of a real connection on loopback, without the HTTP upgrade."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from skyproxy.protocol.messages import CLIENT, OPERATIONS, WORKER, Hello, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.shared_threads import shared_threads
from skyproxy.transport.stream import ByteStream, PlainStream
from skyproxy.transport.tls import TlsStream
from skyproxy.transport.websocket_transport import WebSocketTransport

FAST = Settings(close_timeout_seconds=0.3)
Pair = tuple[WebSocketTransport, WebSocketTransport]
MakePair = Callable[..., Pair]


def tcp_pair(buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets: a client's and a server's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if buffer_bytes:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client = socket.create_connection(listening.getsockname(), timeout=10)
        server, _ = listening.accept()
    if buffer_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return client, server


def tls_streams(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], client: socket.socket, server: socket.socket
) -> tuple[ByteStream, ByteStream]:
    """Both ends of a TLS connection over connected sockets."""
    deadline = time.monotonic() + 10
    made: list[ByteStream] = []

    def accept() -> None:
        made.append(TlsStream(server, contexts[1], server_side=True, server_hostname=None, deadline=deadline))

    thread = threading.Thread(target=accept)
    thread.start()
    mine = TlsStream(client, contexts[0], server_side=False, server_hostname="127.0.0.1", deadline=deadline)
    thread.join(10)
    return mine, made[0]


@pytest.fixture
def make_pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    """Makes joined transports that are past their handshake, and closes them in the end."""
    made: list[WebSocketTransport] = []

    def make(
        kind: str = OPERATIONS,
        *,
        tls: bool = False,
        settings: Settings = FAST,
        handshake: bool = True,
        buffer_bytes: int = 0,
        shares_threads: bool = False,
    ) -> Pair:
        sockets = tcp_pair(buffer_bytes)
        streams: tuple[ByteStream, ByteStream]
        if tls:
            streams = tls_streams(request.getfixturevalue("tls_contexts"), *sockets)
        else:
            streams = PlainStream(sockets[0]), PlainStream(sockets[1])
        threads = shared_threads() if shares_threads else None
        client = WebSocketTransport(streams[0], CLIENT, settings, threads=threads)
        worker = WebSocketTransport(streams[1], WORKER, settings)
        made.extend((client, worker))
        if handshake:
            client.send(Hello([1], kind, "" if kind == OPERATIONS else "s", {}))
            worker.recv(5)
            worker.send(Welcome(1, "s", {}, [], {}))
            client.recv(5)
        return client, worker

    yield make
    threads = [threading.Thread(target=item.close) for item in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen
