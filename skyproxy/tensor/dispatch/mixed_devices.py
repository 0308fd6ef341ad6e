"""Ops whose tensors are not all on one device: what CUDA makes of them.

A CPU tensor with no dimensions is a value, and travels with the command, where the op only reads it. What an op writes
must be where it runs. A few ops work across devices nevertheless, on CUDA as here: those that PyTorch divides into ops
on fewer tensors each, and those that take one of their tensors for a number.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DispatchKey, OpOverload
from skyproxy.tensor.core.transfers import download
from skyproxy.tensor.dispatch.op_info import OpInfo

_COMPOSITE_EXPLICIT = DispatchKey.CompositeExplicitAutograd

_TAKEN_AS_NUMBERS = {
    "aten::fill_.Tensor": "value",
    "aten::index_fill_.int_Tensor": "value",
    "aten::_index_put_impl_": "values",
}
"""The argument of each op that every device reads as a number, whatever device it is on, if it has no dimensions."""


_TAKEN_APART = frozenset(
    "aten::" + name
    for name in (
        *("fill.Tensor", "index_fill.int_Tensor", "index_put", "index_put_", "resize_as_"),
        *("linspace.Tensor_Tensor_out", "linspace.Tensor_Scalar_out", "linspace.Scalar_Tensor_out"),
        *("logspace.Tensor_Tensor_out", "logspace.Tensor_Scalar_out", "logspace.Scalar_Tensor_out"),
    )
)
"""Ops of which PyTorch has one kernel for all devices, made of ops that work across devices."""


class MixedDevicesError(RuntimeError):
    """An op's tensors are on devices that it cannot combine."""


def mixed_devices_error(op: str, first: object, second: object) -> MixedDevicesError:
    """The error of an op whose tensors are on these two devices, in PyTorch's words."""
    return MixedDevicesError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when calling {op})"
    )


def run_across_devices(
    info: OpInfo, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], error: MixedDevicesError
) -> object:
    """Run an op that cannot be recorded, because its tensors are on several devices, as CUDA would.

    Args:
        error: why it cannot be recorded.

    Raises:
        RuntimeError: CUDA would refuse it, too.
    """
    name = _TAKEN_AS_NUMBERS.get(info.name)
    if name is not None:
        args, kwargs, found = _with_number_here(info, args, kwargs, name)
        if found:
            return func(*args, **kwargs)
    if info.for_each or info.name in _TAKEN_APART:
        return func._op_dk(_COMPOSITE_EXPLICIT, *args, **kwargs)
    raise RuntimeError(str(error)) from None


def _with_number_here(
    info: OpInfo, args: tuple[object, ...], kwargs: dict[str, object], name: str
) -> tuple[tuple[object, ...], dict[str, object], bool]:
    """The arguments with the one called `name` fetched, if it is a remote number; and whether it is."""
    position = info.names.index(name)
    value = kwargs[name] if name in kwargs else args[position]
    if type(value) is not RemoteTensor or value.dim():
        return args, kwargs, False
    fetched = download(value)
    if name in kwargs:
        return args, {**kwargs, name: fetched}, True
    return (*args[:position], fetched, *args[position + 1 :]), kwargs, True


def example_on(asked: torch.device, info: OpInfo, tensor: RemoteTensor) -> torch.Tensor:
    """For `zeros_like(x, device=...)` and `x.new_zeros(..., device=...)`: what looks like x, on that device."""
    meta, own = tensor._sky.meta, tensor._sky.device
    index = DEVICES.current if asked.index is None else asked.index  # type: ignore[redundant-expr]
    name = info.name.partition(".")[0]
    if (asked.type == "sky" and index == own.index) or meta.layout is not torch.strided:
        return tensor
    if not (name.endswith("_like") or name.startswith("aten::new_")):
        return tensor
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=asked)


def make_elsewhere(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    """Make what looks like an example of `example_on`. Pinned memory is ordinary memory, as in `Tensor.pin_memory`."""
    if not kwargs.get("pin_memory") or torch.device(kwargs["device"]).type != "cpu" or torch.cuda.is_available():
        return func(*args, **kwargs)
    made = func(*args, **{**kwargs, "pin_memory": False})
    made.untyped_storage()._sky_pinned = True
    return made


__all__ = ["MixedDevicesError", "example_on", "make_elsewhere", "mixed_devices_error", "run_across_devices"]
