"""Profiles that a worker made up."""

from __future__ import annotations

import functools
import gzip
import json
import random
import zlib
from typing import Any

import pytest

from skyproxy.errors import ProtocolError
from skyproxy.profiling import received
from skyproxy.profiling.clock import Clock, ClockReading
from skyproxy.profiling.received import read_profile
from skyproxy.profiling.timeline import Side, merge
from skyproxy.session.trace import SessionTrace

OSC = "\x1b]52;c;ZXZpbA==\x07"
GOOD = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 5.0, "dur": 2.0}
ODD: tuple[Any, ...] = (None, 0, -1, 10**400, 1e308, float("nan"), "x", "", [], {}, [1], {"a": 1}, True, OSC, "batch 7")

compress = functools.partial(gzip.compress, mtime=0)  # else the names of tests change with the clock


def packed(events: object, replies: object = (), base: object = 0) -> bytes:
    trace = {"baseTimeNanoseconds": base, "traceEvents": events}
    return compress(json.dumps({"trace": trace, "replies": replies}).encode())


def shown(content: bytes) -> str:
    """What a program sees of it: the trace as text, and the table."""
    trace, replies = read_profile(content)
    reading = ClockReading(0, 0, 1)
    timeline = merge(
        {"traceEvents": []}, [Side("sky:0", trace, replies, SessionTrace(), Clock(reading, reading))], 0, 9
    )
    json.dumps(timeline.trace)
    return timeline.summary(10)


def test_what_a_worker_did_is_in_the_table() -> None:
    assert "aten::mm" in shown(packed([GOOD], [[1, 3]]))


def test_names_of_operations_do_not_command_the_terminal() -> None:
    table = shown(packed([{**GOOD, "name": OSC}]))
    assert "\\x1b]52" in table
    assert not any(character in table for character in "\x1b\x07")


@pytest.mark.parametrize("seed", range(20))
def test_events_of_any_shape_are_left_out_or_shown(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        event = {key: chance.choice((value, *ODD)) for key, value in GOOD.items() if chance.random() < 0.9}
        events = chance.choice((event, GOOD, *ODD)), GOOD
        assert "aten::mm" in shown(packed(events, [[chance.choice(ODD), 3], [1, chance.choice(ODD)]]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        compress(b"[" * 100_000),
        compress(b"7"),
        compress(b'{"trace": 5, "replies": []}'),
        packed(5),
        packed([], 5),
        packed([], [[1]]),
        packed([], [], 1e308),
        packed([], [], "x"),
    ],
)
def test_what_is_no_profile_is_an_error_in_words(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="no profile"):
        read_profile(content)


def test_a_profile_that_grows_without_end_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "MOST_BYTES", 1 << 20)
    own, produced = zlib.decompressobj(received._GZIP), []

    class Expander:
        def decompress(self, *arguments: Any) -> bytes:
            produced.append(own.decompress(*arguments))
            return produced[-1]

    monkeypatch.setattr(received.zlib, "decompressobj", lambda bits: Expander())
    with pytest.raises(ProtocolError, match="more than 1048576 bytes"):
        read_profile(compress(bytes(64 << 20)))
    assert [len(content) for content in produced] == [(1 << 20) + 1]
