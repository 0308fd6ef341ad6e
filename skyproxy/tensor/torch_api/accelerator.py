"""PyTorch's host side: pinned memory without CUDA, and `torch.accelerator`, which is us as soon as a device exists.

Before that, both are as PyTorch has them without us: a program that imports skyproxy and never uses it must not notice.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import NoReturn, cast

import torch
from torch._C import DispatchKey

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.torch_api import sky_module, streams

_keep: list[torch.library.Library] = []
_other_accelerator: torch.device | None = torch._C._accelerator_getAccelerator()
"""This machine's own one; asked for before PyTorch knows our device, which it prefers to all others."""
_STAYS = "in C++, the name of the device makes it the accelerator of this machine, used or not; and a name stays"
_NO_ACCELERATOR = "Cannot access accelerator device when none is available."


# --- pinned memory ---------------------------------------------------------------------------------------------------


def _is_pinned(self: torch.Tensor, device: torch.device | str | int | None = None) -> bool:
    if "_sky_pinned" in vars(self.untyped_storage()):
        return True
    if not torch.cuda.is_available():
        return False
    if device is not None or threading.current_thread() is not threading.main_thread():
        return bool(_plain("is_pinned", self))
    # PyTorch wants to ask its accelerator, which would be ours. The warning is the method's, so it comes in here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The argument 'device'", DeprecationWarning)
        return self.is_pinned("cuda")


def _plain(name: str, tensor: torch.Tensor) -> object:
    """Ask PyTorch's own kernel, for this machine's own accelerator."""
    op = getattr(torch.ops.aten, name).default
    return op._op_dk(DispatchKey.CompositeExplicitAutograd, tensor, _other_accelerator or torch.device("cuda"))


def _pin_memory(self: torch.Tensor, device: torch.device | str | int | None = None) -> torch.Tensor:
    """A copy, as PyTorch makes one: pinned for CUDA where this machine has it.

    Without CUDA it is in ordinary memory, which uploads read just as fast: the network is what takes time.
    """
    if torch.cuda.is_available():
        copy = cast(torch.Tensor, _plain("_pin_memory", self))
    elif DEVICES.existing():
        copy = self.clone(memory_format=torch.contiguous_format)
    elif _other_accelerator is not None:
        return cast(torch.Tensor, _plain("_pin_memory", self))  # raises PyTorch's error, if there is no driver for it
    else:
        raise RuntimeError(_NO_ACCELERATOR)
    copy.untyped_storage()._sky_pinned = True  # type: ignore[attr-defined]
    return copy


def _install_pinning() -> None:
    """PyTorch asks its accelerator for pinned memory, and would find us without an allocator for it.

    Whether this machine has CUDA is asked when memory is pinned. Asked here, it would start CUDA's driver with the
    import of this package, and no process that is forked afterwards could use a GPU.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's kernel is replaced on purpose
        library.impl("is_pinned", _is_pinned, "CPU", allow_override=True)
        library.impl("_pin_memory", _pin_memory, "CPU", allow_override=True)
    _keep.append(library)
    patching.registered(
        "kernels of `aten::is_pinned` and `aten::_pin_memory` for the CPU",
        None,
        why="PyTorch asks its accelerator for pinned memory, and would find ours without an allocator for it",
        test="tests/tensor/torch_api/test_accelerator.py::test_pinning_works_without_cuda_and_without_warnings",
        stays=_STAYS,
    )


# --- torch.accelerator -----------------------------------------------------------------------------------------------


def _accelerator() -> torch.device | None:
    """Ours as soon as a device of ours exists, this machine's own before."""
    return torch.device("sky") if DEVICES.existing() else _other_accelerator


def _available_accelerator() -> torch.device:
    """The same, or the CPU where there is no driver for this machine's own."""
    found = _accelerator()
    if found is None or (found.type != "sky" and not torch.get_device_module(found).is_available()):
        return torch.device("cpu")
    return found


