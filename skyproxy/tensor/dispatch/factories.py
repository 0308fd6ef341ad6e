"""Tensors made of sizes and options alone: `torch.zeros(3, device="sky")`.

The hot path of what has no tensor among its arguments. As in `hot_path`, whatever is unusual leaves for `recording`.
"""

from __future__ import annotations

import sys
from typing import Any

from skyproxy.protocol.commands import EXPECT
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import make_tensor
from skyproxy.tensor.core.torch_private import OpOverload
from skyproxy.tensor.dispatch.inference import Entry, expectation
from skyproxy.tensor.dispatch.op_info import FIXED_TYPES, NUMBER, SCALAR, Plan
from skyproxy.tensor.dispatch.recording import learn, record, remember_line

_getframe = sys._getframe
_PLAIN_NUMBERS = frozenset({int, float, bool, type(None)})


def create(plan: Plan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Record an op that makes a tensor of sizes and options, and wrap its result."""
    asked = kwargs.get("device")
    if asked is None or asked.type != "sky" or plan.rule is None or plan.special is not None:
        return record(plan, func, args, kwargs)
    # None of these keys is one of `binding.Call`, which has an argument where there is the number of arguments here.
    key: list[object] = [plan, len(args)]
    wire: list[object] = [0]
    for a, how in zip(args, plan.kinds):  # the schema may have more
        kind = type(a)
        if kind is list and how == NUMBER:
            key.append(tuple(a))
        elif kind not in _PLAIN_NUMBERS:
            return record(plan, func, args, kwargs)
        elif how == NUMBER:
            key.append(a if kind is int else (kind, a))
        elif how == SCALAR:
            key.append(kind)
        else:
            return record(plan, func, args, kwargs)
        wire.append(a)
    for name, a in kwargs.items():
        kind = type(a)
        if not (a is None or kind in FIXED_TYPES or (a is False and name == "pin_memory")):
            return record(plan, func, args, kwargs)
        key.append(a)
        if a is None and plan.keyword_kinds[name] in (NUMBER, SCALAR):
            wire.append(a)
    device = DEVICES.at(asked.index)
    signature = (*key, *kwargs)
    entry: Entry | None = device.cache.get(signature)
    if entry is None:
        entry = learn(plan, device, signature, args, kwargs)
        if entry is None or not entry.simple or entry.meta is None:
            return record(plan, func, args, kwargs)
        wire[0] = entry.number
        wire[0:0] = (EXPECT, expectation(entry, ()))
    else:
        wire[0] = entry.number
    meta: Meta = entry.meta  # type: ignore[assignment]  # what has none is not remembered under such a key
    if plan.followed and not meta.size:
        return record(plan, func, args, kwargs)  # a number whose value is known from now on
    handle = device.new_handle(meta)
    result = make_tensor(meta, handle)
    wire.append(handle.slot)
    recorder = device.recorder
    recorder.emit(wire)
    remember_line(device)
    recorder.send_if_due()
    return result


__all__ = ["create"]
