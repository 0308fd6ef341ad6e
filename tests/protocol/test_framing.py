"""The frame format: exact bytes in both directions, and nothing but ProtocolError for anything else."""

from __future__ import annotations

import math
import struct
from dataclasses import fields
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyproxy.errors import ConfigurationError, LimitExceededError, ProtocolError
from skyproxy.protocol import call_messages, framing, messages
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallEvent, CallStart
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    Ack,
    Batch,
    CancelOperations,
    CancelTransfer,
    Challenge,
    Chunk,
    Continue,
    Failure,
    Goodbye,
    Hello,
    JobAnswer,
    JobRequest,
    Known,
    Landed,
    Message,
    NamedBatch,
    Offer,
    PackedChunk,
    Ping,
    Pong,
    Proof,
    Received,
    Repeat,
    Reply,
    RequestId,
    Sequence,
    Warned,
    Welcome,
)

LIMIT = 1 << 20


def raw_frame(code: int, header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<BI", code, len(header)) + header + payload


CASES: list[tuple[Message, bytes]] = [
    (
        Hello([1, 2], "operations", "", {"torch": "2.13"}),
        raw_frame(1, b"\x94\x92\x01\x02\xaaoperations\xa0\x81\xa5torch\xa42.13"),
    ),
    (
        Hello([1], "operations", "s", {}, 600, b"ab", 7),
        raw_frame(1, b"\x97\x91\x01\xaaoperations\xa1s\x80\xcd\x02\x58\xc4\x02ab\x07"),
    ),
    (
        Welcome(1, "s", {}, [{"type": "cpu", "index": 0}], {"max_handles": 4}),
        raw_frame(2, b"\x95\x01\xa1s\x80\x91\x82\xa4type\xa3cpu\xa5index\x00\x81\xabmax_handles\x04"),
    ),
    (Welcome(1, "s", {}, [], {}, b"ab", 3), raw_frame(2, b"\x97\x01\xa1s\x80\x90\x80\xc4\x02ab\x03")),
    (Goodbye("done", "all read"), raw_frame(3, b"\x92\xa4done\xa8all read")),
    (
        Batch(Sequence(1), [7, 300, -1, None, True, "x"]),
        raw_frame(4, b"\x93\x01\x96\x07\xcd\x01\x2c\xff\xc0\xc3\xa1x\x90"),
    ),
    (Batch(Sequence(2), [3], (b"abc", b"", b"de")), raw_frame(4, b"\x93\x02\x91\x03\x93\x03\x00\x02", b"abcde")),
    (Batch(Sequence(3), [1.5]), raw_frame(4, b"\x93\x03\x91\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x90")),
    (
        Batch(Sequence(4), [1 - 2j]),
        raw_frame(4, b"\x93\x04\x91\xd8\x01" + struct.pack("<dd", 1.0, -2.0) + b"\x90"),
    ),
    (
        NamedBatch(Sequence(5), [7, 8], 3, [1], (b"ab",)),
        raw_frame(12, b"\x95\x05\x92\x07\x08\x03\x91\x01\x91\x02", b"ab"),
    ),
    (Repeat(Sequence(6), 3, [9]), raw_frame(13, b"\x94\x06\x03\x91\x09\x90")),
    (Ack(Sequence(2**64 - 1)), raw_frame(5, b"\x91\xcf" + b"\xff" * 8)),
    (Reply(RequestId(9), {"a": [b"\x00", None]}), raw_frame(6, b"\x93\x09\x81\xa1a\x92\xc4\x01\x00\xc0\x90")),
    (Reply(RequestId(9), None, (b"xyz",)), raw_frame(6, b"\x93\x09\xc0\x91\x03", b"xyz")),
    (
        Warned("UserWarning", "hm", {"position": 3}),
        raw_frame(23, b"\x93\xabUserWarning\xa2hm\x81\xa8position\x03"),
    ),
    (Failure(RequestId(5), {"type": "ValueError"}), raw_frame(7, b"\x92\x05\x81\xa4type\xaaValueError")),
    (Chunk(1, 2, 5, (b"\xff\xfe\xfd",)), raw_frame(8, b"\x94\x01\x02\x05\x91\x03", b"\xff\xfe\xfd")),
    (PackedChunk(1, 2, 9, 7, 4, (b"\xff\xfe",)), raw_frame(14, b"\x96\x01\x02\x09\x07\x04\x91\x02", b"\xff\xfe")),
    (Offer(3, 7, b"\x01\x02"), raw_frame(20, b"\x93\x03\x07\xc4\x02\x01\x02")),
    (Known(3, True), raw_frame(21, b"\x92\x03\xc3")),
    (Challenge(3, b"no"), raw_frame(25, b"\x92\x03\xc4\x02no")),
    (Proof(3, b"ok"), raw_frame(26, b"\x92\x03\xc4\x02ok")),
    (Received(5), raw_frame(27, b"\x91\x05")),
    (Landed(3, 7), raw_frame(28, b"\x92\x03\x07")),
    (Continue([1, 2], {3: 4}), raw_frame(29, b"\x92\x92\x01\x02\x81\x03\x04")),
    (CancelOperations(3), raw_frame(30, b"\x91\x03")),
    (CancelTransfer(1, "no"), raw_frame(9, b"\x92\x01\xa2no")),
    (Ping(-5), raw_frame(10, b"\x91\xfb")),
    (Pong(0, {"queued_batches": 3}), raw_frame(11, b"\x92\x00\x81\xaequeued_batches\x03")),
    (CallStart("c", {"name": "f"}, [2], (b"ab",)), raw_frame(15, b"\x94\xa1c\x81\xa4name\xa1f\x91\x02\x91\x02", b"ab")),
    (CallData("c", 0, 1, 2, (b"ab",)), raw_frame(16, b"\x95\xa1c\x00\x01\x02\x91\x02", b"ab")),
    (CallEvent("c", 1, "started", {}, []), raw_frame(17, b"\x96\xa1c\x01\xa7started\x80\x90\x90")),
    (CallAck("c", 4, 0), raw_frame(18, b"\x93\xa1c\x04\x00")),
    (CallCancel("c", "no"), raw_frame(19, b"\x92\xa1c\xa2no")),
    (CallAttach("c", 7), raw_frame(22, b"\x92\xa1c\x07")),
    (JobRequest(RequestId(1), "data", {}, (b"ab",)), raw_frame(31, b"\x94\x01\xa4data\x80\x91\x02", b"ab")),
    (JobAnswer(RequestId(1), "limit", {}), raw_frame(32, b"\x94\x01\xa5limit\x80\x90")),
]


def encode(message: Message) -> bytes:
    return b"".join(framing.encode(message, LIMIT))


@pytest.mark.parametrize(("message", "frame"), CASES, ids=lambda case: type(case).__name__)
def test_message_and_frame_are_one_another(message: Message, frame: bytes) -> None:
    assert encode(message) == frame
    assert framing.decode(frame, LIMIT) == message
    assert framing.decode(memoryview(bytearray(frame)), LIMIT) == message


def test_every_message_has_a_case() -> None:
    assert {type(message) for message, _ in CASES} == set(MESSAGES.values())


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, complex(math.inf, -0.0), 2**64 - 1, -(2**63)],
)
def test_numbers_come_back_bit_for_bit(value: Any) -> None:
    back = framing.decode(encode(Batch(Sequence(1), [value])), LIMIT)
    assert isinstance(back, Batch)
    assert repr(back.stream[0]) == repr(value)


