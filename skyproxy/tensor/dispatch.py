"""Every operation on remote tensors comes through here: found in the shape cache, recorded, wrapped.

`RemoteTensor.__torch_dispatch__` is the hot path of the whole product and is written for speed: one pass over the
arguments builds the cache key and the command together, and everything unusual leaves the function early.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import UnsupportedOpError
from skyproxy.settings import SETTINGS
from skyproxy.tensor import inference
from skyproxy.tensor.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.inference import Entry
from skyproxy.tensor.metadata import Meta, meta_of
from skyproxy.tensor.plans import FIXED, GENERATOR, NUMBER, SCALAR, TENSOR, TENSORS, Plan, plan_of
from skyproxy.tensor.remote_tensor import RemoteTensor, make_tensor, set_metadata

_make_wrapper = torch.Tensor._make_wrapper_subclass
_getframe = sys._getframe
_Parameter = torch.nn.Parameter
_CPU = torch.device("cpu")


class _Foreign(dict[str, bool]):
    """For a source file's name, whether it is PyTorch's or ours, so that errors can name the user's line."""

    _ROOTS = tuple(
        os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
    )

    def __missing__(self, name: str) -> bool:
        foreign = name.startswith((*self._ROOTS, "<frozen ", "<eval_with_key>")) or name == "<string>"
        self[name] = foreign
        return foreign


