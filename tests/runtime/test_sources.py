"""Functions that travel as code bring the name of their file and the lines of their definition."""

from __future__ import annotations

import inspect
import linecache
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.payloads.pickling import Pickled, Pickler, Unpickler
from skyproxy.runtime import sources

_SEEN = "<a cell of a notebook>"


def defined(text: str, file: str, name: str = "work") -> Callable[..., Any]:
    """A function of `__main__` as a cell of a notebook makes it: its file is known to `linecache` only."""
    text = textwrap.dedent(text)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), namespace)
    return namespace[name]  # type: ignore[no-any-return]


def pickled(function: object, *, sends_lines: bool = True) -> Pickled:
    return Pickler(lambda tensor: None, sends_lines=sends_lines).pickle(function)


def refuse(row: object, number: int) -> torch.Tensor:
    raise AssertionError("there are no references")


def arrived(sent: Pickled) -> Any:
    return Unpickler(sent.pieces, sent.tables, refuse).unpickle()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pickled], Any]:
    """Reads a pickle as a process does that has neither the sender's files nor its lines."""

    def read(sent: Pickled) -> Any:
        monkeypatch.setattr(linecache, "cache", {})
        return arrived(sent)

    monkeypatch.setattr(sources, "_shown", type(sources._shown)())
    return read


TWO = """
    CONSTANT = 3

    def helper(x):
        return 1 / x

    def work(x):
        # what the file says
        inner = lambda y: helper(y)
        return inner(x * CONSTANT)
    """


def test_a_traceback_shows_the_lines_of_all_functions(elsewhere: Callable[[Pickled], Any]) -> None:
    work = elsewhere(pickled(defined(TWO, _SEEN)))
    with pytest.raises(ZeroDivisionError) as caught:
        work(0)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [(frame.filename, frame.lineno, frame.line) for frame in frames] == [
        (_SEEN, 10, "return inner(x * CONSTANT)"),
        (_SEEN, 9, "inner = lambda y: helper(y)"),
        (_SEEN, 5, "return 1 / x"),
    ]


def test_the_source_is_that_of_the_definition(elsewhere: Callable[[Pickled], Any]) -> None:
    function = defined(TWO, _SEEN)
    expected = inspect.getsource(function)
    assert "# what the file says" in expected
    assert inspect.getsource(elsewhere(pickled(function))) == expected


def test_decorators_and_methods_bring_their_lines(elsewhere: Callable[[Pickled], Any]) -> None:
    kind: Any = defined(
        """
        import functools

        def twice(function):
            @functools.wraps(function)
            def wrapper(*args):
                return 2 * function(*args)
            return wrapper

        class Work:
            @twice
            def run(self, x):
                return (
                    x
                    + 1
                )
        """,
        _SEEN,
        "Work",
    )
    expected = inspect.getsource(kind.run), inspect.getsource(inspect.unwrap(kind.run, stop=lambda _: True))
    found = elsewhere(pickled(kind))
    assert (inspect.getsource(found.run), inspect.getsource(inspect.unwrap(found.run, stop=lambda _: True))) == expected
    assert found().run(2) == 6


def test_a_later_definition_of_the_same_file_is_the_one_that_is_shown(elsewhere: Callable[[Pickled], Any]) -> None:
    first = pickled(defined("def work(x):\n    return x.first\n", _SEEN))
    second = pickled(defined("def work(x):\n    return x.second\n", _SEEN))
    elsewhere(first)
    assert "x.second" in inspect.getsource(arrived(second))


def test_a_file_that_is_the_same_there_stays_as_it_is(tmp_path: Path, elsewhere: Callable[[Pickled], Any]) -> None:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(TWO))
    function = elsewhere(pickled(defined(TWO, str(file))))
    assert linecache.getline(str(file), 2) == "CONSTANT = 3\n"
    assert function(1) == pytest.approx(1 / 3)


def test_other_lines_of_an_older_file_stay(tmp_path: Path, elsewhere: Callable[[Pickled], Any]) -> None:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(TWO).replace("1 / x", "2 / x"))
    elsewhere(pickled(defined(TWO, str(file), "helper")))
    assert linecache.getlines(str(file))[1:5] == ["CONSTANT = 3\n", "\n", "def helper(x):\n", "    return 1 / x\n"]


def test_a_special_file_is_not_read(elsewhere: Callable[[Pickled], Any]) -> None:
    sent = pickled(defined("def work(x):\n    return x\n", "/dev/zero"))
    assert "return x" in inspect.getsource(elsewhere(sent))


def test_without_lines_the_file_s_name_is_left(elsewhere: Callable[[Pickled], Any]) -> None:
    file = "<a string>"
    function = defined(TWO, file)
    del linecache.cache[file]
    assert elsewhere(pickled(function)).__code__.co_filename == file
    assert linecache.cache == {}


def test_what_comes_back_from_a_worker_changes_no_lines(elsewhere: Callable[[Pickled], Any]) -> None:
    function = elsewhere(pickled(defined(TWO, _SEEN), sends_lines=False))
    assert function.__code__.co_filename == _SEEN
    assert linecache.cache == {}


def test_a_very_long_definition_travels_without_its_lines(elsewhere: Callable[[Pickled], Any]) -> None:
    text = "def work(x):\n" + f"    # {'long ' * 100}\n" * 200 + "    return x\n"
    assert elsewhere(pickled(defined(text, _SEEN)))(5) == 5
    assert linecache.cache == {}


def test_a_definition_goes_once_with_all_that_stands_in_it() -> None:
    function = defined("def work(x):\n" + "    (lambda: x)()  # a comment\n" * 50 + "    return x\n", _SEEN)
    sent = bytes(pickled(function).pieces[0])
    assert sent.count(b"# a comment") <= 50


def test_the_latest_files_are_kept_and_the_first_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[Pickled], Any]
) -> None:
    monkeypatch.setattr(sources, "_MOST_FILES", 3)
    cells = [pickled(defined("def work(x):\n    return x\n", f"<cell {number}>")) for number in range(5)]
    elsewhere(cells[0])
    for cell in cells[1:]:
        arrived(cell)
    assert [name for name in linecache.cache if name.startswith("<cell")] == ["<cell 2>", "<cell 3>", "<cell 4>"]
