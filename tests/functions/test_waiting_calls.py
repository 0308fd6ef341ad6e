"""Functions that wait at a breakpoint on a worker, and whoever attaches through the program that has called them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyproxy
import skyproxy.errors
from skyproxy import nodes
from skyproxy.functions.waiting_calls import WAITING_CALLS
from skyproxy.pools import PendingCompute, pool_calls
from skyproxy.pools.call_options import CallOptions
from skyproxy.runtime import debug_rooms
from skyproxy.runtime.debug_rooms import Line
from skyproxy.settings import Settings

WAIT_SECONDS = 60


class Told:
    """Takes what a call prints, and tells when it waits."""

    def __init__(self) -> None:
        self.text = ""
        self._waits = threading.Semaphore(0)

    def __call__(self, stream: str, text: str) -> None:
        self.text += text
        if "skyproxy debug" in text:
            self._waits.release()

    def wait(self) -> None:
        assert self._waits.acquire(timeout=WAIT_SECONDS)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="sky") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr(WAITING_CALLS, "_process", 0)
        yield


def attached(call: skyproxy.functions.Call) -> tuple[Line, dict[str, Any]]:
    """A connection as `skyproxy debug` makes it; the program notes a call a moment after it has told of it."""
    done = threading.Event()
    while not done.wait(0.01):
        for line in debug_rooms.programs():
            for row in debug_rooms.waiting(line):
                if row["id"] == call.id[:8]:
                    line.send({"attach": row["id"]})
                    return line, row
            line.close()
    raise AssertionError


def until_prompt(line: Line) -> str:
    text = ""
    while (message := line.receive())["kind"] != "prompt":
        assert message["kind"] in ("text", "alive"), message
        text += message["text"]
    return text


def add_up(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
        if number == 1:
            breakpoint()
    return total


def fail() -> None:
    secret = 41
    raise ValueError(f"not {secret + 1}")


@pytest.fixture(params=[False, True], ids=["plain", "isolated"])
def isolate(request: pytest.FixtureRequest, node: skyproxy.Node) -> bool:
    """Whether a function has a process of its own."""
    if request.param and not node._session.welcome.limits.get("isolates"):
        pytest.skip("processes of functions need Linux")
    return bool(request.param)


@pytest.mark.usefixtures("rooms")
def test_a_breakpoint_waits_until_somebody_goes_on(node: skyproxy.Node, isolate: bool) -> None:
    told = Told()
    call = node.submit(add_up, 3, debug=True, isolate=isolate, on_output=told)
    told.wait()
    assert told.text.startswith("skyproxy: waits at a breakpoint in add_up, test_waiting_calls.py:")
    line, row = attached(call)
    assert (row["kind"], row["function"], row["rank"]) == ("breakpoint", "add_up", 0)
    until_prompt(line)
    line.send({"line": "p total * 100"})
    assert "100" in until_prompt(line)
    line.send({"line": "!total = 40"})
    until_prompt(line)
    line.send({"line": "c"})
    assert call.result(WAIT_SECONDS) == 42
    line.close()


@pytest.mark.usefixtures("rooms")
def test_who_leaves_the_debugger_leaves_the_function_waiting(node: skyproxy.Node, isolate: bool) -> None:
    told = Told()
    call = node.submit(add_up, 3, debug=True, isolate=isolate, on_output=told)
    told.wait()
    first, _ = attached(call)
    until_prompt(first)
    first.close()
    while True:
        line, _ = attached(call)
        message = line.receive()
        if message["kind"] != "end":  # the worker learns a moment later that the first one has left
            break
        line.close()
    if message["kind"] != "prompt":
        until_prompt(line)
    line.send({"line": "c"})
    assert call.result(WAIT_SECONDS) == 3
    line.close()


@pytest.mark.usefixtures("rooms")
def test_an_exception_waits_to_be_looked_at_and_is_raised_then(node: skyproxy.Node, isolate: bool) -> None:
    told = Told()
    call = node.submit(fail, debug=True, isolate=isolate, on_output=told)
    told.wait()
    line, row = attached(call)
    assert row["kind"] == "exception"
    assert "ValueError: not 42" in until_prompt(line)
    line.send({"line": "p secret"})
    assert "41" in until_prompt(line)
    line.send({"line": "q"})
    with pytest.raises(ValueError, match="not 42"):
        call.result(WAIT_SECONDS)
    line.close()


@pytest.mark.usefixtures("rooms")
def test_where_nobody_comes_the_function_ends_with_a_reason(
    node: skyproxy.Node, isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node._session, "settings", Settings(debug=True, breakpoint_seconds=0.1))
    with pytest.raises(Exception, match=r"nobody attached to the breakpoint in .*SKYPROXY_BREAKPOINT_SECONDS"):
        node.submit(add_up, 3, isolate=isolate).result(WAIT_SECONDS)


@pytest.mark.usefixtures("rooms")
def test_a_call_that_is_cancelled_waits_no_more(node: skyproxy.Node, isolate: bool) -> None:
    told = Told()
    call = node.submit(add_up, 3, debug=True, isolate=isolate, on_output=told)
    told.wait()
    assert call.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        call.result(WAIT_SECONDS)
    assert node.run(add_up, 1) == 0


def test_where_it_does_not_wait_the_way_is_named(node: skyproxy.Node, isolate: bool) -> None:
    with pytest.raises(RuntimeError, match=r"debug=True, or set SKYPROXY_DEBUG=1 .* `skyproxy debug` attaches"):
        node.submit(add_up, 3, isolate=isolate).result(WAIT_SECONDS)


def add_up_on_each(count: int) -> tuple[int, int]:
    rank = skyproxy.instance_info().rank
    total = 100 * rank
    breakpoint()
    return rank, total + count


@pytest.mark.usefixtures("rooms")
def test_ranks_of_a_pool_wait_each_by_itself_and_say_which_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", dataclasses.replace(nodes.SETTINGS, debug=True))
    with skyproxy.Compute(name="looked-at", provider=skyproxy.Local(device="cpu"), nodes=2) as pool:
        future = skyproxy.function(add_up_on_each)(1).submit_to_all(pool)
        lines = [attached_to_rank(rank) for rank in range(2)]
        for rank in (1, 0):  # in any order: none waits for another
            line, row = lines[rank]
            assert (row["function"], row["rank"], row["world_size"]) == ("add_up_on_each", rank, 2)
            assert row["pool"].startswith("looked-at")
            until_prompt(line)
            line.send({"line": "p 'total is', total"})
            assert f"('total is', {100 * rank})" in until_prompt(line)
            line.send({"line": f"!total = {7 + rank}"})
            until_prompt(line)
            line.send({"line": "c"})
        assert future.result(WAIT_SECONDS) == [(0, 8), (1, 9)]
        for line, _ in lines:
            line.close()


def fail_as_script(script: object) -> None:
    raise ValueError("not 42")


@pytest.mark.usefixtures("rooms")
def test_what_runs_a_script_does_not_wait_itself_where_the_script_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", dataclasses.replace(nodes.SETTINGS, debug=True))
    monkeypatch.setattr(pool_calls, "run_script", fail_as_script)
    (tmp_path / "train.py").touch()
    with skyproxy.Compute(provider=skyproxy.Local(device="cpu"), nodes=2) as pool:
        with pytest.raises(skyproxy.errors.RankErrors, match="not 42"):
            pool.torchrun(tmp_path / "train.py", timeout=WAIT_SECONDS)
        single = PendingCompute(fail, (), {}, CallOptions(debug=False), "fail")  # as an elastic pool makes it
        with pytest.raises(ValueError, match="not 42"):
            pool.submit_call(single).result(WAIT_SECONDS)


def attached_to_rank(rank: int) -> tuple[Line, dict[str, Any]]:
    """A connection as `skyproxy debug` makes it, to the call that waits on a rank."""
    done, end = threading.Event(), time.monotonic() + WAIT_SECONDS
    while not done.wait(0.01) and time.monotonic() < end:
        for line in debug_rooms.programs():
            for row in debug_rooms.waiting(line):
                if row["rank"] == rank:
                    line.send({"attach": row["id"]})
                    return line, row
            line.close()
    raise AssertionError(f"rank {rank} did not wait")
