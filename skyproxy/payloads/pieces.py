"""Payloads on the wire: pieces of any size, cut where they are large, put together again on the other side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from skyproxy.errors import ProtocolError
from skyproxy.protocol.messages import Buffer, CallData, Message

Made = TypeVar("Made")


class Head(Protocol):
    """Makes the message that announces a payload, with these buffers in it."""

    def __call__(self, sizes: list[int], buffers: tuple[Buffer, ...]) -> Message: ...


def flat_size(piece: Buffer) -> int:
    """The bytes of a piece."""
    return piece.nbytes if isinstance(piece, memoryview) else len(piece)


def send_payload(
    send: Callable[[Message], None], head: Head, call: str, number: int, pieces: Sequence[Buffer], chunk_bytes: int
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
    """A payload that is coming in.

    Attributes:
        pieces: what `allocate` made for each piece; filled once `complete`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        buffers: Sequence[Buffer],
        allocate: Callable[[int, int], tuple[Made, memoryview]],
        max_bytes: int,
    ) -> None:
        """Args:
        sizes: of the pieces.
        buffers: the pieces, if they came already; they are copied.
        allocate: makes memory for a piece of its index and size; what it is, and a writable view of its bytes.
        max_bytes: what the payload may have.

        Raises:
            ProtocolError: the sizes cannot be, or differ from what came.
        """
        total = sum(sizes)
        if any(size < 0 for size in sizes) or total > max_bytes:
            raise ProtocolError(f"a payload of {total:,} bytes in {len(sizes)} pieces is not allowed")
        made = [allocate(index, size) for index, size in enumerate(sizes)]
        self.pieces: list[Made] = [piece for piece, _ in made]
        self._views = [view for _, view in made]
        self._missing = total
        if total and buffers:
            if [flat_size(buffer) for buffer in buffers] != list(sizes):
                raise ProtocolError("the buffers of a payload have other sizes than it says")
            for index, buffer in enumerate(buffers):
                self._fill(index, 0, buffer)

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self._missing <= 0

    def add(self, data: CallData) -> None:
        """Takes a part that came.

        Raises:
            ProtocolError: it does not fit.
        """
        if data.piece >= len(self._views) or data.offset + flat_size(data.buffers[0]) > len(self._views[data.piece]):
            raise ProtocolError(f"CallData for piece {data.piece}, byte {data.offset} does not fit its payload")
        self._fill(data.piece, data.offset, data.buffers[0])

    def _fill(self, piece: int, offset: int, buffer: Buffer) -> None:
        size = flat_size(buffer)
        if size:
            self._views[piece][offset : offset + size] = memoryview(buffer).cast("B")
            self._missing -= size


def plain_memory(index: int, size: int) -> tuple[Any, memoryview]:
    """An `allocate` that makes a bytearray of every piece."""
    memory = bytearray(size)
    return memory, memoryview(memory)
