"""Devices without a number, where another than the first is current: PyTorch's C++ takes the first for them, unasked.

That is in `tensor.to("sky")`, which `Module.to` calls, and in what makes tensors of data. What makes them of sizes asks
our kernels, which know.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container

import torch

from skyproxy import patching
from skyproxy.errors import SELF_EXPLAINING
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.torch_api.tensor_methods import copy_with_warning

_Uninitialized = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_TEST = "tests/tensor/torch_api/test_current_device.py"
_OF_DATA = ("tensor", "as_tensor", "asarray")
_SPARSE = tuple(f"sparse_{layout}_tensor" for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed"))

_installing = threading.RLock()


def _add_number(a: object) -> object:
    """Return an argument, with the number of the current device if it is a device without one."""
    if (type(a) is str and a == "sky") or (type(a) is torch.device and a.type == "sky" and a.index is None):
        return torch.device("sky", DEVICES.current)
    return a


def _with_number(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that gives another one the number of the current device.

    What copies tensors warns of it, at the line of the innermost frame, which would be ours.
    """
    is_copying = function is torch.tensor

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if DEVICES.current:
            args = (*args[:1], *map(_add_number, args[1:]))
            if "device" in kwargs:
                kwargs["device"] = _add_number(kwargs["device"])
            source = args[0] if is_copying and len(args) == 1 else None
            if isinstance(source, torch.Tensor) and not kwargs.get("pin_memory"):
                if kwargs.get("device") is None:
                    kwargs["device"] = source.device
                kwargs["device"] = torch.device(kwargs["device"])  # type: ignore[call-overload]
                return copy_with_warning("torch.tensor", source.dtype, source, **kwargs)  # type: ignore[arg-type]
        try:
            return function(*args, **kwargs)
        except SELF_EXPLAINING as error:
            error.__traceback__ = None
            raise

    return call


_OURS = _with_number(len).__code__


def _finding_originals(find_builtin: Callable[[object], object]) -> Callable[[object], object]:
    @functools.wraps(find_builtin)
    def find(function: object) -> object:
        ours = getattr(function, "__code__", None) is _OURS
        return find_builtin(getattr(function, "__wrapped__", None) if ours else function)

    return find


def _type_with_number(type_of: Callable[..., object]) -> Callable[..., object]:
    """Return `Tensor.type`, which makes a tensor of the CPU one of the current device: its types name no number."""

    @functools.wraps(type_of)
    def call(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        wanted = args[0] if args else kwargs.get("dtype")
        name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", "")
        if DEVICES.current and name.startswith("torch.sky.") and self.device.type != "sky":
            self = self.to(torch.device("sky", DEVICES.current))
        return type_of(self, *args, **kwargs)

    return call


def _context_with_number(
    constructors: Callable[[], Container[object]], torch_function: Callable[..., object]
) -> Callable[..., object]:
    """Return the method of `torch.set_default_device` that gives functions a device, here with its number."""

    @functools.wraps(torch_function)
    def call(
        self: torch.utils._device.DeviceContext,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if DEVICES.current and kwargs.get("device") is None and func in constructors():
            kwargs = {**kwargs, "device": _add_number(self.device)}
        return torch_function(self, func, types, args, kwargs)

    return call


def _install_for_other_devices() -> None:
    if patching.is_replaced(torch.jit._builtins, "_find_builtin"):
        return  # which is the last
    from torch.utils import _device  # later, for few programs need it

    patching.require(_device, "_device_constructors", "DeviceContext")
    with _installing:  # threads may begin with a device each
        _device._device_constructors()  # PyTorch keeps the set of its functions, which it looks up once
        for owner, name in (
            (torch.Tensor, "to"),
            *((torch, n) for n in _OF_DATA + _SPARSE),
        ):
            _wrap_once(
                owner,
                name,
                _with_number,
                why="PyTorch takes the first device for one without a number, whichever is current",
                test="test_a_device_without_a_number_is_the_current_one",
            )
        _wrap_once(
            torch.Tensor,
            "type",
            _type_with_number,
            why="names of types have no number, for which PyTorch takes the first device, whichever is current",
            test="test_a_type_without_a_number_is_of_the_current_device",
        )
        _wrap_once(
            _device.DeviceContext,
            "__torch_function__",
            functools.partial(_context_with_number, _device._device_constructors),
            why="a default device is given to PyTorch's own functions, past ours",
            test="test_a_default_device_without_a_number_is_the_current_one",
        )
        if not patching.is_replaced(_Uninitialized, "_allowed_methods"):
            patching.replace(
                _Uninitialized,
                "_allowed_methods",
                [*_Uninitialized._allowed_methods, torch.Tensor.to],
                why="lazy parameters know the methods that they have by their identity",
                test=f"{_TEST}::test_lazy_parameters_move",
                when=patching.When.OTHER_DEVICE,
            )
        _wrap_once(
            torch.jit._builtins,
            "_find_builtin",
            _finding_originals,
            why="scripts know PyTorch's functions by their identity",
            test="test_a_script_makes_tensors",
        )


def _wrap_once(owner: object, name: str, make: Callable[..., object], *, why: str, test: str) -> None:
    if not patching.is_replaced(owner, name):
        patching.wrap(owner, name, make, why=why, test=f"{_TEST}::{test}", when=patching.When.OTHER_DEVICE)


def install() -> None:
    """Has the current device stand for one without a number everywhere, once it is not the first."""
    patching.require(torch.jit._builtins, "_find_builtin")
    patching.require(_Uninitialized, "_allowed_methods")
    DEVICES.before_other = _install_for_other_devices


__all__ = ["install"]