def test_nan_keeps_its_payload() -> None:
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_1234))[0]
    back = framing.decode(encode(Batch(Sequence(1), [nan, complex(nan, 1)])), LIMIT)
    assert isinstance(back, Batch)
    assert struct.pack("<d", back.stream[0]) == struct.pack("<d", nan)
    assert math.isnan(back.stream[1].real)


def test_lone_surrogates_survive() -> None:
    failure = Failure(RequestId(1), {"file": "caf\udce9.py"})
    assert framing.decode(encode(failure), LIMIT) == failure


def test_buffers_are_neither_copied_nor_split() -> None:
    owner = bytearray(b"12345678")
    view = memoryview(owner)
    parts = framing.encode(Chunk(1, 0, 8, (view,)), LIMIT)
    assert len(parts) == 2
    owner[0] = 0x58
    assert bytes(parts[1]) == b"X2345678"


def test_buffers_of_wider_items_count_bytes() -> None:
    view = memoryview(bytearray(16)).cast("Q")
    back = framing.decode(encode(Chunk(1, 0, 16, (view,))), LIMIT)
    assert isinstance(back, Chunk)
    assert [len(item) for item in back.buffers] == [16]


def test_decoded_buffers_are_views_of_the_frame() -> None:
    frame = bytearray(encode(Chunk(1, 0, 3, (b"abc",))))
    back = framing.decode(frame, LIMIT)
    assert isinstance(back, Chunk)
    frame[-1] = ord("!")
    assert bytes(back.buffers[0]) == b"ab!"


