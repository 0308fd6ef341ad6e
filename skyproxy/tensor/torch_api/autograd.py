"""Backward on remote tensors: on the calling thread, with Python's errors intact."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from skyproxy import patching
from skyproxy.interrupts import constant_for_cpp, install_signal_guard, take_parked_error
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    DelayedError,
    DisableTorchFunction,
    count_dispatch_modes,
    count_function_modes,
    disable_current_modes,
    function_transform_level,
)


class Guard(torch._C._acc.DeviceGuard):
    """The guard that C++ asks for the type of our devices."""

    type_ = constant_for_cpp(torch._C._autograd.DeviceType.PrivateUse1)


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """The answers to what C++ asks of a backend."""

    is_available = constant_for_cpp(True)
    is_built = constant_for_cpp(True)
    has_primary_context = constant_for_cpp(True)


def to_device(position: int, gradient: Any, device: torch.device, giver: str = "") -> Any:
    """Return a gradient that belongs to a tensor on `device`: the engine checks it of no class of tensors in Python.

    Raises:
        RuntimeError: as the engine does for other tensors, if it is elsewhere and has dimensions.
    """
    if (
        not isinstance(gradient, torch.Tensor)
        or gradient.device == device
        or "sky" not in (gradient.device.type, device.type)
    ):
        return gradient
    if gradient.dim() == 0:
        return gradient.to(device)
    returned = f"Function {giver} returned an" if giver else ""
    text = f"{returned} invalid gradient at index {position} - expected device {device} but got {gradient.device}"
    raise RuntimeError(text.strip())


def _checking(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a user's `autograd.Function`, whose gradients are on the devices of the inputs."""

    @functools.wraps(apply)
    def checked(self: Any, *args: object) -> object:
        given = apply(self, *args)
        several = isinstance(given, tuple)
        gradients: list[Any] = list(given) if several else [given]
        # An entry for each input that is a tensor, and None where it requires no gradient.
        edges = [edge for edge in self.next_functions if edge[0] is not None]
        wanted = [i for i, needed in enumerate(self.needs_input_grad) if needed]
        if len(edges) != len(wanted):
            return given
        for (node, number), i in zip(edges, wanted, strict=True):
            if i < len(gradients) and isinstance(gradients[i], torch.Tensor):
                device = node._input_metadata[number].device
                gradients[i] = to_device(i, gradients[i], device, self.name())
        return tuple(gradients) if several else gradients[0]

    return checked


def _shares_leaves() -> bool:
    here = threading.current_thread()
    return any(thread is not here and not thread.name.startswith("skyproxy-") for thread in threading.enumerate())


def keep_accumulators(tensors: Iterable[object]) -> object:
    """Return what keeps the gradient accumulators of remote leaves alive, where other threads of the program run.

    C++ makes an accumulator under a lock of the leaf, and asks the Python guard for the device's stream there, which
    needs the interpreter lock. Whoever comes to that lock with the interpreter lock held would wait for ever for a
    thread that is just there. Of an accumulator that lives already, nothing is asked.
    """
    remote = [t for t in tensors if isinstance(t, RemoteTensor)]
    if not remote or not torch.is_grad_enabled() or function_transform_level() is not None or not _shares_leaves():
        return None
    if count_dispatch_modes() or count_function_modes() or any(type(t) is not RemoteTensor for t in remote):
        with DisableTorchFunction(), disable_current_modes():
            return _node_of_leaves(remote)
    return _node_of_leaves(remote)


def _node_of_leaves(tensors: list[RemoteTensor]) -> object:
    """Return results of a node of C++ whose gradients nobody asks for.

    It comes to the lock without that of the interpreter, for all leaves in one call, and nothing is recorded.
    """
    leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
    return DelayedError("the gradient of nothing", len(leaves))(*leaves) if leaves else None


def _keeping(apply: Callable[..., object]) -> object:
    """The `apply` of an `autograd.Function`, which looks up accumulators with the interpreter lock held."""
    plain = inspect.getattr_static(torch.autograd.Function, "apply")  # a method in C from torch 2.14 on

    @functools.wraps(apply)
    def kept(cls: type, *args: object, **kwargs: object) -> object:
        accumulators = keep_accumulators(args)
        try:
            return plain.__get__(None, cls)(*args, **kwargs)
        finally:
            del accumulators

    return classmethod(kept)  # type: ignore[arg-type]


class EngineOnCallingThread:
    """PyTorch's autograd engine, run on the thread that calls it.

    With its own device threads, backward on `sky:1` aborts the process: the Python guard's device count is fixed at 1.
    On the calling thread every index works, and no interpreter lock is handed over between threads.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, outputs: Any, gradients: Any, *args: object, **kwargs: object) -> object:
        gradients = tuple(
            to_device(i, gradient, output.device) if isinstance(output, torch.Tensor) else gradient
            for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=True))
        )
        accumulators = keep_accumulators(outputs)
        threaded = torch._C._is_multithreading_enabled()
        if threaded:
            take_parked_error()
        try:
            if threaded:
                torch._C._set_multithreading_enabled(False)
            return self._engine.run_backward(outputs, gradients, *args, **kwargs)
        except BaseException:
            parked = take_parked_error()
            if parked is None:
                raise
        finally:
            del accumulators
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
        patching.wrap(
            torch.autograd.Function,
            "apply",
            _keeping,
            why="applied to a leaf that another thread uses for the first time, it would wait for ever",
            test="tests/tensor/torch_api/test_autograd_engine.py::test_threads_that_share_a_leaf_do_not_wait_for_ever",
            when=patching.When.FIRST_DEVICE,
        )
        for name in ("apply", "apply_boxed"):
            if hasattr(BackwardCFunction, name):  # the second from torch 2.13 on
                patching.wrap(
                    BackwardCFunction,
                    name,
                    _checking,
                    why="the engine checks the devices of gradients only where no class of tensors in Python is",
                    test="tests/tensor/torch_api/test_autograd_engine.py::test_a_gradient_of_another_device_is_an_error",
                    when=patching.When.FIRST_DEVICE,
                )


def install() -> None:
    """Have the engine installed when the first sky device comes to exist; programs without one keep PyTorch's."""
    DEVICES.before_new[install_engine] = None
