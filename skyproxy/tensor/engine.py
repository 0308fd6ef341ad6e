"""Backward on remote tensors: on the calling thread, and with Python's errors intact."""

from __future__ import annotations

import threading
from typing import Any

import torch

_no_arguments: tuple[()] = ()


class ParkedError(threading.local):
    """An exception that C++ could not have carried; see `Guard`."""

    error: BaseException | None = None


PARKED = ParkedError()
_PRIVATE_USE_1 = torch._C._autograd.DeviceType.PrivateUse1


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc,name-defined]
    def type_(self) -> Any:
        # C++ calls this from a destructor that must not throw, perhaps while a Python error is set: an op or a hook
        # raised in backward, or Ctrl-C struck. To return then would abort the process. The call below notices such an
        # error (the interpreter checks results of calls with unpacked arguments) and turns it into a SystemError; it
        # is parked, and `backward` raises it again.
        try:
            str(*_no_arguments)
        except SystemError as error:
            if PARKED.error is None:
                PARKED.error = error.__cause__
        return _PRIVATE_USE_1


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
            torch._C._set_multithreading_enabled(False)
            PARKED.error = None
        try:
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
    variable = torch.autograd.variable.Variable
    if not isinstance(variable._execution_engine, EngineOnCallingThread):
        variable._execution_engine = EngineOnCallingThread(variable._execution_engine)  # type: ignore[assignment]