_foreign = _Foreign()


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither PyTorch's nor ours, from `frame` on outwards."""
    while _foreign[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


_record_lines = SETTINGS.record_lines


def _dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    try:
        plan = func._sky_plan
    except AttributeError:
        plan = plan_of(func)
    if plan.special is not None:
        return plan.special(plan, func, args, kwargs or {})
    device = None
    key = [plan]
    wire = [0]
    root = None
    for a in args:
        kind = type(a)
        if kind is RemoteTensor:
            handle = a._sky
            if handle.device is not device:
                if device is not None:
                    return _several_devices(plan, func, args, kwargs or {})
                device = handle.device
                root = handle
            key.append(handle.meta)
            wire.append(handle.slot)
        elif kind is float:
            key.append(float)
            wire.append(a)
        else:
            how = plan.kinds[len(key) - 1]
            if how == NUMBER and kind is not torch.dtype:
                if kind is list:
                    key.append(tuple(a))
                    wire.append(a)
                elif kind is int or a is None or kind is bool:
                    key.append(a)
                    wire.append(a)
                else:
                    return record(plan, func, args, kwargs or {})
            elif how == SCALAR or (how == TENSOR and (kind is int or kind is bool or a is None)):
                if kind is list:
                    return record(plan, func, args, kwargs or {})
                key.append(kind)
                wire.append(a if a is not None or how == SCALAR else 0)
            elif how == FIXED and (kind is bool or a is None):
                key.append(a)
            else:
                return record(plan, func, args, kwargs or {})
    if kwargs or device is None:
        return record(plan, func, args, kwargs or {})
    entry = device.cache.get(tuple(key))
    if entry is None or not entry.simple:
        return record(plan, func, args, {})
    recorder = device.recorder
    wire[0] = entry.number
    if entry.meta is not None:
        meta = entry.meta
        result = _make_wrapper(
            RemoteTensor, meta.size, meta.stride, meta.offset, dtype=meta.dtype, device=device.torch_device
        )
        handle = device.handle_type()
        handle.meta = meta
        handle.root = (root.root or root) if entry.shares_first else None
        try:
            handle.slot = slot = recorder.dirty.pop() if recorder.dirty else recorder.free.pop()
        except IndexError:
            handle.slot = slot = recorder.new_slot()
        result._sky = handle
        wire.append(slot)
    else:
        result = args[0]
    stream = recorder.stream
    stream.extend(wire)
    frame = _getframe(1)
    if _record_lines:
        while _foreign[frame.f_code.co_filename] and frame.f_back is not None:
            frame = frame.f_back
    recorder.lines.extend((frame.f_code, frame.f_lasti))
    if len(stream) > recorder.limit:
        recorder.flush()
    return result


RemoteTensor.__torch_dispatch__ = classmethod(_dispatch)  # type: ignore[method-assign,assignment]


class Call:
    """One call of an op, taken apart: where it runs, what it looks like, what travels.

    Attributes:
        device: the device it runs on.
        key: what the shape of its results depends on.
        wire: the operands that travel, without the op's number and the results' slots.
        templates: how the worker puts the operands together again.
        keyword_templates: the same for keywords.
        tensors: the remote tensors among the arguments, in order.
    """

    __slots__ = ("args", "device", "key", "keyword_templates", "kwargs", "plan", "templates", "tensors", "wire")

    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[RemoteTensor] = []
        self.device = self._find_device()
        self.key: list[Any] = [plan]
        self.wire: list[Any] = []
        self.templates = tuple(self._take(a, plan.kinds[i]) for i, a in enumerate(args))
        self.keyword_templates: dict[str, Any] = {}
        for name, a in kwargs.items():
            if name == "pin_memory" and not a:
                continue
            self.key.append(name)
            self.keyword_templates[name] = self._take(a, plan.keyword_kinds[name])

    def _find_device(self) -> SkyDevice:
        found: SkyDevice | None = None
        for a in (*self.args, *self.kwargs.values()):
            for item in a if type(a) is list or type(a) is tuple else (a,):
                if type(item) is RemoteTensor:
                    device = item._sky.device
                    if found is None:
                        found = device
                    elif device is not found:
                        raise RuntimeError(
                            "Expected all tensors to be on the same device, but found at least two devices, "
                            f"sky:{found.index} and sky:{device.index}! (when calling {self.plan.name})"
                        )
        asked = self.kwargs.get("device")
        if asked is not None and asked.type == "sky" and (found is None or asked.index not in (None, found.index)):
            return DEVICES.of(asked)
        if found is None:
            generator = self.kwargs.get("generator")
            return generator.sky_device if hasattr(generator, "sky_device") else DEVICES.at(None)
        return found

    def _take(self, a: Any, how: int) -> Any:
        """Adds one argument to key and operands; its template."""
        kind = type(a)
        if kind is RemoteTensor:
            handle = a._sky
            self.tensors.append(a)
            self.key.append(handle.meta)
            self.wire.append(handle.slot)
            return "t"
        if isinstance(a, torch.Tensor):
            return self._take_host(a)
        if how == TENSORS and a is not None:
            return self._take_list(a)
        if how == GENERATOR and a is not None:
            self.key.append("generator")
            self.wire.append(a.handle_on(self.device).slot)
            return "t"
        if a is None and how == TENSOR:
            self.key.append(kind)
            self.wire.append(0)
            return "t"
        if how == FIXED and (kind is bool or a is None):
            self.key.append(a)
            return ("c", "", a)
        if how == FIXED or kind in _FIXED_TYPES or how == GENERATOR:
            constant = self._constant(a)
            self.key.append(("c", _frozen(constant)))
            return ("c", *_frozen(constant))
        if how == NUMBER:
            value = [_number(item) for item in a] if isinstance(a, list | tuple) else _number(a)
            self.key.append(tuple(value) if type(value) is list else value)
            self.wire.append(value)
            return "v"
        if isinstance(a, list | tuple):
            value = [_number(item) for item in a]
            self.key.append(tuple(type(item) for item in value))
            self.wire.append(value)
            return "v"
        self.key.append(kind)
        self.wire.append(_number(a))
        return "v"

    def _constant(self, a: Any) -> list[Any]:
        if isinstance(a, torch.device):
            a = DEVICES.of(a).worker_device if a.type == "sky" else a
        return torch_codec.encode_constant(a)

    def _take_host(self, a: torch.Tensor) -> Any:
        """A tensor of the CPU among remote ones: allowed with no dimensions, as PyTorch allows it on every device."""
        if a.device.type != "cpu" or a.dim() != 0 or a.layout is not torch.strided:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"sky:{self.device.index} and {a.device}! (when calling {self.plan.name})"
            )
        name = torch_codec.DTYPE_NAMES[a.dtype]
        self.key.append(("host", name))
        self.wire.append(a.item())
        return ("k", name)

    def _take_list(self, items: Any) -> Any:
        slots: list[int] = []
        looks: list[Meta | None] = []
        for item in items:
            if item is None:
                slots.append(0)
                looks.append(None)
                continue
            if type(item) is not RemoteTensor:
                item = self._place_in_list(item)
            self.tensors.append(item)
            slots.append(item._sky.slot)
            looks.append(item._sky.meta)
        self.key.append(tuple(looks))
        self.wire.append(slots)
        return "T"

    def _place_in_list(self, item: Any) -> RemoteTensor:
        if isinstance(item, torch.Tensor) and item.device.type == "cpu" and (
            item.dim() == 0 or self.plan.places_host_indices
        ):
            from skyproxy.tensor.copies import upload

            return upload(item, self.device)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"sky:{self.device.index} and {getattr(item, 'device', type(item).__name__)}! (when calling {self.plan.name})"
        )

    def argument(self, name: str) -> Any:
        """The value of an argument by its schema name; None where it was left out."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.plan.names.index(name)
        return self.args[position] if position < len(self.args) else None


_FIXED_TYPES = frozenset({torch.dtype, torch.layout, torch.memory_format, torch.device, str})


def _number(a: Any) -> Any:
    if a is None or isinstance(a, bool | int | float | complex):
        return a
    if isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool):
        return a.node.maybe_as_int() if isinstance(a, torch.SymInt) else float(a)
    raise UnsupportedOpError(f"an argument of type {type(a).__name__} cannot be sent to a worker: {a!r:.80}")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def record(plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Records a call of any op, whatever its arguments, and wraps its results."""
    if plan.special is not None:
        return plan.special(plan, func, args, kwargs)
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor) and type(a) not in _KNOWN_TENSORS and not _is_plain_subclass(a):
            return NotImplemented  # another wrapper; its own dispatch comes next
    call = Call(plan, args, kwargs)
    return run(call)


