"""Debugging of functions on a worker: what waits at a breakpoint in this process, and the words of whoever looks."""

from __future__ import annotations

import bdb
import os
import pdb
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, Protocol

from skyproxy.errors import ConfigurationError, text_of
from skyproxy.runtime.instance import instance_info

_LOOK_SECONDS = 0.2
"""The interval at which a wait looks up: an interrupt of the function strikes then."""
_SIGN_SECONDS = 1.0
_MAX_WAITING_TEXTS = 10_000
_MAX_NAME_CHARACTERS = 4096

Place = dict[str, Any]
"""A place where a function waits: kind, file, line, function, rank, world_size, pool. Of a process other than that of
the call, also "debugger", which names what to attach to; of the kind "gone" when that process has ended."""


def known_place(said: object) -> Place:
    """Return a place that another process has told of, of which nothing is believed.

    Raises:
        ValueError: it is none.
    """
    if type(said) is not dict or said.get("kind") not in ("breakpoint", "exception"):
        raise ValueError("a place of an unknown form")
    texts = {name: said.get(name) for name in ("kind", "file", "function", "pool")}
    numbers = {name: said.get(name) for name in ("line", "rank", "world_size")}
    if any(type(text) is not str for text in texts.values()) or any(type(one) is not int for one in numbers.values()):
        raise ValueError("a place of an unknown form")
    return {name: str(text)[:_MAX_NAME_CHARACTERS] for name, text in texts.items()} | numbers


class Followed(Protocol):
    """A debugger, as whoever attaches uses it."""

    @property
    def identity(self) -> str:
        """Its name, a secret."""

    ended: bool

    def follow(self) -> Generator[tuple[str, str]]:
        """See `Debugger.follow`."""

    def tell(self, line: str) -> None:
        """See `Debugger.tell`."""


class _FramePdb(pdb.Pdb):
    """pdb that stops in its first frame first, not in a finalizer that Python happens to run on the way there."""

    first_frame: FrameType | None = None

    def stop_here(self, frame: FrameType) -> bool:
        if self.first_frame is not None:
            if frame is not self.first_frame:
                return False
            self.first_frame = None
        return super().stop_here(frame)


