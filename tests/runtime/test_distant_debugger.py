"""Both ends of a debugger that is in another process, in one process here, and what one end does not believe."""

from __future__ import annotations

import bdb
import sys
import threading
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.breakpoints import Debugger, known_place, stop_tracing
from skyproxy.runtime.distant_debugger import MAX_TEXT_CHARACTERS, DebuggedProcess, DistantDebugger
from tests.runtime.prompts import until_prompt

WAIT_SECONDS = 60.0
PLACE = {"kind": "breakpoint", "file": "f", "function": "g", "pool": "", "line": 1, "rank": 0, "world_size": 1}


class Pair:
    """A function that stops in a debugger, and the ends of both processes, which hear each other at once."""

    def __init__(self) -> None:
        self.debugger = Debugger("", WAIT_SECONDS, lambda place: None)
        self.distant = DistantDebugger("secret", self._to_process)
        self.process = DebuggedProcess(self.debugger, self.distant.hear)
        self.total = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _to_process(self, message: dict[str, Any]) -> None:
        self.process.hear(message)

    def _run(self) -> None:
        total = 1
        try:
            self.debugger.stop(sys._getframe())
            self.total = total + 1
        except bdb.BdbQuit:
            pass
        finally:
            stop_tracing()
            self.debugger.ended = True

    def end(self) -> None:
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()


def test_who_leaves_may_come_back_and_a_second_is_refused() -> None:
    pair = Pair()
    said = pair.distant.follow()
    assert "_run()" in until_prompt(said)
    with pytest.raises(ConfigurationError, match="somebody else is attached"):
        next(pair.distant.follow())
    said.close()
    again = pair.distant.follow()
    assert until_prompt(again).endswith("(Pdb) ")
    pair.distant.tell("!total = 41")
    until_prompt(again)
    pair.distant.tell("c")
    assert [kind for kind, _ in again if kind != "alive"] == ["end"]
    pair.end()
    assert pair.total == 42


def test_a_long_text_comes_in_parts() -> None:
    pair = Pair()
    said = pair.distant.follow()
    until_prompt(said)
    pair.distant.tell(f"p 'x' * {2 * MAX_TEXT_CHARACTERS}")
    assert until_prompt(said).count("x") == 2 * MAX_TEXT_CHARACTERS
    pair.distant.tell("c")
    pair.end()


def test_what_nobody_reads_is_bounded_and_the_prompt_still_comes() -> None:
    distant = DistantDebugger("secret", lambda message: None)
    said = distant.follow()
    first = threading.Thread(target=next, args=(said,), daemon=True)
    first.start()
    distant.hear([0, "text", "of nobody"])
    while not distant._attached:
        first.join(0.01)
    for _ in range(5000):
        distant.hear([1, "text", "x"])
    distant.hear([1, "prompt", ""])
    first.join(WAIT_SECONDS)
    rest = until_prompt(said)
    assert 0 < len(rest) <= 1000


def test_a_process_that_is_gone_ends_what_follows_it() -> None:
    def gone(message: dict[str, Any]) -> None:
        raise ConnectionError("gone")

    assert list(DistantDebugger("secret", gone).follow()) == [("end", "")]


def test_a_worker_that_is_gone_leaves_nothing_waiting() -> None:
    def gone(said: list[object]) -> None:
        raise ConnectionError("gone")

    pair = Pair()
    pair.process = DebuggedProcess(pair.debugger, gone)
    pair.process.hear({"attach": 1})
    pair.end()
    assert pair.total == 0
    assert "the worker is gone" in pair.debugger.explain()


@pytest.mark.parametrize(
    "said",
    [None, {}, [], [1, "text"], [True, "text", ""], [1, "text", 7], [1, "command", ""], [1, "text", "x" * 9000]],
)
def test_words_that_no_debugger_says_are_refused(said: object) -> None:
    with pytest.raises(ValueError, match="unknown form"):
        DistantDebugger("secret", lambda message: None).hear(said)


@pytest.mark.parametrize(
    "change", [{"kind": "gone"}, {"kind": None}, {"file": None}, {"line": "1"}, {"rank": True}, {"pool": []}]
)
def test_a_place_of_another_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unknown form"):
        known_place({**PLACE, **change})
    assert known_place({**PLACE, "more": 1}) == PLACE
    assert len(known_place({**PLACE, "file": "x" * 10_000})["file"]) == 4096