def test_head_is_read_before_the_payload_is_there() -> None:
    frame = encode(Chunk(7, 0, 5, (b"hello",)))
    needed = framing.header_size(frame[: framing.PREFIX_BYTES], LIMIT)
    assert needed == len(frame) - 5
    head = framing.decode_head(frame[:needed], LIMIT)
    assert (head.buffer_lengths, head.header_bytes, head.frame_bytes) == ([5], needed, len(frame))
    assert head.complete() == Chunk(7, 0, 5)
    assert head.complete([b"hello"]) == Chunk(7, 0, 5, (b"hello",))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_integers_beyond_64_bits_are_named(value: int) -> None:
    with pytest.raises(ConfigurationError, match=str(value)):
        encode(Batch(Sequence(1), [1, [value]]))


def test_huge_integers_are_described() -> None:
    with pytest.raises(ConfigurationError, match="50001 bits"):
        encode(Batch(Sequence(1), [2**50_000]))


def test_foreign_objects_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"Batch holds a builtins\.object"):
        encode(Batch(Sequence(1), [object()]))


def test_a_failed_encoding_leaves_no_trace_in_the_next() -> None:
    with pytest.raises(ConfigurationError):
        encode(Batch(Sequence(1), [1, 2, object()]))
    assert encode(Ack(Sequence(1))) == raw_frame(5, b"\x91\x01")


def test_too_large_a_frame_is_refused_by_its_sender() -> None:
    with pytest.raises(LimitExceededError, match="SKYPROXY_MAX_FRAME_BYTES"):
        framing.encode(Chunk(1, 0, 100, (bytes(100),)), 100)


BAD_FRAMES: list[tuple[bytes, str]] = [
    (b"", "too short"),
    (b"\x05\x01\x00\x00", "too short"),
    (raw_frame(0, b"\x90"), "code 0"),
    (raw_frame(200, b"\x90"), "code 200"),
    (raw_frame(5, b"\x91\x01")[:-1], "frame ends before"),
    (raw_frame(5, b"\x91\x01") + b"x", "add up to 7"),
    (raw_frame(5, b"\x92\x01\x02"), "2 fields and has 1"),
    (raw_frame(5, b"\x90"), "0 fields"),
    (raw_frame(5, b"\x01"), "not a list"),
    (raw_frame(5, b""), "not msgpack"),
    (raw_frame(5, b"\xc1"), "not msgpack"),
    (raw_frame(5, b"\x91"), "not msgpack"),
    (raw_frame(5, b"\xdd\xff\xff\xff\xff"), "not msgpack"),
    (raw_frame(5, b"\x91" * 3000 + b"\x01"), "not msgpack"),
    (raw_frame(5, b"\x91\x01\x02"), "not msgpack"),
    (raw_frame(5, b"\x91\xa11"), "sequence should be int"),
    (raw_frame(5, b"\x91\xc3"), "sequence"),
    (raw_frame(5, b"\x91\xcb" + bytes(8)), "sequence"),
    (raw_frame(4, b"\x93\x01\x81\x01\x01\x90"), "stream"),
    (raw_frame(4, b"\x93\x01\x90\x01"), "lengths"),
    (raw_frame(4, b"\x93\x01\x90\x91\xff"), "lengths"),
    (raw_frame(4, b"\x93\x01\x90\x91\xc3", b"x"), "lengths"),
    (raw_frame(4, b"\x93\x01\x90\x91\x03", b"ab"), "add up"),
    (raw_frame(4, b"\x93\x01\x90\x91\x03", b"abcd"), "add up"),
    (raw_frame(4, b"\x93\x01\x90\x91\xcf" + b"\xff" * 8), "limit"),
    (raw_frame(4, b"\x93\x01\x91\xd4\x02\x00\x90"), "extension 2"),
    (raw_frame(4, b"\x93\x01\x91\xd4\x01\x00\x90"), "extension 1 of 1 bytes"),
    (raw_frame(3, b"\x92\xa1\xff\xa0"), "not msgpack"),
    (raw_frame(3, b"\x92\xc4\x01a\xa0"), "code_name"),
    (raw_frame(1, b"\x94\x91\xa11\xa0\xa0\x80"), "versions"),
    (raw_frame(1, b"\x94\x91\x01\xa0\xa0\x81\x01\xa0"), "software"),
    (raw_frame(2, b"\x95\x01\xa0\x80\x91\x01\x80"), "devices"),
    (raw_frame(7, b"\x92\x01\x81\x90\x01"), "not msgpack"),
]


