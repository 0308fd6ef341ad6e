"""The functions connection on the worker's side: what the start of a call may bring beside its function."""

from __future__ import annotations

import hashlib
import pickle
import sys
from typing import Any

import pytest

from skyproxy.errors import SessionLostError
from skyproxy.payloads.pieces import MAX_FORGOTTEN
from skyproxy.protocol.call_messages import CallEvent, CallStart
from skyproxy.protocol.messages import Message
from skyproxy.relays.relays import RELAYS
from skyproxy.settings import SETTINGS
from skyproxy_server.activity import Activity
from skyproxy_server.auth import Identity
from skyproxy_server.functions.call_threads import CallThreads
from skyproxy_server.functions.connection import FunctionsConnection
from skyproxy_server.functions.registry import Calls

TASK: dict[str, Any] = {
    "name": "work",
    "results": "value",
    "context": b"",
    "timeout": None,
    "tensors": [],
    "bases": [],
}


class Client:
    """A transport whose peer sends these messages and waits for the end of each call."""

    identity = Identity("tests", "here")

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.events: list[CallEvent] = []
        self.closed = ""

    def recv(self) -> Message:
        if not self.messages:
            raise SessionLostError("over")
        return self.messages.pop(0)

    def send(self, message: Message) -> None:
        assert isinstance(message, CallEvent)
        self.events.append(message)

    def close(self, code: str = "", reason: str = "") -> None:
        self.closed = reason


def start(call: str, **options: object) -> CallStart:
    content = pickle.dumps((len, ("abc",), {}))
    return CallStart(call, TASK | options, [len(content)], (content,))


def serve(client: Client, calls: Calls, bound: list[str] | None = None) -> None:
    def bind(call: str) -> None:
        assert bound is not None
        bound.append(call)
        calls.bind("session", call, [], ())

    FunctionsConnection(calls, "session", client, SETTINGS, bind if bound is not None else None).run()  # type: ignore[arg-type]


@pytest.fixture
def calls() -> Calls:
    calls = Calls([], SETTINGS, Activity())
    calls._threads = CallThreads(kept_seconds=0.0)  # a call is over when its thread is
    return calls


def wait_for_end(calls: Calls, call: str) -> None:
    known = calls._get(call)
    if known is not None and known._thread is not None:
        known._thread.join(60)


def test_a_call_that_is_bound_begins_at_once_and_a_quiet_one_tells_its_end_alone(calls: Calls) -> None:
    bound: list[str] = []
    client = Client(start("a", bound=True, quiet=True), start("b", bound=True))
    serve(client, calls, bound)
    assert bound == ["a", "b"]
    for call in bound:
        wait_for_end(calls, call)
    caller = Client()
    for call in bound:
        calls.attach_here(FunctionsConnection(calls, "session", caller, SETTINGS), call, 0)  # type: ignore[arg-type]
    kinds = {call: [event.kind for event in caller.events if event.call == call] for call in bound}
    assert kinds == {"a": ["result"], "b": ["started", "result"]}


def test_a_call_that_is_not_bound_waits_for_the_operations(calls: Calls) -> None:
    bound: list[str] = []
    serve(Client(start("a"), start("b", bound=False)), calls, bound)
    assert bound == []
    assert calls.running == 0


def test_the_start_of_a_call_brings_the_word_that_others_may_be_forgotten(calls: Calls) -> None:
    bound: list[str] = []
    serve(Client(start("a", bound=True)), calls, bound)
    wait_for_end(calls, "a")
    assert calls.names() == ["a"]
    serve(Client(start("b", bound=True, forget=["a", "never existed"])), calls, bound)
    wait_for_end(calls, "b")
    assert calls.names() == ["b"]


@pytest.mark.parametrize(
    "options",
    [
        {"bound": 1},
        {"bound": None},
        {"quiet": "yes"},
        {"forget": "abc"},
        {"forget": [1]},
        {"forget": [b"a"]},
        {"forget": ["a" * 65]},
        {"forget": ["a"] * (MAX_FORGOTTEN + 1)},
        {"forget": {"a": 1}},
        {"passed": "a"},  # with the bytes
        {"passed": 1},
    ],
)
def test_options_that_cannot_be_end_the_connection(calls: Calls, options: dict[str, object]) -> None:
    client = Client(start("a", **options), start("b", bound=True))
    serve(client, calls, [])
    assert "malformed" in client.closed
    assert calls.names() == []


def passed(call: str, name: object, size: int, **options: object) -> CallStart:
    return CallStart(call, TASK | {"passed": name, **options}, [size], ())


@pytest.mark.parametrize("options", [{"name": 1}, {"name": "a" * 65}, {"name": "a", "file": "/proc/1/fd/1"}])
def test_a_payload_that_was_passed_on_has_a_name_and_nothing_else(calls: Calls, options: dict[str, object]) -> None:
    client = Client(passed("a", options.pop("name"), 10, **options))
    serve(client, calls, [])
    assert "malformed" in client.closed


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are there on Linux only")
def test_a_payload_that_was_passed_on_to_the_session_is_taken_once_and_no_other(calls: Calls) -> None:
    content = pickle.dumps((len, ("abc",), {}))
    digest = hashlib.sha256(content).digest()
    try:
        for session, name in (("session", "ours"), ("session", "short"), ("another", "theirs")):
            RELAYS.get_or_make(session, name, len(content), digest).hold([content])
        client = Client(
            passed("a", "ours", len(content), bound=True),
            passed("b", "ours", len(content), bound=True),
            passed("c", "short", len(content) - 1, bound=True),
            passed("d", "theirs", len(content), bound=True),
        )
        bound: list[str] = []
        serve(client, calls, bound)
        wait_for_end(calls, "a")
        assert bound == calls.names() == ["a"]
        asked = [(event.call, event.value) for event in client.events if event.kind == "unknown"]
        assert asked == [(call, {"reason": "never begun"}) for call in "bcd"], "the client is to send the bytes"
    finally:
        for session in ("session", "another"):
            RELAYS.forget(session)


def test_who_may_not_bind_cannot(calls: Calls) -> None:
    client = Client(start("a", bound=True))
    serve(client, calls)
    assert "malformed" in client.closed
    assert calls.names() == []


@pytest.mark.parametrize("name", ["timeout", "debug"])
@pytest.mark.parametrize("seconds", [float("nan"), -1.0, "1", 1])
def test_a_time_that_cannot_be_waited_for_ends_the_connection(calls: Calls, name: str, seconds: object) -> None:
    client = Client(start("a", bound=True, **{name: seconds}))
    serve(client, calls, [])
    assert "malformed" in client.closed
    assert calls.running == 0


@pytest.mark.parametrize("options", [{"timeout": float("inf")}, {"timeout": 1e308}, {}, {"debug": float("inf")}])
def test_who_says_no_time_or_one_without_end_waits_for_the_function(calls: Calls, options: dict[str, object]) -> None:
    begin = start("a", bound=True, **options)
    if "timeout" not in options:
        del begin.task["timeout"]
    client = Client(begin)
    serve(client, calls, [])
    wait_for_end(calls, "a")
    call = calls._get("a")
    assert call is not None
    assert [event.kind for event in call.events._log] == ["started", "result"]
    assert client.closed == ""
    assert calls.running == 0
