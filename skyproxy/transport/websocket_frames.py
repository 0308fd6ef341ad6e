"""RFC 6455's frames, without I/O: headers for what we send, and a reader for what comes in.

websockets' own codec would make a copy of each payload and a future or two for each frame; here a large payload is
received straight into the memory that the layer above chose.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import NamedTuple

from skyproxy.errors import ProtocolError
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection, State
from skyproxy.protocol.messages import MAX_HELLO_BYTES, Message
from skyproxy.transport.base import PayloadSink
from skyproxy.transport.masking import load_numpy, mask, rotate, unmask

CONTINUATION, TEXT, BINARY = 0, 1, 2
CLOSE, PING, PONG = 8, 9, 10

_FINAL = 0x80
_MASKED = 0x80
_BUFFER_BYTES = 256 << 10
_WHOLE_BYTES = 64 << 10
"""Messages up to this size are handed out as views into the read buffer."""
_DIRECT_BYTES = 16 << 10
"""A rest of at least this size is received into its final place, a smaller one by way of the read buffer."""


def frame_header(opcode: int, size: int, key: bytes = b"") -> bytes:
    """The header of a final frame.

    Args:
        opcode: what kind of frame.
        size: the bytes of its payload.
        key: the masking key of a client, empty for a server.
    """
    masked = _MASKED if key else 0
    if size < 126:
        return bytes((_FINAL | opcode, masked | size)) + key
    if size < 1 << 16:
        return struct.pack("!BBH", _FINAL | opcode, masked | 126, size) + key
    return struct.pack("!BBQ", _FINAL | opcode, masked | 127, size) + key


class _Frame(NamedTuple):
    final: bool
    opcode: int
    size: int
    key: bytes


_NOTHINGS_AT_ONCE = 1_000
"""Control frames and empty fragments, which a peer may send without end."""

Steps = Generator[memoryview | Message, int, None]
Reading = Generator[memoryview | Message, int, bool]
"""Steps that tell at their end whether the WebSocket is still open."""


class MessageReader:
    """Turns the bytes of one direction of a WebSocket into messages.

    `steps()` yields memory to be filled, and is sent how much of it was; or it yields a message. Among many frames of
    which no message comes it yields empty memory, which nothing is received for: the caller may have no time for more
    of them. It ends when the peer closes the WebSocket. Between any two steps the caller may take as long as it likes.

    Attributes:
        sink: where payloads go; see `transport.base`.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        masked: bool,
        max_frame_bytes: int,
        on_control: Callable[[int, bytes], None],
        received: bytes = b"",
    ) -> None:
        """Begin at the first byte after the upgrade.

        Args:
            connection: checks what comes in.
            masked: whether the peer must mask, as clients must; else it must not.
            max_frame_bytes: the largest message that we accept, behind a client's Hello.
            on_control: is told of each control frame, with its opcode and payload.
            received: bytes that came in already.
        """
        self.sink: PayloadSink | None = None
        self._connection = connection
        self._masked = masked
        self._max_frame_bytes = max_frame_bytes
        if masked and connection.state is State.NEW:
            self._max_frame_bytes = min(MAX_HELLO_BYTES, max_frame_bytes)
        self._max_later_bytes = max_frame_bytes
        self._on_control = on_control
        self._buffer = bytearray(max(_BUFFER_BYTES, len(received)))
        self._view = memoryview(self._buffer)
        self._start = self._nothings = 0
        self._end = len(received)
        self._buffer[: len(received)] = received
        # The data frame that is being read.
        self._frame = _Frame(True, BINARY, 0, b"")
        self._left = 0

    def take_rest(self) -> bytes:
        """Return what was received beyond the last message; whoever reads the connection from now on begins with it."""
        rest = bytes(self._view[self._start : self._end])
        self._start = self._end = 0
        return rest

    @property
    def is_empty(self) -> bool:
        """True if nothing was received beyond the last message."""
        return self._start == self._end

    def steps(self) -> Steps:
        """The one generator that does the reading."""
        while True:
            frame = self._next_frame()
            if frame is None:
                yield from self._fill(1)
                continue
            if frame.opcode >= CLOSE:
                if not (yield from self._control(frame)):
                    return
            elif frame.opcode == CONTINUATION:
                raise ProtocolError("A WebSocket continuation frame came without a beginning.")
            elif frame.final and frame.size <= _WHOLE_BYTES and self.sink is None:
                while self._end - self._start < frame.size:
                    yield from self._fill(frame.size)
                message = self._whole_message(frame)
                self._max_frame_bytes = self._max_later_bytes
                yield message
            else:
                streamed = yield from self._stream_payload(frame)
                if streamed is None:
                    return
                self._max_frame_bytes = self._max_later_bytes
                yield streamed

    def _fill(self, needed: int) -> Steps:
        """Gets at least one more byte into the buffer, which has room for `needed` from its start on."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + needed > len(self._buffer) or self._end == len(self._buffer):
            count = self._end - self._start
            self._view[:count] = self._view[self._start : self._end]
            self._start, self._end = 0, count
        self._end += yield self._view[self._end :]

    def _next_frame(self) -> _Frame | None:
        """Takes a frame's header from the buffer; None while it is not there in full."""
        buffer, start = self._buffer, self._start
        available = self._end - start
        if available < 2:
            return None
        first, second = buffer[start], buffer[start + 1]
        size = second & 0x7F
        header = 2
        if size >= 126:
            header = 4 if size == 126 else 10
            if available < header:
                return None
            size = int.from_bytes(buffer[start + 2 : start + header], "big")
        key = b""
        if second & _MASKED:
            key = bytes(buffer[start + header : start + header + 4])
            header += 4
            if available < header:
                return None
        opcode = first & 0x0F
        if bool(key) != self._masked:
            raise ProtocolError(f"A WebSocket frame is {'not ' if self._masked else ''}masked, against RFC 6455.")
        if first & 0x70:
            raise ProtocolError("A WebSocket frame uses an extension, and none was agreed.")
        if opcode not in (CONTINUATION, BINARY, CLOSE, PING, PONG):
            what = "text" if opcode == TEXT else f"opcode {opcode}"
            raise ProtocolError(f"A WebSocket frame has {what}; only binary messages are in use.")
        if opcode >= CLOSE and (size > 125 or not first & _FINAL):
            raise ProtocolError(f"A WebSocket control frame has {size} bytes or is fragmented, against RFC 6455.")
        if size > self._max_frame_bytes:
            raise ProtocolError(f"A WebSocket frame announces {size:,} bytes; the limit is {self._max_frame_bytes:,}.")
        self._start = start + header
        return _Frame(bool(first & _FINAL), opcode, size, key)

    def _control(self, frame: _Frame) -> Reading:
        while self._end - self._start < frame.size:
            yield from self._fill(frame.size)
        payload = self._take(frame)
        self._on_control(frame.opcode, bytes(payload))
        yield from self._pause()
        return frame.opcode != CLOSE

    def _pause(self) -> Steps:
        """Yield empty memory once for many frames of which no message came."""
        self._nothings += 1
        if self._nothings % _NOTHINGS_AT_ONCE == 0:
            yield self._view[:0]

    def _take(self, frame: _Frame) -> memoryview:
        """The whole payload of a frame that is in the buffer."""
        payload = self._view[self._start : self._start + frame.size]
        self._start += frame.size
        if frame.key:
            payload[:] = mask(payload, frame.key)
        return payload

    def _whole_message(self, frame: _Frame) -> Message:
        message = framing.decode(self._take(frame), self._max_frame_bytes)
        self._connection.on_receive(message, frame.size)
        return message

    def _stream_payload(self, frame: _Frame) -> Generator[memoryview | Message, int, Message | None]:
        """Reads a message that is large, fragmented, or may go to the sink; None when the peer closed the WebSocket."""
        self._frame, self._left = frame, frame.size
        prefix = memoryview(bytearray(framing.PREFIX_BYTES))
        if not (yield from self._read(prefix)):
            return None
        header = _memory(framing.header_size(prefix, self._max_frame_bytes))
        header[: framing.PREFIX_BYTES] = prefix
        if not (yield from self._read(header[framing.PREFIX_BYTES :])):
            return None
        head = framing.decode_head(header, self._max_frame_bytes)
        if frame.final and head.frame_bytes != frame.size:
            raise ProtocolError(f"The message has {frame.size:,} bytes, but its parts add up to {head.frame_bytes:,}.")
        target = self._place(head)
        if not (yield from self._read(target)):
            return None
        while not self._left and not self._frame.final:
            if not (yield from self._next_fragment()):
                return None
        if self._left:
            raise ProtocolError(f"The message goes on after the {head.frame_bytes:,} bytes that its parts add up to.")
        message = head.complete(framing.split(target, head.buffer_lengths))
        self._connection.on_receive(message, head.frame_bytes)
        return message

    def _place(self, head: framing.DecodedHead) -> memoryview:
        """Memory for all buffers of a message."""
        total = sum(head.buffer_lengths)
        if self.sink is not None and len(head.buffer_lengths) == 1 and total:
            message = head.complete()
            self._connection.check_payload(message, total)
            target = self.sink(message)
            if target is not None:
                if len(target) < total:
                    name = type(message).__name__
                    raise ProtocolError(f"{name} carries {total:,} bytes, and there is room for {len(target):,}.")
                return target[:total]
        return _memory(total)

    def _read(self, target: memoryview) -> Reading:
        """Fills `target` with the message's next bytes, across fragments."""
        filled = 0
        while filled < len(target):
            if not self._left:
                if self._frame.final:
                    raise ProtocolError("The message ends in the middle.")
                if not (yield from self._next_fragment()):
                    return False
                continue
            piece = target[filled : filled + min(len(target) - filled, self._left)]
            yield from self._read_piece(piece)
            if self._frame.key:
                unmask(piece, rotate(self._frame.key, self._frame.size - self._left))
            self._left -= len(piece)
            filled += len(piece)
        return True

    def _read_piece(self, piece: memoryview) -> Steps:
        filled = 0
        while True:
            count = min(len(piece) - filled, self._end - self._start)
            piece[filled : filled + count] = self._view[self._start : self._start + count]
            self._start += count
            filled += count
            while len(piece) - filled >= _DIRECT_BYTES:
                filled += yield piece[filled:]
            if filled == len(piece):
                return
            yield from self._fill(1)

    def _next_fragment(self) -> Reading:
        """Goes on to the message's next data frame; control frames may come in between."""
        while True:
            frame = self._next_frame()
            if frame is None:
                yield from self._fill(1)
            elif frame.opcode >= CLOSE:
                if not (yield from self._control(frame)):
                    return False
            elif frame.opcode != CONTINUATION:
                raise ProtocolError("A WebSocket message begins inside another one.")
            else:
                self._frame, self._left = frame, frame.size
                if not frame.size:
                    yield from self._pause()
                return True


def _memory(size: int) -> memoryview:
    """Memory for so many bytes, to be written before it is read. Of much, the system gives what is written only: what a
    peer announces and does not send takes none.
    """
    numpy = load_numpy() if size > _WHOLE_BYTES else None
    return memoryview(bytearray(size) if numpy is None else numpy.empty(size, numpy.uint8))
