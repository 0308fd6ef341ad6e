"""Two ends of a real connection on loopback, without the HTTP upgrade."""

from __future__ import annotations

import datetime
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyproxy.protocol.messages import CLIENT, WORKER, Hello, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.stream import PlainStream, Stream
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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and localhost, and its key."""
    trustme = pytest.importorskip("trustme")
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return folder / "ca.pem", folder / "server.pem"
