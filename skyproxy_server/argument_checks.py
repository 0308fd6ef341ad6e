"""Bounds of an op's constant arguments, held against its schema once, when its signature is defined.

PyTorch's C++ takes integers for dtypes, layouts and memory formats, and uses them as indices of tables unchecked.
What varies from call to call are tensors, numbers and lists of numbers, whose kernels check them.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.errors import ProtocolError, UnsupportedOpError

_ENUMERATIONS: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "QScheme": torch.qscheme,
    "Device": torch.device,
}
MAX_DIMENSIONS = 64
"""More have no tensor that a kernel takes."""
UNUSABLE_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),  # they need scales, which do not travel
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    )
    if hasattr(torch, name)
)


def enumeration_of(argument: Any) -> type | None:
    """The Python type of an argument that C++ keeps as a number: a dtype, a layout, a device; None for others.

    Args:
        argument: as the op's schema has it.
    """
    text = str(argument.real_type)
    while text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    return _ENUMERATIONS.get(text)


def check_constant(op: str, argument: Any, value: object, *, on_cpu: bool) -> None:
    """Check that a constant is what the op's schema asks for.

    Raises:
        ProtocolError: the argument is an enumeration, and the value no member of it.
        UnsupportedOpError: the worker does not offer what it stands for.
    """
    if value is None:
        return
    if argument.name == "pin_memory" and value:
        raise UnsupportedOpError(f"{op}: a client cannot lock memory of the worker's machine (pin_memory=True)")
    wanted = enumeration_of(argument)
    if wanted is None:
        return
    if not isinstance(value, wanted):
        raise ProtocolError(f"{op}: {argument.name} is a {wanted.__name__}, not {value!r:.60}")
    if isinstance(value, torch.device):
        check_device(value, on_cpu=on_cpu)
    elif value in UNUSABLE_DTYPES:
        raise UnsupportedOpError(f"{op}: tensors of {value} cannot live on a worker")


def check_device(device: torch.device, *, on_cpu: bool) -> None:
    """Check that the worker has a device.

    Raises:
        UnsupportedOpError: the worker does not have the device.
    """
    index = device.index or 0
    if device.type == "cpu" and index == 0:
        return
    if device.type == "cuda" and not on_cpu and 0 <= index < torch.cuda.device_count():
        return
    raise UnsupportedOpError(f"the worker does not offer the device {device}")


def only_none(value: object) -> None:
    """Accept None only: an enumeration cannot vary from call to call.

    Raises:
        TypeError: it is not.
    """
    if value is not None:
        raise TypeError(f"a dtype, layout, memory format or device cannot be given as {value!r:.40}")
