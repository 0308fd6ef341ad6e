"""The little HTTP that comes before a WebSocket: reading one head from a stream, bounded in size and time."""

from __future__ import annotations

import logging
import time

from skyproxy.errors import ProtocolError
from skyproxy.transport.stream import ByteStream, remaining

MAX_HEAD_BYTES = 16 << 10
_END = b"\r\n\r\n"

SILENT_LOGGER = logging.Logger("skyproxy.websockets", logging.CRITICAL + 1)  # noqa: LOG001 - nobody may turn it on
"""For websockets' protocol objects, whose debug output has every header: the token must not reach a log."""


def read_head(stream: ByteStream, deadline: float, start: bytes) -> tuple[bytes, bytes]:
    """Reads a request's or a response's head.

    Args:
        stream: the fresh stream.
        deadline: when to give up, in the time of `time.monotonic`.
        start: what the head must begin with, such as b"HTTP/"; other bytes are refused as soon as they come.

    Returns:
        The head with the empty line at its end, and what came behind it.

    Raises:
        ProtocolError: this is no such head, or it is too long.
        TimeoutError: it did not come in time.
        EOFError: the stream ended before.
        OSError: the connection is gone.
    """
    received = b""
    view = memoryview(bytearray(4096))
    while True:
        count = stream.recv_into(view, remaining(deadline))
        if count < 0 or time.monotonic() > deadline:
            raise TimeoutError("the HTTP head did not come in time")
        if count == 0:
            raise EOFError("the connection was closed before the end of the HTTP head")
        received += view[:count]
        if received[: len(start)] != start[: len(received)]:
            raise ProtocolError(f"This is not HTTP: it begins with {received[:16]!r}.")
        end = received.find(_END)
        if end >= 0:
            return received[: end + len(_END)], received[end + len(_END) :]
        if len(received) > MAX_HEAD_BYTES:
            raise ProtocolError(f"The HTTP head is longer than {MAX_HEAD_BYTES:,} bytes.")
