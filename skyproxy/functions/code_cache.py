"""Functions that were pickled before, and have not changed since: their bytes are taken again.

What a pickled function holds can change between two calls: its defaults, what it closes over, the globals that it
names. All of that is compared by identity, and only functions are kept whose parts cannot change within: constants,
modules and what is imported from libraries, and functions made of such parts.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle.cloudpickle as _cloudpickle

from skyproxy.payloads.projects import is_project_module

CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAX_PARTS = 512
_MISSING = object()
_lock = threading.Lock()
_kept: weakref.WeakKeyDictionary[types.FunctionType, tuple[list[object], Any]]
_kept = weakref.WeakKeyDictionary()


class ChangeableError(Exception):
    """A function holds something that may change without a trace."""


def look(function: types.FunctionType, wrappers: Iterable[object]) -> list[object] | None:
    """Return all that decides a function's pickle, to be compared by identity; None where nothing can tell.

    Args:
        function: the function.
        wrappers: the classes around it.
    """
    if getattr(_cloudpickle, "_PICKLE_BY_VALUE_MODULES", True):
        return None  # somebody is registering what goes by value
    parts: list[object] = list(wrappers)
    try:
        _look_at(function, parts, {id(function)})
    except (ChangeableError, RecursionError):
        return None
    return parts


def find(function: types.FunctionType, parts: list[object]) -> tuple[bool, Any]:
    """Return whether the function was kept with these very parts, and its code then."""
    with _lock:
        entry = _kept.get(function)
    if entry is None or len(entry[0]) != len(parts) or not all(map(operator.is_, entry[0], parts)):
        return False, None
    return True, entry[1]


def keep(function: types.FunctionType, parts: list[object], code: Any) -> None:
    """Keep a function's code for as long as the function lives; None for one that travels by name."""
    with _lock:
        _kept[function] = parts, code


def _look_at(function: types.FunctionType, parts: list[object], seen: set[int]) -> None:
    if function.__dict__ or len(parts) > _MAX_PARTS:
        raise ChangeableError
    code = function.__code__
    parts += [code, function.__name__, function.__qualname__, function.__module__, function.__doc__]
    for value in function.__defaults__ or ():
        _look_into(value, parts, seen)
    for mapping in (function.__kwdefaults__, function.__annotations__):
        for value in _items(mapping) if mapping else ():
            _look_into(value, parts, seen)
    for cell in function.__closure__ or ():
        try:
            _look_into(cell.cell_contents, parts, seen)
        except ValueError:  # not bound yet
            parts.append(_MISSING)
    own = function.__globals__
    for name in names_of(code):
        _look_into(own.get(name, _MISSING), parts, seen)


def _items(mapping: dict[str, Any]) -> Iterator[object]:
    for name, value in mapping.items():
        yield sys.intern(name)
        yield value


def _look_into(value: object, parts: list[object], seen: set[int]) -> None:
    """Add what stands for a value, and for all that it holds.

    Raises:
        ChangeableError: it may change within.
    """
    kind = type(value)
    if kind in CONSTANTS or value is _MISSING:
        parts.append(value)
    elif kind is types.FunctionType:
        assert isinstance(value, types.FunctionType)
        if is_installed(value):
            parts.append(value)
            return
        # Not the function itself: those that call each other would keep each other for ever.
        parts.append(weakref.ref(value))
        if id(value) not in seen:
            seen.add(id(value))
            _look_at(value, parts, seen)
    elif kind is types.ModuleType:
        assert isinstance(value, types.ModuleType)
        if is_project_module(value) or value.__name__ in ("__main__", "__mp_main__"):
            raise ChangeableError
        # Submodules that are loaded by now go along.
        parts += [value, _count(len(sys.modules))]
    elif isinstance(value, types.GenericAlias | types.UnionType):
        parts.append(getattr(value, "__origin__", types.UnionType))
        for argument in value.__args__:
            _look_into(argument, parts, seen)
    elif kind is types.BuiltinFunctionType or isinstance(value, type):
        if not is_installed(value):
            raise ChangeableError
        parts.append(value)
    else:
        raise ChangeableError


@functools.lru_cache(64)
def _count(number: int) -> object:
    """An object that stands for a number, the same one each time for as long as it matters."""
    return (number,)


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code may look up in its globals, those of functions within it included."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


def is_installed(value: Any) -> bool:
    """Return whether a worker imports a function or class from a library, under its own name."""
    name = getattr(value, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name in ("__main__", "__mp_main__") or is_project_module(module):
        return False
    return getattr(module, getattr(value, "__qualname__", ""), None) is value
