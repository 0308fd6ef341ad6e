"""PyTorch's warnings from C++ while one operation runs, for the client that asked for the operation.

`torch.ops` calls kernels below the layer that makes Python warnings of C++'s, so those end in the log of the process.
Functions of PyTorch's Python interface have that layer, also one that calls back, and `Tensor.apply_` is the least of
those. It costs half a microsecond, so only operations that may have something new to say run inside.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from skyproxy import patching

_T = TypeVar("_T")


_NOT_TOLD = "RNN module weights are not part of single contiguous chunk of memory"
"""Of cuDNN's networks on the weights of a client, which are no buffer on a worker: there is nothing it can do."""


class KernelWarning(NamedTuple):
    """A warning that a kernel gave."""

    category: str
    message: str


class _Thread(threading.local):
    """Warnings of the operation that this thread runs, so far; None where nobody listens. And its number to listen by,
    which takes longer to make than to use.
    """

    found: list[KernelWarning] | None = None
    number: torch.Tensor | None = None


_thread = _Thread()
_install_lock = threading.Lock()
_installed = False


def collect(function: Callable[[], _T], found: list[KernelWarning]) -> _T:
    """Call a function and return its result; add what C++ warns of meanwhile, in this thread, also where it raises.

    Not what threads of a kernel's own warn of: that goes to the log, as all of it would without this.
    """
    if not _installed:
        _install()
    results: list[_T] = []

    def call(_: float) -> float:
        results.append(function())
        return 0.0

    outer, number = _thread.found, _thread.number
    if number is None:
        number = torch.zeros((), dtype=torch.float64)
    # Whoever calls us meanwhile, in this thread, makes one of their own.
    _thread.found, _thread.number = found, None
    try:
        number.apply_(call)
    finally:
        _thread.found, _thread.number = outer, number
    return results[0]


def _install() -> None:
    """Let `collect` see every warning, each time: who is told of the same one twice is for the client to decide."""
    global _installed
    with _install_lock:
        if _installed:
            return
        torch.set_warn_always(True)
        # From 2.15 on, operators raise Python warnings themselves, on behalf of the code that calls them.
        warnings.filterwarnings("always", module=r"skyproxy_server\.")
        show = warnings.showwarning

        def take(message: Warning | str, category: type[Warning], *place: Any, **rest: Any) -> None:
            if _thread.found is None:
                show(message, category, *place, **rest)
            elif not str(message).startswith(_NOT_TOLD):
                _thread.found.append(KernelWarning(category.__name__, str(message)))

        patching.replace(
            warnings,
            "showwarning",
            take,
            why="what a kernel warns of is shown by the client, at the line of the program that called it",
            test="tests/server/test_kernel_warnings.py::test_what_a_kernel_warns_of_is_heard_each_time",
            when=patching.When.WORKER,
        )
        _installed = True
