"""Groups of short calls, on the worker's side: made in order, given back in part, each result told once."""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import Any

import pytest

from skyproxy.runtime.call_groups import GroupTask, give_back, is_constant, is_simple, take

KEY = "key"


def test_all_results_come_in_order_and_nothing_is_kept() -> None:
    values, begun, has_more, seconds = GroupTask(pow)(KEY, [(2, 3), (3, 2), (2, 0)])
    assert (values, begun, has_more) == ([8, 9, 1], 3, False)
    assert seconds >= 0
    assert give_back(KEY) is None


def test_a_group_that_gives_back_begins_no_more_and_tells_each_result_once() -> None:
    at_second, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def work(number: int) -> int:
        made.append(number)
        if number == 1:
            at_second.set()
            assert go_on.wait(60)
        return number

    replies: list[list[Any]] = []
    thread = threading.Thread(target=lambda: replies.append(GroupTask(work)(KEY, [(0,), (1,), (2,), (3,)])))
    thread.start()
    assert at_second.wait(60)
    assert give_back(KEY) == [[0], 2]
    assert give_back(KEY) == [[], 2]
    go_on.set()
    thread.join(60)
    assert replies[0][:3] == [[1], 2, False]
    assert made == [0, 1]


def test_a_failure_ends_the_group_and_the_results_before_it_can_be_had_once() -> None:
    with pytest.raises(ZeroDivisionError):
        GroupTask(lambda number: 1 // number)(KEY, [(1,), (0,), (1,)])
    assert give_back(KEY) == [[1], 2]
    assert give_back(KEY) is None


def test_a_result_that_is_not_simple_ends_the_group_and_is_taken_by_itself() -> None:
    weird = object()
    values, begun, has_more, _ = GroupTask(lambda number: weird if number else number)(KEY, [(0,), (1,), (2,)])
    assert (values, begun, has_more) == ([0], 2, True)
    assert take(KEY) is weird
    with pytest.raises(LookupError, match="gone"):
        take(KEY)


def test_each_call_has_a_context_of_its_own() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def work(number: int) -> int:
        before = variable.get()
        variable.set(number)
        return before

    assert GroupTask(work)(KEY, [(1,), (2,), (3,)])[0] == [0, 0, 0]
    assert variable.get() == 0


def test_a_line_that_was_begun_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        has_begun_line = False

    stream = Stream()

    def work(number: int) -> int:
        stream.has_begun_line = number == 1
        return number

    monkeypatch.setattr(sys, "stdout", stream)
    values, begun, _, _ = GroupTask(work)(KEY, [(0,), (1,), (2,)])
    assert (values, begun) == ([0, 1], 2)


@pytest.mark.parametrize("value", [None, 1, 2.5, 1j, True, "a", b"a", (), (1, ("a", None))])
def test_numbers_strings_and_tuples_are_constant(value: object) -> None:
    assert is_simple(value)
    assert is_constant(value)


@pytest.mark.parametrize("value", [[1], {"a": 1}, ({"a": [2]},)])
def test_what_can_be_changed_is_simple_but_not_constant(value: object) -> None:
    assert is_simple(value)
    assert not is_constant(value)


def test_what_is_large_deep_or_of_another_class_is_not_simple() -> None:
    class Number(int):
        pass

    deep: object = 1
    for _ in range(9):
        deep = (deep,)
    endless: list[object] = []
    endless.append(endless)
    for value in (Number(1), "a" * 5000, list(range(100)), deep, endless, {1, 2}, object()):
        assert not is_simple(value)