@pytest.mark.parametrize(("frame", "problem"), BAD_FRAMES)
def test_bad_frame_is_refused_with_its_reason(frame: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        framing.decode(frame, LIMIT)


def test_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        framing.header_size(struct.pack("<BI", 5, LIMIT), LIMIT)
    with pytest.raises(ProtocolError, match="code 99"):
        framing.header_size(struct.pack("<BI", 99, 1), LIMIT)
    head = raw_frame(8, b"\x94\x01\x02\x05\x91\xce\x7f\xff\xff\xff")
    with pytest.raises(ProtocolError, match="limit"):
        framing.decode_head(head, LIMIT)


def test_no_type_of_its_own_comes_out_of_a_timestamp() -> None:
    back = framing.decode(raw_frame(4, b"\x93\x01\x91\xd6\xff\x00\x00\x00\x01\x90"), LIMIT)
    assert back == Batch(Sequence(1), [1.0])


PLAIN = {int, float, complex, str, bytes, bool, type(None), list, dict, tuple, memoryview}

msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


def only_protocol_errors(frame: bytes) -> None:
    try:
        message = framing.decode(frame, LIMIT)
    except ProtocolError:
        return
    assert encode(message)
    for item in fields(message):
        assert type(getattr(message, item.name)) in PLAIN


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_arbitrary_bytes(data: bytes) -> None:
    only_protocol_errors(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 15), st.binary(max_size=60), st.binary(max_size=10))
def test_fuzz_headers(code: int, header: bytes, payload: bytes) -> None:
    only_protocol_errors(raw_frame(code, header, payload))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(MESSAGES)), st.lists(msgpack_values, max_size=6), st.binary(max_size=10))
def test_fuzz_fields(code: int, fields: list[Any], payload: bytes) -> None:
    only_protocol_errors(raw_frame(code, msgpack.packb(fields), payload))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([frame for _, frame in CASES]), st.data())
def test_fuzz_flipped_and_cut_frames(frame: bytes, data: st.DataObject) -> None:
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    only_protocol_errors(bytes(changed[: data.draw(st.integers(0, len(changed)))]))


@settings(max_examples=120, deadline=None)
@given(st.lists(msgpack_values | st.complex_numbers(allow_nan=False)), st.lists(st.binary(max_size=20), max_size=4))
def test_fuzz_round_trip(stream: list[Any], buffers: list[bytes]) -> None:
    frame = encode(Batch(Sequence(1), stream, tuple(buffers)))
    assert encode(framing.decode(frame, LIMIT)) == frame


def test_every_message_has_a_code_of_its_own() -> None:
    defined = {**vars(messages), **vars(call_messages)}
    kinds = [kind for kind in defined.values() if isinstance(kind, type) and hasattr(kind, "code")]
    assert sorted(kind.code for kind in kinds) == sorted({kind.code for kind in kinds})
    assert {kind for kind in kinds if kind is not messages.Message} == set(MESSAGES.values())
