"""Functions that were pickled before: their bytes are taken again, and never where anything in them has changed."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from skyproxy.functions import code_cache
from skyproxy.functions.payload import Payload
from skyproxy.payloads import pickling
from skyproxy.pools.tasks import CoroutineTask
from skyproxy.runtime.call_groups import GroupTask
from skyproxy.runtime.lifecycle import Task


def made(source: str, **variables: object) -> dict[str, Any]:
    """The globals of a program that has run this."""
    program: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(source, program)
    return program


def digest(function: Callable[..., object]) -> bytes:
    code = Payload.of(function).code
    assert code is not None
    return code.digest


def run(function: Callable[..., object], *args: object) -> object:
    code = Payload.of(function).code
    assert code is not None
    return cloudpickle.loads(code.content)(*args)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many values were pickled in full since the last time."""
    pickles: list[object] = []
    plain = pickling.Pickler.pickle

    def pickle(self: pickling.Pickler, value: object) -> pickling.Pickled:
        pickles.append(value)
        return plain(self, value)

    def counted() -> int:
        number = len(pickles)
        pickles.clear()
        return number

    monkeypatch.setattr(pickling.Pickler, "pickle", pickle)
    return counted


SIMPLE = """
import math
scale = 3
def helper(x: int) -> int:
    return x * scale
def work(x, *, more=1):
    return helper(x) + more + math.floor(0.5)
"""


def test_a_function_is_pickled_once(count: Callable[[], int]) -> None:
    work = made(SIMPLE)["work"]
    first = digest(work)
    count()
    assert digest(work) == first
    assert count() == 0
    assert run(work, 2) == 7


@pytest.mark.parametrize("wrap", [Task, CoroutineTask, lambda f: GroupTask(Task(f))])
def test_each_way_of_wrapping_it_is_another_pickle(wrap: Callable[[Any], Any]) -> None:
    work = made(SIMPLE)["work"]
    assert digest(wrap(work)) != digest(work)
    assert digest(wrap(work)) == digest(wrap(work))


def test_the_value_of_a_global_as_it_is_now_is_what_travels() -> None:
    program = made(SIMPLE)
    assert run(program["work"], 2) == 7
    program["scale"] = 10
    assert run(program["work"], 2) == 21


def test_a_constant_of_another_class_that_is_equal_is_another_one() -> None:
    program = made("flag = 1\ndef work():\n    return type(flag).__name__")
    assert run(program["work"]) == "int"
    program["flag"] = True
    assert run(program["work"]) == "bool"


def test_a_helper_that_was_defined_anew_is_what_travels() -> None:
    program = made(SIMPLE)
    assert run(program["work"], 2) == 7
    exec("def helper(x):\n    return 100", program)
    assert run(program["work"], 2) == 101
    program["helper"].__defaults__ = (5,)
    exec("helper.__code__ = (lambda x: 200).__code__", program)
    assert run(program["work"], 2) == 201


def test_defaults_and_closures_that_changed_are_what_travels() -> None:
    work = made(SIMPLE)["work"]
    assert run(work, 2) == 7
    work.__kwdefaults__ = {"more": 50}
    assert run(work, 2) == 56

    program = made("def outer():\n    n = 1\n    def set(v):\n        nonlocal n\n        n = v\n    def get():\n"
                   "        return n\n    return set, get\nset, get = outer()")  # fmt: skip
    assert run(program["get"]) == 1
    program["set"](2)
    assert run(program["get"]) == 2


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("data = [1]\ndef work():\n    return len(data)", "data.append(2)"),
        ("data = {}\ndef work():\n    return len(data)", "data[1] = 2"),
        ("class Box:\n    size = 1\ndef work():\n    return Box.size", "Box.size = 2"),
        ("class Box:\n    pass\nbox = Box()\nbox.size = 1\ndef work():\n    return box.size", "box.size = 2"),
        ("def work(data=[1]):\n    return len(data)", "work.__defaults__[0].append(2)"),
        ("def work():\n    return work.size\nwork.size = 1", "work.size = 2"),
        ("data = ([1],)\ndef work():\n    return len(data[0])", "data[0].append(2)"),
    ],
)
def test_what_can_change_within_is_pickled_each_time(source: str, change: str) -> None:
    program = made(source)
    before = run(program["work"])
    exec(change, program)
    assert before in (0, 1)
    assert run(program["work"]) == before + 1  # type: ignore[operator]


def test_functions_that_call_each_other_do_not_keep_each_other_alive() -> None:
    program = made("def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n != 0 and even(n - 1)")
    digest(program["even"])
    digest(program["odd"])
    gone = [weakref.ref(program["even"]), weakref.ref(program["odd"])]
    program.clear()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_modules_that_somebody_wants_by_value_are_not_taken_from_what_was_kept() -> None:
    work = made(SIMPLE)["work"]
    assert code_cache.look(work, []) is not None
    module = types.ModuleType("test_code_cache_module")
    import sys

    sys.modules[module.__name__] = module
    try:
        cloudpickle.register_pickle_by_value(module)
        try:
            assert code_cache.look(work, []) is None
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    finally:
        del sys.modules[module.__name__]


def test_a_decorated_function_is_never_kept_by_its_wrapper_alone() -> None:
    program = made("size = [1]\ndef plain():\n    return size[0]")
    plain = program["plain"]  # alone: the program has `__builtins__`, and in it whatever another test has put there

    @functools.wraps(plain)
    def work() -> object:
        return plain()

    assert run(work) == 1
    program["size"][0] = 2
    assert run(work) == 2


def test_simple_arguments_arrive_as_they_are() -> None:
    arguments = (1, 2.5, "a", b"b", None, True, [1, [2]], {"a": (1,)})
    payload = Payload.of(made(SIMPLE)["work"], arguments, {"more": [1]})
    assert payload.pickled.is_simple
    assert pickling.unpickle_simple(payload.pickled.pieces[0]) == (None, arguments, {"more": [1]})


def test_a_simple_value_brings_no_class_into_being() -> None:
    import pickle

    from skyproxy.errors import ProtocolError

    for data in (pickle.dumps(functools.partial(print, 1)), b"\x80\x05", b"nonsense"):
        with pytest.raises(ProtocolError, match="simple value"):
            pickling.unpickle_simple(data)
