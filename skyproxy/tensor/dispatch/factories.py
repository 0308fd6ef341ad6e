"""Tensors made of sizes and options alone: `torch.zeros(3, device="sky")`.

The hot path of what has no tensor among its arguments. As in `hot_path`, whatever is unusual leaves for `recording`.
"""

from __future__ import annotations

import sys
from heapq import heappop
from typing import Any

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol.commands import EXPECT
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload, make_wrapper_subclass
from skyproxy.tensor.core.user_lines import FOREIGN, OUTERMOST
from skyproxy.tensor.dispatch.derived_copies import WHOLE, derive_of_numbers
from skyproxy.tensor.dispatch.entries import Entry, expectation
from skyproxy.tensor.dispatch.kernel_trials import EVERY_NUMBER, check_number
from skyproxy.tensor.dispatch.known_results import know_filled
from skyproxy.tensor.dispatch.op_info import FIXED_TYPES, NUMBER, SCALAR, OpInfo
from skyproxy.tensor.dispatch.recording import learn, record

_getframe = sys._getframe
_make_wrapper = make_wrapper_subclass
_record_lines = SETTINGS.record_lines
_LARGEST = torch.finfo(torch.float32).max
_PLAIN_NUMBERS = frozenset({int, float, bool, complex, type(None)})


def create(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Record an op that makes a tensor of sizes and options, and wrap its result; called by a kernel alone."""
    asked = kwargs.get("device")
    if asked is None or asked.type != "sky" or info.rule is None or info.special is not None:
        return record(info, func, args, kwargs)
    # None of these keys equals a key of a `BoundCall`, which has an argument where these have the number of arguments.
    key: list[object] = [info, len(args)]
    command: list[object] = [0]
    for a, how in zip(args, info.kinds):  # the schema may have more
        kind = type(a)
        if kind is list and how == NUMBER:
            key.append(tuple(a))
        elif kind not in _PLAIN_NUMBERS:
            return record(info, func, args, kwargs)
        elif how == NUMBER:
            key.append(a if kind is int else (kind, a))
        elif how == SCALAR:
            if kind is float:
                is_usual = -_LARGEST <= a <= _LARGEST
            else:
                is_usual = kind is not complex
            if not is_usual or kwargs.get("dtype") not in EVERY_NUMBER:
                check_number(info, args, kwargs)
            key.append(kind)
        else:
            return record(info, func, args, kwargs)
        command.append(a)
    key += kwargs.values()
    key += kwargs
    device = DEVICES.at(asked.index)
    signature = tuple(key)
    try:
        entry: Entry | None = device.cache.get(signature)
    except TypeError as error:  # there is a list among the options
        if raised_by_handler(error):
            raise
        entry = None
    if entry is None:
        entry = _infer_entry(info, device, signature, args, kwargs)
        if entry is None:
            return record(info, func, args, kwargs)
        command[0:1] = (EXPECT, expectation(entry, ()), entry.number)
    else:
        command[0] = entry.number
    meta: Meta = entry.meta  # type: ignore[assignment]  # what has none is not remembered under such a key
    recorder = device.recorder
    result = _make_wrapper(
        RemoteTensor, meta.size, meta.stride, meta.offset, None, meta.dtype, meta.layout, device.torch_device
    )
    handle = device.handle_type()
    handle.meta = meta
    handle.root = None
    if info.derived and meta.size and meta.dtype in WHOLE:
        derive_of_numbers(handle, info, args, kwargs)
    free, held = recorder.free, recorder.held
    if free:  # as in `take_slot`: no call may end between
        handle.slot = slot = free[0]
        held[slot] = True
        heappop(free)
    else:
        recorder.take_slot(handle)
    result._sky_dict = {"_sky": handle}
    command.append(handle.slot)
    stream = recorder.stream
    stream.extend(command)
    try:
        frame = _getframe(2)
    except ValueError as error:
        if raised_by_handler(error):
            raise
        frame = OUTERMOST
    if _record_lines:
        while FOREIGN[frame.f_code.co_filename] and frame.f_back is not None:
            frame = frame.f_back
    recorder.lines.extend((frame.f_code, frame.f_lasti))
    if info.followed and not meta.size:  # a number whose value is known from now on
        know_filled(handle, info, args)
    if len(stream) > recorder.limit:
        recorder.send_some()
    return result


def _infer_entry(
    info: OpInfo, device: SkyDevice, signature: tuple[object, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Entry | None:
    """Infer a call that never came before; None where `record` must take it, each time."""
    kinds = info.keyword_kinds
    for name, a in kwargs.items():
        is_fixed = type(a) in FIXED_TYPES  # which a schema calls numbers now and then
        is_plain = is_fixed or a is None or (a is False and name == "pin_memory")
        if not is_plain or (kinds[name] in (NUMBER, SCALAR) and not is_fixed):
            return None
    entry = learn(info, device, signature, args, kwargs)
    return entry if entry is not None and entry.simple and entry.meta is not None else None


__all__ = ["create"]
