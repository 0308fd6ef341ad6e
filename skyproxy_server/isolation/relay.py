"""Carries the bytes of an encrypted connection between the stream where TLS ends and a session's process.

TLS state does not travel between processes, so the supervisor decrypts, and the process gets one end of a socket pair.
Each direction has a thread and one buffer: a side that does not read stops the other, as without us.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable

from skyproxy.transport.stream import ByteStream, shutdown
from skyproxy.transport.tls import TlsStream

logger = logging.getLogger("skyproxy.server")

_BUFFER_BYTES = 256 << 10


class _Writer:
    """The stream's writing half: both threads write, for what comes in can ask OpenSSL for an answer."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.byte_count = 0

    def write(self, data: memoryview) -> None:
        with self._lock:
            counts: list[int] = []
            done = 0
            while done < len(data):
                self._stream.write([data[done:]], counts)
                done = sum(counts)
            self.byte_count += done

    def pump(self) -> None:
        with self._lock:
            self._stream.pump()


def relay(
    stream: TlsStream,
    pair: socket.socket,
    pidfd: int,
    *,
    is_over: Callable[[], bool],
    on_left: Callable[[], object],
    goodbye_seconds: float,
) -> int:
    """Carry bytes both ways until both sides have ended, or the session's process has.

    Args:
        stream: the client's side. It stays open, and no thread of ours uses it any more: if the process ended without a
            last word, somebody else can say one.
        pair: our end of the socket pair; closed at the end.
        pidfd: readable once the session's process has ended.
        is_over: whether the process has said its last word on this connection.
        on_left: called when the client has left.
        goodbye_seconds: how long the client may take to end its side after the process has.

    Returns:
        How many bytes of the process have reached the client's side.
    """
    writer = _Writer(stream)
    stream.on_output = writer.pump
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        pair.setsockopt(socket.SOL_SOCKET, option, 4 * _BUFFER_BYTES)

    def on_closed() -> None:
        # The process has released the connection without a goodbye: our writer must not wait for the client.
        if not is_over() and not _wait_for(pidfd, goodbye_seconds):
            stream.shutdown()

    incoming = threading.Thread(
        target=_carry_in, args=(stream, pair, pidfd, on_left, on_closed), name="skyproxy-relay", daemon=True
    )
    incoming.start()
    try:
        if _carry_out(writer, pair, pidfd):
            if is_over():
                stream.shutdown_write()
                incoming.join(goodbye_seconds)
            else:
                # The kernel closes what a process had open a little before it tells that the process has ended.
                _wait_for(pidfd, goodbye_seconds)
    finally:
        shutdown(pair, socket.SHUT_RDWR)  # and the other thread finds out
        incoming.join()
        pair.close()
    return writer.byte_count


def _carry_in(
    stream: TlsStream,
    pair: socket.socket,
    pidfd: int,
    on_left: Callable[[], object],
    on_closed: Callable[[], object],
) -> None:
    view = memoryview(bytearray(_BUFFER_BYTES))
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    poll.register(pair, 0)  # the shutdown is reported in any case
    try:
        while (count := stream.recv_into(view, 0)) != 0:
            if count > 0:
                pair.sendall(view[:count])
            elif [descriptor for descriptor, _ in poll.poll()] != [stream.fileno()]:
                on_closed()
                return
    except OSError as error:
        logger.debug("a relayed connection ended: %s", error)
    on_left()
    shutdown(pair, socket.SHUT_WR)


def _carry_out(writer: _Writer, pair: socket.socket, pidfd: int) -> bool:
    """Carry what the process says until it has ended its side; False where the connection is gone."""
    view = memoryview(bytearray(_BUFFER_BYTES))
    poll = select.poll()
    poll.register(pair, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    try:
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if pair.fileno() not in ready:
                return True
            count = pair.recv_into(view)
            if not count:
                return True
            writer.write(view[:count])
    except OSError as error:
        logger.debug("a relayed connection ended: %s", error)
        return False


def _wait_for(descriptor: int, timeout_seconds: float) -> bool:
    """Wait until a descriptor is readable; return whether it is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1e3))
