"""Exceptions arrive as what they are, whatever their `__init__` takes."""

from __future__ import annotations

import abc
import dataclasses
import json
import pickle
from typing import Any

import pytest

from skyproxy.errors import add_note, tell_origin
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


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    hint: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Exception):
    code: int
    parts: tuple[int, ...] = ()


class Guarded(Exception):
    """Lets nobody change it."""

    def __init__(self, code: int) -> None:
        self.__dict__["code"] = code

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


class Slots(ValueError):
    __slots__ = ("__hidden", "code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self.__hidden = -code

    def hidden(self) -> int:
        return self.__hidden


class MadeByNew(Exception):
    def __new__(cls, *, made_by: str) -> MadeByNew:
        made = super().__new__(cls, f"made by {made_by}")
        made.made_by = made_by
        return made

    def __init__(self, *, made_by: str) -> None:
        """Leave all of it to `__new__`."""

    made_by: str


class OfTwo(ValueError, OSError):
    """The class that decides how it lies in memory is not the first one."""


class Shadowed(Exception):
    """What it keeps has the name of a property, which cannot be set."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.__dict__["code"] = code

    @property
    def code(self) -> object:
        return self.__dict__["code"]


class Abstract(Exception, abc.ABC):
    def __init__(self, *, code: int) -> None:
        self.code = code


class ForgetsItsParameter(json.JSONDecodeError):
    """Its parent's `__reduce__` makes it of three arguments."""

    def __init__(self, text: str, document: str, position: int, path: str) -> None:
        super().__init__(text, document, position)
        self.path = path


class Revived(Exception):
    """Says itself what is kept of it, and what becomes of that."""

    def __init__(self, *, code: int) -> None:
        super().__init__("revived")
        self.code = code

    def __getstate__(self) -> Any:
        return {"kept": self.code}

    def __setstate__(self, state: Any) -> None:
        self.code = state["kept"]


class Loud(Exception):
    heard: list[str] = []

    def __new__(cls, *args: object) -> Loud:
        cls.heard.append("new")
        return super().__new__(cls, *args)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.heard.append("init")
        self.code = code

    def __setattr__(self, name: str, value: object) -> None:
        self.heard.append("setattr")
        super().__setattr__(name, value)


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
        Frozen(3, "less"),
        FrozenSlots(3, (1, 2)),
        Guarded(3),
        MadeByNew(made_by="me"),
        OfTwo(2, "no"),
        Shadowed(3),
        Abstract(code=3),
        ForgetsItsParameter("no", "[", 1, "file"),
        Revived(code=3),
        ValueError("a", 1),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        ImportError("no", name="n", path="p"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_keeps_its_class_its_words_and_its_attributes(error: Exception) -> None:
    if not isinstance(error, Own):  # which says itself what it consists of
        add_note(error, "noted")
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


def test_what_is_in_slots_is_kept() -> None:
    error = Slots(4)
    error.add_note("noted")
    again = carried(error)
    assert (again.code, again.hidden(), again.args, again.__notes__) == (4, -4, (4,), ["noted"])
    assert not hasattr(again, "unset")
    assert (carried(FrozenSlots(3, (1,))).code, carried(FrozenSlots(3, (1,))).parts) == (3, (1,))


def test_an_exception_that_holds_itself_is_no_endless_one() -> None:
    error = Coded(1, hint="round")
    error.inside = [error]  # type: ignore[attr-defined]
    again = carried(error)
    assert again.inside[0] is again


def test_a_group_with_a_constructor_of_its_own_keeps_class_and_parts() -> None:
    again = carried(Nested(2))
    assert type(again) is Nested
    assert (again.count, [one.code for one in again.exceptions]) == (2, [0, 1])


def test_no_code_of_the_class_runs_where_it_is_made_again() -> None:
    pickled = Pickler(lambda tensor: None).pickle(Loud(1))
    Loud.heard = []
    again = pickle.loads(pickled.pieces[0])
    assert (type(again), again.args, Loud.heard) == (Loud, (1,), [])


@pytest.mark.parametrize("error", [ValueError("x"), Frozen(1), FrozenSlots(1), Guarded(1)], ids=repr)
def test_anybodys_exception_gets_a_note_and_a_cause(error: Exception) -> None:
    assert tell_origin(error, "f", "the traceback") is error
    add_note(error, "another")
    assert [note[:11] for note in error.__notes__] == ["raised by f", "another"]
    assert "the traceback" in str(error.__cause__)
