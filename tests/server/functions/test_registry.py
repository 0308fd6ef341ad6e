"""Calls on the worker's side, without a connection: what is kept for whom, and for how long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from skyproxy.errors import SessionLostError
from skyproxy.payloads.pickling import Pickler
from skyproxy.runtime.lifecycle import LIFECYCLE
from skyproxy.settings import Settings
from skyproxy_server.activity import Activity
from skyproxy_server.functions import call, registry
from skyproxy_server.functions.call_threads import CallThreads
from skyproxy_server.functions.events import OutgoingEvent
from skyproxy_server.functions.registry import Calls

DEVICES = [{"type": "cpu", "index": 0, "name": "cpu"}]
LAST = ("result", "error")
HAS_RUN: list[int] = []


class Caller:
    """A connection that remembers what it is sent."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str, dict[str, Any]]] = []
        self.ended: dict[str, threading.Event] = {}
        self.broken = False

    def send_event(self, call: str, event: OutgoingEvent) -> None:
        if self.broken:
            raise SessionLostError("cut")
        self.events.append((call, event.number, event.kind, event.value))
        if event.kind in LAST:
            self.ended.setdefault(call, threading.Event()).set()

    def wait(self, call: str) -> None:
        assert self.ended.setdefault(call, threading.Event()).wait(60)

    def kinds(self, call: str) -> list[str]:
        return [kind for name, _, kind, _ in self.events if name == call]


def note(number: int) -> None:
    HAS_RUN.append(number)


class LateThreads(CallThreads):
    """Remembers what a thread is to do; the test does it."""

    def start(self, body: Callable[[], object], name: str) -> threading.Thread:
        self.body = body
        return threading.current_thread()


def make_calls(**limits: Any) -> Calls:
    calls = Calls(DEVICES, Settings(**limits), Activity())
    calls._threads = CallThreads(kept_seconds=0.0)  # a call is over when its thread is
    return calls


def payload(function: Any, *args: Any) -> tuple[dict[str, Any], list[bytes]]:
    """What arrives for a call: its task and its pieces."""
    pickled = Pickler(lambda tensor: None).pickle((function, args, {}))
    task = {"name": "call", "results": "value", "context": b"", "timeout": None, **pickled.tables}
    return task, [bytes(piece) for piece in pickled.pieces]


def start(calls: Calls, caller: Caller, name: str, function: Any, *args: Any, timeout: float | None = None) -> None:
    task, pieces = payload(function, *args)
    calls.bind("session", name, [], [])
    calls.start("session", caller, name, {**task, "name": name, "timeout": timeout}, pieces)


def ended(calls: Calls, name: str) -> None:
    """Waits until the call's thread is through."""
    call = calls._get(name)
    assert call is not None
    assert call._thread is not None
    call._thread.join(60)


def test_it_begins_when_payload_and_arguments_are_there() -> None:
    calls, caller = make_calls(), Caller()
    calls.start("session", caller, "a", *payload(abs, -3))
    assert caller.events == []
    calls.bind("session", "a", [], [])
    caller.wait("a")
    assert caller.kinds("a") == ["started", "result"]


def test_modes_that_cannot_be_put_back_are_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no such mode here")

    monkeypatch.setattr(call, "wait_for_rest", refuse)
    calls, caller = make_calls(), Caller()
    start(calls, caller, "a", abs, -3)
    caller.wait("a")
    assert caller.kinds("a") == ["started", "error"]


def test_a_second_start_changes_nothing() -> None:
    calls, caller, runs = make_calls(), Caller(), []
    append = runs.append
    calls.bind("session", "a", [], [])
    task = {"name": "a", "results": "value", "context": b"", "timeout": None, "tensors": [], "bases": []}
    pickled = [bytes(Pickler(lambda tensor: None).pickle((count_up, (), {})).pieces[0])]
    for _ in range(2):
        calls.start("session", caller, "a", task, pickled)
    caller.wait("a")
    ended(calls, "a")
    calls.forget("a")
    calls.start("session", caller, "a", task, pickled)
    append(COUNT[0])
    assert runs == [1]


COUNT = [0]


def count_up() -> None:
    COUNT[0] += 1


def test_a_connection_that_breaks_is_made_up_for() -> None:
    calls, first, second = make_calls(), Caller(), Caller()
    first.broken = True
    start(calls, first, "a", abs, -3)
    ended(calls, "a")
    assert calls.attach(second, "a", 0) is None
    assert second.kinds("a") == ["started", "result"]
    assert [number for _, number, _, _ in second.events] == [1, 2]


