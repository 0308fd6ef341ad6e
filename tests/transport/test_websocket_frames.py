"""Reading RFC 6455 frames, byte by byte and all at once, without a socket."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from skyproxy.errors import ProtocolError
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import BULK, OPERATIONS, WORKER, Batch, Chunk, Hello, Message, Sequence, Welcome
from skyproxy.transport import websocket_frames as ws
from skyproxy.transport.base import PayloadSink
from skyproxy.transport.masking import mask

LIMIT = 1 << 20
KEY = b"\x01\xa0\x00\xff"


def worker_connection(kind: str = OPERATIONS) -> Connection:
    connection = Connection(WORKER)
    connection.on_receive(Hello([1], kind, "" if kind == OPERATIONS else "s", {}))
    connection.on_send(Welcome(1, "s", {}, [], {}))
    return connection


class Wire:
    """Feeds a reader and collects what it makes of it."""

    def __init__(
        self,
        kind: str = OPERATIONS,
        sink: PayloadSink | None = None,
        masked: bool = True,
        limit: int = LIMIT,
        connection: Connection | None = None,
    ) -> None:
        self.controls: list[tuple[int, bytes]] = []
        self.messages: list[Message] = []
        self.closed = False
        self.connection = connection or worker_connection(kind)
        reader = ws.MessageReader(
            self.connection,
            masked=masked,
            max_frame_bytes=limit,
            on_control=lambda opcode, payload: self.controls.append((opcode, payload)),
        )
        reader.sink = sink
        self._steps = reader.steps()
        self._target = self._advance(None)

    def _advance(self, count: int | None) -> memoryview:
        try:
            item = next(self._steps) if count is None else self._steps.send(count)
            while not isinstance(item, memoryview):
                # Buffers are only lent; what we keep we copy.
                self.messages.append(framing.decode(b"".join(framing.encode(item, LIMIT)), LIMIT))
                item = next(self._steps)
        except StopIteration:
            self.closed = True
            return memoryview(bytearray(1 << 16))
        return item

    def feed(self, data: bytes, step: int = 1 << 30) -> Wire:
        while data and not self.closed:
            count = min(len(data), len(self._target), step)
            self._target[:count] = data[:count]
            data = data[count:]
            self._target = self._advance(count)
        return self


def frame(payload: bytes, opcode: int = ws.BINARY, *, final: bool = True, key: bytes = KEY) -> bytes:
    header = bytearray(ws.frame_header(opcode, len(payload), key))
    if not final:
        header[0] &= 0x7F
    return bytes(header) + (mask(payload, key) if key else payload)


def body(message: Message) -> bytes:
    return b"".join(framing.encode(message, LIMIT))


def fragments(payload: bytes, *cuts: int) -> list[bytes]:
    edges = [0, *sorted(cuts), len(payload)]
    pieces = [payload[start:end] for start, end in itertools.pairwise(edges)]
    last = len(pieces) - 1
    return [
        frame(piece, ws.BINARY if index == 0 else ws.CONTINUATION, final=index == last)
        for index, piece in enumerate(pieces)
    ]


def batch(sequence: int, size: int = 0) -> Batch:
    buffers = (bytes(index & 0xFF for index in range(size)),) if size else ()
    return Batch(Sequence(sequence), [sequence], buffers)


SIZES = [0, 1, 100, 125, 126, 65_000, 65_536, 200_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("opcode", [ws.BINARY, ws.PING])
def test_headers_are_those_of_websockets(size: int, opcode: int) -> None:
    if opcode == ws.PING and size > 125:
        return
    ours = ws.frame_header(opcode, size) + bytes(size)
    assert ours == Frame(Opcode(opcode), bytes(size)).serialize(mask=False)


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 30])
def test_messages_of_all_sizes_in_a_row(step: int) -> None:
    sizes = [0, 1, 3, 130, 5000] if step == 1 else SIZES + SIZES
    expected = [batch(number, size) for number, size in enumerate(sizes, 1)]
    wire = Wire().feed(b"".join(frame(body(message)) for message in expected), step)
    assert wire.messages == expected


def test_unmasked_frames_of_a_server() -> None:
    assert Wire(masked=False).feed(frame(body(batch(1, 70_000)), key=b"")).messages == [batch(1, 70_000)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3000), st.lists(st.integers(0, 3000), max_size=6), st.sampled_from([1, 13, 1 << 30]), st.booleans()
)
def test_fuzz_fragments_with_control_frames_in_between(size: int, cuts: list[int], step: int, sunk: bool) -> None:
    message = Chunk(1, 5, size + 5, (bytes(index & 0xFF for index in range(size)),))
    payload = body(message)
    place = bytearray(size + 5)
    wire = Wire(BULK, (lambda _: memoryview(place)[5:]) if sunk else None)
    ping = frame(b"are you there", ws.PING)
    pieces = fragments(payload, *(min(cut, len(payload)) for cut in cuts))
    wire.feed(ping + ping.join(pieces) + ping, step)
    assert wire.messages == [message]
    assert wire.controls == [(ws.PING, b"are you there")] * (len(pieces) + 1)
    if sunk:
        assert bytes(place[5:]) == message.buffers[0]


def test_a_large_payload_is_received_in_its_place() -> None:
    place = bytearray(500_000)
    wire = Wire(BULK, lambda _: memoryview(place))
    message = Chunk(1, 0, 500_000, (bytes(range(250)) * 2000,))
    data = frame(body(message))
    wire.feed(data[:100])
    # What the reader now wants filled is the sink's own memory.
    assert wire._target.obj is place
    wire.feed(data[100:])
    assert bytes(place) == message.buffers[0]
    assert wire.messages == [message]


def test_the_sink_is_asked_for_small_payloads_too_and_may_decline() -> None:
    asked = []

    def decline(message: Message) -> None:
        asked.append(message)

    wire = Wire(BULK, decline).feed(frame(body(Chunk(1, 0, 4, (b"abcd",)))) + frame(body(Chunk(1, 4, 4, (b"",)))))
    assert asked == [Chunk(1, 0, 4)]
    assert wire.messages == [Chunk(1, 0, 4, (b"abcd",)), Chunk(1, 4, 4, (b"",))]


def test_several_buffers_of_a_large_message() -> None:
    message = Batch(Sequence(1), [1], (bytes(50_000), b"x" * 30_000, b""))
    assert Wire().feed(frame(body(message))).messages == [message]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what is resident")
@pytest.mark.parametrize("part", ["header", "payload"])
def test_what_is_announced_and_does_not_come_takes_no_memory(part: str) -> None:
    limit, large = 64 << 20, 60 << 20  # more than the allocator keeps for itself
    head = b"" if part == "header" else msgpack.packb([1, [], [large]])
    start = framing.PREFIX.pack(Batch.code, len(head) or large) + head
    before = resident_bytes()
    wires = [Wire(limit=limit).feed(ws.frame_header(ws.BINARY, len(start) + large, bytes(4)) + start) for _ in range(4)]
    assert resident_bytes() - before < large
    assert not any(wire.closed for wire in wires)


def test_a_hello_has_little_room_and_what_follows_has_more() -> None:
    hello = body(Hello([1], OPERATIONS, "", {"skyproxy": "x" * ws.MAX_HELLO_BYTES}))
    for pieces in ([frame(hello)], fragments(hello, 10, 5000)):
        with pytest.raises(ProtocolError, match="the limit is 16,384"):
            Wire(connection=Connection(WORKER)).feed(b"".join(pieces))
    wire = Wire(connection=Connection(WORKER))
    wire.feed(frame(body(Hello([1], OPERATIONS, "", {}))))
    wire.connection.on_send(Welcome(1, "s", {}, [], {}))
    wire.feed(frame(body(batch(1, ws.MAX_HELLO_BYTES))))
    assert [type(message) for message in wire.messages] == [Hello, Batch]


def test_a_close_frame_ends_the_reading() -> None:
    wire = Wire().feed(frame(body(batch(1))) + frame(b"\x03\xe8bye", ws.CLOSE) + b"garbage behind it")
    assert wire.messages == [batch(1)]
    assert wire.controls == [(ws.CLOSE, b"\x03\xe8bye")]
    assert wire.closed


def test_a_close_frame_in_the_middle_of_a_message() -> None:
    pieces = fragments(body(batch(1, 1000)), 500)
    wire = Wire().feed(pieces[0] + frame(b"", ws.CLOSE))
    assert wire.closed
    assert wire.messages == []


def cut_short(message: Message, count: int) -> bytes:
    return frame(body(message)[:count])


BAD: list[tuple[str, bytes, str]] = [
    ("unmasked", frame(body(batch(1)), key=b""), "not masked"),
    ("text", frame(b"hello", ws.TEXT), "text"),
    ("reserved opcode", frame(b"hello", 3), "opcode 3"),
    ("reserved bit", bytes([0xC2]) + frame(body(batch(1)))[1:], "extension"),
    ("stray continuation", frame(b"x", ws.CONTINUATION), "without a beginning"),
    ("nested message", frame(body(batch(1))[:7], final=False) + frame(body(batch(1))), "inside another"),
    ("long ping", frame(bytes(126), ws.PING), "126 bytes"),
    ("fragmented ping", frame(b"x", ws.PING, final=False), "fragmented"),
    ("oversized", ws.frame_header(ws.BINARY, LIMIT + 1, KEY), "limit"),
    ("oversized 64 bit", ws.frame_header(ws.BINARY, 2**63, KEY), "limit"),
    ("empty", frame(b""), "too short"),
    ("unknown code", frame(b"\x63\x00\x00\x00\x00"), "code 99"),
    ("cut in the header", cut_short(batch(1, 100), 8), "frame ends before"),
    ("cut in the payload", cut_short(batch(1, 100), 50), "add up"),
    ("cut large", cut_short(batch(1, 100_000), 90_000), "add up"),
    ("too much", frame(body(batch(1)) + b"x"), "add up"),
    ("too much large", frame(body(batch(1, 100_000)) + b"x"), "add up"),
    ("fragments too short", b"".join(fragments(body(batch(1, 1000))[:900], 100)), "ends in the middle"),
    ("fragments too long", b"".join(fragments(body(batch(1, 1000)) + b"x", 100, 1000)), "goes on after"),
    ("fragment header only", b"".join(fragments(body(batch(1, 1000))[:3], 1)), "ends in the middle"),
    ("oversized in fragments", frame(b"\x08\xff\xff\xff\xff", final=False), "limit"),
    ("wrong sequence", frame(body(batch(2))), "after batch 0"),
    ("wrong connection", frame(body(Chunk(1, 0, 1, (b"x",)))), "may not send Chunk"),
]


@pytest.mark.parametrize("step", [1, 1 << 30])
@pytest.mark.parametrize(("data", "problem"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_broken_rules(data: bytes, problem: str, step: int) -> None:
    if step == 1 and len(data) > 20_000:
        step = 1000
    with pytest.raises(ProtocolError, match=problem):
        Wire().feed(data, step)


def test_a_client_refuses_masked_frames() -> None:
    with pytest.raises(ProtocolError, match="is masked"):
        Wire(masked=False).feed(frame(body(batch(1))))


def test_a_payload_that_does_not_fit_is_refused_before_the_sink_is_asked() -> None:
    def sink(message: Message) -> memoryview:
        raise AssertionError("asked")

    with pytest.raises(ProtocolError, match="bytes 3 to 7 of 5"):
        Wire(BULK, sink).feed(frame(body(Chunk(1, 3, 5, (b"abcd",)))))
    with pytest.raises(ProtocolError, match="room for 2"):
        Wire(BULK, lambda _: memoryview(bytearray(2))).feed(frame(body(Chunk(1, 0, 5, (b"abcd",)))))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([1, 1 << 30]))
def test_fuzz_garbage(data: bytes, step: int) -> None:
    try:
        Wire().feed(data, step)
    except ProtocolError:
        pass
