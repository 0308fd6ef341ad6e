"""What the same machine does without skyproxy, in the same minutes: round trips and bulk transfer over loopback.

Run as a script, it is one of the two helper processes: `python benchmarks/_yardsticks.py echo|raw [CERTIFICATE]`.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import socket
import ssl
import time
from typing import TYPE_CHECKING

from _figures import medians, microseconds_each
from _helper_process import HelperProcess, announce, end_with_parent

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 3


def _websocket_echo(context: ssl.SSLContext | None) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import ServerConnection, serve

    def echo(connection: ServerConnection) -> None:
        # Accepted sockets inherit nothing of the listening one, so each is told.
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionClosed):
            for message in connection:
                connection.send(message)

    with serve(echo, "127.0.0.1", 0, compression=None, ssl=context) as server:
        announce(port=server.socket.getsockname()[1])
        server.serve_forever()


def _raw_sink(context: ssl.SSLContext | None) -> None:
    """Fills fresh memory with what comes, and sends it back when it is asked to."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        announce(port=listening.getsockname()[1])
        while True:
            peer, _ = listening.accept()
            with contextlib.suppress(OSError), _secured(peer, context) as peer:
                size = int.from_bytes(_received(peer, 8), "little")
                memory = _received(peer, size)
                peer.sendall(b"k")
                _received(peer, 1)
                peer.sendall(memory)


def _connected(url: str, context: ssl.SSLContext | None) -> ClientConnection:
    """Connect to the echo. Over TLS that fails now and then on a busy machine: the library's thread reads from the TLS
    object while another one writes to it.
    """
    from websockets.exceptions import InvalidHandshake
    from websockets.sync.client import connect

    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(InvalidHandshake, EOFError):
            return connect(url, compression=None, ssl=context)
    return connect(url, compression=None, ssl=context)


def _secured(peer: socket.socket, context: ssl.SSLContext | None) -> socket.socket:
    return context.wrap_socket(peer, server_side=True) if context is not None else peer


def _received(peer: socket.socket, size: int) -> memoryview:
    view, got = _fresh_memory(size), 0
    while got < size:
        count = peer.recv_into(view[got : got + _CHUNK_BYTES])
        if not count:
            raise ConnectionResetError("the other end is gone")
        got += count
    return view


def _fresh_memory(size: int) -> memoryview:
    """Memory that nobody touched yet, as `torch.empty` gets it; a bytearray would be filled with zeros first."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class YardstickServers:
    """Two helper processes: a bare WebSocket echo, and a raw socket that fills fresh memory.

    Attributes:
        echo_port, raw_port: where they listen.
    """

    def __init__(self, certificate: str | None = None) -> None:
        """Args:
        certificate: a PEM file with certificate and key; with it both speak TLS.
        """
        extra = (certificate,) if certificate is not None else ()
        self._processes: list[HelperProcess] = []
        try:
            for role in ("echo", "raw"):
                self._processes.append(HelperProcess("_yardsticks.py", role, *extra))
        except BaseException:
            self.close()
            raise
        self.echo_port, self.raw_port = (process.announced["port"] for process in self._processes)

    def close(self) -> None:
        """Ends the helper processes."""
        for process in self._processes:
            process.close()


class Yardsticks:
    """The two measurements, over whatever lies between here and the helper processes."""

    def __init__(
        self,
        echo_port: int | None = None,
        raw_port: int | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Args:
        echo_port, raw_port: of `YardstickServers`, or of a proxy before them; without them own ones are started.
        ssl_context: for TLS.
        """
        self._servers: YardstickServers | None = None
        if echo_port is None or raw_port is None:
            self._servers = YardstickServers()
            echo_port, raw_port = self._servers.echo_port, self._servers.raw_port
        self._raw_port, self._context = raw_port, ssl_context
        scheme = "wss" if ssl_context is not None else "ws"
        self._open = contextlib.ExitStack()
        self._echo = self._open.enter_context(_connected(f"{scheme}://127.0.0.1:{echo_port}", ssl_context))
        self._echo.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trip(self) -> None:
        """One small message to the echo and back, through the websockets library."""
        self._echo.send(b"0123456789abcdef")
        self._echo.recv()

    def raw_transfer(self, data: memoryview) -> tuple[float, float]:
        """Seconds to send the bytes over a raw socket into fresh memory, and to get them back into fresh memory."""
        with socket.create_connection(("127.0.0.1", self._raw_port)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                return _timed_transfer(plain, data)
            with self._context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
                return _timed_transfer(secured, data)

    def close(self) -> None:
        """Ends the connection, and the helper processes if they are ours."""
        self._open.close()
        if self._servers is not None:
            self._servers.close()


def _timed_transfer(peer: socket.socket, data: memoryview) -> tuple[float, float]:
    started = time.perf_counter()
    peer.sendall(len(data).to_bytes(8, "little"))
    peer.sendall(data)
    _received(peer, 1)
    up = time.perf_counter() - started
    started = time.perf_counter()
    peer.sendall(b"g")  # asked for, as `.cpu()` asks: on a slow link that is half a round trip
    back = _received(peer, len(data))
    down = time.perf_counter() - started
    assert back == data, "the raw socket changed the bytes"
    return up, down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("echo", "raw"))
    parser.add_argument("certificate", nargs="?", help="PEM file with certificate and key")
    arguments = parser.parse_args()
    end_with_parent()
    context = None
    if arguments.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments.certificate)
    {"echo": _websocket_echo, "raw": _raw_sink}[arguments.role](context)


if __name__ == "__main__":
    main()

__all__ = ["YardstickServers", "Yardsticks", "medians", "microseconds_each"]
