"""Records calls of ops with all the care they need: any kind of argument, results that are not known yet.

`hot_path` handles what is known already, and calls `record` for the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import UnsupportedOpError
from skyproxy.interrupts import shielded
from skyproxy.protocol.commands import EXPECT
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core import known_values
from skyproxy.tensor.core.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.core.generators import device_of, slot_of
from skyproxy.tensor.core.known_values import KnownMeta
from skyproxy.tensor.core.metadata import Meta, meta_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor, make_view, set_metadata
from skyproxy.tensor.core.transfers import upload
from skyproxy.tensor.dispatch import inference
from skyproxy.tensor.dispatch.capture import check_reshaped
from skyproxy.tensor.dispatch.inference import Entry
from skyproxy.tensor.dispatch.mixed_devices import MixedDevicesError, mixed_devices_error, run_across_devices
from skyproxy.tensor.dispatch.op_info import FIXED, FIXED_TYPES, GENERATOR, NUMBER, TENSOR, TENSORS, Plan, plan_of

_infers = torch.is_inference_mode_enabled
_getframe = sys._getframe
_Parameter = torch.nn.Parameter
_HALVES = (torch.float16, torch.bfloat16)


class _Foreign(dict[str, bool]):
    """For a source file's name, whether it is PyTorch's or ours, so that errors can name the user's line."""

    _ROOTS = tuple(
        os.path.join(os.path.abspath(sys.modules[package].__path__[0]), "") for package in ("torch", "skyproxy")
    )

    def __missing__(self, name: str) -> bool:
        foreign = name.startswith((*self._ROOTS, "<frozen ", "<eval_with_key>")) or name == "<string>"
        self[name] = foreign
        return foreign


