"""Functions that travel as code: sent once, found again by their content, never stale."""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import ProtocolError
from skyproxy.functions.function_code import FunctionCode
from skyproxy.payloads.pickling import Pickler
from skyproxy.protocol.call_messages import CallStart
from skyproxy_server.functions.known_functions import KnownFunctions

PADDING = "x" * 20_000

MAIN = """
import functools
PADDING = {padding!r}
NUMBER = {number}
SCALE = 2
calls = 0

def scaled(x):
    global calls
    calls += 1
    return x * SCALE, calls, len(PADDING) + 0 * NUMBER

def named(function):
    @functools.wraps(function)
    def wrapper(*args):
        return "wrapped", function(*args)
    return wrapper

wrapped = named(scaled)

cache = {{}}
current = None

def remember(key, value):
    cache[key] = value
    return len(cache)

def recall(key):
    return cache.get(key), current

def rebind(value):
    global current
    current = value

def helper(x):
    return 2 * x

def doubled(x):
    return helper(x)

def helped(x):
    return helper(x) + 1

def scale_later(begun, go):
    import os, time
    open(begun, "w").close()
    while not os.path.exists(go):
        time.sleep(0.005)
    return SCALE

def scale_of_helper(x):
    return scaled_by(x), SCALE * x

def scaled_by(x):
    return SCALE * x

HELPERS = {{"scaled": scaled_by}}

def scale_of_table(x):
    return HELPERS["scaled"](x), SCALE * x

class Row:
    def scale(self):
        return SCALE

def make_row():
    return Row()

def row_is_one(count):
    global calls
    calls += count
    row = make_row()
    return isinstance(row, Row), row.scale(), calls

def holding(number):
    def held():
        return number
    return held

chosen = holding(1)

def choose():
    return chosen()

def closing_over(values):
    def collect(x):
        values.append(x)
        return list(values)
    return collect
"""


_mains = itertools.count()


@pytest.fixture
def main() -> ModuleType:
    """A main file that no worker can import, and that no other test has."""
    module = ModuleType("__main__")
    number = next(_mains)
    module.__file__ = f"main_{number}.py"
    exec(MAIN.format(padding=PADDING, number=number), vars(module))
    return module


@pytest.fixture(scope="module")
def worker() -> Iterator[skyproxy.Node]:
    """A worker of these tests' own."""
    with skyproxy.launch_local("cpu") as node:
        node.run(abs, 1)
        yield node


