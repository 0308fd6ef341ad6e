"""`torch.set_default_dtype`, followed by the workers and by what is remembered of operations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.tensor.devices import DEVICES, SkyDevice
from skyproxy.torch_codec import DTYPE_NAMES

_SETTERS = ("_set_default_dtype", "_set_default_tensor_type")


def follow(devices: list[SkyDevice]) -> None:
    """Makes the default dtype of this process that of the devices, from this point of the program on."""
    dtype = torch.get_default_dtype()
    late = {device.session: None for device in devices if device.default_dtype is not dtype}
    for session in late:
        with contextlib.suppress(SessionLostError):  # whoever uses it next is told
            session.recorder.flush()  # what was recorded before belongs to the dtype before
            session.do("set_default_dtype", DTYPE_NAMES[dtype])
            session.recorder.flush()
    for device in devices:
        device.use_default_dtype(dtype)


def _followed(setter: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(setter)
    def set_and_follow(value: Any) -> None:
        setter(value)
        follow(DEVICES.alive())

    return set_and_follow


def install() -> None:
    """Makes every way to set the default dtype tell the devices.

    Raises:
        ConfigurationError: this torch sets it in another way.
    """
    for name in _SETTERS:
        if not hasattr(torch._C, name):
            raise ConfigurationError(f"torch {torch.__version__} has no torch._C.{name}, which skyproxy follows")
        setattr(torch._C, name, _followed(getattr(torch._C, name)))
    DEVICES.on_new = follow
