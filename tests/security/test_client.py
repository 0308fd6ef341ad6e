"""What a hostile worker can do to a client that calls no functions."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy.errors import RemoteError, visible
from skyproxy.session.session import Session


def rebuilt(record: dict[str, Any]) -> RemoteError:
    session = object.__new__(Session)
    return session._remote_error(record, "")


@pytest.mark.parametrize(
    "name",
    [
        "ExceptionGroup",
        "BaseExceptionGroup",
        "StopIteration",
        "SystemExit",
        "KeyboardInterrupt",
        "exec",
        "",
        7,
        None,
        [],
    ],
    ids=str,
)
def test_whatever_type_a_worker_names_there_is_an_error_to_raise(name: Any) -> None:
    error = rebuilt({"type": name, "message": "m", "op": "", "traceback": ""})
    assert type(error) is RemoteError
    assert str(error) == "m"


@pytest.mark.parametrize("name", ["UnicodeDecodeError", "UnicodeEncodeError", "ImportError", "KeyError", "OSError"])
def test_exceptions_of_unusual_making_are_made(name: str) -> None:
    error = rebuilt({"type": name, "message": "m", "op": "", "traceback": ""})
    assert isinstance(error, RemoteError)
    assert str(error) == "m"


@pytest.mark.parametrize("record", [{}, {"type": "ValueError"}, {"message": 5}, {"message": [], "op": {}}], ids=str)
def test_a_failure_that_lacks_everything_is_still_an_error(record: dict[str, Any]) -> None:
    assert isinstance(rebuilt(record), RemoteError)


def test_a_workers_words_do_not_command_the_terminal() -> None:
    copy = "\x1b]52;c;ZXZpbA==\x07\x9d\x1b[31m\r"
    error = rebuilt({"type": "ValueError", "message": copy, "op": copy, "traceback": copy})
    text = str(error) + "".join(error.__notes__) + error.remote_traceback + error.op
    assert not any(character in text for character in "\x1b\x07\x9d\r")
    assert "\\x1b]52;c;ZXZpbA==\\x07" in str(error)
    assert visible("a\tb\nc") == "a\tb\nc"
