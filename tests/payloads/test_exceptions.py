"""Exceptions arrive as what they are, whatever their `__init__` takes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from skyproxy.payloads.pickling import Pickler


class Coded(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"failed with {code}")
        self.code = code
        self.hint = hint


class Prefixed(ValueError):
    """Its `args` fit its own `__init__`, which must not run again all the same."""

    def __init__(self, text: str) -> None:
        super().__init__(f"prefix: {text}")


class Silent(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Missing(FileNotFoundError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "no such thing", name)


class Own(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a + b)
        self.pair = a, b

    def __reduce__(self) -> Any:
        return Own, self.pair


class Nested(ExceptionGroup[Exception]):
    def __new__(cls, count: int) -> Nested:
        return super().__new__(cls, "nested", [Coded(i, hint="") for i in range(count)])

    def __init__(self, count: int) -> None:
        self.count = count


class Plain(KeyError):
    pass


def carried(error: BaseException) -> Any:
    pickled = Pickler(lambda tensor: None).pickle(error)
    return pickle.loads(pickled.pieces[0])


@pytest.mark.parametrize(
    "error",
    [
        Coded(3, hint="try less"),
        Prefixed("a"),
        Silent([1, 2]),
        Missing("x"),
        Own(1, 2),
        Plain("k"),
        ValueError("a", 1),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        ImportError("no", name="n", path="p"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_keeps_its_class_its_words_and_its_attributes(error: Exception) -> None:
    if not isinstance(error, Own):  # which says itself what it consists of
        error.add_note("noted")
    again = carried(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_an_exception_that_holds_others_keeps_them() -> None:
    error = Coded(1, hint="outer")
    error.inner = Coded(2, hint="inner")  # type: ignore[attr-defined]
    assert carried(error).inner.hint == "inner"


def test_an_exception_that_cannot_be_made_so_is_still_an_error_of_pickle_and_no_crash() -> None:
    with pytest.raises(TypeError):
        carried(Nested(2))