_KNOWN_TENSORS = (RemoteTensor, torch.Tensor, _Parameter)


def _is_plain_subclass(a: torch.Tensor) -> bool:
    return type(a).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def run(call: Call) -> Any:
    """Records a call that was taken apart; infers what its results look like where that is not known yet."""
    key = tuple(call.key)
    device = call.device
    entry = device.cache.get(key)
    expected = False
    if entry is None:
        device.misses += 1
        entry = inference.infer(call)
        if entry is None:
            return _ask(call)
        entry.number = _signature(call, entry)
        device.remember(key, entry)
        expected = bool(entry.descriptions)
    return _finish(call, entry, expected)


def _signature(call: Call, entry: Entry) -> int:
    outputs = tuple(entry.output_templates)
    structure = (call.plan.name, call.templates, tuple(call.keyword_templates.items()), outputs)
    return call.device.session.signature(
        structure,
        lambda: [
            call.plan.name,
            [_thawed(t) for t in call.templates],
            {name: _thawed(t) for name, t in call.keyword_templates.items()},
            list(outputs),
        ],
        len(call.wire) + sum(template in ("n", "N") for template in outputs),
    )


def _thawed(template: Any) -> Any:
    return [_thawed(item) for item in template] if isinstance(template, tuple) else template


def remember_line(device: SkyDevice) -> None:
    """Notes the user's line for the op that was just recorded."""
    frame = _getframe(1)
    if _record_lines:
        frame = user_frame(frame)
    device.recorder.lines.extend((frame.f_code, frame.f_lasti))


def _finish(call: Call, entry: Entry, expected: bool) -> Any:
    device = call.device
    wire = [entry.number, *call.wire]
    if expected:
        wire = [2, [torch_codec.encode_description(d) for d in entry.descriptions], *wire]
    results: list[Any] = []
    for output in entry.outputs:
        if output.argument is not None:
            results.append(call.argument(output.argument))
        elif output.tensor is not None:
            results.append(call.tensors[output.tensor])
        elif output.items is not None:
            made = [_new(device, call, meta, shared) for meta, shared in output.items]
            wire.append([tensor._sky.slot for tensor in made])
            results.append(made)
        elif output.meta is not None:
            tensor = _new(device, call, output.meta, output.shares)
            wire.append(tensor._sky.slot)
            results.append(tensor)
        else:
            results.append(output.value)
    device.recorder.stream.extend(wire)
    remember_line(device)
    for position, meta in entry.changed:
        set_metadata(call.tensors[position], meta)
    if len(device.recorder.stream) > device.recorder.limit:
        device.recorder.flush()
    if call.plan.waits:
        device.session.synchronize()
    if len(results) == 1:
        return results[0]
    return tuple(results) if results else None


def _new(device: SkyDevice, call: Call, meta: Meta, shares: int | None) -> RemoteTensor:
    root: Handle | None = None
    if shares is not None:
        base = call.tensors[shares]._sky
        root = base.root or base
    return make_tensor(meta, device.new_handle(meta, root))


def _ask(call: Call) -> Any:
    """Runs an op whose results only the worker knows: their sizes depend on values, or nothing here can infer them.

    Costs one round trip. Errors are the worker's, raised here and now.
    """
    plan, device = call.plan, call.device
    outputs = ["x" if argument is not None else "n" for argument in plan.returns]
    entry = Entry([inference.Output(argument=argument) for argument in plan.returns], [])
    entry.output_templates = outputs
    handles = [device.new_handle(None) for template in outputs if template == "n"]
    device.recorder.stream.extend((_signature(call, entry), *call.wire, *(h.slot for h in handles)))
    remember_line(device)
    inputs = [tensor._sky.slot for tensor in call.tensors]
    changed = [call.argument(name) for name in plan.writes]
    changed = [tensor for tensor in changed if type(tensor) is RemoteTensor]
    slots = [handle.slot for handle in handles] + [tensor._sky.slot for tensor in changed]
    rows = device.session.request(plan.name, lambda number: (7, number, slots, inputs))
    made = []
    for handle, (fields, alias) in zip(handles, rows, strict=False):
        if fields is None:
            made.append(alias)
            continue
        handle.meta = inference.intern_meta(torch_codec.decode_description(fields))
        if alias >= 0:
            base = call.tensors[alias]._sky
            handle.root = base.root or base
        made.append(make_tensor(handle.meta, handle))
    for tensor, (fields, _) in zip(changed, rows[len(handles) :], strict=True):
        meta = inference.intern_meta(torch_codec.decode_description(fields))
        if meta is not tensor._sky.meta:
            set_metadata(tensor, meta)
    fresh = iter(made)
    results = [next(fresh) if name is None else call.argument(name) for name in plan.returns]
    if len(results) == 1:
        return results[0]
    return tuple(results) if results else None


def _several_devices(plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return record(plan, func, args, kwargs)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op that PyTorch hands over without a remote tensor among its arguments: factories, and kernels that
    were registered for the device."""
    return record(plan_of(func), func, args, kwargs)


__all__ = ["Call", "dispatch", "meta_of", "record", "remember_line", "run"]
