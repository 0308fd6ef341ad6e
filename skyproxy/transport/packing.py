"""Pieces of large tensors, compressed where the link is what holds them up and the bytes allow it.

Byte shuffle, as in Blosc: the first bytes of all elements, then the second ones, and so on. In weights, the plane with
the exponents is repetitive and the others are noise; so each plane is compressed or stored for itself. The result is
one ordinary deflate stream, for the standard library on the other side.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

from skyproxy.errors import ProtocolError
from skyproxy.protocol.messages import MAX_PACKED_BYTES, Buffer, Chunk, PackedChunk
from skyproxy.transport.base import Transport

WORTHWHILE = 0.93
"""The share of the original that a result must stay below to be worth the other side's time."""
SLOW_SECONDS_PER_BYTE = 0.080 / (1 << 20)
"""Links that take longer, those below about 100 Mbit/s, are slow."""
SLOW_WINDOWS = 3
"""A link is slow when it was so in this many windows in a row: one is a hiccup."""
WINDOW_BYTES = 1 << 20
"""The link is measured over this much at a time; less says more about socket buffers than about the link."""
TRUST_SECONDS = 10.0
"""For how long a measurement of the link holds."""
REST_BYTES = 16 << 20
"""The bytes that leave uncompressed before compression is tried anew where it did not pay."""

_LEAST_BYTES = 16 << 10
_SAMPLE_BYTES = 8 << 10
_RAW_DEFLATE = -15


def _deflate(plane: bytes, level: int, flush: int) -> bytes:
    # Runs and frequencies only: in planes of exponents, matching strings takes ten times as long and finds less.
    compressor = zlib.compressobj(level, zlib.DEFLATED, _RAW_DEFLATE, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return compressor.compress(plane) + compressor.flush(flush)


def _pays(plane: bytes) -> bool:
    """Return whether two samples of a plane shrink."""
    middle = len(plane) // 2
    sample = plane[:_SAMPLE_BYTES] + plane[middle : middle + _SAMPLE_BYTES]
    return len(_deflate(sample, 1, zlib.Z_FINISH)) < WORTHWHILE * len(sample)


def pack(piece: Buffer, width: int) -> bytes | None:
    """The piece, compressed; None where that is hopeless, which is found out cheaply.

    Args:
        piece: the bytes, at least one.
        width: the size of an element, 1 to `MAX_ELEMENT_BYTES`; it need not divide the piece.
    """
    raw = bytes(piece)
    planes = [raw[index::width] for index in range(width)] if width > 1 else [raw]
    paying = [_pays(plane) for plane in planes]
    if not any(paying):
        return None
    last = len(planes) - 1
    return b"".join(
        # After a full flush the next compressor's output is a valid continuation.
        _deflate(plane, int(pays), zlib.Z_FINISH if index == last else zlib.Z_FULL_FLUSH)
        for index, (plane, pays) in enumerate(zip(planes, paying))
    )


def unpack(chunk: PackedChunk) -> bytes | bytearray:
    """The bytes that `pack` was given; never more than `chunk.raw_bytes` of them are made, whatever came.

    Raises:
        ProtocolError: the buffer is not what `pack` makes of so many bytes.
    """
    size, width = chunk.raw_bytes, chunk.width
    expander = zlib.decompressobj(_RAW_DEFLATE)
    try:
        planes = expander.decompress(chunk.buffers[0], size + 1)  # one byte more than allowed, to see the end
    except zlib.error as error:
        raise ProtocolError(f"A packed chunk of transfer {chunk.transfer} cannot be unpacked: {error}.") from None
    if len(planes) != size or not expander.eof or expander.unused_data:
        raise ProtocolError(f"A packed chunk of transfer {chunk.transfer} does not hold the {size:,} bytes it names.")
    if width == 1:
        return planes
    raw = bytearray(size)
    start = 0
    for index in range(width):
        end = start + len(range(index, size, width))
        raw[index::width] = planes[start:end]
        start = end
    return raw


class ChunkWriter:
    """Sends the pieces of transfers on one connection. Belongs to one thread.

    It measures what the link takes, and compresses while the link is slow and that pays. On a fast link it never even
    tries.

    Attributes:
        packed_chunks: pieces that left compressed so far.
        attempts: pieces that it tried to compress so far.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self.packed_chunks = 0
        self.attempts = 0
        self._transport = transport
        self._clock = clock
        self._packs_until: float | None = None
        self._resting_bytes = 0
        self._window_bytes = 0
        self._window_seconds = 0.0
        self._slow: list[float] = []

    def use(self, transport: Transport) -> None:
        """Go on with another connection."""
        self._transport = transport

    def send(self, transfer: int, offset: int, total_bytes: int, piece: memoryview, width: int) -> None:
        """Sends one piece.

        Args:
            transfer, offset, total_bytes: as in `Chunk`.
            piece: the bytes.
            width: the size of an element, 1 to `MAX_ELEMENT_BYTES`.

        Raises:
            SessionLostError: the connection is gone.
        """
        if self._packs_until is not None and _LEAST_BYTES <= len(piece) <= MAX_PACKED_BYTES:
            packed = self._pack(piece, width)
            if packed is not None:
                self._transport.send(PackedChunk(transfer, offset, total_bytes, len(piece), width, (packed,)))
                self.packed_chunks += 1
                return
        started = self._clock()
        self._transport.send(Chunk(transfer, offset, total_bytes, (piece,)))
        self._measure(len(piece), self._clock() - started)

    def _measure(self, size: int, seconds: float) -> None:
        """Takes note of what left as it is. What fits into socket buffers goes fast and ends a slow spell."""
        self._resting_bytes = max(self._resting_bytes - size, 0)
        self._window_bytes += size
        self._window_seconds += seconds
        if self._window_bytes < WINDOW_BYTES:
            return
        seconds_per_byte = self._window_seconds / self._window_bytes
        self._window_bytes, self._window_seconds = 0, 0.0
        before = self._slow[1 - SLOW_WINDOWS :]
        self._slow = [*before, seconds_per_byte] if seconds_per_byte > SLOW_SECONDS_PER_BYTE else []
        if len(self._slow) == SLOW_WINDOWS and not self._resting_bytes:
            self._packs_until = self._clock() + TRUST_SECONDS

    def _pack(self, piece: memoryview, width: int) -> bytes | None:
        started = self._clock()
        assert self._packs_until is not None
        if started >= self._packs_until:
            self._packs_until, self._slow = None, []
            return None
        self.attempts += 1
        packed = pack(piece, width)
        to_send_seconds = len(piece) * sum(self._slow) / len(self._slow)
        if packed is not None and len(packed) < WORTHWHILE * len(piece) and self._clock() - started < to_send_seconds:
            return packed
        self._packs_until, self._resting_bytes = None, REST_BYTES
        return None
