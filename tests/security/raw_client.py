"""A client that keeps no rule: it sends any bytes behind a right handshake, and notes what comes back."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgpack

from skyproxy.protocol.framing import PREFIX
from skyproxy.protocol.messages import Goodbye, Hello, Message, Welcome
from skyproxy.transport.websocket_frames import frame_header

_BINARY, _CLOSE = 2, 8
_NO_MASK = bytes(4)
"""A client's frames are masked; with zeros they stay as they are."""
_MOST_KEPT_BYTES = 4 << 20


def frame_of(code: int, values: Sequence[Any], buffers: Sequence[bytes] = ()) -> bytes:
    """Return a frame of any fields, right or wrong; see `skyproxy.protocol.framing`."""
    header = msgpack.packb(list(values), unicode_errors="surrogatepass")
    return PREFIX.pack(code, len(header)) + header + b"".join(buffers)


def values_of(message: Message) -> tuple[list[Any], list[bytes]]:
    """Return the fields of a message as they travel, and its buffers."""
    names = [item.name for item in fields(message)]
    values = [getattr(message, name) for name in names]
    if names[-1] != "buffers":
        return values, []
    buffers = [bytes(item) for item in values.pop()]
    return [*values, [len(item) for item in buffers]], buffers


class RawClient:
    """One WebSocket to a worker.

    Attributes:
        received: the last bytes that came, of all frames.
        is_over: whether the other side has closed the connection.
        goodbye: the code of the worker's farewell; empty as long as there was none.
    """

    def __init__(self, port: int, token: str, timeout_seconds: float = 60.0) -> None:
        self.received = bytearray()
        self.is_over = False
        self.goodbye = ""
        self.welcome: list[Any] = []
        self._unread = bytearray()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            f"Sec-WebSocket-Version: 13\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        head = b""
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in head and (piece := self._socket.recv(4096)):
                head += piece
        self.is_over = not head.startswith(b"HTTP/1.1 101")
        self._unread += head.partition(b"\r\n\r\n")[2]

    def greet(self, hello: Hello, timeout_seconds: float = 60.0) -> bool:
        """Say hello; return whether the worker welcomes us."""
        self.say(hello)
        while not self.welcome and not self.is_over and self.listen(timeout_seconds):
            pass
        return bool(self.welcome)

    @property
    def session(self) -> str:
        return str(self.welcome[1]) if self.welcome else ""

    @property
    def secret(self) -> bytes:
        return self.welcome[5] if len(self.welcome) > 5 else b""

    def say(self, message: Message) -> None:
        """Send a message."""
        values, buffers = values_of(message)
        self.send(frame_of(message.code, values, buffers))

    def send(self, payload: bytes) -> None:
        """Send bytes as one message of the WebSocket; nothing where the other side has ended."""
        self.send_raw(frame_header(_BINARY, len(payload), _NO_MASK) + payload)

    def send_raw(self, data: bytes) -> None:
        """Send bytes below the WebSocket, and read meanwhile: else both sides could wait for the other."""
        view = memoryview(data)
        while view and not self.is_over:
            readable, writable, _ = select.select([self._socket], [self._socket], [], 60)
            if readable:
                self._read()
            elif not writable:
                raise TimeoutError("the worker reads nothing for a minute")
            if writable:
                try:
                    view = view[self._socket.send(view[: 1 << 16]) :]
                except OSError:
                    self.is_over = True

    def listen(self, timeout_seconds: float) -> bool:
        """Read what comes within this time; return whether anything did."""
        if self.is_over or not select.select([self._socket], [], [], timeout_seconds)[0]:
            return False
        self._read()
        return True

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self.is_over = True
            return
        self.received += data
        del self.received[:-_MOST_KEPT_BYTES]
        self._unread += data
        self._take_frames()

    def _take_frames(self) -> None:
        while len(self._unread) >= 2:
            size, begin = self._unread[1] & 127, 2
            if size > 125:
                form, begin = ("!H", 4) if size == 126 else ("!Q", 10)
                if len(self._unread) < begin:
                    return
                (size,) = struct.unpack_from(form, self._unread, 2)
            if len(self._unread) < begin + size:
                return
            self._on_frame(self._unread[0] & 15, bytes(self._unread[begin : begin + size]))
            del self._unread[: begin + size]

    def _on_frame(self, opcode: int, payload: bytes) -> None:
        if opcode == _CLOSE:
            self.goodbye = self.goodbye or "closed"
        if opcode != _BINARY or len(payload) < PREFIX.size:
            return
        code, length = PREFIX.unpack_from(payload)
        if code == Welcome.code and not self.welcome:
            self.welcome = msgpack.unpackb(payload[PREFIX.size : PREFIX.size + length], strict_map_key=False)
        elif code == Goodbye.code:
            header = payload[PREFIX.size : PREFIX.size + length]
            self.goodbye = str(msgpack.unpackb(header, unicode_errors="replace")[0])

    def cut(self) -> None:
        """Break the connection without a word."""
        self.is_over = True
        self._socket.close()
