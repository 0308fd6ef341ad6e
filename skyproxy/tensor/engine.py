"""Backward on remote tensors: on the calling thread, and with Python's errors intact."""

from __future__ import annotations

import _thread
import itertools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_no_arguments: tuple[()] = ()
_PRIVATE_USE_1 = torch._C._autograd.DeviceType.PrivateUse1
_MAIN_THREAD = threading.main_thread().ident
_DEFERRED_BY_SECONDS = 0.001


class ParkedError(threading.local):
    """An exception that C++ could not have carried; see `type_in_backward`."""

    error: BaseException | None = None


PARKED = ParkedError()


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc,name-defined]
    """What C++ asks for the type of our devices: in destructors too, and there whatever `type_` raises aborts.

    So outside of backward `type_` is no Python function at all: Ctrl-C would find its way into one.
    """

    type_: Any = itertools.repeat(_PRIVATE_USE_1).__next__


def type_in_backward(guard: Guard) -> Any:
    """`Guard.type_` while backward runs, when C++ may call it while it carries a Python error.

    An op or a hook raised, or Ctrl-C struck; to return then would abort the process. The call below notices such an
    error (the interpreter checks results of calls with unpacked arguments) and turns it into a SystemError; it is
    parked, and `run_backward` raises it again.
    """
    try:
        str(*_no_arguments)
    except SystemError as error:
        if PARKED.error is None:
            PARKED.error = error.__cause__
    return _PRIVATE_USE_1


class CarefulHandler:
    """A handler of Ctrl-C that puts it off while `type_in_backward` runs, and is `inner` otherwise."""

    def __init__(self, inner: Callable[[int, FrameType | None], Any]) -> None:
        self.inner = inner

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is type_in_backward.__code__:
                threading.Timer(_DEFERRED_BY_SECONDS, _thread.interrupt_main, (number,)).start()
                return None
            at = at.f_back
        return self.inner(number, frame)


class _Running:
    """The calls of backward that are under way, on any thread; while there are some, `Guard` can bear errors."""

    def __init__(self) -> None:
        self._calls: set[object] = set()
        self._lock = threading.Lock()

    def enter(self, one: object) -> None:
        with self._lock:
            self._calls.add(one)
            Guard.type_ = type_in_backward

    def leave(self, one: object) -> None:
        """Idempotent, and harmless for a call that Ctrl-C kept from entering."""
        with self._lock:
            self._calls.discard(one)
            if not self._calls:
                Guard.type_ = _TYPE


_TYPE = Guard.type_
_RUNNING = _Running()


class EngineOnCallingThread:
    """PyTorch's autograd engine, run on the thread that calls it.

    With its own device threads, backward on `sky:1` aborts the process: the Python guard's device count is fixed at 1.
    On the calling thread every index works, and no interpreter lock is handed over between threads.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_multithreading_enabled():  # inside of another backward, or where the user wants it so
            return self._engine.run_backward(*args, **kwargs)
        handler = signal.getsignal(signal.SIGINT) if _thread.get_ident() == _MAIN_THREAD else None
        PARKED.error = None
        this = object()
        try:
            _RUNNING.enter(this)
            if callable(handler) and not isinstance(handler, CarefulHandler):
                signal.signal(signal.SIGINT, CarefulHandler(handler))
            torch._C._set_multithreading_enabled(False)
            return self._engine.run_backward(*args, **kwargs)
        except BaseException:
            parked = PARKED.error
            if parked is not None:
                PARKED.error = None
                raise parked from None
            raise
        finally:
            torch._C._set_multithreading_enabled(True)
            _RUNNING.leave(this)
            if callable(handler):
                signal.signal(signal.SIGINT, handler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def install_engine() -> None:
    """Puts backward on the calling thread, for the whole process; called when the first sky device comes to exist."""
    variable = torch.autograd.variable.Variable
    if not isinstance(variable._execution_engine, EngineOnCallingThread):
        variable._execution_engine = EngineOnCallingThread(variable._execution_engine)  # type: ignore[assignment]
