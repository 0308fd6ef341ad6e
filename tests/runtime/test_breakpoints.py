"""A debugger whose terminal is somewhere else: what it says, who may talk to it, and that it does not wait for ever."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.runtime import breakpoints
from skyproxy.runtime.breakpoints import DEBUGGERS, Debugger, Place, describe, is_quit, stop_tracing
from tests.runtime.prompts import until_prompt

LONG_SECONDS = 60.0


class Stopped:
    """A function that runs on a thread of its own, as on a worker."""

    def __init__(self, function: Callable[[Debugger], Any], seconds: float = LONG_SECONDS) -> None:
        self.places: list[Place] = []
        self.debugger = DEBUGGERS.begin(f"call {id(self)}", seconds, self.places.append)
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[[Debugger], Any]) -> None:
        try:
            self.result = function(self.debugger)
        except Exception as error:
            self.error = error
        finally:
            stop_tracing()
            DEBUGGERS.end(self.debugger)

    def end(self) -> None:
        self.thread.join(LONG_SECONDS)
        assert not self.thread.is_alive()


def add_up(debugger: Debugger) -> int:
    total = 1
    debugger.stop(sys._getframe())
    total += 1
    return total


def fail(debugger: Debugger) -> None:
    secret = 41
    try:
        raise ValueError(f"not {secret + 1}")
    except ValueError as error:
        debugger.look_at(error)


def test_whoever_attaches_reads_and_changes_what_is_there() -> None:
    stopped = Stopped(add_up)
    said = breakpoints.attach(stopped.debugger.identity)
    assert "add_up()" in until_prompt(said)
    breakpoints.tell(stopped.debugger.identity, "p total + 40")
    assert "41" in until_prompt(said)
    breakpoints.tell(stopped.debugger.identity, "!total = 10")
    until_prompt(said)
    breakpoints.tell(stopped.debugger.identity, "c\n")
    assert [kind for kind, _ in said if kind != "alive"][-1] == "end"
    stopped.end()
    assert stopped.result == 11


def add_up_beside_a_collection(debugger: Debugger) -> int:
    class Stop(Debugger):
        def _pdb(self) -> Any:
            terminal = super()._pdb()
            set_trace = terminal.set_trace

            def collect_on_the_way(frame: Any) -> None:
                set_trace(frame)
                finalizer()

            terminal.set_trace = collect_on_the_way  # type: ignore[method-assign]
            return terminal

    def finalizer() -> None:
        pass

    total = 1
    debugger.__class__ = Stop
    debugger.stop(sys._getframe())
    total += 1
    return total


def test_a_finalizer_that_runs_on_the_way_is_not_where_it_stops() -> None:
    stopped = Stopped(add_up_beside_a_collection)
    said = breakpoints.attach(stopped.debugger.identity)
    assert "add_up_beside_a_collection()" in until_prompt(said)
    breakpoints.tell(stopped.debugger.identity, "c")
    stopped.end()
    assert stopped.result == 2


def test_who_leaves_may_come_back_and_a_second_is_refused() -> None:
    stopped = Stopped(add_up)
    said = stopped.debugger.follow()
    until_prompt(said)
    with pytest.raises(ConfigurationError, match="somebody else is attached"):
        next(stopped.debugger.follow())
    said.close()  # type: ignore[attr-defined]
    again = stopped.debugger.follow()
    assert until_prompt(again) == "(Pdb) "
    stopped.debugger.tell("c")
    stopped.end()
    assert stopped.result == 2


def add_up_twice(debugger: Debugger) -> None:
    debugger.stop(sys._getframe())
    debugger.stop(sys._getframe())


def test_who_leaves_as_the_function_comes_to_its_next_stop_leaves_one_that_says_where_it_waits() -> None:
    stopped = Stopped(add_up_twice)
    said = stopped.debugger.follow()
    until_prompt(said)
    before = len(stopped.places)
    stopped.debugger.tell("c")
    until_prompt(said)  # it has come to the next one while somebody is attached, so nothing is told
    assert len(stopped.places) == before
    said.close()  # type: ignore[attr-defined]
    while len(stopped.places) == before:
        stopped.thread.join(0.01)
    assert stopped.places[-1]["line"] == add_up_twice.__code__.co_firstlineno + 2
    until_prompt(stopped.debugger.follow())
    stopped.debugger.tell("c")
    stopped.end()


def test_a_place_is_told_with_its_function_and_line() -> None:
    stopped = Stopped(add_up, seconds=0.0)
    stopped.end()
    [place] = stopped.places
    here = describe({**place, "line": 12})
    assert here == "skyproxy: waits at a breakpoint in add_up, test_breakpoints.py:12: skyproxy debug\n"
    there = describe({**place, "kind": "exception", "world_size": 4, "rank": 3})
    assert there.startswith("skyproxy: rank 3 waits with an exception in add_up")


def test_where_nobody_comes_the_function_ends_and_says_why() -> None:
    stopped = Stopped(add_up, seconds=0.0)
    stopped.end()
    assert stopped.error is not None
    assert is_quit(stopped.error)
    assert "nobody attached" in stopped.debugger.explain()
    with pytest.raises(LookupError):
        breakpoints.tell(stopped.debugger.identity, "c")


def test_quitting_ends_the_function() -> None:
    stopped = Stopped(add_up)
    said = stopped.debugger.follow()
    until_prompt(said)
    stopped.debugger.tell("q")
    stopped.end()
    assert stopped.error is not None
    assert is_quit(stopped.error)
    assert "told to quit" in stopped.debugger.explain()


def test_an_exception_can_be_looked_at_with_the_variables_of_its_frame() -> None:
    stopped = Stopped(fail)
    said = stopped.debugger.follow()
    assert "ValueError: not 42" in until_prompt(said)
    stopped.debugger.tell("p secret")
    assert "41" in until_prompt(said)
    stopped.debugger.tell("q")
    stopped.end()
    assert (stopped.places or [stopped.debugger.place])[0]["kind"] == "exception"


def test_an_exception_that_nobody_looks_at_is_let_go() -> None:
    stopped = Stopped(fail, seconds=0.0)
    stopped.end()
    assert stopped.error is None
