"""Source lines of functions that travel as code: tracebacks, debuggers and `inspect.getsource` on the worker show them.

cloudpickle writes neither the file of a function nor its lines. Here a function's code takes its file's name along, and
each outermost one the lines of its definition, which the worker puts where Python looks for lines.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import threading
import types
from collections import OrderedDict
from typing import Any

import cloudpickle.cloudpickle as _cloudpickle

_DROPPED = "<dynamic-code>"  # what cloudpickle writes in place of a file's name, since 3.1.2
_MOST_BYTES = 64 * 2**10
"""Definitions that are longer than this travel without their lines."""
_MOST_LINES = 20_000
"""Lines of a file before a definition and in it, for which a worker keeps room."""
_MOST_FILES = 512
_shown: OrderedDict[str, None] = OrderedDict()  # files of which lines came, the latest last
_lock = threading.Lock()


class SourceTable:
    """The definitions whose lines one pickle has taken along already."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, range]] = []

    def reduce(self, code: types.CodeType, *, with_lines: bool) -> tuple[Any, tuple[Any, ...]]:
        """Return how a pickle writes code: as cloudpickle does, with its file and, if wanted, its lines."""
        make, arguments = _cloudpickle._code_reduce(code)
        named = tuple(code.co_filename if argument == _DROPPED else argument for argument in arguments)
        if not with_lines or self._has(code):
            return make, named
        lines = _definition(code, code.co_filename)
        if not lines:
            return make, named
        self._taken.append((code.co_filename, range(code.co_firstlineno, code.co_firstlineno + len(lines))))
        return make_code, (named, code.co_filename, code.co_firstlineno, lines)

    def _has(self, code: types.CodeType) -> bool:
        """Return whether the code stands within a definition that was taken along, as a nested function does."""
        return any(code.co_filename == file and code.co_firstlineno in lines for file, lines in self._taken)


@functools.lru_cache(256)
def _definition(code: types.CodeType, file: str) -> tuple[str, ...]:
    """Return the lines of a definition, decorators included; nothing where they cannot be read, or are very many.

    Args:
        code: of the function; its first line is a line of the file.
        file: its file; code of two files may be equal.
    """
    first = code.co_firstlineno - 1
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not 0 <= first < len(lines):
        return ()
    try:
        block = inspect.getblock(lines[first:])
    except (SyntaxError, ValueError):  # the file is another one by now
        return ()
    fits = first + len(block) <= _MOST_LINES and sum(map(len, block)) <= _MOST_BYTES
    return tuple(block) if fits else ()


def make_code(arguments: tuple[Any, ...], file: str, first: int, lines: tuple[str, ...]) -> types.CodeType:
    """Make code that was pickled with its lines, and have Python show these as lines of its file.

    Args:
        arguments: those of `types.CodeType`.
        file: what the sender calls it; this machine need not have it.
        first: the number of the first line, from one.
        lines: the definition.
    """
    if first + len(lines) - 1 <= _MOST_LINES:
        _show(file, slice(first - 1, first - 1 + len(lines)), list(lines))
    return types.CodeType(*arguments)


def _show(file: str, place: slice, lines: list[str]) -> None:
    with _lock:
        linecache.checkcache(file)
        known = linecache.getlines(file) if file in linecache.cache or os.path.isfile(file) else []
        if known[place] == lines:  # it is the same file here, or came before
            return
        known = known + ["\n"] * (place.stop - len(known))
        known[place] = lines
        # Without a time of change, so that Python does not look for the file.
        linecache.cache[file] = (sum(map(len, known)), None, known, file)
        _shown.pop(file, None)
        _shown[file] = None
        if len(_shown) > _MOST_FILES:
            linecache.cache.pop(_shown.popitem(last=False)[0], None)


__all__ = ["SourceTable", "make_code"]
