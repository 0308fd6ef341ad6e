"""Questions that code written for `torch.cuda`, `torch.xpu` or `torch.mps` asks now and then, answered for workers.

What has no meaning there, as pointers into a process that is another one, raises and says so.
"""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.torch_api import sky_module
from skyproxy.tensor.torch_api.sky_module import DeviceLike

has_half = True
has_magma = False


# --- memory ----------------------------------------------------------------------------------------------------------


def _rename(name: str, to: str) -> Callable[..., Any]:
    """Make a function of `torch.cuda` that has another name today: it warns, as there."""

    def function(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"torch.sky.{name} has been renamed to torch.sky.{to}", FutureWarning, stacklevel=2)
        return getattr(sky_module.MODULE, to)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Another name of `torch.sky.{to}`, which warns."
    return function


memory_cached = _rename("memory_cached", "memory_reserved")
max_memory_cached = _rename("max_memory_cached", "max_memory_reserved")


def reset_max_memory_cached(device: DeviceLike = None) -> None:
    """Starts both maxima anew, as the function of `torch.cuda` with this name does."""
    sky_module.reset_peak_memory_stats(device)


def current_allocated_memory() -> int:
    """Bytes that tensors take on the current device, under the name of `torch.mps`."""
    return sky_module.memory_allocated()


def driver_allocated_memory() -> int:
    """Bytes that the current device's allocator holds, under the name of `torch.mps`."""
    return sky_module.memory_reserved()


def recommended_max_memory() -> int:
    """Bytes of the current device's memory, under the name of `torch.mps`."""
    return sky_module.mem_get_info()[1]


def device_memory_used(device: DeviceLike = None) -> int:
    """Bytes of the device's memory that anybody uses."""
    free, total = sky_module.mem_get_info(device)
    return total - free


def get_allocator_backend() -> str:
    """The worker's allocator of memory, which is PyTorch's own."""
    return "native"


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """1.0: this program limits nothing; the worker has limits of its own."""
    DEVICES.of(device)
    return 1.0


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Checks its arguments, and warns that it limits nothing.

    Raises:
        TypeError, ValueError: as its namesake in `torch.cuda`.
    """
    DEVICES.of(device)
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if fraction < 0 or fraction > 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    if fraction < 1:
        warnings.warn(
            f"torch.sky.set_per_process_memory_fraction({fraction}) limits nothing: limits of memory are options of "
            "the worker",
            UserWarning,
            stacklevel=2,
        )


def host_memory_stats() -> dict[str, object]:
    """Nothing: no allocator of ours pins memory of this machine, see `Tensor.pin_memory`."""
    return {}


def host_memory_stats_as_nested_dict() -> dict[str, object]:
    """Nothing, as `host_memory_stats`."""
    return {}


def reset_accumulated_host_memory_stats() -> None:
    """Nothing to do: there are none."""


def reset_peak_host_memory_stats() -> None:
    """Nothing to do: there are none."""


# --- devices ---------------------------------------------------------------------------------------------------------


def get_arch_list() -> list[str]:
    """Return nothing: the worker's build of PyTorch has architectures, and this one none for `sky`."""
    return []


def get_gencode_flags() -> str:
    """Return nothing, as `get_arch_list`."""
    return ""


