"""Bytes over a connected TCP socket, in a form that survives Ctrl-C; `tls.py` has the same with encryption."""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Protocol

from skyproxy.protocol.messages import Buffer
from skyproxy.transport.shared_threads import tell_of_closed_socket

_DONT_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)


class ByteStream(Protocol):
    """A two-way stream of bytes. One thread may read while another writes."""

    interruptible: bool
    """True if the main thread may call `write`: a signal handler that raises then never hides how much was written."""

    keeps_nothing: bool = False
    """True if what was not read from it lies in the socket, and nowhere else."""

    def write(self, parts: list[Buffer], counts: list[int]) -> None:
        """Writes a beginning of `parts`, as much as goes at once; waits while nothing goes.

        Args:
            parts: consecutive bytes.
            counts: gets the number of bytes that were written appended, in the same step that writes them.

        Raises:
            OSError: the connection is gone.
        """

    def pump(self) -> None:
        """Sends what reading has caused to be sent; belongs to the thread that writes."""

    def recv_into(self, view: memoryview, timeout_seconds: float | None) -> int:
        """Reads at least one byte, and no more than fit.

        Returns:
            How many; 0 at the end of the stream, -1 when none came in time.

        Raises:
            OSError: the connection is gone.
        """

    def unread_bytes(self) -> int:
        """Return how many bytes wait in the system to be read; 0 where it does not tell. From any thread."""
        return 0

    def shutdown_write(self) -> None:
        """Tells the peer that nothing more comes; never raises."""

    def shutdown(self) -> None:
        """Ends both directions and wakes threads that wait in them; never raises."""

    def close(self) -> None:
        """Gives the socket back; only after `shutdown`, when no thread uses it."""

    def fileno(self) -> int:
        """The socket's descriptor; -1 after `close`."""
        return -1


class SocketStream(ByteStream):
    """A stream whose bytes, plain or encrypted, go through one connected socket, which belongs to it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(None)
        prepare(sock)
        self._readable = Readable(sock)

    def unread_bytes(self) -> int:
        return unread_bytes(self._socket)  # as they came, encrypted where they are

    def shutdown(self) -> None:
        shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        tell_of_closed_socket()

    def fileno(self) -> int:
        """The socket's descriptor; -1 after `close`."""
        return self._socket.fileno()


class PlainStream(SocketStream):
    """A stream without encryption."""

    interruptible = True
    keeps_nothing = True

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._send = sock.send
        self._recv_into = sock.recv_into
        self._sendmsg: Callable[[list[Buffer]], int] | None = getattr(sock, "sendmsg", None)

    def write(self, parts: list[Buffer], counts: list[int]) -> None:
        # `extend` and `map` run without returning to the interpreter, so the count is kept even when a signal handler
        # raises right after the system call; one that raises during it means that nothing was written.
        if len(parts) == 1 or self._sendmsg is None:
            counts.extend(map(self._send, parts[:1]))
        else:
            counts.extend(map(self._sendmsg, (parts,)))

    def pump(self) -> None:
        pass

    def recv_into(self, view: memoryview, timeout_seconds: float | None) -> int:
        if timeout_seconds is not None:
            if not timeout_seconds and _DONT_WAIT:
                try:
                    return self._recv_into(view, 0, _DONT_WAIT)
                except BlockingIOError:
                    return -1
            if not self._readable.wait(timeout_seconds):
                return -1
        return self._recv_into(view)

    def shutdown_write(self) -> None:
        shutdown(self._socket, socket.SHUT_WR)


def unread_bytes(sock: socket.socket) -> int:
    """Return how many bytes wait in a socket to be read; 0 where the system does not tell."""
    try:
        import fcntl
        import termios

        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
    except (ImportError, OSError, ValueError):  # Windows has no such call; or the socket is closed
        return 0


class Readable:
    """Waits until a socket has something to read."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # Not select() where it can be avoided: it fails for file descriptors above 1023.
        self._poll: Callable[[float], list[tuple[int, int]]] | None = None
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            self._poll = poll.poll

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether it became readable (or ended) in time."""
        timeout_seconds = max(timeout_seconds, 0.0)
        if self._poll is not None:
            return bool(self._poll(timeout_seconds * 1e3))
        return bool(select.select([self._socket], [], [], timeout_seconds)[0])


_KEEP_ALIVE = {"TCP_KEEPIDLE": 120, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 6}


def prepare(sock: socket.socket) -> None:
    """Sets what every socket of ours needs; unix sockets have none of it."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        # Without it, small messages wait for the peer's delayed acknowledgement: 40 ms a round trip.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The system reports a peer whose machine vanished after five minutes rather than two hours.
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shutdown(sock: socket.socket, how: int) -> None:
    """`sock.shutdown` that does not mind a connection that is gone already."""
    try:
        sock.shutdown(how)
    except OSError:
        pass


def write_all(stream: ByteStream, data: bytes) -> None:
    """Writes all of `data` from a thread that nothing interrupts, or before anything else was sent."""
    counts: list[int] = []
    while (done := sum(counts)) < len(data):
        stream.write([memoryview(data)[done:]], counts)


def remaining(deadline: float) -> float:
    """Seconds until `deadline` of `time.monotonic`, 0 when it has passed."""
    return max(deadline - time.monotonic(), 0.0)
