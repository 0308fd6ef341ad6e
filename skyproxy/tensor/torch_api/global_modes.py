"""PyTorch's global modes, followed by the workers and by what is remembered of operations.

The functions that set a mode are replaced by ones that tell the devices, in order with the operations around them; an
operation itself never looks. They are replaced when the first device comes to exist, so that programs without one keep
PyTorch's own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable

import torch

from skyproxy import patching
from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.torch_modes import (
    MODES,
    Record,
    attention_order,
    flushes_denormal,
    note_attention_order,
    note_earlier_attention_order,
    note_flush_denormal,
    record_of,
    values_in_force,
)

_WHY = "the workers and what is remembered of operations follow each mode, in order with the operations around it"
_TEST = "tests/tensor/torch_api/test_global_modes.py::test_a_mode_is_in_force_on_every_worker_once_it_is_set"
_WHEN = patching.When.FIRST_DEVICE
_lock = threading.RLock()
_values: dict[str, object] = {}
"""The modes of this process, as far as the devices were told; empty before the first device."""


def follow(devices: Iterable[SkyDevice]) -> None:
    """Makes the modes of this process those of the devices, from this point of the program on."""
    with _lock:
        if not _values:
            _install()
            note_flush_denormal(flushes_denormal())
            note_earlier_attention_order()
        _values.update(values_in_force())
        _tell(devices)


def _tell(devices: Iterable[SkyDevice]) -> None:
    record = record_of(_values)
    late: dict[int, tuple[Session, list[SkyDevice]]] = {}
    for device in devices:
        if device.modes != record:
            late.setdefault(id(device.session), (device.session, []))[1].append(device)
    for session, group in late.values():
        _switch(session, group, record)


@shielded
def _switch(session: Session, devices: list[SkyDevice], record: Record) -> None:
    """Both or neither: the worker works under other modes, and what we remember belongs to them."""
    # Emitted directly, which never waits. If the worker is gone, whoever uses it next is told.
    session.recorder.emit((commands.DO, "set_modes", [dict(record)]))
    for device in devices:
        device.use_modes(record)


def _follow(name: str, setter: Callable[..., object]) -> Callable[..., object]:
    rows = [mode for mode in MODES.values() if name in mode.setters]

    @functools.wraps(setter)
    def set_and_follow(*args: object, **kwargs: object) -> object:
        order = attention_order()
        result = setter(*args, **kwargs)
        if name == "set_flush_denormal":
            note_flush_denormal(bool(result) and bool(args[0] if args else kwargs["mode"]))
        elif name == "_set_sdp_priority_order":
            note_attention_order(order)
        with _lock:
            now = {mode.name: mode.read() for mode in rows}
            if _values and any(_values[key] != value for key, value in now.items()):
                _values.update(now)
                _tell(DEVICES.alive())
        return result

    return set_and_follow


def _install() -> None:
    """Replace every function of PyTorch that sets a mode.

    Raises:
        ConfigurationError: if this torch has not all of them.
    """
    names = dict.fromkeys(name for mode in MODES.values() for name in mode.setters)
    patching.require(torch._C, *names)
    followed: dict[int, Callable[..., object]] = {}
    for name in names:
        original = getattr(torch._C, name)
        followed[id(original)] = replacement = _follow(name, original)
        for owner in (torch._C, torch):
            if getattr(owner, name, None) is original:
                _replace(owner, name, replacement)
    # `torch.backends.cudnn.benchmark = True` and its like keep the functions that they call.
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.backends"):
            for name, attribute in vars(type(module)).items():
                if isinstance(attribute, torch.backends.ContextProp) and id(attribute.setter) in followed:
                    _replace(attribute, "setter", followed[id(attribute.setter)], label=f"{module_name}.{name}")
    patching.registered("what the devices were told of modes", _values.clear, why=_WHY, test=_TEST, when=_WHEN)


def _replace(owner: object, name: str, replacement: object, label: str = "") -> None:
    patching.replace(owner, name, replacement, label=label, why=_WHY, test=_TEST, when=_WHEN)


def install() -> None:
    """Makes devices follow the modes of this process from their first moment on."""
    DEVICES.on_new = follow