@pytest.fixture
def sizes(worker: skyproxy.Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call has brought."""
    found: list[int] = []
    transport = worker._runner._channel._transport
    plain = transport.send

    def send(message: Any) -> None:
        if isinstance(message, CallStart):
            found.append(sum(message.sizes))
        plain(message)

    monkeypatch.setattr(transport, "send", send)
    return found


def test_a_function_is_sent_once_and_keeps_its_globals(
    worker: skyproxy.Node, sizes: list[int], main: ModuleType
) -> None:
    assert [worker.run(main.scaled, n) for n in range(3)] == [(0, 1, 20_000), (2, 2, 20_000), (4, 3, 20_000)]
    assert sizes[0] > 20_000
    assert max(sizes[1:]) < 1_000


def test_a_changed_global_is_no_longer_the_old_one(worker: skyproxy.Node, main: ModuleType) -> None:
    assert worker.run(main.scaled, 1)[0] == 2
    main.SCALE = 10
    assert worker.run(main.scaled, 1)[:2] == (10, 2)  # what has not changed here lives on there
    main.SCALE = 2
    assert worker.run(main.scaled, 1)[:2] == (2, 3)
    main.calls = 7
    assert worker.run(main.scaled, 1)[:2] == (2, 8)


def test_functions_of_one_file_see_each_others_globals(worker: skyproxy.Node, main: ModuleType) -> None:
    assert worker.run(main.remember, "a", 1) == 1
    assert worker.run(main.recall, "a") == (1, None)
    assert worker.run(main.rebind, "new") is None
    assert worker.run(main.recall, "a") == (1, "new")
    assert worker.run(main.remember, "b", 2) == 2
    main.current = "from here"  # what the program sets is taken over, and nothing else with it
    assert worker.run(main.recall, "b") == (2, "from here")
    assert worker.run(main.remember, "c", 3) == 3
    main.cache["z"] = 26
    assert worker.run(main.recall, "a") == (None, "from here")
    assert worker.run(main.recall, "z") == (26, "from here")


def test_a_function_that_runs_keeps_the_globals_that_it_was_sent_with(
    worker: skyproxy.Node, main: ModuleType, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    running = worker.submit(main.scale_later, str(begun), str(go))
    while not begun.exists():
        assert not running.done()
        time.sleep(0.005)
    main.SCALE = 10
    assert worker.run(main.scaled, 1)[0] == 10
    go.touch()
    assert running.result(60) == 2


def test_functions_that_a_function_calls_see_what_has_changed(worker: skyproxy.Node, main: ModuleType) -> None:
    for scale in (2, 10, 3, 2, 10):
        main.SCALE = scale
        assert worker.run(main.scale_of_helper, 1) == (scale, scale)
        assert worker.run(main.scale_of_table, 1) == (scale, scale)
        assert worker.run(main.row_is_one, 0) == (True, scale, 0)


def test_they_do_so_while_another_call_runs_with_what_was_before(
    worker: skyproxy.Node, main: ModuleType, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    assert worker.run(main.row_is_one, 5) == (True, 2, 5)
    assert worker.run(main.scale_of_table, 1) == (2, 2)
    running = worker.submit(main.scale_later, str(begun), str(go))
    while not begun.exists():
        assert not running.done()
        time.sleep(0.005)
    for scale in (10, 11):
        main.SCALE = scale
        assert worker.run(main.scale_of_helper, 1) == (scale, scale)
        assert worker.run(main.scale_of_table, 1) == (scale, scale)
        assert worker.run(main.row_is_one, 0) == (True, scale, 5)  # what they had counted stays
    go.touch()
    assert running.result(60) == 2
    main.SCALE = 12
    assert worker.run(main.scale_of_table, 1) == (12, 12)
    assert worker.run(main.row_is_one, 1) == (True, 12, 6)


def test_a_class_that_is_defined_anew_is_the_new_one_for_all(worker: skyproxy.Node, main: ModuleType) -> None:
    assert worker.run(main.row_is_one, 0)[:2] == (True, 2)
    exec("class Row:\n    def scale(self):\n        return -SCALE", vars(main))
    assert worker.run(main.row_is_one, 0)[:2] == (True, -2)


@pytest.mark.parametrize(
    ("before", "after"), [("-1", "-2"), ("1", "1.0"), ("1", "True"), ("0.0", "-0.0"), ("'a'", "b'a'")]
)
def test_a_function_whose_constant_alone_has_changed_is_the_new_one(
    before: str, after: str, worker: skyproxy.Node, main: ModuleType
) -> None:
    for constant in (before, after):
        exec(f"def helper(x):\n    return {constant}", vars(main))
        assert repr(worker.run(main.doubled, 3)) == repr(eval(constant))


def test_a_function_that_closes_over_something_else_is_the_new_one(worker: skyproxy.Node, main: ModuleType) -> None:
    assert worker.run(main.choose) == 1
    main.chosen = main.holding(2)
    assert worker.run(main.choose) == 2
    main.chosen = main.holding(main.holding(3))
    assert worker.run(main.choose)() == 3
    main.chosen = main.holding(main.holding(4))
    assert worker.run(main.choose)() == 4


def test_a_function_that_is_defined_anew_is_the_new_one_for_all(worker: skyproxy.Node, main: ModuleType) -> None:
    assert worker.run(main.doubled, 3) == 6
    exec("def helper(x):\n    return 100 * x", vars(main))
    assert worker.run(main.doubled, 3) == 300
    assert worker.run(main.helped, 3) == 301
    assert worker.run(main.scaled, 1)[0] == 2
    assert worker.run(main.doubled, 3) == 300


def test_decorators_keep_what_is_under_them_warm(worker: skyproxy.Node, main: ModuleType) -> None:
    assert [worker.run(main.wrapped, 1)[1][1] for _ in range(2)] == [1, 2]


def test_what_a_closure_holds_is_fresh_for_each_call(worker: skyproxy.Node, sizes: list[int], main: ModuleType) -> None:
    values = [1]
    collect = main.closing_over(values)
    assert [worker.run(collect, 2) for _ in range(2)] == [[1, 2], [1, 2]]
    values.append(7)
    assert worker.run(collect, 2) == [1, 7, 2]


def test_methods_and_partials_bring_their_objects_each_time(worker: skyproxy.Node, main: ModuleType) -> None:
    collected: list[int] = []
    append = functools.partial(main.closing_over(collected), 3)
    assert [worker.run(append) for _ in range(2)] == [[3], [3]]


def test_a_worker_that_has_dropped_a_function_asks_for_it(
    worker: skyproxy.Node, sizes: list[int], main: ModuleType
) -> None:
    def drop() -> int:
        import gc

        kept = [one for one in gc.get_objects() if type(one).__name__ == "KnownFunctions"]
        for one in kept:
            one._kept.clear()
            one._bytes = 0
        return len(kept)

    assert worker.run(main.scaled, 1)[:2] == (2, 1)
    assert worker.run(drop) >= 1
    del sizes[:]
    assert worker.run(main.scaled, 1)[:2] == (2, 2)  # its globals are the file's, and were not dropped
    assert sizes[0] < 1_000 < 20_000 < sizes[1]  # named first, then brought
    assert worker.run(main.scaled, 1)[:2] == (2, 3)


def test_another_session_of_the_worker_has_its_own(worker: skyproxy.Node, main: ModuleType) -> None:
    assert worker.run(main.scaled, 1)[1] == 1
    with skyproxy.connect(worker.url, token=worker._worker.token, trust_worker=True) as other:
        assert other.run(main.scaled, 1)[1] == 1


def test_tensors_that_a_function_holds_are_as_they_are_now(worker: skyproxy.Node, main: ModuleType) -> None:
    weight = torch.ones(2)
    read = lambda: weight.sum().item()
    assert worker.run(read) == 2
    weight.fill_(3)
    assert worker.run(read) == 6
    remote = torch.ones(2, device=worker.device("cpu"))
    read = lambda: remote.sum().item()
    assert worker.run(read) == 2
    remote.fill_(4)
    assert worker.run(read) == 8


def test_edited_modules_reach_functions_that_were_made_before(
    worker: skyproxy.Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: ModuleType
) -> None:
    source = tmp_path / "sky_edited_module.py"
    source.write_text("def value():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("sky_edited_module")
    try:
        exec("from sky_edited_module import value\ndef ask():\n    return value()", vars(main))
        assert worker.run(main.ask) == 1
        source.write_text("def value():\n    return 'edited'\n")
        importlib.reload(module)
        exec("from sky_edited_module import value", vars(main))
        assert worker.run(main.ask) == "edited"
    finally:
        import sys

        sys.modules.pop("sky_edited_module", None)


def test_many_threads_may_send_the_same_function_at_once(worker: skyproxy.Node, main: ModuleType) -> None:
    main.SCALE = 5  # not seen before
    found: list[int] = []
    begin = threading.Barrier(8)

    def send() -> None:
        begin.wait(60)
        found.append(worker.run(main.scaled, 1)[0])

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [5] * 8


# --- the worker's side, without a worker -----------------------------------------------------------------------------


def code_of(function: Any) -> FunctionCode:
    code = FunctionCode.of(function, lambda: Pickler(lambda tensor: None))
    assert code is not None
    return code


def test_what_is_kept_has_a_bound(main: ModuleType) -> None:
    codes = []
    for scale in range(5):
        main.SCALE = scale
        codes.append(code_of(main.scaled))
    known = KnownFunctions(max_bytes=3 * (len(codes[0].content) + 4096))
    for code in codes:
        assert known.find("a", code.digest, True, code.content) is not None
    assert [known.find("a", code.digest, True, b"") is not None for code in codes] == [False, False, True, True, True]
    assert known.find("b", codes[4].digest, True, b"") is None
    known.forget("a")
    assert known.find("a", codes[4].digest, True, b"") is None
    assert known._bytes == 0


def test_a_function_under_another_digest_is_refused(main: ModuleType) -> None:
    code = code_of(main.scaled)
    with pytest.raises(ProtocolError, match="digest"):
        KnownFunctions(1 << 20).find("a", b"\0" * 32, True, code.content)


def test_functions_with_data_travel_whole(main: ModuleType) -> None:
    tensor = torch.ones(3)
    assert FunctionCode.of(lambda: tensor, lambda: Pickler(lambda tensor: None)) is None
    assert FunctionCode.of(torch.nn.functional.relu, lambda: Pickler(lambda tensor: None)) is None
    assert FunctionCode.of(print, lambda: Pickler(lambda tensor: None)) is None
    assert code_of(main.scaled).keeps_globals
    assert not code_of(main.closing_over([])).keeps_globals
