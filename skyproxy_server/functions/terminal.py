"""Questions that functions would ask at a terminal: on a worker nobody is there, and they are told so at once."""

from __future__ import annotations

import faulthandler
import io
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from skyproxy import patching
from skyproxy.runtime.breakpoints import Debugger
from skyproxy.runtime.calls import current_call
from skyproxy_server.functions.output import current_sink

_installing = threading.Lock()
_TEST = "tests/pools/test_unusual_ends.py::test_who_asks_for_a_terminal_is_told_at_once"
_DEBUG_TEXT = (
    " To debug it there: call it with debug=True, or set SKYPROXY_DEBUG=1 for the program; then it waits, and "
    "`skyproxy debug` attaches."
)
_TEXT = (
    "a function on a worker has no standard input: nobody can answer {what} there. Pass what it needs as arguments, or "
    "call the function here, with f.local(...), where there is a terminal."
)


class _Input(io.TextIOBase):
    """Stands in for `sys.stdin`: refuses functions, and passes on what anybody else asks."""

    def __init__(self, original: TextIO) -> None:
        self._original = original

    def _ask(self, name: str, *args: object) -> Any:
        if current_call() is not None:
            raise RuntimeError(_TEXT.format(what="input() or a read of sys.stdin"))
        return getattr(self._original, name)(*args)

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> str:
        return str(self._ask("read", size))

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return str(self._ask("readline", size))

    def fileno(self) -> int:
        return int(self._ask("fileno"))

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def install() -> None:
    """Put the stand-ins in place, once; and have crashes of functions tell in the log where they struck."""
    with _installing:
        if sys.stdin is not None and not isinstance(sys.stdin, _Input):
            patching.replace(
                sys,
                "stdin",
                _Input(sys.stdin),
                why="a function that asks for input is told at once that nobody can answer, and does not wait forever",
                test=_TEST,
                when=patching.When.WORKER,
            )
        if not isinstance(sys.breakpointhook, _Breakpoint):
            patching.wrap(
                sys,
                "breakpointhook",
                _Breakpoint,
                why="`breakpoint()` in a function would wait for a terminal forever",
                test=_TEST,
                when=patching.When.WORKER,
            )
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__, all_threads=False)


class _Breakpoint:
    """Stands in for `sys.breakpointhook`."""

    def __init__(self, original: Callable[..., object]) -> None:
        self._original = original

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if current_call() is not None:
            debugger: Debugger | None = getattr(current_sink(), "debugger", None)
            if debugger is None:
                raise RuntimeError(_TEXT.format(what="breakpoint()") + _DEBUG_TEXT)
            debugger.stop(sys._getframe(1))
            return None
        return self._original(*args, **kwargs)
