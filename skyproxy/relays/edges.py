"""Two processes and a payload between them: what the one that has it says, and the one that wants it.

Over TLS 1.3: the one that connects knows the other by the fingerprint of its certificate, and shows a secret that is
good for one connection. It has both from the client, which has them from nobody but those two. Then come, from the one
that was connected to: "." each second while it has no payload itself; the path of the payload, for a process of the
same machine, which says whether that will do; the bytes; or the word that there will be none.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable

from skyproxy.relays.content import PART_BYTES, Content, Writer, open_content
from skyproxy.transport.trust import PinnedContext

SECRET_BYTES = 32
STALL_SECONDS = 10.0
"""Without a byte, after which the other one is given up."""
CONNECT_SECONDS = 5.0
LEAST_BYTES_PER_SECOND = 256 << 10
"""On average, while the bytes come: who is slower is given up."""
BEAT_SECONDS = 1.0
_WAIT, _PATH, _BYTES, _NOTHING = b".", b"p", b"b", b"x"
_YES, _NO = b"y", b"n"


class UnreachableError(ConnectionError):
    """The other process cannot be connected to, or does not say a word."""


def longest_seconds(size: int) -> float:
    """The time within which so many bytes must have come, once they begin to."""
    return STALL_SECONDS + size / LEAST_BYTES_PER_SECOND


def receive(
    host: str, port: int, fingerprint: str, secret: bytes, size: int, digest: bytes, is_over: Callable[[], bool]
) -> Content:
    """Connect to the process that has, or will have, the payload; wait for it, and check it.

    Args:
        host, port: where it listens.
        fingerprint: of its certificate.
        secret: for this connection.
        size, digest: of the payload, as the client says.
        is_over: asked again and again, once a second at least; true where nobody wants it any more.

    Raises:
        UnreachableError: it cannot be reached.
        OSError: it will not have the payload, or sends something else, or is too slow.
    """
    try:
        plain = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        raise UnreachableError(f"{host} cannot be reached: {error}") from error
    try:
        plain.settimeout(STALL_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = PinnedContext(fingerprint).wrap_socket(plain)
    except OSError as error:
        plain.close()
        raise UnreachableError(f"{host} is not the process that is looked for: {error}") from error
    with tls:
        tls.sendall(secret)
        while (kind := _exactly(tls, 1)) == _WAIT:
            if is_over():
                raise OSError("nobody wants it any more")
        if kind == _PATH:
            content = _from_path(tls, size, digest)
            if content is not None:
                tls.sendall(_YES)
                return content
            tls.sendall(_NO)
            kind = _exactly(tls, 1)
        if kind != _BYTES:
            raise OSError("the other process has not got it")
        until = time.monotonic() + longest_seconds(size)
        memory = memoryview(bytearray(min(size, PART_BYTES)))
        left = size
        with Writer(size, digest) as writer:
            while left:
                count = tls.recv_into(memory, min(left, len(memory)))
                if not count:
                    raise ConnectionResetError("the other process is gone")
                if time.monotonic() > until:
                    raise TimeoutError("the other process is too slow")
                if is_over():
                    raise OSError("nobody wants it any more")
                writer.write(memory[:count])
                left -= count
            content = writer.finish()
        tls.sendall(_YES)
        return content


def _from_path(tls: ssl.SSLSocket, size: int, digest: bytes) -> Content | None:
    path = _exactly(tls, _exactly(tls, 1)[0])
    try:
        return open_content(path.decode("ascii"), size, digest)
    except (OSError, ValueError):  # of another container, or another user
        return None


def send(tls: ssl.SSLSocket, content: Callable[[float], Content | None], *, near: bool) -> None:
    """Give the payload to the process that has connected, and shown its secret.

    Args:
        tls: the connection; its time-out bounds each step.
        content: waits for the payload so many seconds; returns None if it is not there then, and raises LookupError
            where there will be none.
        near: whether the other process may be on this machine.

    Raises:
        OSError: that process is gone, or too slow; or there will be no payload, which it is told.
    """
    try:
        while (found := content(BEAT_SECONDS)) is None:
            tls.sendall(_WAIT)
        with found.opened() as descriptor:
            if near:
                path = found.path.encode("ascii")
                tls.sendall(_PATH + bytes([len(path)]) + path)
                if _exactly(tls, 1) == _YES:
                    return
            tls.sendall(_BYTES)
            until = time.monotonic() + longest_seconds(found.size)
            for offset in range(0, found.size, PART_BYTES):
                tls.sendall(os.pread(descriptor, min(PART_BYTES, found.size - offset), offset))
                if time.monotonic() > until:
                    raise TimeoutError("the other process is too slow")
            _exactly(tls, 1)
    except LookupError as error:
        tls.sendall(_NOTHING)
        raise OSError(str(error)) from error


def read_secret(tls: ssl.SSLSocket) -> bytes:
    """Read what the other process shows first.

    Raises:
        OSError: it is gone, or shows nothing.
    """
    return _exactly(tls, SECRET_BYTES)


def _exactly(tls: ssl.SSLSocket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = tls.recv(count - len(found))
        if not part:
            raise ConnectionResetError("the other process is gone")
        found += part
    return found
