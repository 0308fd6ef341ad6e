"""Exceptions as values that travel, whatever their classes make of being made and of being changed.

Python pickles an exception as a call of its class with `args`, which are what the class handed on to `Exception`: for
one with an `__init__` of its own, mostly another number of them, or a text that it would put into its text a second
time. What it keeps in slots is lost, and attributes of a frozen dataclass cannot be set. So it is made here from what
it consists of, and nothing runs that its class has written in Python.
"""

from __future__ import annotations

import copyreg
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

C_DATA = (types.MemberDescriptorType, types.GetSetDescriptorType)
"""Types of descriptors of data that lies in an object itself: in a slot, or where a class in C keeps it."""
_IN_C: dict[str, type] = {
    "__new__": types.BuiltinFunctionType,
    "__init__": types.WrapperDescriptorType,
    **dict.fromkeys(("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"), types.MethodDescriptorType),
}
"""The types of methods that are written in C."""


def reduce_exception(error: BaseException) -> object:
    """Return what pickle needs to make `error` again; NotImplemented where its class says that itself."""
    kind = type(error)
    has_own_way = _has_own(kind, "__reduce__") or _has_own(kind, "__reduce_ex__")
    if kind in copyreg.dispatch_table or (has_own_way and _keeps_its_word(error)):
        return NotImplemented
    arguments, attributes = parts_of(error)
    if _has_own(kind, "__setstate__"):
        state = error.__getstate__() if _has_own(kind, "__getstate__") else attributes or None
        notes = {name: value for name, value in attributes.items() if name == "__notes__"}
        return make_exception, (kind, arguments, notes), state
    return describe_exception(kind, arguments, attributes)


def describe_exception(
    kind: type[BaseException], arguments: tuple[object, ...], attributes: Mapping[str, object]
) -> tuple[object, ...]:
    """Return what pickle needs to make an exception of its parts, which may hold the exception itself."""
    return make_exception, (kind, arguments), attributes or None, None, None, set_attributes


def make_exception(
    kind: type[BaseException], arguments: tuple[object, ...], attributes: Mapping[str, object] | None = None
) -> BaseException:
    """Make an exception from its `args` and attributes, without any method that its class has written in Python."""
    error: BaseException = _find_in_c(kind, "__new__")(kind, *arguments)
    # It sets what `__new__` leaves to it, such as the `errno` of an OSError.
    _find_in_c(kind, "__init__")(error, *arguments)
    if attributes:
        set_attributes(error, attributes)
    return error


def set_attributes(error: BaseException, attributes: Mapping[str, object]) -> None:
    """Give an exception attributes, also where its class lets nobody do so, as frozen dataclasses do."""
    for name, value in attributes.items():
        found = inspect.getattr_static(type(error), name, None)
        if isinstance(found, C_DATA):
            found.__set__(error, value)
        else:
            error.__dict__[name] = value


def parts_of(error: BaseException) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments and attributes of an exception, with those in slots and those that its class keeps in C."""
    reduced = _find_in_c(type(error), "__reduce__")(error)
    state = reduced[2] if len(reduced) > 2 else None
    attributes = state if isinstance(state, dict) else vars(error)
    return tuple(reduced[1]), {**dict(_slots_of(error)), **attributes}


def _slots_of(error: BaseException) -> Iterator[tuple[str, object]]:
    for base in type(error).__mro__:
        if "__slots__" not in vars(base):
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(error)
                except AttributeError:  # nothing was put there
                    continue


def _find_in_c(kind: type, name: str) -> Callable[..., Any]:
    """Return the method of the nearest class that has it in C."""
    # Only the `__new__` of the class that decides how objects lie in memory can make one.
    for base in _layout_of(kind) if name == "__new__" else kind.__mro__:
        found = vars(base).get(name)
        if isinstance(found, _IN_C[name]):
            return cast(Callable[..., Any], found)
    raise TypeError(f"{kind!r} has no {name} in C")


def _layout_of(kind: type | None) -> Iterator[type]:
    while kind is not None:
        yield kind
        kind = kind.__base__


def _has_own(kind: type, name: str) -> bool:
    """Return whether a class has a method in Python."""
    return not isinstance(inspect.getattr_static(kind, name), _IN_C[name])


def _keeps_its_word(error: BaseException) -> bool:
    """Return whether what its class says of how to make an exception can be.

    A class that adds a parameter to one with a `__reduce__` mostly forgets it there.
    """
    try:
        reduced = error.__reduce_ex__(5)
        if isinstance(reduced, tuple):
            inspect.signature(reduced[0]).bind(*reduced[1])
    except ValueError:  # some classes do not say what they take
        return True
    except Exception:  # code of the user's class
        return False
    return True
