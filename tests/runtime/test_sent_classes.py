"""Classes of the program's main file are made in one thread while others use their bases."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from skyproxy.payloads.pickling import Pickler
from skyproxy.runtime.sent_classes import _make_class

PATIENCE_SECONDS = 60


def made(name: str, bases: tuple[type, ...], kind: type = type, **attributes: object) -> Any:
    """A class as a process makes it that is not the program."""
    attributes = {"__module__": "__main__", "__qualname__": name, **attributes}
    return _make_class(kind, name, bases, attributes, uuid.uuid4().hex, None)


class Making:
    """A base, and a thread that is in the midst of making a class of it.

    Attributes:
        told: the names of the subclasses that the base was told of.
    """

    def __init__(self) -> None:
        told: list[str] = []

        def __init_subclass__(cls: type) -> None:
            told.append(cls.__name__)

        begun, self._may_go_on = threading.Event(), threading.Event()
        may_go_on = self._may_go_on

        class Slow(type):
            def __new__(mcs, *arguments: Any) -> Any:
                begun.set()
                assert may_go_on.wait(PATIENCE_SECONDS)
                return super().__new__(mcs, *arguments)

        self.told = told
        self.hook: Any = classmethod(__init_subclass__)
        self.base = made("Base", (), __init_subclass__=self.hook)
        self._thread = threading.Thread(target=made, args=("Made", (self.base,), Slow))
        self._thread.start()
        assert begun.wait(PATIENCE_SECONDS)

    def finish(self) -> None:
        """Let the thread go on, and wait for its end."""
        self._may_go_on.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def making() -> Iterator[Making]:
    found = Making()
    yield found
    found.finish()


def test_a_base_is_told_of_a_class_that_another_thread_defines_meanwhile(making: Making) -> None:
    type("Own", (making.base,), {})
    making.finish()
    assert making.told == ["Own"]
    assert vars(making.base)["__init_subclass__"] is making.hook


def test_what_another_thread_writes_of_a_base_meanwhile_has_the_hook_of_its_own(making: Making) -> None:
    state = Pickler(lambda tensor: None).reducer_override(making.base)[2][0]
    assert state["__init_subclass__"] is making.hook


def test_a_class_that_is_made_in_the_midst_of_another_leaves_the_hook_as_it_was() -> None:
    told: list[str] = []

    def __init_subclass__(cls: type) -> None:
        told.append(cls.__name__)

    hook: Any = classmethod(__init_subclass__)
    base = made("Base", (), __init_subclass__=hook)

    class Within(type):
        def __new__(mcs, *arguments: Any) -> Any:
            made("Inner", (base,))
            return super().__new__(mcs, *arguments)

    made("Outer", (base,), Within)
    assert vars(base)["__init_subclass__"] is hook
    assert told == []


def test_a_hook_that_another_thread_sets_meanwhile_stays(making: Making) -> None:
    other = classmethod(lambda cls: None)
    making.base.__init_subclass__ = other
    making.finish()
    assert vars(making.base)["__init_subclass__"] is other
    assert making.told == []