_OF_THE_OTHER = {
    "_accelerator_deviceCount": "device_count",
    "_accelerator_getDeviceIndex": "current_device",
    "_accelerator_setDeviceIndex": "set_device",
    "_accelerator_exchangeDevice": "_exchange_device",
    "_accelerator_maybeExchangeDevice": "_maybe_exchange_device",
    "_accelerator_synchronizeDevice": "synchronize",
    "_accelerator_getStream": "current_stream",
    "_accelerator_setStream": "set_stream",
    "_accelerator_isAllocatorInitialized": "is_initialized",
    "_accelerator_emptyCache": "empty_cache",
    "_accelerator_getMemoryInfo": "mem_get_info",
    "_accelerator_getDeviceStats": "memory_stats_as_nested_dict",
    "_accelerator_resetAccumulatedStats": "reset_accumulated_memory_stats",
    "_accelerator_resetPeakStats": "reset_peak_memory_stats",
}
"""Functions that answer in the module of this machine's own accelerator: PyTorch itself would ask ours."""


def _defer_until_used(name: str, ours: Callable[..., object], original: Callable[..., object]) -> Callable[..., object]:
    """A function of `torch.accelerator` that is ours as soon as a device exists."""

    @functools.wraps(ours)
    def function(*args: object) -> object:
        if DEVICES.existing():
            return ours(*args)
        if _other_accelerator is not None:
            other = torch.get_device_module(_other_accelerator)
            return getattr(other, _OF_THE_OTHER[name])(*args) if name in _OF_THE_OTHER else original(*args)
        if name == "_accelerator_deviceCount":
            return 0
        raise RuntimeError(_NO_ACCELERATOR)

    return function


def _raise_missing(*args: object) -> NoReturn:
    raise RuntimeError(_NO_ACCELERATOR)


def _set_device_index(index: int) -> None:
    DEVICES.current = index


def _exchange_device(index: int) -> int:
    """Makes a device the current one; the one before. A negative index changes nothing and gives -1, as for CUDA."""
    if index < 0:
        return -1
    before, DEVICES.current = DEVICES.current, index
    return before


def _capability(index: int) -> dict[str, object]:
    bits = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return {"supported_dtypes": {*bits, *floats, torch.complex64, torch.complex128}}


_ACCELERATOR: dict[str, Callable[..., object]] = {
    "_accelerator_deviceCount": sky_module.device_count,
    "_accelerator_getDeviceIndex": sky_module.current_device,
    "_accelerator_setDeviceIndex": _set_device_index,
    "_accelerator_exchangeDevice": _exchange_device,
    "_accelerator_maybeExchangeDevice": _exchange_device,
    "_accelerator_synchronizeDevice": sky_module.synchronize,
    "_accelerator_getStream": streams.current_stream,
    "_accelerator_setStream": streams.set_stream,
    "_accelerator_getDeviceCapability": _capability,
    "_accelerator_isAllocatorInitialized": sky_module.is_initialized,
    "_accelerator_emptyCache": sky_module.empty_cache,
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_getMemoryInfo": sky_module.mem_get_info,
    "_accelerator_getDeviceStats": sky_module.memory_stats_as_nested_dict,
    "_accelerator_resetAccumulatedStats": sky_module.reset_accumulated_memory_stats,
    "_accelerator_resetPeakStats": sky_module.reset_peak_memory_stats,
}


def install() -> None:
    """Answers for pinned memory and `torch.accelerator`.

    Raises:
        ConfigurationError: this torch asks for them elsewhere.
    """
    if _keep:
        return  # it still is
    accelerator = torch._C._accelerator_getAccelerator()
    if accelerator.type != "sky":
        raise ConfigurationError(f"torch takes {accelerator} for this machine's accelerator, not sky")
    patching.require(
        torch._C, "_accelerator_getDeviceIndex", "_accelerator_exchangeDevice", "_accelerator_synchronizeDevice"
    )
    answers = {
        **{
            name: _defer_until_used(name, ours, getattr(torch._C, name, _raise_missing))
            for name, ours in _ACCELERATOR.items()
        },
        "_accelerator_getAccelerator": _accelerator,
        "_get_accelerator": _available_accelerator,
    }
    for name, answer in answers.items():
        if hasattr(torch._C, name):
            patching.replace(
                torch._C,
                name,
                answer,
                why="`torch.accelerator` speaks for `sky` once it is in use, and for this machine's own device before",
                test="tests/tensor/torch_api/test_accelerator.py::test_sky_is_the_accelerator",
                stays=_STAYS,
            )
    _install_pinning()
