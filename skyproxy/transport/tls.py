"""The encrypted stream, over memory buffers.

An `ssl.SSLSocket` may not read and write at once from two threads before Python 3.13. Here the `SSLObject` only turns
bytes into other bytes, which takes microseconds and happens under a lock; the waiting happens outside, on the socket.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from skyproxy.protocol.messages import Buffer
from skyproxy.transport.stream import SocketStream, remaining, shutdown

_PIECE_BYTES = 128 << 10
_READ_BYTES = 256 << 10


class TlsStream(SocketStream):
    """A stream with TLS.

    Attributes:
        on_output: called by the reading thread when the peer's bytes ask for an answer that `pump` would send.
    """

    # OpenSSL's Python wrapper checks for signals after it has encrypted, and a handler that raises hides how much.
    interruptible = False

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None,
        deadline: float,
    ) -> None:
        """Makes the TLS handshake on a connected socket.

        Args:
            sock: the connected socket; it belongs to the stream from now on.
            context: certificates and trust.
            server_side: whether we are the side that has the certificate.
            server_hostname: the name that the peer's certificate must have.
            deadline: when to give up, in the time of `time.monotonic`.

        Raises:
            ssl.SSLError: the handshake failed.
            TimeoutError: it took too long.
            OSError: the connection is gone.
        """
        super().__init__(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        # Any: the type stubs do not know that `read` with a buffer returns a count.
        self._tls: Any = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._lock = threading.Lock()
        self._cipher = memoryview(bytearray(_READ_BYTES))
        self.on_output: Callable[[], None] = lambda: None
        self._handshake(deadline)

    def _handshake(self, deadline: float) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.pump()
                count = self._receive(remaining(deadline))
                if count < 0:
                    raise TimeoutError("the TLS handshake took too long") from None
                if count == 0:
                    raise ConnectionResetError("the peer closed the connection during the TLS handshake") from None
            except ssl.SSLError:
                # The peer deserves to learn the reason: it is in the alert that OpenSSL has just written.
                self.pump()
                raise
        self.pump()

    def _receive(self, timeout_seconds: float | None) -> int:
        """Moves bytes from the socket to OpenSSL; returns like `recv_into`."""
        if timeout_seconds is not None and not self._readable.wait(timeout_seconds):
            return -1
        count = self._socket.recv_into(self._cipher)
        with self._lock:
            if count:
                self._incoming.write(self._cipher[:count])
            else:
                self._incoming.write_eof()
        return count

    def write(self, parts: list[Buffer], counts: list[int]) -> None:
        view = memoryview(parts[0])[:_PIECE_BYTES]
        done = 0
        with self._lock:
            while done < len(view):
                done += self._tls.write(view[done:])
            cipher = self._outgoing.read()
        counts.append(done)
        self._socket.sendall(cipher)

    def pump(self) -> None:
        with self._lock:
            cipher = self._outgoing.read()
        if cipher:
            self._socket.sendall(cipher)

    def recv_into(self, view: memoryview, timeout_seconds: float | None) -> int:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            count = self._decrypt(view)
            if count is not None:
                return count
            # At the end of the socket's stream we decrypt once more: OpenSSL then says how it ended.
            if self._receive(None if deadline is None else remaining(deadline)) < 0:
                return -1

    def _decrypt(self, view: memoryview) -> int | None:
        """Like `recv_into`, from what was received already; None when that is not enough."""
        filled = 0
        ended = False
        with self._lock:
            try:
                while filled < len(view):
                    count = self._tls.read(len(view) - filled, view[filled:])
                    if count == 0:
                        ended = True
                        break
                    filled += count
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                ended = True
            must_answer = self._outgoing.pending > 0
        if must_answer:
            self.on_output()
        return filled if filled or ended else None

    def shutdown_write(self) -> None:
        try:
            with self._lock:
                self._tls.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # it would wait for the peer's answer, which may never come
        try:
            self.pump()
        except OSError:
            pass
        shutdown(self._socket, socket.SHUT_WR)
