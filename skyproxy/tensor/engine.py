"""Backward on remote tensors: on the calling thread, with Python's errors intact, and Ctrl-C that does not abort.

C++ asks our guard for the type of its devices while it builds and walks the autograd graph, in functions that must not
throw: any Python error there aborts the process. There are two sources of such errors. One may be set already, because
an op or a hook raised in backward; it is parked, and `run_backward` raises it again. And Ctrl-C may strike: before it
calls us, pybind11 makes a string, which runs the handlers of signals. So the handler of Ctrl-C is wrapped: it is told
when it must not raise, and tries again a moment later. Every op looks whether it still is, for programs change the
handler at any time; Jupyter does with every cell.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # `signal` wraps each call in slow conversions
import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

_no_arguments: tuple[()] = ()
_MAIN_THREAD = threading.main_thread().ident or 0
_PUT_OFF_BY_SECONDS = 0.001
_get_ident = _thread.get_ident
_getsignal = _signal.getsignal
_F = TypeVar("_F", bound=Callable[..., Any])


class ParkedError(threading.local):
    """An exception that C++ could not have carried."""

    error: BaseException | None = None


PARKED = ParkedError()


_SHIELDED: set[CodeType] = set()


def shielded(function: _F) -> _F:
    """Ctrl-C never strikes inside this function or what it calls; it strikes a moment later. For short functions."""
    _SHIELDED.add(function.__code__)
    return function


@shielded
def _park() -> None:
    """Parks the error that C++ left set, if there is one; to return to C++ with it would be an error in itself."""
    try:
        # The interpreter checks the result of this kind of call (by `tp_call`): it fails if an error is set.
        object(*_no_arguments)
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
            unsafe = at.f_code in _SHIELDED
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


def be_careful() -> None:
    """Wraps the handler of Ctrl-C; it stays wrapped until somebody sets another one."""
    if _get_ident() != _MAIN_THREAD:
        return  # only the main thread runs handlers, or may set them
    handler = _getsignal(signal.SIGINT)
    if callable(handler) and type(handler) is not CarefulHandler:
        signal.signal(signal.SIGINT, CarefulHandler(handler))


def told_to_cpp(answer: Any) -> property:
    """A method that C++ calls for a constant. The look-up begins what the call ends: Ctrl-C must not strike between."""

    @shielded
    def look_up(self: object) -> Callable[..., Any]:
        _park()
        if _get_ident() == _MAIN_THREAD:
            CarefulHandler.inside = True
            be_careful()
        return tell

    @shielded
    def tell(*args: object) -> Any:
        if _get_ident() == _MAIN_THREAD:
            CarefulHandler.inside = False
        return answer

    return property(look_up)


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc,name-defined]
    """What C++ asks for the type of our devices."""

    type_ = told_to_cpp(torch._C._autograd.DeviceType.PrivateUse1)


class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc,name-defined]
    """What C++ asks of a backend."""

    is_available = told_to_cpp(True)
    is_built = told_to_cpp(True)
    has_primary_context = told_to_cpp(True)


class EngineOnCallingThread:
    """PyTorch's autograd engine, run on the thread that calls it.

    With its own device threads, backward on `sky:1` aborts the process: the Python guard's device count is fixed at 1.
    On the calling thread every index works, and no interpreter lock is handed over between threads.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        be_careful()
        threaded = torch._C._is_multithreading_enabled()
        if threaded:
            PARKED.error = None
        try:
            if threaded:
                torch._C._set_multithreading_enabled(False)
            return self._engine.run_backward(*args, **kwargs)
        except BaseException:
            parked, PARKED.error = PARKED.error, None
            if parked is None:
                raise
            try:
                raise parked from None
            finally:
                del parked  # its traceback holds this frame
        finally:
            if threaded:
                torch._C._set_multithreading_enabled(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def install_engine() -> None:
    """Puts backward on the calling thread, for the whole process; called when the first sky device comes to exist."""
    be_careful()
    variable = torch.autograd.variable.Variable
    if not isinstance(variable._execution_engine, EngineOnCallingThread):
        variable._execution_engine = EngineOnCallingThread(variable._execution_engine)  # type: ignore[assignment]