FOREIGN = _Foreign()


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame that is neither PyTorch's nor ours, from `frame` on outwards."""
    while FOREIGN[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


_record_lines = SETTINGS.record_lines


class Call:
    """One call of an op, taken apart: where it runs, what it looks like, what travels.

    Attributes:
        device: the device it runs on.
        has_values: whether a CPU tensor travels as a value.
        key: what the shape of its results depends on.
        wire: the operands that travel, without the op's number and the results' slots.
        templates: how the worker puts the operands together again.
        keyword_templates: the same for keywords.
        tensors: the remote tensors among the arguments, in order.
        known: those of their handles whose values were known, each with its look till then and the value.
    """

    __slots__ = (
        "args",
        "device",
        "has_values",
        "key",
        "keyword_templates",
        "known",
        "kwargs",
        "plan",
        "templates",
        "tensors",
        "wire",
    )

    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.has_values = False
        self.tensors: list[RemoteTensor] = []
        self.known: list[tuple[Handle, KnownMeta, torch.Tensor]] = []
        self.device = self._find_device()
        self.key: list[Any] = [plan]
        self.wire: list[Any] = []
        writes = plan.writes
        self.templates = tuple(self._take(a, plan.kinds[i], plan.names[i] in writes) for i, a in enumerate(args))
        self.keyword_templates: dict[str, Any] = {}
        for name, a in kwargs.items():
            if name == "pin_memory":
                _refuse_to_pin(a)
                continue
            self.key.append(name)
            self.keyword_templates[name] = self._take(a, plan.keyword_kinds[name], name in writes)

    def _find_device(self) -> SkyDevice:
        found: SkyDevice | None = None
        for a in (*self.args, *self.kwargs.values()):
            for item in a if type(a) is list or type(a) is tuple else (a,):
                if type(item) is RemoteTensor:
                    device = item._sky.device
                    if found is None:
                        found = device
                    elif device is not found:
                        DEVICES.check_sessions(found, device)
                        raise mixed_devices_error(self.plan.name, found.torch_device, device.torch_device)
        asked = self.kwargs.get("device")
        if asked is not None and asked.type == "sky" and (found is None or asked.index not in (None, found.index)):
            return DEVICES.of(asked)
        if found is None:
            generator = self.kwargs.get("generator")
            return (device_of(generator) if generator is not None else None) or DEVICES.at(None)
        return found

    def _take(self, a: Any, how: int, is_written: bool) -> Any:
        """Adds one argument to key and operands; its template."""
        kind = type(a)
        if kind is RemoteTensor:
            handle = a._sky
            self.tensors.append(a)
            if handle.meta.known:
                self._forget(handle)
            self.key.append(handle.meta)
            self.wire.append(handle.slot)
            return "t"
        if isinstance(a, torch.Tensor):
            return self._take_host(a, is_written)
        if how == TENSORS and a is not None:
            return self._take_list(a, is_written)
        if how == GENERATOR and a is not None:
            self.key.append("generator")
            self.wire.append(slot_of(a, self.device))
            return "t"
        if a is None and how == TENSOR:
            self.key.append(kind)
            self.wire.append(0)
            return "t"
        if how in (FIXED, GENERATOR) or kind in FIXED_TYPES:
            constant = _frozen(self._constant(a))
            self.key.append(tuple(a) if kind is list else a)
            return ("c", *constant)
        if how == NUMBER:
            value = [_number(item) for item in a] if isinstance(a, list | tuple) else _number(a)
            # 1, True and 1.0 are equal as keys, but not as arguments of arange.
            typed = value if kind is int or a is None else (kind, value)
            self.key.append(tuple(value) if type(value) is list else typed)
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

    def _forget(self, handle: Handle) -> None:
        meta: Any = handle.meta
        value = known_values.forget(handle)
        if value is not None:
            self.known.append((handle, meta, value))

    def _constant(self, a: Any) -> list[Any]:
        if isinstance(a, torch.device):
            a = DEVICES.of(a).worker_device if a.type == "sky" else a
        return torch_codec.encode_constant(a)

    def _take_host(self, a: torch.Tensor, is_written: bool) -> Any:
        """A tensor of the CPU among remote ones: a value if it has no dimensions, as PyTorch allows on every device.

        What the op writes is no value: the worker would change a copy.
        """
        self.has_values = True
        if self.plan.name.startswith("aten::_foreach_addc") and a.device.type == "cpu" and a.dim() == 1:
            self.key.append(("host", a.dtype, len(a)))
            self.wire.append(a.tolist())
            return ("k", torch_codec.DTYPE_NAMES[a.dtype])
        if is_written or a.device.type != "cpu" or a.dim() != 0 or a.layout is not torch.strided:
            raise mixed_devices_error(self.plan.name, self.device.torch_device, a.device)
        name = torch_codec.DTYPE_NAMES[a.dtype]
        self.key.append(("host", name))
        self.wire.append(a.item())
        return ("k", name)

    def _take_list(self, items: Any, is_written: bool) -> Any:
        slots: list[int] = []
        looks: list[Meta | None] = []
        for item in items:
            if item is None:
                slots.append(0)
                looks.append(None)
                continue
            if type(item) is not RemoteTensor:
                item = self._place_in_list(item, is_written)
            self.tensors.append(item)
            if item._sky.meta.known:
                self._forget(item._sky)
            slots.append(item._sky.slot)
            looks.append(item._sky.meta)
        self.key.append(tuple(looks))
        self.wire.append(slots)
        return "T"

    def _place_in_list(self, item: Any, is_written: bool) -> RemoteTensor:
        """A copy on the device of an item of the CPU. Lists of `_foreach` ops are taken apart instead, item by item."""
        if (
            not is_written
            and not self.plan.for_each
            and isinstance(item, torch.Tensor)
            and item.device.type == "cpu"
            and (item.dim() == 0 or self.plan.places_host_indices)
        ):
            return upload(item, self.device)
        place = getattr(item, "device", type(item).__name__)
        raise mixed_devices_error(self.plan.name, self.device.torch_device, place)

    def argument(self, name: str) -> Any:
        """The value of an argument by its schema name; None where it was left out."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.plan.names.index(name)
        return self.args[position] if position < len(self.args) else None


def _refuse_to_pin(wanted: Any) -> None:
    """Raise what CUDA raises of `pin_memory=True`, without asking the worker.

    Raises:
        RuntimeError: it is wanted.
    """
    if wanted:
        raise RuntimeError("Only dense CPU tensors can be pinned")


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
        if type(a) not in _KNOWN_TENSORS and isinstance(a, torch.Tensor) and not _is_plain_subclass(a):
            return NotImplemented  # another wrapper; its own dispatch comes next
    if kwargs.get("device") is not None and args and type(args[0]) is RemoteTensor:
        args = (_example_on(kwargs["device"], plan, args[0]), *args[1:])
        if type(args[0]) is not RemoteTensor:
            return func(*args, **kwargs)
    try:
        call = Call(plan, args, kwargs)
    except MixedDevicesError as error:
        return run_across_devices(plan, func, args, kwargs, error)
    return run(call)


def _example_on(asked: torch.device, plan: Plan, tensor: RemoteTensor) -> torch.Tensor:
    """For `zeros_like(x, device=...)` and `x.new_zeros(..., device=...)`: what looks like x, on that device."""
    meta, own = tensor._sky.meta, tensor._sky.device
    index = DEVICES.current if asked.index is None else asked.index
    name = plan.name.partition(".")[0]
    if (asked.type == "sky" and index == own.index) or meta.layout is not torch.strided:
        return tensor
    if not (name.endswith("_like") or name.startswith("aten::new_")):
        return tensor
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=asked)


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
            # What is written may be resized by values that no fake tensor has.
            return ask(call, key if call.plan.learns and not call.plan.writes else None)
        if call.plan.learns or (call.plan.learns_halves and any(t.dtype in _HALVES for t in call.tensors)):
            return ask(call, key)
        entry.number = _signature(call, entry)
        device.remember(key, entry)
        expected = bool(entry.made)
    if entry.changed:
        check_reshaped([call.tensors[position]._sky for position, _ in entry.changed])
        # Each time: should the op fail, the worker still learns what the tensors look like from now on.
        expected = True
        call = _on_their_own(call, [position for position, _ in entry.changed])
    if call.plan.followed and (call.known or _makes_a_number(call, entry)):
        settled, followed = entry, call
        return known_values.follow(followed, lambda: _finish(followed, settled, expected))
    return _finish(call, entry, expected)


def record_as(call: Call, looks: Sequence[Meta | None]) -> list[Any]:
    """Records a call whose results are known to look so; the worker does not check it. None: that result is None."""
    entry = Entry([inference.Output(meta) for meta in looks], [])
    entry.output_templates = [output.template for output in entry.outputs]
    entry.number = _signature(call, entry)
    results = _finish(call, entry, expected=False)
    return list(results) if len(looks) > 1 else [results]


def learn(
    plan: Plan, device: SkyDevice, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Entry | None:
    """What the plan's shape rule tells of a call that never came before, remembered under `key`; None: ask `record`.

    The short way, for arguments that the fast path has taken: tensors, numbers, lists of them, constants.
    """
    looks: list[Any] = []
    templates: list[Any] = []
    for a, how in zip(args, plan.kinds, strict=False):
        if type(a) is RemoteTensor:
            looks.append(a._sky.meta)
            templates.append("t")
        else:
            looks.append(_look_and_template(a, how, templates, device))
    named: dict[str, Any] = {}
    keywords: list[Any] = []
    if kwargs:
        kinds = plan.keyword_kinds
        for name, a in kwargs.items():
            if name == "pin_memory":
                _refuse_to_pin(a)
                continue
            named[name] = _look_and_template(a, kinds[name], keywords, device)
        keywords = list(zip(named, keywords, strict=True))
    for look in (*looks, *named.values()) if named else looks:
        kind = type(look)
        if kind is KnownMeta or (kind is list and KnownMeta in map(type, look)):
            return None
    assert plan.rule is not None
    found = plan.rule(*looks, **named)
    if found is None:
        return None
    entry = Entry.of_rule(found)
    if not (entry.simple or entry.several or entry.nothing or entry.listed is not None):
        return None
    if entry.shares_first and _infers() != args[0].is_inference():
        return None
    entry.number = _number_of(device, plan.name, tuple(templates), tuple(keywords), tuple(entry.output_templates))
    device.misses += 1
    device.remember(key, entry)
    return entry


_ONE_OPERAND = frozenset({"t", "T", "v"})


def _look_and_template(a: Any, how: int, templates: list[Any], device: SkyDevice) -> Any:
    kind = type(a)
    if kind is RemoteTensor:
        templates.append("t")
        return a._sky.meta
    if how == TENSORS and kind is list:
        templates.append("T")
        return [None if item is None else item._sky.meta for item in a]
    if how in (FIXED, GENERATOR) or kind in FIXED_TYPES:
        constant = device.worker_device if kind is torch.device and a.type == "sky" else a
        templates.append(("c", *_frozen(torch_codec.encode_constant(constant))))
    else:
        templates.append("t" if a is None and how == TENSOR else "v")
    return a


def _on_their_own(call: Call, positions: list[int]) -> Call:
    """Gives tensors that are about to look otherwise a value of their own, where others hold the same one."""
    shared = [call.tensors[i] for i in positions if getattr(call.tensors[i]._sky, "is_shared", False)]
    for tensor in shared:
        tensor._sky = run(Call(plan_of(torch.ops.aten.alias.default), (tensor,), {}))._sky
    return Call(call.plan, call.args, call.kwargs) if shared else call


def _makes_a_number(call: Call, entry: Entry) -> bool:
    made = entry.outputs[0].meta if not call.tensors and entry.outputs else None
    return made is not None and not made.size


def _signature(call: Call, entry: Entry) -> int:
    keywords = tuple(call.keyword_templates.items())
    outputs = tuple(entry.output_templates)
    return _number_of(call.device, call.plan.name, call.templates, keywords, outputs)


def _number_of(device: SkyDevice, name: str, arguments: Any, keywords: Any, outputs: Any) -> int:
    """The op's number on the wire."""
    structure = (name, arguments, keywords, outputs)
    number = device.session.known_signature(structure)
    if number is not None:
        return number
    operands = sum(template in _ONE_OPERAND for template in arguments)
    operands += sum(template in _ONE_OPERAND for _, template in keywords)
    # A host tensor's value travels as well.
    operands += sum(template[0] == "k" for template in (*arguments, *(t for _, t in keywords)))
    return device.session.signature(
        structure,
        lambda: [name, [_thawed(t) for t in arguments], {key: _thawed(t) for key, t in keywords}, list(outputs)],
        operands + sum(template in ("n", "N") for template in outputs),
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
        wire = [EXPECT, inference.expectation(entry, call.key), *wire]
    results: list[Any] = []
    for output in entry.outputs:
        if output.argument is not None:
            results.append(call.argument(output.argument))
        elif output.tensor is not None:
            results.append(call.tensors[output.tensor])
        elif output.items is not None:
            made = [_result(call, meta, shares) for meta, shares in output.items]
            wire.append([tensor._sky.slot for tensor in made])
            results.append(made)
        elif output.meta is not None:
            tensor = _result(call, output.meta, output.shares)
            wire.append(tensor._sky.slot)
            results.append(tensor)
        else:
            results.append(output.value)
    if entry.changed:
        _record_change(call, entry, wire)
    else:
        device.recorder.stream.extend(wire)
    remember_line(device)
    if len(device.recorder.stream) > device.recorder.limit:
        device.recorder.send_some()
    if call.plan.waits:
        device.session.synchronize()
    if len(results) == 1:
        return results[0]
    return tuple(results) if results else None


@shielded
def _record_change(call: Call, entry: Entry, wire: list[Any]) -> None:
    """Both or neither: the worker changes what a tensor looks like, and so do we."""
    call.device.recorder.stream.extend(wire)
    for position, meta in entry.changed:
        set_metadata(call.tensors[position], meta)


def _result(call: Call, meta: Meta, shares: int | None) -> RemoteTensor:
    """A fresh tensor; a view of the call's tensor with number `shares`, if that is given."""
    if shares is None:
        return new_tensor(call.device, meta)
    base = call.tensors[shares]
    root = base._sky
    return make_view(meta, call.device.new_handle(meta, root.root or root), base)


def new_tensors(device: SkyDevice, looks: list[tuple[Meta, int | None]], owner: Handle | None) -> list[RemoteTensor]:
    """Fresh plain tensors; those that share the first argument's storage are views of `owner`."""
    handles = [device.new_handle(meta, owner if shares == 0 else None) for meta, shares in looks]
    return [make_tensor(handle.meta, handle) for handle in handles]


def new_tensor(device: SkyDevice, meta: Meta) -> RemoteTensor:
    """A fresh tensor with a storage of its own."""
    return make_tensor(meta, device.new_handle(meta))


def ask(call: Call, key: Any = None, record: Callable[[list[Any]], None] | None = None) -> Any:
    """Runs an op whose results only the worker knows: their sizes depend on values, or nothing here can infer them.

    Costs one round trip. Errors are the worker's, raised here and now.

    Args:
        key: if given, what the worker tells is remembered under it, for the next call that looks the same.
        record: what records the command; by default it goes into the stream.
    """
    plan, device = call.plan, call.device
    call = _on_their_own(call, inference.written_tensors(call))
    asked = Entry([inference.Output(argument=argument) for argument in plan.returns], [])
    asked.output_templates = ["x" if argument is not None else "n" for argument in plan.returns]
    handles = [device.new_handle(None) for argument in plan.returns if argument is None]
    command = [_signature(call, asked), *call.wire, *(h.slot for h in handles)]
    if record is not None:
        record(command)
    else:
        device.recorder.stream.extend(command)
        remember_line(device)
    if plan.waits:
        device.session.synchronize()
    inputs = [tensor._sky.slot for tensor in call.tensors]
    written = inference.written_tensors(call)
    slots = [handle.slot for handle in handles] + [inputs[i] for i in written]
    rows = device.session.request(plan.name, lambda number: (7, number, slots, inputs))
    found = iter([_answered(call, handle, row) for handle, row in zip(handles, rows, strict=False)])
    changed = []
    for i, (fields, _) in zip(written, rows[len(handles) :], strict=True):
        if fields[0] == torch_codec.NESTED:  # those keep their sizes
            continue
        meta = inference.intern_meta(torch_codec.decode_description(fields))
        if meta is not call.tensors[i]._sky.meta:
            changed.append((i, meta))
    for i, meta in changed:
        set_metadata(call.tensors[i], meta)
    outputs = []
    results = []
    for name in plan.returns:
        output, result = (inference.Output(argument=name), call.argument(name)) if name is not None else next(found)
        outputs.append(output)
        results.append(result)
    if key is not None and all(
        output.argument is not None or output.meta is not None or result is None
        for output, result in zip(outputs, results, strict=True)
    ):
        entry = Entry(outputs, changed).settle(call)
        entry.number = _signature(call, entry)
        device.remember(key, entry)
    if len(results) == 1:
        return results[0]
    return tuple(results) if results else None


def _answered(call: Call, handle: Handle, row: Any) -> tuple[inference.Output, Any]:
    """One result of an op that was asked for: what is known of it, and the result itself."""
    fields, alias = row
    if fields is None:
        return inference.Output(), alias
    if fields == "list":  # one slot holds them all; each gets its own
        handles = [call.device.new_handle(None) for _ in alias]
        call.device.session.do("take_apart", handle.slot, [h.slot for h in handles])
        return inference.Output(), [_answered(call, h, part)[1] for h, part in zip(handles, alias, strict=True)]
    if fields[0] == torch_codec.NESTED:
        return inference.Output(), answered(handle, row)
    handle.meta = inference.intern_meta(torch_codec.decode_description(fields))
    if alias < 0:
        return inference.Output(meta=handle.meta), make_tensor(handle.meta, handle)
    base = call.tensors[alias]
    handle.root = base._sky.root or base._sky
    return inference.Output(meta=handle.meta, shares=alias), make_view(handle.meta, handle, base)


def answered(handle: Handle, row: Any) -> Any:
    """The tensor in a slot that the worker has described, with a memory of its own; None where there is none."""
    fields, _ = row
    if fields is None:
        return None
    if fields[0] == torch_codec.NESTED:
        from skyproxy.tensor.ops.nested_tensors import RemoteNestedTensor

        return RemoteNestedTensor.holding(handle, fields)
    handle.meta = inference.intern_meta(torch_codec.decode_description(fields))
    return make_tensor(handle.meta, handle)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op that PyTorch hands over without a remote tensor among its arguments: factories, and kernels that
    were registered for the device."""
    return record(plan_of(func), func, args, kwargs)


__all__ = ["Call", "dispatch", "meta_of", "record", "record_as", "remember_line", "run"]