def test_only_what_was_not_received_is_sent_again() -> None:
    calls, first, second = make_calls(), Caller(), Caller()
    start(calls, first, "a", abs, -3)
    first.wait("a")
    calls.attach(second, "a", 1)
    assert second.kinds("a") == ["result"]


def test_without_a_caller_the_oldest_output_goes() -> None:
    calls, caller = make_calls(max_waiting_output_bytes=3 * 74), Caller()
    release = threading.Event()
    RELEASES["a"] = release
    start(calls, caller, "a", wait_for, "a")
    call = calls._get("a")
    assert call is not None
    calls.detach(caller)
    for number in range(10):
        call.write("stdout", f"line {number:04d}\n")
    calls.attach(caller, "a", 1)
    release.set()
    caller.wait("a")
    lines = [value["text"] for _, _, kind, value in caller.events if kind == "output"]
    assert 1 <= len(lines) <= 3
    assert lines == [f"line {number:04d}\n" for number in range(10 - len(lines), 10)]


RELEASES: dict[str, threading.Event] = {}


def wait_for(name: str) -> None:
    RELEASES[name].wait(60)


def test_the_oldest_unread_results_go_first() -> None:
    calls, caller = make_calls(max_kept_calls=2), Caller()
    for name in "abc":
        start(calls, caller, name, abs, -1)
        caller.wait(name)
        ended(calls, name)
        calls.detach(caller)
    answers = [calls.attach(Caller(), name, 0) for name in "abc"]
    assert [answer.value["reason"] if answer else None for answer in answers] == ["gone", None, None]


def test_a_result_that_was_received_may_be_shed() -> None:
    calls, caller, late = make_calls(max_kept_result_bytes=1000), Caller(), Caller()
    for name in "ab":
        start(calls, caller, name, bytes, 900)
        caller.wait(name)
        ended(calls, name)
    calls.attach(late, "a", 0)
    assert late.events[-1][2] == "error"
    assert "SKYPROXY_MAX_KEPT_RESULT_BYTES" in late.events[-1][3]["message"]
    calls.attach(late, "b", 0)
    assert late.events[-1][2] == "result"


def test_a_call_that_is_cancelled_before_its_thread_has_begun_runs_nothing() -> None:
    calls, caller = make_calls(), Caller()
    late = LateThreads()
    calls._threads = late
    start(calls, caller, "a", note, 1)
    calls.cancel("session", "a", InterruptedError("cancelled"))
    late.body()
    assert caller.kinds("a") == ["started", "error"]
    assert not HAS_RUN
    assert calls.running == 0


def test_too_many_at_once_are_refused() -> None:
    calls, caller = make_calls(max_calls=1), Caller()
    RELEASES["a"] = threading.Event()
    start(calls, caller, "a", wait_for, "a")
    start(calls, caller, "b", abs, -1)
    assert caller.events[-1][3]["type"] == "LimitExceededError"
    RELEASES["a"].set()
    caller.wait("a")
    ended(calls, "a")
    assert calls.running == 0


def test_a_start_that_is_sent_again_is_not_refused_where_the_limit_is_reached() -> None:
    calls, first, second = make_calls(max_calls=1), Caller(), Caller()
    RELEASES["a"] = threading.Event()
    arrived = payload(wait_for, "a")
    calls.start("session", first, "a", *arrived)
    calls.start("session", first, "a", *arrived)  # waits for its arguments, and counts once
    calls.bind("session", "a", [], [])
    calls.detach(first)
    calls.attach(second, "a", 0)
    calls.start("session", second, "a", *arrived)  # runs
    assert second.kinds("a") == ["started"]
    RELEASES["a"].set()
    second.wait("a")
    assert second.kinds("a") == ["started", "result"]
    ended(calls, "a")
    start(calls, first, "b", abs, -1)
    calls.start("session", second, "a", *arrived)  # has ended
    first.wait("b")
    assert first.kinds("b") == ["started", "result"]
    assert second.kinds("a") == ["started", "result"]


def test_who_has_a_result_may_make_the_next_call_in_the_same_breath() -> None:
    calls, second = make_calls(max_calls=1), Caller()

    class Hasty(Caller):
        def send_event(self, call: str, event: OutgoingEvent) -> None:
            if event.kind in LAST:
                start(calls, second, call + " again", abs, -1)
            super().send_event(call, event)

    for name, function in (("a", abs), ("b", wait_for)):  # one returns, the other raises
        start(calls, first := Hasty(), name, function, -1)
        first.wait(name)
        second.wait(name + " again")
        assert second.kinds(name + " again") == ["started", "result"]