class Debugger:
    """The debugger of one call: pdb, with somebody else's terminal.

    Attributes:
        attached: whether somebody looks.
        place: where it waits, or waited last.
        gave_up: whether nobody came in time.
    """

    def __init__(self, identity: str, seconds: float, announce: Callable[[Place], object]) -> None:
        """Make the debugger of one call.

        Args:
            identity: names the call.
            seconds: how long to wait for somebody.
            announce: called with each place where it waits while nobody looks.
        """
        self.identity = identity
        self.attached = self.gave_up = self.ended = False
        self.place: Place = {}
        self._seconds = seconds
        self._announce = announce
        self._asks = self._is_alone = False
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    # --- the function's side -----------------------------------------------------------------------------------------

    def stop(self, frame: FrameType) -> None:
        """Stop the function in `frame`; what it says next is said to whoever attaches."""
        self._wait_at("breakpoint", frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        debugger = self._pdb()
        debugger.first_frame = frame
        debugger.set_trace(frame)

    def look_at(self, error: BaseException) -> None:
        """Wait for somebody to look at an exception, before the call fails with it."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None:
            return
        code = trace.tb_frame.f_code
        self._wait_at("exception", code.co_filename, trace.tb_lineno, code.co_name)
        self.write(f"{type(error).__name__}: {text_of(error)}\n")
        debugger: Any = self._pdb()
        debugger.reset()
        debugger.interaction(None, error.__traceback__)

    def _pdb(self) -> _FramePdb:
        # It takes these two for a terminal: all that it asks of them is here.
        return _FramePdb(stdin=self, stdout=self, nosigint=True, readrc=False)  # type: ignore[arg-type]

    def _wait_at(self, kind: str, file: str, line: int, function: str) -> None:
        info = instance_info()
        self.place = {
            "kind": kind,
            "file": file,
            "line": line,
            "function": function,
            "rank": info.rank,
            "world_size": info.world_size,
            "pool": info.job,
        }

    def readline(self) -> str:
        """The next line of whoever looks; empty, which ends the function, if nobody has come in time."""
        self._asks = True
        is_announced = False
        self._said.put(("prompt", ""))
        until = time.monotonic() + self._seconds
        try:
            while True:
                if not self.attached and not is_announced:
                    # Also where somebody leaves who has gone on to here from the place before.
                    is_announced = True
                    self._announce(dict(self.place))
                try:
                    return self._lines.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    if self.attached and not self._is_alone:
                        until = time.monotonic() + self._seconds
                    elif self._is_alone or time.monotonic() > until:
                        self.gave_up = True
                        return ""
        finally:
            self._asks = False

    def write(self, text: str) -> int:
        """Say something to whoever looks; they may come later."""
        if self._said.qsize() < _MAX_WAITING_TEXTS:
            self._said.put(("text", text))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def explain(self) -> str:
        """Return why the function was ended."""
        where = f"{self.place.get('file')}:{self.place.get('line')}"
        if self._is_alone:
            return f"the worker is gone by which a debugger gets to {where}, so the function was ended"
        if self.gave_up:
            return (
                f"nobody attached to the breakpoint in {where} within {self._seconds:g} s, so the function was ended. "
                "`skyproxy debug` attaches; SKYPROXY_BREAKPOINT_SECONDS sets how long it waits."
            )
        return f"the debugger at {where} was told to quit, which ends the function"

    # --- the other side ----------------------------------------------------------------------------------------------

    def follow(self) -> Generator[tuple[str, str]]:
        """Attach: what the debugger says, until the call has ended. Now and then there is a sign of life.

        Raises:
            ConfigurationError: somebody else is attached.
        """
        if self.attached:
            raise ConfigurationError("somebody else is attached to this breakpoint. Let them leave it first.")
        self.attached = True
        try:
            if self._asks and self._said.empty():
                yield "text", "(Pdb) "
                yield "prompt", ""
            signed_at = time.monotonic()
            while True:
                try:
                    yield self._said.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    if self.ended:
                        yield "end", ""
                        return
                    if time.monotonic() - signed_at > _SIGN_SECONDS:
                        signed_at = time.monotonic()
                        yield "alive", ""
        finally:
            self.attached = False

    def tell(self, line: str) -> None:
        """Say a line to the debugger."""
        self._lines.put(line.rstrip("\n") + "\n")

    def give_up(self) -> None:
        """Wait no more, now or later: nobody can come."""
        self._is_alone = True


class Debuggers:
    """The debuggers of the calls that run in this process."""

    def __init__(self) -> None:
        self._known: dict[str, Followed] = {}
        self._lock = threading.Lock()

    def begin(self, identity: str, seconds: float, announce: Callable[[Place], object]) -> Debugger:
        """Make one for a call."""
        debugger = Debugger(identity, seconds, announce)
        self.add(debugger)
        return debugger

    def add(self, debugger: Followed) -> None:
        """Take one that stands for a debugger of another process."""
        with self._lock:
            self._known[debugger.identity] = debugger

    def end(self, debugger: Followed) -> None:
        """The call is over."""
        debugger.ended = True
        with self._lock:
            self._known.pop(debugger.identity, None)

    def get(self, identity: str) -> Followed:
        """Return the one of a call.

        Raises:
            LookupError: it has ended.
        """
        with self._lock:
            debugger = self._known.get(identity)
        if debugger is None:
            raise LookupError("the function that waited there has ended")
        return debugger


DEBUGGERS = Debuggers()


def describe(place: Place) -> str:
    """A place where a function waits, in words for the program that has called it."""
    if place["kind"] == "gone":
        return ""
    who = f"rank {place['rank']} " if place["world_size"] > 1 else ""
    what = "at a breakpoint" if place["kind"] == "breakpoint" else "with an exception"
    where = f"{os.path.basename(place['file'])}:{place['line']}"
    return f"skyproxy: {who}waits {what} in {place['function']}, {where}: skyproxy debug\n"


def is_quit(error: BaseException) -> bool:
    """Return whether a debugger has ended the function."""
    return isinstance(error, bdb.BdbQuit)


def stop_tracing() -> None:
    """Let this thread run on without a debugger."""
    sys.settrace(None)


# --- what a program calls on its workers -----------------------------------------------------------------------------


def attach(identity: str) -> Iterator[tuple[str, str]]:
    """See `Debugger.follow`."""
    yield from DEBUGGERS.get(identity).follow()


def tell(identity: str, line: str) -> None:
    """See `Debugger.tell`."""
    DEBUGGERS.get(identity).tell(line)
