"""Functions that travel as code, apart from their arguments: a worker that has one is sent its digest instead."""

from __future__ import annotations

import hashlib
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyproxy.functions import code_cache
from skyproxy.functions.code_cache import CONSTANTS, is_installed
from skyproxy.payloads.pickling import Pickled, Pickler

MAX_CODE_BYTES = 8 << 20
"""A larger function travels with its arguments, each time."""
_MAX_DIGESTS = 4096
_MAX_WRAPPERS = 4
_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_CONSTANTS = tuple(CONSTANTS)


@dataclass(frozen=True, slots=True)
class FunctionCode:
    """A function as bytes, with all that its pickle holds: its code, and the values of globals and of its closure.

    Attributes:
        content: the pickle.
        digest: names the content.
        keeps_globals: whether a worker makes one function of it, whose globals live on between calls; else each call
            has its own.
        name: of the function that travels as code.
    """

    content: bytes
    digest: bytes
    keeps_globals: bool
    name: str

    @classmethod
    def of(cls, fn: Callable[..., object], make_pickler: Callable[[], Pickler]) -> FunctionCode | None:
        """Pickle a function by itself; None where it travels by name, or holds tensors, arrays or too much.

        Raises:
            Exception: as `Pickler.pickle`.
        """
        inner = unwrapped(fn)
        if not isinstance(inner, types.FunctionType) or is_installed(inner):
            return None
        parts = code_cache.look(inner, _wrappers(fn))
        if parts is None:
            return cls._pickle(fn, inner, make_pickler)
        code: FunctionCode | None
        is_known, code = code_cache.find(inner, parts)
        if not is_known:
            code = cls._pickle(fn, inner, make_pickler)
            code_cache.keep(inner, parts, code)
        return code

    @classmethod
    def _pickle(
        cls, fn: Callable[..., object], inner: types.FunctionType, make_pickler: Callable[[], Pickler]
    ) -> FunctionCode | None:
        pickled: Pickled = make_pickler().pickle(fn)
        content = pickled.pieces[0]
        if not pickled.by_value or pickled.tensors or len(pickled.pieces) > 1 or len(content) > MAX_CODE_BYTES:
            return None
        data = bytes(content)
        return cls(data, hashlib.sha256(data).digest(), _closes_over_code_only(inner, 0), pickled.by_value)


class Digests:
    """The functions that a worker has, as far as one of its clients knows: the newest few thousand."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    def add(self, digest: bytes) -> None:
        """The worker has it."""
        self._known[digest] = None
        if len(self._known) > _MAX_DIGESTS:
            self.drop(next(iter(self._known), b""))

    def drop(self, digest: bytes) -> None:
        """The worker no longer has it."""
        self._known.pop(digest, None)


def unwrapped(fn: Any) -> object:
    """Return the function in a pool's wrappers, which have no state."""
    for _ in range(_MAX_WRAPPERS):
        if not getattr(type(fn), "wraps_function", False):
            break
        fn = fn.function
    return fn


def _wrappers(fn: Any) -> list[object]:
    """The classes of the wrappers around a function."""
    found: list[object] = []
    while len(found) < _MAX_WRAPPERS and getattr(type(fn), "wraps_function", False):
        found.append(type(fn))
        fn = fn.function
    return found


def _closes_over_code_only(fn: types.FunctionType, depth: int) -> bool:
    """Return whether no closure holds data: what decorators close over is code; all else is as good as an argument."""
    if depth > _MAX_WRAPPERS:
        return False
    for cell in fn.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if isinstance(value, types.FunctionType):
            if value is not fn and not _closes_over_code_only(value, depth + 1):
                return False
        elif not isinstance(value, _FIXED + _CONSTANTS):
            return False
    return True
