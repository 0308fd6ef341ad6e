"""Backward on remote tensors: on the calling thread, with Python's errors intact, and Ctrl-C that does not abort.

C++ asks our guard for the type of its devices while it builds and walks the autograd graph, in functions that must not
throw: any Python error there aborts the process. There are two sources of such errors. One may be set already, because
an op or a hook raised in backward; it is parked, and `run_backward` raises it again. And Ctrl-C may strike: before it
calls us, pybind11 makes a string, which runs the handlers of signals. So the handler of Ctrl-C is told when it must not
raise, and tries again a moment later.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # `signal` wraps each call in slow conversions
import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_no_arguments: tuple[()] = ()
_PRIVATE_USE_1 = torch._C._autograd.DeviceType.PrivateUse1
_MAIN_THREAD = threading.main_thread().ident or 0
_PUT_OFF_BY_SECONDS = 0.001
_get_ident = _thread.get_ident
_getsignal = _signal.getsignal


class ParkedError(threading.local):
    """An exception that C++ could not have carried."""

    error: BaseException | None = None


PARKED = ParkedError()


def _park() -> None:
    """Parks the error that C++ left set, if there is one; to return to C++ with it would be an error in itself."""
    try:
        # The interpreter checks results of calls with unpacked arguments: this one fails if an error is set.
        str(*_no_arguments)
    except SystemError as error:
        if PARKED.error is None:
            PARKED.error = error.__cause__


class CarefulHandler:
    """A handler of Ctrl-C that never raises where that would abort the process, and is `inner` otherwise.

    Attributes:
        inside: whether the main thread is being asked for the type of our devices.
        put_off: whether a thread is waiting to strike again.
    """

    inside = False
    put_off = False

    def __init__(self, inner: Callable[[int, FrameType | None], Any]) -> None:
        self.inner = inner

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        _park()
        at: FrameType | None = frame
        unsafe = CarefulHandler.inside
        while at is not None and not unsafe:
            unsafe = at.f_code in _UNSAFE
            at = at.f_back
        if not unsafe:
            return self.inner(number, frame)
        if not CarefulHandler.put_off:
            CarefulHandler.put_off = True
            _thread.start_new_thread(_strike_again, (number,))
        return None


def _strike_again(number: int) -> None:
    time.sleep(_PUT_OFF_BY_SECONDS)
    CarefulHandler.put_off = False
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(_MAIN_THREAD, number)  # a true signal, for it must end waits as well
    else:
        _thread.interrupt_main(number)


def _be_careful() -> None:
    """Wraps the handler of Ctrl-C; it stays wrapped until somebody sets another one. Call on the main thread."""
    handler = _getsignal(signal.SIGINT)
    if callable(handler) and type(handler) is not CarefulHandler:
        signal.signal(signal.SIGINT, CarefulHandler(handler))


def _asked(guard: Guard) -> Any:
    """C++ looks `type_` up; the function that it then calls."""
    _park()
    if _get_ident() == _MAIN_THREAD:
        CarefulHandler.inside = True
        if type(_getsignal(2)) is not CarefulHandler:
            _be_careful()
    return _answer


def _answer() -> Any:
    if _get_ident() == _MAIN_THREAD:
        CarefulHandler.inside = False
    return _PRIVATE_USE_1


_UNSAFE = frozenset({_asked.__code__, _answer.__code__, _park.__code__})


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc,name-defined]
    """What C++ asks for the type of our devices."""

    type_ = property(_asked)


class EngineOnCallingThread:
    """PyTorch's autograd engine, run on the thread that calls it.

    With its own device threads, backward on `sky:1` aborts the process: the Python guard's device count is fixed at 1.
    On the calling thread every index works, and no interpreter lock is handed over between threads.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        threaded = torch._C._is_multithreading_enabled()
        if threaded:
            PARKED.error = None
        try:
            if threaded:
                torch._C._set_multithreading_enabled(False)
            return self._engine.run_backward(*args, **kwargs)
        except BaseException:
            parked = PARKED.error
            if parked is not None:
                PARKED.error = None
                raise parked from None
            raise
        finally:
            if threaded:
                torch._C._set_multithreading_enabled(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def install_engine() -> None:
    """Puts backward on the calling thread, for the whole process; called when the first sky device comes to exist."""
    if _get_ident() == _MAIN_THREAD:
        _be_careful()
    variable = torch.autograd.variable.Variable
    if not isinstance(variable._execution_engine, EngineOnCallingThread):
        variable._execution_engine = EngineOnCallingThread(variable._execution_engine)  # type: ignore[assignment]
