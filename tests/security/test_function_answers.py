"""A hostile worker, and the calls of functions that a program makes there: any frames, and events without end."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyproxy.errors import ProtocolError, SessionLostError, visible
from skyproxy.functions.call import Call
from skyproxy.functions.channel import FunctionChannel
from skyproxy.functions.waiting_calls import WaitingCalls
from skyproxy.protocol.answers import checked_event
from skyproxy.protocol.call_messages import CallEvent
from skyproxy.protocol.messages import Message
from skyproxy.runtime import debug_rooms
from skyproxy.settings import Settings
from tests.security.function_answers import besiege

ROUNDS = 60
SETTINGS = Settings(max_waiting_items=4, max_waiting_output_bytes=1 << 12)
_MOST_EVENTS = 100_000


@pytest.mark.timeout(240)
def test_whatever_a_worker_sends_of_calls_they_end_and_nothing_of_it_runs_here() -> None:
    siege = besiege(0, ROUNDS)
    assert siege.problems == []
    assert siege.worker.sent["CallEvent"] > ROUNDS
    assert siege.outcomes["a value"] < ROUNDS


class Flood:
    """A connection whose worker sends the same events until somebody ends it, or far too many were taken."""

    bytes_sent = bytes_received = 0

    def __init__(self, kind: str, value: dict[str, Any]) -> None:
        self._kind, self._value = kind, value
        self._number = 0
        self._closed = threading.Event()
        self.begun = threading.Event()

    def recv(self) -> Message:
        self.begun.wait(60)
        if self._closed.is_set() or self._number > _MOST_EVENTS:
            raise SessionLostError("closed")
        self._number += 1
        return CallEvent("c", self._number, self._kind, self._value, [1], (b"\xc0",))

    def send(self, message: Message) -> None:
        pass

    def close(self) -> None:
        self._closed.set()
        self.begun.set()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("item", {"form": "plain", "tensors": [], "bases": []}),
        ("output", {"stream": "stdout", "text": "x" * 100, "waits": {"kind": "x", "file": "y" * 10_000}}),
        ("started", {"x": "y" * 1000}),
    ],
    ids=["items", "output", "beginnings"],
)
def test_no_worker_fills_the_memory_of_a_caller_who_is_slow(
    kind: str, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyproxy.functions.channel._FIRST_PAUSE_SECONDS", 0.0)
    session = SimpleNamespace(settings=SETTINGS, at_end=[], auxiliary=[], often=[], lost=None, threads=None)
    session.check = session.wait_until_awake = session.wake = lambda: None
    session.is_suspended = False
    session.recorder = SimpleNamespace(hidden_writes=0)
    session.count_wait = lambda kind: None
    flood = Flood(kind, value)
    channel = FunctionChannel(cast(Any, session), cast(Any, lambda: flood))
    goes_on = threading.Event()
    adopter = SimpleNamespace(release=lambda: None)
    call = Call("c", "f", channel, cast(Any, adopter), lambda stream, text: goes_on.wait(60))
    channel._calls["c"] = call
    if kind == "started":  # behind some output that its caller is slow to show
        channel._pass_on(call, CallEvent("c", 1, "output", {"stream": "stdout", "text": "x"}, []), _complete())
        flood._number = 1
    channel.open()
    try:
        flood.begun.set()
        pause = threading.Event()
        while flood._number <= _MOST_EVENTS and channel._calls and not pause.wait(0.01):
            assert channel._threads[0].is_alive()
        assert flood._number < _MOST_EVENTS // 10
    finally:
        goes_on.set()
        session.lost = SessionLostError("over")
        for tell in session.at_end:
            tell(session.lost)
        for thread in channel._threads:
            thread.join(60)
    with pytest.raises(SessionLostError, match="ahead of the caller of f"):
        call.result(0)


def _complete() -> Any:
    return SimpleNamespace(pieces=[])


def test_where_a_function_waits_is_told_in_short_words() -> None:
    place = {"kind": "breakpoint", "file": "f" * 100_000, "line": 3, "debugger": "d", "more": ["x"] * 100_000}
    event = checked_event("output", {"stream": "stderr", "text": "t", "waits": place, "more": "y" * 100_000})
    assert len(json.dumps(event)) < 10_000
    with pytest.raises(ProtocolError):
        checked_event("output", {"stream": "stderr", "text": "t", "waits": {"kind": "breakpoint", "line": ["x"]}})


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="sky") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def _call(identity: str, ends: list[Any]) -> Call:
    return cast(Call, SimpleNamespace(id=identity, name=f"f{identity}", add_done_callback=ends.append))


@pytest.mark.usefixtures("rooms")
def test_no_worker_hides_from_debuggers_what_waits_on_another() -> None:
    waiting, ends = WaitingCalls(), []
    hostile, honest = _call("h" * 32, ends), _call("o" * 32, ends)
    ours, theirs = cast(Any, object()), cast(Any, object())
    for number in range(20_000):
        waiting.note(theirs, hostile, {"kind": "breakpoint", "debugger": f"d{number}", "file": "\x1b[2J" * 500})
    waiting.note(ours, honest, {"kind": "breakpoint", "file": "mine.py", "line": 7})
    # Nor does it take its place, or call it gone.
    waiting.note(theirs, hostile, {"kind": "breakpoint", "debugger": honest.id, "file": "theirs.py"})
    waiting.note(theirs, hostile, {"kind": "gone", "debugger": honest.id})
    (line,) = debug_rooms.programs()
    try:
        rows = debug_rooms.waiting(line)
    finally:
        line.close()
    assert [row["file"] for row in rows if row["id"] == "oooooooo"] == ["mine.py"]
    assert len(rows) > 100
    assert "\x1b" not in json.dumps(rows, ensure_ascii=False)
    assert rows[0]["file"] in visible("\x1b[2J" * 500)
    assert len(ends) == 2
    for end in ends:
        end(hostile)
        end(honest)
    assert waiting._list() == []


def test_more_than_a_worker_sends_ahead_is_refused_in_words() -> None:
    from skyproxy.functions.items import Ahead

    ahead = Ahead("f")
    ahead.queued = 1 << 30
    ahead.note("result", SETTINGS)
    with pytest.raises(ProtocolError, match="SKYPROXY_MAX_WAITING_OUTPUT_BYTES"):
        ahead.note("output", SETTINGS)
