"""The routing of what a function prints: its own caller, whichever thread of it printed.

`sys.stdout` and `sys.stderr` of a worker are stand-ins that ask a context variable. What a subprocess of a function
writes goes to the worker's own output, because it writes to file descriptors that all calls share.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import sys
import threading
from typing import Any, Protocol, TextIO

from skyproxy import patching
from skyproxy.runtime.calls import ValueOfContext
from skyproxy.runtime.cuda_streams import carry_streams
from skyproxy.runtime.output import muted


class Sink(Protocol):
    """Takes what a call prints."""

    def write(self, stream: str, text: str) -> None: ...

    def flush(self, stream: str) -> None: ...

    def has_begun_line(self, stream: str) -> bool: ...


_SINK: contextvars.ContextVar[Sink | None] = contextvars.ContextVar("skyproxy_sink", default=None)
_installing = threading.Lock()


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer`: bytes as text."""

    def __init__(self, router: OutputRouter) -> None:
        self._router = router

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._router.write(raw.decode(self._router.encoding, "replace"))
        return len(raw)

    def flush(self) -> None:
        self._router.flush()


class OutputRouter(io.TextIOBase):
    """Stands in for one of the process's output streams.

    Attributes:
        asks_muted: that it asks `skyproxy.runtime.output.muted` itself.
    """

    asks_muted = True

    def __init__(self, original: TextIO, name: str) -> None:
        self._original = original
        self._name = name
        self._process = os.getpid()
        self.buffer = _Bytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def _sink(self) -> Sink | None:
        # A process that a function forked (the workers of a DataLoader) must not write on its parent's connection.
        return _SINK.get() if os.getpid() == self._process else None

    @property
    def has_begun_line(self) -> bool:
        """True if the running call has printed the beginning of a line, and not its end."""
        sink = self._sink()
        return sink is not None and sink.has_begun_line(self._name)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return int(self._original.fileno())

    def write(self, text: str) -> int:
        sink = self._sink()
        if muted(self._name):
            return len(text)
        if sink is None:
            self._original.write(text)
        else:
            sink.write(self._name, str(text))
        return len(text)

    def flush(self) -> None:
        sink = self._sink()
        if sink is None:
            self._original.flush()
        else:
            sink.flush(self._name)


def current_sink() -> Sink | None:
    """Return where this thread prints; None outside a call."""
    return _SINK.get()


def printing_to(sink: Sink) -> contextlib.AbstractContextManager[None]:
    """Send to `sink` what this thread prints inside the `with` block, and the threads and tasks that it starts."""
    return ValueOfContext(_SINK, sink)


def install() -> None:
    """Puts the stand-ins in place, once; a thread that a function starts inherits its context from now on."""
    with _installing:
        for name in ("stdout", "stderr"):
            if not isinstance(getattr(sys, name), OutputRouter):
                patching.replace(
                    sys,
                    name,
                    OutputRouter(getattr(sys, name), name),
                    why="what a function prints goes to its own caller",
                    test="tests/functions/test_output.py::test_it_is_printed_here",
                    when=patching.When.WORKER,
                )
        if not hasattr(threading.Thread.start, "inherits_context"):
            patching.wrap(
                threading.Thread,
                "start",
                _wrap_thread_start,
                why="what a thread of a function prints goes to the caller of the function",
                test="tests/functions/test_output.py::test_each_call_has_its_own_output_threads_included",
                when=patching.When.WORKER,
            )


def _wrap_thread_start(plain: Any) -> Any:
    def start(self: threading.Thread) -> None:
        if _SINK.get() is not None:
            context, run, use_streams = contextvars.copy_context(), self.run, carry_streams()

            def run_as_function() -> None:
                use_streams()
                for variable, value in context.items():  # not by `context.run`: an error of the thread is told after it
                    variable.set(value)
                run()

            self.run = run_as_function  # type: ignore[method-assign]
        plain(self)

    start.inherits_context = True  # type: ignore[attr-defined]
    return start
