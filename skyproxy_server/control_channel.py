"""The control channel between two processes of a worker: small messages in order, and file descriptors with them."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from skyproxy.transport.stream import Readable

MAX_BYTES = 160 << 10
"""The largest message; the kernel takes a record of this size whole."""
_MAX_DESCRIPTORS = 4


class ChannelClosedError(Exception):
    """The process at the other end is gone, or has closed its end."""


class ControlChannel:
    """One end of a Unix socket pair that keeps records whole.

    Sending is safe from any thread; receiving belongs to one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._readable = Readable(sock)

    @classmethod
    def pair(cls, send_seconds: int = 0) -> tuple[ControlChannel, socket.socket]:
        """Make a channel: our end, and the socket of the other, to be passed on.

        Args:
            send_seconds: how long our end waits for room where the peer does not read, before the peer counts as gone;
                0 forever.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)
        if send_seconds:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_seconds, 0))
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, object], descriptors: Sequence[int] = (), *, wait: bool = True) -> None:
        """Send a message, and copies of these descriptors with it.

        Args:
            message: plain values: numbers, texts, bytes, lists, dictionaries.
            descriptors: open files of this process; they stay open here.
            wait: whether to wait for room where the peer does not read. Otherwise a full channel counts as closed.

        Raises:
            ChannelClosedError: the message cannot arrive any more.
            ValueError: the message is larger than `MAX_BYTES`.
        """
        data = msgpack.packb(message, use_bin_type=True)
        if len(data) > MAX_BYTES:
            raise ValueError(f"a control message of {len(data)} bytes; the limit is {MAX_BYTES}")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_seconds: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """The next message, with descriptors that belong to the caller.

        Raises:
            ChannelClosedError: no more messages come, or what came is none.
            TimeoutError: none came in time.
        """
        if timeout_seconds is not None and not self._readable.wait(timeout_seconds):
            raise TimeoutError(f"no control message came within {timeout_seconds} s")
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MAX_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        descriptors = _descriptors(ancillary)
        try:
            if not data:
                raise ChannelClosedError("the other end was closed")
            if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise ChannelClosedError("a message came in part")
            message = msgpack.unpackb(data, raw=False, strict_map_key=False)
            if not isinstance(message, dict):
                raise ChannelClosedError("a message of an unknown form came")
        except (ValueError, msgpack.UnpackException, ChannelClosedError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, ChannelClosedError):
                raise
            raise ChannelClosedError(f"a malformed message came: {error}") from error
        return message, descriptors

    def close(self) -> None:
        """Close this end; the other one finds the channel ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def abandon(self) -> None:
        """Close this process's copy only: in a forked child, because the channel is the parent's."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
