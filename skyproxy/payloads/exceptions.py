"""Exceptions as values that travel, whatever their classes' `__init__` takes.

Python pickles an exception as a call of its class with `args`, which are what the class handed on to `Exception`: for
one with an `__init__` of its own, mostly another number of them, or a text that it would put into its text a second
time. So it is made here without that `__init__`, from what it consists of.
"""

from __future__ import annotations

from typing import Any

_BUILT_IN = type(BaseException.__init__)
"""The type of an `__init__` that is written in C."""


def reduce_exception(error: BaseException) -> object:
    """Return what pickle needs to make `error` again; NotImplemented where its class does so or needs no help."""
    kind = type(error)
    own_init = type(kind.__init__) is not _BUILT_IN
    if not own_init or type(kind.__reduce__) is not type(BaseException.__reduce__):
        return NotImplemented
    if kind.__reduce_ex__ is not object.__reduce_ex__:
        return NotImplemented
    reduced = error.__reduce__()
    if not isinstance(reduced, tuple) or reduced[0] is not kind:
        return NotImplemented
    arguments, state = reduced[1], reduced[2] if len(reduced) > 2 else None
    return make_exception, (kind, arguments, state)


def make_exception(kind: type[BaseException], arguments: tuple[object, ...], state: object) -> BaseException:
    """Make an exception from its `args` and attributes, without the `__init__` that its class has written in Python."""
    error: Any = kind.__new__(kind, *arguments)
    # The nearest one in C sets what `__new__` leaves to it, such as the `errno` of an OSError.
    built_in: Any = next(base for base in kind.__mro__ if type(base.__dict__.get("__init__")) is _BUILT_IN)
    built_in.__init__(error, *arguments)
    if state is not None:
        error.__setstate__(state)
    return error  # type: ignore[no-any-return]
