"""Cells as functions: what they read, what they leave, how they fail."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from skyproxy.notebook.cells import RESULT, inputs_of, read_cell, run_cell


def run(source: str, **variables: Any) -> dict[str, Any]:
    return run_cell(read_cell(source, "<cell>"), "<cell>", **variables)


@pytest.mark.parametrize(
    ("source", "reads", "sets"),
    [
        ("y = x + 1", {"x"}, {"y"}),
        ("x = 1\ny = x", set(), {"x", "y"}),
        ("x += 1", {"x"}, {"x"}),
        ("x = x + 1", {"x"}, {"x"}),
        ("if c:\n    x = 1\nprint(x)", {"c", "x", "print"}, {"x"}),
        ("for i in n:\n    t = t + i", {"n", "t", "i"}, {"i", "t"}),
        ("def f(a):\n    inner = a\n    return g", {"a", "g"}, {"f"}),
        ("class C(Base):\n    field = value", {"Base", "value"}, {"C"}),
        ("import os.path\nfrom m import a as b\nos.x", set(), {"os", "b"}),
        ("with open_it() as f, lock: pass", {"open_it", "lock"}, {"f"}),
        ("a, (b, *c) = v", {"v"}, {"a", "b", "c"}),
        ("x[0] = y.z", {"x", "y"}, set()),
        ("q = [i for i in n]", {"n", "i"}, {"q"}),
        ("(w := v)", {"v"}, {"w"}),
        ("del x", set(), set()),
    ],
)
def test_names_are_told_apart(source: str, reads: set[str], sets: set[str]) -> None:
    cell = read_cell(source, "<cell>")
    assert (set(cell.reads), set(cell.sets)) == (reads, sets)


def test_what_ipython_put_there_does_not_travel_unless_it_was_replaced() -> None:
    hidden = {"exit": object(), "open": object()}
    namespace = {**hidden, "open": "mine", "x": 1, "unused": 2}
    cell = read_cell("print(x, open, exit, unknown)", "<cell>")
    assert inputs_of(cell, namespace, hidden) == {"x": 1, "open": "mine"}


def test_the_cell_leaves_what_it_set_and_the_value_of_its_last_line() -> None:
    assert run("y = x * 2\ny + 1", x=4) == {"y": 8, RESULT: 9}


def test_a_semicolon_hides_the_last_value() -> None:
    assert run("x + 1;", x=4) == {}


def test_modules_and_private_names_stay() -> None:
    assert run("import math\n_a = 1\nb = math.pi") == {"b": pytest.approx(3.14159, abs=1e-4)}


def test_what_was_deleted_is_not_left() -> None:
    assert run("a = 1\ndel a") == {}


def test_functions_see_the_names_of_the_cell() -> None:
    left = run("factor = 3\ndef f(a): return a * factor + x", x=1)
    assert left["f"](2) == 7


def test_an_empty_cell_leaves_nothing() -> None:
    assert run("") == {}
    assert run("# nothing") == {}


def test_a_traceback_shows_the_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run("a = 1\nb = a / 0")
    assert "b = a / 0" in "".join(traceback.format_exception(caught.value))


def test_no_python_is_a_syntax_error() -> None:
    with pytest.raises(SyntaxError):
        read_cell("1 +", "<cell>")
