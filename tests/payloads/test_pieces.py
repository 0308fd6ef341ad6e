"""Payloads in pieces: cut, sent in any size, put together, and refused where they do not fit."""

from __future__ import annotations

from functools import partial

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.payloads.pieces import Assembly, plain_memory, send_payload
from skyproxy.protocol.call_messages import CallData, CallStart
from skyproxy.protocol.messages import Message

PIECES = [b"pickle", b"", bytes(range(100)), memoryview(bytes(60)).cast("I")]
SIZES = [6, 0, 100, 60]


def head(sizes: list[int], buffers: tuple[object, ...]) -> Message:
    return CallStart("c", {}, sizes, buffers)


def assembled(sent: list[Message], max_bytes: int = 1000) -> Assembly[bytearray]:
    start, *rest = sent
    assembly: Assembly[bytearray] = Assembly(start.sizes, start.buffers, plain_memory, max_bytes)
    for data in rest:
        assert not assembly.complete
        assembly.add(data)
    return assembly


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 100, 165, 166, 1000])
def test_what_was_sent_is_put_together(chunk_bytes: int) -> None:
    sent: list[Message] = []
    send_payload(sent.append, head, "c", 0, PIECES, chunk_bytes)
    assembly = assembled(sent)
    assert assembly.complete
    assert assembly.pieces == [bytes(piece) for piece in PIECES]
    assert all(len(message.buffers[0]) <= chunk_bytes for message in sent[1:])
    assert (len(sent) == 1) == (chunk_bytes >= sum(SIZES))


def test_what_is_put_together_is_a_copy() -> None:
    source = bytearray(b"abc")
    assembly: Assembly[bytearray] = Assembly([3], (source,), plain_memory, 10)
    source[0] = 0
    assert assembly.pieces == [b"abc"]


@pytest.mark.parametrize("sizes", [[-1], [5, -5], [11], [6, 5]])
def test_sizes_that_cannot_be_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ProtocolError, match="not allowed"):
        Assembly(sizes, (), plain_memory, 10)


def test_buffers_must_have_the_announced_sizes() -> None:
    with pytest.raises(ProtocolError, match="other sizes"):
        Assembly([2, 1], (b"a", b"bc"), plain_memory, 10)


@pytest.mark.parametrize(("piece", "offset"), [(2, 0), (0, 3), (1, 0)])
def test_data_must_fit(piece: int, offset: int) -> None:
    assembly: Assembly[bytearray] = Assembly([4, 1], (), plain_memory, 10)
    with pytest.raises(ProtocolError, match="does not fit"):
        assembly.add(CallData("c", 0, piece, offset, (b"ab",)))


def test_an_empty_payload_is_complete() -> None:
    sent: list[Message] = []
    send_payload(sent.append, partial(head), "c", 0, [], 10)
    assert assembled(sent).complete
