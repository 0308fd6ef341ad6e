"""Backward on remote tensors: on the calling thread, with Python's errors intact."""

from __future__ import annotations

from typing import Any

import torch

from skyproxy import patching
from skyproxy.interrupts import constant_for_cpp, install_signal_guard, take_parked_error
from skyproxy.tensor.core.devices import DEVICES


class Guard(torch._C._acc.DeviceGuard):
    """The guard that C++ asks for the type of our devices."""

    type_ = constant_for_cpp(torch._C._autograd.DeviceType.PrivateUse1)


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """The answers to what C++ asks of a backend."""

    is_available = constant_for_cpp(True)
    is_built = constant_for_cpp(True)
    has_primary_context = constant_for_cpp(True)


class EngineOnCallingThread:
    """PyTorch's autograd engine, run on the thread that calls it.

    With its own device threads, backward on `sky:1` aborts the process: the Python guard's device count is fixed at 1.
    On the calling thread every index works, and no interpreter lock is handed over between threads.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: object, **kwargs: object) -> object:
        threaded = torch._C._is_multithreading_enabled()
        if threaded:
            take_parked_error()
        try:
            if threaded:
                torch._C._set_multithreading_enabled(False)
            return self._engine.run_backward(*args, **kwargs)
        except BaseException:
            parked = take_parked_error()
            if parked is None:
                raise
        finally:
            if threaded:
                torch._C._set_multithreading_enabled(True)
        try:
            raise parked  # outside the handler above, whose error was caused only by the parking
        finally:
            del parked  # its traceback holds this frame

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def install_engine() -> None:
    """Put backward on the calling thread, for the whole process; called when the first sky device comes to exist."""
    install_signal_guard()
    variable = torch.autograd.variable.Variable  # type: ignore[attr-defined]
    if not isinstance(variable._execution_engine, EngineOnCallingThread):
        patching.wrap(
            variable,
            "_execution_engine",
            EngineOnCallingThread,
            why="on the engine's own threads, backward on `sky:1` aborts the process",
            test="tests/tensor/torch_api/test_autograd_engine.py::test_backward_runs_on_the_thread_that_calls_it",
            when=patching.When.FIRST_DEVICE,
        )


def install() -> None:
    """Have the engine installed when the first sky device comes to exist; programs without one keep PyTorch's."""
    DEVICES.before_new[install_engine] = None
