"""Compressed chunks: bit for bit, bounded, only on slow links, and only while that pays."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from itertools import pairwise

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.protocol.messages import Chunk, Message, PackedChunk
from skyproxy.transport import packing
from skyproxy.transport.packing import ChunkWriter, pack, unpack

MIB = 1 << 20
NOISE = random.Random(0).randbytes(MIB)
WEIGHTS = b"".join(NOISE[i : i + 3] + b"\x3f" for i in range(0, 3 * MIB // 4, 3))


def packed(raw: bytes, width: int) -> PackedChunk:
    data = pack(raw, width)
    assert data is not None
    return PackedChunk(1, 0, len(raw), len(raw), width, (data,))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 4096, 100_003])
def test_bytes_come_back_bit_for_bit(width: int, size: int) -> None:
    raw = bytes(random.Random(size).choices(range(3), k=size)) + bytes(300)
    assert unpack(packed(raw, width)) == raw
    mixed = NOISE[:size] + bytes(200_000)
    assert unpack(packed(mixed, width)) == mixed


def test_the_planes_of_weights_are_told_apart() -> None:
    data = pack(memoryview(WEIGHTS), 4)
    assert data is not None
    assert len(data) < 0.76 * len(WEIGHTS)
    assert unpack(packed(WEIGHTS, 4)) == WEIGHTS


def test_noise_is_not_compressed() -> None:
    assert pack(NOISE, 1) is None
    assert pack(NOISE, 4) is None


GOOD = packed(bytes(1000), 4).buffers[0]


@pytest.mark.parametrize(
    "bad",
    [
        PackedChunk(1, 0, 1000, 999, 4, (GOOD,)),
        PackedChunk(1, 0, 2000, 1001, 4, (GOOD,)),
        PackedChunk(1, 0, 1000, 1000, 4, (bytes(GOOD)[:-1],)),
        PackedChunk(1, 0, 1000, 1000, 4, (bytes(GOOD) + b"x",)),
        PackedChunk(1, 0, 1000, 1000, 4, (b"\xff" * 10,)),
        PackedChunk(1, 0, 1000, 1000, 4, (b"",)),
    ],
)
def test_what_is_malformed_is_refused(bad: PackedChunk) -> None:
    with pytest.raises(ProtocolError, match="packed chunk of transfer 1"):
        unpack(bad)


def test_a_bomb_unpacks_to_no_more_than_it_names() -> None:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = compressor.compress(bytes(64 * MIB)) + compressor.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="1,000 bytes"):
            unpack(PackedChunk(1, 0, 1000, 1000, 1, (bomb,)))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


class Link:
    """A transport that takes its time, on a clock of its own."""

    def __init__(self, mbit: float, buffer_bytes: int = 0) -> None:
        self.now = 0.0
        self.sent: list[Message] = []
        self.rate = mbit * 1e6 / 8
        self.buffer_bytes = buffer_bytes
        self._free_at = 0.0

    def clock(self) -> float:
        return self.now

    def send(self, message: Message) -> None:
        assert isinstance(message, Chunk | PackedChunk)
        self.sent.append(message)
        self._free_at = max(self._free_at, self.now) + len(message.buffers[0]) / self.rate
        self.now = max(self.now, self._free_at - self.buffer_bytes / self.rate)

    def kinds(self) -> str:
        return "".join("P" if isinstance(message, PackedChunk) else "." for message in self.sent)


def write(link: Link, writer: ChunkWriter, raw: bytes, count: int, width: int = 4) -> None:
    for number in range(count):
        writer.send(1, number * len(raw), count * len(raw), memoryview(raw), width)


def writer_on(link: Link) -> ChunkWriter:
    return ChunkWriter(link, clock=link.clock)  # type: ignore[arg-type]


def test_a_slow_link_gets_compressed_chunks_after_three_slow_ones() -> None:
    link = Link(mbit=40)
    writer = writer_on(link)
    write(link, writer, WEIGHTS, 20)
    assert link.kinds() == "..." + 17 * "P"
    assert writer.packed_chunks == 17
    assert link.now < 0.85 * 20 * MIB / link.rate


def test_what_fits_into_socket_buffers_says_nothing() -> None:
    link = Link(mbit=40, buffer_bytes=4 * MIB)
    write(link, writer_on(link), WEIGHTS, 12)
    assert link.kinds() == 7 * "." + 5 * "P"


@pytest.mark.parametrize("mbit", [110, 1000, 10_000])
def test_a_fast_link_is_never_even_tried(mbit: float) -> None:
    link = Link(mbit)
    writer = writer_on(link)
    write(link, writer, WEIGHTS, 300)
    assert writer.attempts == writer.packed_chunks == 0
    assert set(link.kinds()) == {"."}


def test_hiccups_of_a_fast_link_are_not_taken_for_a_slow_one() -> None:
    link = Link(mbit=1000)
    writer = writer_on(link)
    for number in range(60):
        link.rate = 1e6 if number % 3 else 1e9
        write(link, writer, WEIGHTS, 1)
    assert writer.attempts == 0


def test_noise_is_tried_once_in_a_while() -> None:
    link = Link(mbit=40)
    writer = writer_on(link)
    write(link, writer, NOISE, 100)
    assert writer.packed_chunks == 0
    assert 2 <= writer.attempts <= 100 // 16 + 1


def test_after_noise_weights_are_compressed_again() -> None:
    link = Link(mbit=40)
    writer = writer_on(link)
    write(link, writer, NOISE, 5)
    write(link, writer, WEIGHTS, 40)
    assert "P" * 20 in link.kinds()


def test_a_link_that_became_fast_is_noticed() -> None:
    link = Link(mbit=40)
    writer = writer_on(link)
    write(link, writer, WEIGHTS, 10)
    link.rate = 1e9
    link.now += packing.TRUST_SECONDS
    before = writer.packed_chunks
    write(link, writer, WEIGHTS, 50)
    assert writer.packed_chunks == before > 0


def test_a_slow_processor_does_not_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(mbit=40)

    def slow_pack(piece: memoryview, width: int) -> bytes | None:
        link.now += 0.5
        return pack(piece, width)

    monkeypatch.setattr(packing, "pack", slow_pack)
    writer = writer_on(link)
    write(link, writer, WEIGHTS, 19)
    assert writer.packed_chunks == 0
    assert writer.attempts == 1


def test_small_pieces_are_measured_together_and_compressed_one_by_one() -> None:
    link = Link(mbit=40)
    piece = WEIGHTS[: 128 << 10]
    write(link, writer_on(link), piece, 40)
    assert link.kinds() == 24 * "." + 16 * "P"
    pieces = [message for message in link.sent if isinstance(message, PackedChunk)]
    assert all(unpack(message) == piece for message in pieces)
    assert all(b.offset - a.offset == len(piece) for a, b in pairwise(pieces))