def test_a_call_that_waits_for_its_arguments_counts() -> None:
    calls, caller = make_calls(max_calls=1), Caller()
    calls.start("session", caller, "a", *payload(abs, -1))
    start(calls, caller, "b", abs, -1)
    assert caller.events[-1][3]["type"] == "LimitExceededError"
    calls.bind("session", "a", [], [])
    caller.wait("a")
    assert caller.kinds("a") == ["started", "result"]


def test_a_cancel_that_comes_before_the_payload_holds() -> None:
    calls, caller = make_calls(), Caller()
    calls.cancel("session", "a", InterruptedError("given up"))
    start(calls, caller, "a", count_up)
    assert caller.kinds("a") == ["error"]


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Any]:
    """The sessions whose hooks are left."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(LIFECYCLE, "abandon", lambda *arguments: found.put(arguments))
    return found


def test_hooks_of_an_ended_session_stay_as_long_as_its_functions_run(abandoned: queue.SimpleQueue[Any]) -> None:
    calls, caller = make_calls(), Caller()
    RELEASES["a"] = threading.Event()
    start(calls, caller, "a", wait_for, "a")
    calls.session_ended("another")
    assert abandoned.get(timeout=60) == ("another",)
    calls.session_ended("session")
    assert abandoned.empty()
    RELEASES["a"].set()
    assert abandoned.get(timeout=60) == ("session",)


def test_hooks_are_left_though_a_function_that_was_given_up_goes_on(abandoned: queue.SimpleQueue[Any]) -> None:
    calls, caller = make_calls(call_grace_seconds=0.01), Caller()
    RELEASES["a"] = threading.Event()
    start(calls, caller, "a", wait_for, "a")
    calls.detach(caller)
    calls.session_ended("session")
    assert abandoned.get(timeout=60) == ("session", ["a"])
    RELEASES["a"].set()


def test_an_ended_session_begins_nothing(abandoned: queue.SimpleQueue[Any]) -> None:
    calls, caller = make_calls(), Caller()
    calls.session_ended("session")
    begun = COUNT[0]
    start(calls, caller, "late", count_up)
    assert caller.events == []
    assert COUNT[0] == begun


@pytest.mark.parametrize("comes_back", [True, False])
def test_orphans_live_until_their_grace_is_over(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []

    class Timer:
        def __init__(self, seconds: float, function: Any, arguments: tuple[Any, ...]) -> None:
            self.fire = lambda: function(*arguments)
            assert seconds == 300
            timers.append(self)

        def start(self) -> None:
            pass

    monkeypatch.setattr("skyproxy_server.functions.registry.threading.Timer", Timer)
    calls, caller = make_calls(), Caller()
    start(calls, caller, "a", abs, -1)
    caller.wait("a")
    calls.detach(caller)
    calls.session_ended("session")
    if comes_back:
        assert calls.attach(Caller(), "a", 0) is None
    timers[0].fire()
    answer = calls.attach(Caller(), "a", 0)
    assert (answer is None) == comes_back


class SlowCaller(Caller):
    """A connection whose client does not read what ends a call."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = threading.Event()
        self.reads = threading.Event()

    def send_event(self, call: str, event: OutgoingEvent) -> None:
        if event.kind in LAST:
            self.is_full.set()
            assert self.reads.wait(60)
        super().send_event(call, event)


def test_a_client_who_does_not_read_keeps_no_other_waiting() -> None:
    calls, slow, quick = make_calls(), SlowCaller(), Caller()
    start(calls, slow, "slow", abs, -1)
    try:
        assert slow.is_full.wait(60)
        start(calls, quick, "quick", abs, -1)
        ended(calls, "quick")
        assert quick.kinds("quick") == ["started", "result"]
        # Now that it was told: who has left is told nothing.
        leaving = threading.Thread(target=calls.detach, args=(quick,), daemon=True)
        leaving.start()
        leaving.join(60)
        assert not leaving.is_alive()
    finally:
        slow.reads.set()
    slow.wait("slow")


def test_names_of_forgotten_calls_have_a_bound_each_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REMEMBERED", 3)
    calls = make_calls()
    for number in range(10):
        calls.forget("x" * 100_000 + str(number))
    assert not calls._gone
    for number in range(10):
        calls.forget(str(number))
    assert list(calls._gone) == ["7", "8", "9"]
