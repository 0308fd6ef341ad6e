"""Payloads on the wire: pieces of any size, cut where they are large, put together again on the other side."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from skyproxy.errors import ProtocolError
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol.call_messages import CallData
from skyproxy.protocol.messages import Buffer, Message

Made = TypeVar("Made")
_LARGE_BYTES = 1 << 20
MAX_FORGOTTEN = 64
"""Names of ended calls that the start of another one may bring."""
FILE_NAME = "skyproxy-payload"
"""The name of a payload in memory that a client writes, and workers of its machine read."""


class HeadMaker(Protocol):
    """Makes the message that announces a payload, with these buffers in it."""

    def __call__(self, sizes: list[int], buffers: tuple[Buffer, ...]) -> Message: ...


def flat_size(piece: Buffer) -> int:
    """The bytes of a piece."""
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def send_payload(
    send: Callable[[Message], None], head: HeadMaker, call: str, number: int, pieces: Sequence[Buffer], chunk_bytes: int
) -> None:
    """Sends the message that `head` makes, and the pieces: with it where they are small, else in `CallData` behind it.

    Raises:
        SessionLostError: the connection is gone.
    """
    sizes = [flat_size(piece) for piece in pieces]
    if sum(sizes) <= chunk_bytes:
        send(head(sizes, tuple(pieces)))
        return
    send(head(sizes, ()))
    for index, piece in enumerate(pieces):
        view = memoryview(piece).cast("B")
        for offset in range(0, sizes[index], chunk_bytes):
            send(CallData(call, number, index, offset, (view[offset : offset + chunk_bytes],)))


class Assembly(Generic[Made]):
    """A payload that is coming in: its pieces one after another, each from its first byte on.

    Memory is taken as bytes come, and not as they are announced: at most one piece is there in part.

    Attributes:
        pieces: what `allocate` made for each piece; all of them once `complete`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        buffers: Sequence[Buffer],
        allocate: Callable[[int, int], tuple[Made, memoryview]],
        max_bytes: int,
    ) -> None:
        """Begin to receive a payload.

        Args:
            sizes: of the pieces.
            buffers: the pieces, if they came already; they are copied.
            allocate: makes memory for a piece of its index and size; what it is, and a writable view of its bytes.
            max_bytes: what the payload may have.

        Raises:
            ProtocolError: the sizes cannot be, or differ from what came.
        """
        total = sum(sizes)
        if total > max_bytes or (sizes and min(sizes) < 0):
            raise ProtocolError(f"a payload of {total:,} bytes in {len(sizes)} pieces is not allowed")
        self.pieces: list[Made] = []
        self._sizes = sizes
        self._allocate = allocate
        self._view = memoryview(b"")
        self._filled = 0
        """Bytes of the last piece that are there."""
        self._total = self._missing = total
        if not total:
            self._begin_until(len(sizes))
        elif buffers:
            if list(map(flat_size, buffers)) != list(sizes):
                raise ProtocolError("the buffers of a payload have other sizes than it says")
            for index, buffer in enumerate(buffers):
                self._begin(index)
                if sizes[index]:
                    self._view[:] = memoryview(buffer).cast("B")
            self._missing = 0

    @property
    def complete(self) -> bool:
        """True if all of it is here."""
        return self._missing <= 0

    def add(self, data: CallData) -> None:
        """Takes a part that came.

        Raises:
            ProtocolError: it does not fit, or is not the next one.
        """
        size = flat_size(data.buffers[0])
        if data.piece >= len(self._sizes) or not size or data.offset + size > self._sizes[data.piece]:
            raise ProtocolError(f"CallData for piece {data.piece}, byte {data.offset} does not fit its payload")
        self._fill(data.piece, data.offset, data.buffers[0])
        if self.complete:
            self._begin_until(len(self._sizes))

    def _fill(self, piece: int, offset: int, buffer: Buffer) -> None:
        size = flat_size(buffer)
        if not size:
            return
        if piece >= len(self.pieces) and self._filled == len(self._view):
            self._begin_until(piece + 1)
        if piece != len(self.pieces) - 1 or offset != self._filled:
            raise ProtocolError(f"CallData for piece {piece}, byte {offset} does not fit: it is not what comes next")
        self._view[offset : offset + size] = memoryview(buffer).cast("B")
        self._filled += size
        self._missing -= size

    def _begin_until(self, count: int) -> None:
        """Makes the next pieces: one, after those that have no bytes."""
        while len(self.pieces) < count:
            if self._filled != len(self._view):
                raise ProtocolError(f"CallData left out bytes of piece {len(self.pieces) - 1}, so it does not fit")
            self._begin(len(self.pieces))

    def _begin(self, index: int) -> None:
        try:
            made, self._view = self._allocate(index, self._sizes[index])
        except (MemoryError, OSError, RuntimeError) as error:
            if raised_by_handler(error):
                raise
            raise ProtocolError(f"there is no memory for a payload of {self._total:,} bytes: {error}") from error
        self._filled = 0
        self.pieces.append(made)


def plain_memory(index: int, size: int) -> tuple[object, memoryview]:
    """An `allocate` that makes a bytearray of a small piece; a large one gets memory that is there once written."""
    memory: Any = bytearray(size) if size < _LARGE_BYTES else mmap.mmap(-1, size)
    return memory, memoryview(memory)
