"""PyTorch's host side: pinned memory without CUDA, and `torch.accelerator`, which is us."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from skyproxy.errors import ConfigurationError
from skyproxy.tensor import device_module, streams
from skyproxy.tensor.devices import DEVICES

_keep: list[torch.library.Library] = []


# --- pinned memory ---------------------------------------------------------------------------------------------------


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return False


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy, as PyTorch makes one. Uploads read ordinary memory just as fast: the network is what takes time."""
    return self.clone(memory_format=torch.contiguous_format)


def _install_pinning() -> None:
    """PyTorch asks its accelerator for pinned memory, and would find us without an allocator for it.

    With CUDA on this machine, memory is pinned for CUDA.
    """
    if torch.cuda.is_available():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's kernel is replaced on purpose
        library.impl("is_pinned", _is_pinned, "CPU", allow_override=True)
        library.impl("_pin_memory", _pin_memory, "CPU", allow_override=True)
    _keep.append(library)


# --- torch.accelerator -----------------------------------------------------------------------------------------------


def _set_device_index(index: int) -> None:
    DEVICES.current = index


def _exchange_device(index: int) -> int:
    """Makes a device the current one; the one before. A negative index changes nothing and gives -1, as for CUDA."""
    if index < 0:
        return -1
    before, DEVICES.current = DEVICES.current, index
    return before


def _device_stats(index: int) -> dict[str, Any]:
    """What `torch.accelerator.memory_stats` flattens."""
    row = device_module.memory_stats(index)
    return {
        f"{kind}_bytes": {"all": {"current": row[kind], "peak": row[f"max_{kind}"]}}
        for kind in ("allocated", "reserved")
    }


def _capability(index: int) -> dict[str, Any]:
    bits = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return {"supported_dtypes": {*bits, *floats, torch.complex64, torch.complex128}}


_ACCELERATOR = {
    "_accelerator_deviceCount": device_module.device_count,
    "_accelerator_getDeviceIndex": device_module.current_device,
    "_accelerator_setDeviceIndex": _set_device_index,
    "_accelerator_exchangeDevice": _exchange_device,
    "_accelerator_maybeExchangeDevice": _exchange_device,
    "_accelerator_synchronizeDevice": device_module.synchronize,
    "_accelerator_getStream": streams.current_stream,
    "_accelerator_setStream": streams.set_stream,
    "_accelerator_getDeviceCapability": _capability,
    "_accelerator_isAllocatorInitialized": device_module.is_initialized,
    "_accelerator_emptyCache": device_module.empty_cache,
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_getMemoryInfo": device_module.mem_get_info,
    "_accelerator_getDeviceStats": _device_stats,
    "_accelerator_resetAccumulatedStats": lambda index: None,
    "_accelerator_resetPeakStats": device_module.reset_peak_memory_stats,
}


def install() -> None:
    """Answers for pinned memory and `torch.accelerator`.

    Raises:
        ConfigurationError: this torch asks for them elsewhere.
    """
    accelerator = torch._C._accelerator_getAccelerator()
    if accelerator.type != "sky":
        raise ConfigurationError(f"torch takes {accelerator} for this machine's accelerator, not sky")
    required = ("_accelerator_getDeviceIndex", "_accelerator_exchangeDevice", "_accelerator_synchronizeDevice")
    missing = [name for name in required if not hasattr(torch._C, name)]
    if missing:
        raise ConfigurationError(f"torch {torch.__version__} has no torch._C.{missing[0]}, which skyproxy replaces")
    for name, function in _ACCELERATOR.items():
        setattr(torch._C, name, function)
    _install_pinning()
