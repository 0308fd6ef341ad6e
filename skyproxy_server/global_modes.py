"""The global modes of each session: PyTorch has one set of them a process, and a worker many clients.

Nearly every session leaves them as they are, and their batches run side by side, without a lock. So do batches of
sessions with the same modes; a batch with other modes waits until it has its turn.

Functions of sessions share the modes of the process. What one has left there is found by the next function, but by no
batch: from then on, each batch has the modes of its session put in force, and those of functions back behind it.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from skyproxy.torch_modes import (
    MODES,
    USUAL,
    Record,
    put_in_force,
    set_flush_denormal,
    values_in_force,
)

_FLUSH_DENORMAL = ("flush_denormal", True)
_LEFT: Record = (("left by a function", True),)
_LOOKS_AGAIN_SECONDS = 0.001
_LONGEST_BATCH_SECONDS = 10.0


class _Process:
    """The modes that are in force in this process.

    Attributes:
        record: the modes in force; `_LEFT` for what functions have left.
        at_rest: what is in force between batches with modes of their own: the usual modes, or `_LEFT`.
        own: all values before the first function.
        has_run_functions: whether a function has ended since somebody looked what it has left.
        is_changing: whether they are being changed; whoever would run waits.
        before: all values before the first change, while the modes are not those at rest; what a function of a
            session has set meanwhile counts as being before.
        put: all values right after the last change.
        change: held by whoever changes them.
    """

    record: Record = USUAL
    at_rest: Record = USUAL
    own: dict[str, object] | None = None
    has_run_functions = False
    is_changing = False
    before: dict[str, object] | None = None
    put: dict[str, object] = {}
    change = threading.RLock()


def note_function(begins: bool) -> None:
    """A function begins, or has ended: it may set modes of this process."""
    if not begins:
        _Process.has_run_functions = True
    elif _Process.own is None:
        with _Process.change:
            if _Process.own is None:
                _Process.own = _Process.before or values_in_force()


def wait_for_rest() -> None:
    """Wait until no batch has modes of its own in force, so that a function begins with those that functions have left.

    A caller who has got a value of a batch has not seen its end, which puts the modes back. A batch that runs for more
    than ten seconds is not waited for.
    """
    if _Process.record == _Process.at_rest and not _Process.is_changing:
        return
    end = time.monotonic() + _LONGEST_BATCH_SECONDS
    if not _Process.change.acquire(timeout=_LONGEST_BATCH_SECONDS):
        return
    try:
        if _Process.record != _Process.at_rest:
            _change(_Process.at_rest, waits=end - time.monotonic())
    finally:
        _Process.change.release()


_sessions: weakref.WeakSet[SessionModes] = weakref.WeakSet()


class SessionModes:
    """A session's modes; a context in which they are in force, entered for each batch.

    Attributes:
        record: the session's modes.
        is_running: whether a batch of the session runs under them.
    """

    def __init__(self) -> None:
        self.record: Record = USUAL
        self.is_running = False
        self._is_inside = False
        _sessions.add(self)

    def __enter__(self) -> None:
        self._is_inside = True
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_inside = False
        self._end()

    def switch(self, record: Record) -> None:
        """Makes `record` the session's modes from here on, inside a batch too.

        Raises:
            ConfigurationError: this worker cannot have one of them; the session keeps the modes it had.
        """
        if record == self.record:
            return
        if not self._is_inside:
            self.record = record
            return
        before = self.record
        self._end()
        self.record = record
        try:
            self._begin()
        except BaseException:
            self.record = before
            self._begin()
            raise

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Let other sessions have their modes during the block, which computes nothing: it waits for a client."""
        if not self._is_inside:
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    @contextmanager
    def use_for_block(self, record: Record) -> Iterator[None]:
        """Run the block under other modes than the session's own, which are back afterwards."""
        own = self.record
        self.switch(record)
        try:
            yield
        finally:
            self.switch(own)

    def _begin(self) -> None:
        # Set the mark, then look. Whoever changes modes does it the other way round, so one of the two sees the other.
        self.is_running = True
        if _Process.record != self.record or _Process.is_changing or _Process.has_run_functions:
            self.is_running = False
            with _Process.change:
                if _Process.has_run_functions:
                    _find_what_functions_left()
                if _Process.record != self.record:
                    _change(self.record)
                self.is_running = True  # before anybody else can change them
        if _FLUSH_DENORMAL in self.record:
            set_flush_denormal(True)

    def _end(self) -> None:
        if _FLUSH_DENORMAL in self.record:
            set_flush_denormal(False)
        self.is_running = False
        if self.record != _Process.at_rest:
            with _Process.change:
                if _Process.record == self.record != _Process.at_rest:
                    _change(_Process.at_rest, waits=0)


def _find_what_functions_left() -> None:
    """Look whether modes are as they were before the first function. Call with `change` held."""
    _Process.has_run_functions = False
    if _Process.record == _Process.at_rest:
        _Process.record = _Process.at_rest = _resting(values_in_force())


def _resting(values: dict[str, object]) -> Record:
    """Return what to call these modes of the process: the usual ones, or left by a function."""
    own = _Process.own or values
    return _LEFT if any(values[name] != own[name] for name in MODES if name not in _LEAVE) else USUAL


_LEAVE = frozenset(("sdp.priority_order", *(name for name, mode in MODES.items() if mode.of_thread)))
"""Modes that no function needs to have set: PyTorch itself sets the order of attention, by the hardware."""


def _change(record: Record, *, waits: float = math.inf) -> None:
    """Puts other modes in force once nobody runs, or leaves it after `waits` seconds. Call with `change` held."""
    _Process.is_changing = True
    try:
        pause = threading.Event()
        end = time.monotonic() + waits
        while any(session.is_running for session in list(_sessions)):
            if time.monotonic() >= end:
                return
            pause.wait(_LOOKS_AGAIN_SECONDS)
        now = values_in_force()
        before = now
        if _Process.before is not None:
            before = {
                name: value if now[name] == _Process.put[name] else now[name] for name, value in _Process.before.items()
            }
        _Process.before = before
        if record == _Process.at_rest:
            wanted = before
        else:
            own = before if _Process.at_rest == USUAL or _Process.own is None else _Process.own
            wanted = {**own, **{name: before[name] for name in _LEAVE}, **dict(record)}
        try:
            put_in_force(wanted, now)
        except BaseException:
            put_in_force(before)
            record = _Process.at_rest
            raise
        finally:
            if record == _Process.at_rest:
                _Process.before = None
                _Process.record = _Process.at_rest = _resting(before)
            else:
                _Process.record = record
                _Process.put = values_in_force()
    finally:
        _Process.is_changing = False