_NO_RECORD = "workers keep no record of single allocations; torch.sky.memory_summary() has the sums"
_MISSING = {
    "_dump_snapshot": _NO_RECORD,
    "_record_memory_history": _NO_RECORD,
    "_snapshot": _NO_RECORD,
    "caching_allocator_alloc": "memory of a worker has no address in this process; torch.empty(..., device='sky') has",
    "caching_allocator_delete": "memory of a worker has no address in this process; `del` frees a tensor's",
    "caching_allocator_enable": "the worker's allocator is chosen where the worker is started",
    "change_current_allocator": "the worker's allocator is chosen where the worker is started",
    "clock_rate": "workers do not watch their devices' clocks",
    "cudart": "the runtime of CUDA is the worker's; skyproxy.run(function) runs a function there",
    "current_blas_handle": "handles of cuBLAS are the worker's; skyproxy.run(function) runs a function there",
    "current_solver_handle": "handles of cuSOLVER are the worker's; skyproxy.run(function) runs a function there",
    "get_stream_from_external": "streams of other libraries live in this process, and those of sky on a worker",
    "list_gpu_processes": "workers do not tell who else uses their devices; torch.sky.mem_get_info() has free bytes",
    "memory_snapshot": _NO_RECORD,
    "memory_usage": "workers do not watch how busy memory is; torch.sky.device_memory_used() has the bytes",
    "power_draw": "workers do not watch their devices' power",
    "temperature": "workers do not watch their devices' temperature",
    "utilization": "workers do not watch how busy their devices are; torch.sky.queue() tells what is still to do",
}
"""Functions that a program may look for, and why they raise."""


def _make_refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def function(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"torch.sky.{name} is not there: {reason}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raises NotImplementedError: {reason}."
    return function


# --- ranges ----------------------------------------------------------------------------------------------------------


class _OpenRanges(threading.local):
    """The ranges that a thread has begun with `range_push`."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_open = _OpenRanges()
_started: dict[int, Any] = {}


def _begin(message: str) -> Any:
    entered = torch.profiler.record_function(str(message))
    entered.__enter__()
    return entered


def range_push(msg: str) -> int:
    """Begin a range, which profiles of `torch.profiler` show; return how many this thread had begun before."""
    _open.stack.append(_begin(msg))
    return len(_open.stack) - 1


def range_pop() -> int:
    """End the range that this thread began last; return how many are left, or -1 if there was none."""
    if not _open.stack:
        return -1
    _open.stack.pop().__exit__(None, None, None)
    return len(_open.stack)


def range_start(msg: str, *unused: object) -> int:
    """Begin a range that `range_end` ends; return its number."""
    entered = _begin(msg)
    _started[id(entered)] = entered
    return id(entered)


def range_end(range_id: int, *unused: object) -> None:
    """End the range of this number."""
    entered = _started.pop(range_id, None)
    if entered is not None:
        entered.__exit__(None, None, None)


def mark(msg: str) -> None:
    """Mark a moment, which profiles of `torch.profiler` show."""
    _begin(msg).__exit__(None, None, None)


@contextlib.contextmanager
def _range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """Begin a range, and end it with the block or the function; `msg` is formatted with the other arguments."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


def ranges() -> types.ModuleType:
    """Make `torch.sky.nvtx`, in the shape of `torch.cuda.nvtx`."""
    module = types.ModuleType("torch.sky.nvtx", "Ranges of a program, which profiles show.")
    module.__dict__.update(
        mark=mark,
        range=_range,
        range_end=range_end,
        range_pop=range_pop,
        range_push=range_push,
        range_start=range_start,
    )
    return module


_MEMORY = (
    "memory_cached",
    "max_memory_cached",
    "reset_max_memory_cached",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "set_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
)
_OTHERS = (
    "current_allocated_memory",
    "device_memory_used",
    "driver_allocated_memory",
    "get_arch_list",
    "get_gencode_flags",
    "has_half",
    "has_magma",
    "recommended_max_memory",
)
_MISSING_OF_MEMORY = (
    "_dump_snapshot",
    "_record_memory_history",
    "_snapshot",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_enable",
    "change_current_allocator",
    "list_gpu_processes",
    "memory_snapshot",
)


def names() -> dict[str, object]:
    """Return what belongs into `torch.sky`, by name."""
    found = {name: globals()[name] for name in (*_MEMORY, *_OTHERS)}
    return found | {name: _make_refusal(name, reason) for name, reason in _MISSING.items()} | {"nvtx": ranges()}


OF_MEMORY = (*_MEMORY, *_MISSING_OF_MEMORY)
"""Names of these that `torch.cuda.memory` has, too."""

__all__ = ["OF_MEMORY", "names"]
