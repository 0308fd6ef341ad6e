"""Records calls of ops with all the care they need: any kind of argument, results that are not known yet.

`hot_path` handles what is known already, and calls `record` for the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from skyproxy import torch_codec
from skyproxy.errors import SELF_EXPLAINING, LimitExceededError, ProtocolError
from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core import host_copies, known_values
from skyproxy.tensor.core.devices import Handle, SkyDevice
from skyproxy.tensor.core.known_values import KnownMeta
from skyproxy.tensor.core.memory import is_beyond
from skyproxy.tensor.core.metadata import Meta, meta_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor, is_wrapper_class, make_tensor, make_view, set_metadata
from skyproxy.tensor.core.torch_private import OpOverload, TensorBase
from skyproxy.tensor.core.user_lines import user_frame
from skyproxy.tensor.dispatch import inference, known_results
from skyproxy.tensor.dispatch.binding import SYMBOLS, BoundCall, number_of_signature, refuse_to_pin, template_of
from skyproxy.tensor.dispatch.capture import check_reshaped, is_capturing
from skyproxy.tensor.dispatch.derived_copies import derive
from skyproxy.tensor.dispatch.entries import Entry, Output, expectation, written_tensors
from skyproxy.tensor.dispatch.kernel_trials import may_refuse_sign, takes_dtypes
from skyproxy.tensor.dispatch.mixed_devices import MixedDevicesError, example_on, make_elsewhere, run_across_devices
from skyproxy.tensor.dispatch.op_info import NUMBER, SCALAR, TENSORS, OpInfo, info_of
from skyproxy.tensor.dispatch.overlaps import may_overlap, overlaps
from skyproxy.tensor.dispatch.replies import described_meta, wrap_result

_infers = torch.is_inference_mode_enabled
_is_of_inference = TensorBase.is_inference
_getframe = sys._getframe
_VALUES = frozenset({NUMBER, SCALAR})
_NUMBERS = frozenset({int, float, list})
_record_lines = SETTINGS.record_lines
_REACHING = "aten::as_strided"  # may reach beyond the memory of its tensor; a rule knows of those that do not
_MANY_TENSORS = 50_000  # operations that take and give more tensors begin a batch
_MOST_TENSORS = 250_000  # that one operation takes and gives: three lists describe each, of the million in a message


def record(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Records a call of any op, whatever its arguments, and wraps its results."""
    if info.special is not None:
        return info.special(info, func, args, kwargs)
    kinds = {*map(type, args), *map(type, kwargs.values())}
    for a in args:
        if type(a) is list or type(a) is tuple:
            kinds.update(map(type, a))
    if any(map(is_wrapper_class, kinds)):
        return NotImplemented  # its own dispatch comes next
    if kwargs.get("device") is not None and args and type(args[0]) is RemoteTensor:
        args = (example_on(kwargs["device"], info, args[0]), *args[1:])
        if type(args[0]) is not RemoteTensor:
            return make_elsewhere(func, args, kwargs)
    try:
        call = BoundCall(info, args, kwargs)
    except MixedDevicesError as error:
        for name in info.changed_lists:
            count_changes(kwargs[name] if name in kwargs else args[info.names.index(name)])
        try:
            return run_across_devices(info, func, args, kwargs, error)
        except RuntimeError as refused:
            if refused.args == error.args:
                refused.__traceback__ = None
            raise
    try:
        result = run(call)
    except SELF_EXPLAINING as error:
        error.__traceback__ = None
        raise
    if call.elements:
        known_values.restore(call.elements)
    return result


def count_changes(tensors: list[torch.Tensor]) -> None:
    """Count a change of each of them, as PyTorch's kernels for lists do, which the dispatcher leaves that to.

    Raises:
        RuntimeError: one is a tensor of inference, which nothing outside of that mode changes; in PyTorch's words.
    """
    if not _infers() and any(map(_is_of_inference, tensors)):
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed."
            "You can make a clone to get a normal tensor before doing inplace update."
            "See https://github.com/pytorch/rfcs/pull/17 for more details."
        )
    increment_version(tensors)


def run(call: BoundCall) -> Any:
    """Records a call that was taken apart; infers what its results look like where that is not known yet."""
    key = tuple(call.key)
    device = call.device
    entry = device.cache.get(key)
    expected = False
    if entry is None:
        device.misses += 1
        if call.kwargs.get("check_errors") and not is_capturing():
            return ask(call)  # `torch.linalg.inv_ex` and its like, told to raise where they are called
        filled = _infer_on_cuda(call) or inference.infer_filled(call)
        entry = inference.infer(call) if filled is None else filled
        if entry is not None and len(entry.made) + len(call.tensors) > _MANY_TENSORS:
            if len(entry.made) + len(call.tensors) > _MOST_TENSORS:
                return _run_in_parts(call, len(entry.made) + len(call.tensors))
            device.recorder.flush()  # no two of these in one batch
        if entry is None:
            positions = known_results.nonzero(call)
            if positions is not None:
                return _finish_known(call, positions)
            sized = known_results.sized_by_values(call)
            if sized is not None:
                return _finish_sized(call, *sized)
            # What is written may be resized by values that no fake tensor has.
            return ask(call, key if call.info.asks_worker_for_shape and not call.info.writes else None)
        asks = filled is None and inference.depends_on_kind(call)
        looks, named = inference.looks_of(call)
        if asks or not takes_dtypes(call.info, looks, named, entry.made, is_guessed=entry.is_guessed):
            return ask(call, key)
        entry.number = _signature(call, entry)
        if call.info.writes and may_overlap(call.info, looks, named):
            entry.guard()
        if call.info.name == _REACHING:
            entry.simple = False  # of memory, which is looked at each time, the key says nothing
        if not may_refuse_sign(call.info, looks):
            device.remember(key, entry)
        expected = bool(entry.made)
    if call.info.writes and overlaps(call.info, call.args, call.kwargs) and not is_capturing():
        return ask(call)  # most kernels refuse that
    if call.info.name == _REACHING and not entry.simple and is_beyond(call.tensors[0]._sky, entry.made):
        return ask(call)
    if entry.changed:
        check_reshaped([call.tensors[position]._sky for position, _ in entry.changed])
        # Sent each time: even if the op fails, the worker learns what the tensors look like from now on.
        expected = True
        call = _unalias(call, [position for position, _ in entry.changed])
    if call.info.followed and (call.known or known_results.makes_a_number(call, entry)):
        settled, followed = entry, call
        return known_results.follow(followed, lambda: _finish(followed, settled, expected))
    return _finish(call, entry, expected)


def _run_in_parts(call: BoundCall, count: int) -> list[RemoteTensor]:
    """Divide the views of a very long tensor, which a loop over it makes, among several operations.

    Raises:
        LimitExceededError: it is another operation, which takes or gives more tensors than a message describes.
    """
    name = call.info.name
    if name not in ("aten::unbind.int", "aten::split.Tensor"):
        raise LimitExceededError(
            f"{name} takes and gives {count:,} tensors here; one operation on a worker has at most {_MOST_TENSORS:,}. "
            "Divide it into several."
        )
    tensor, *rest = call.args
    length, dim = (1, *rest, 0)[:2] if name == "aten::unbind.int" else (*rest, 0)[:2]
    step = length * 4 * _MANY_TENSORS
    parts: list[RemoteTensor] = []
    for start in range(0, tensor.size(dim), step):
        window = (tensor, dim, start, min(start + step, tensor.size(dim)))
        part = run(BoundCall(info_of(torch.ops.aten.slice.Tensor), window, {}))
        parts += run(BoundCall(call.info, (part, *call.args[1:]), {}))
    return parts


def _infer_on_cuda(call: BoundCall) -> Entry | None:
    """Infer by the rule that workers with CUDA have in place of the usual one; None: there is none that can tell."""
    rule = call.info.cuda_rule
    if rule is None or call.has_values or call.device.row["type"] != "cuda":
        return None
    looks, named = inference.looks_of(call)
    found = rule(*looks, **named)
    return None if found is None else Entry.of_rule(found)


def record_as(call: BoundCall, looks: Sequence[Meta | None], expected: bool = False) -> list[RemoteTensor | None]:
    """Records a call whose results are known to look so; the worker checks it if `expected`. None: it is None."""
    entry = Entry([Output(meta) for meta in looks]).settle(call)
    entry.number = _signature(call, entry)
    results = _finish(call, entry, expected)
    return list(results) if len(looks) > 1 else [results]


def _finish_known(call: BoundCall, values: torch.Tensor) -> RemoteTensor:
    """Record a call whose result was computed here."""
    before = call.device.recorder.ops
    (result,) = record_as(call, [inference.intern_meta(torch_codec.describe(values))])
    assert result is not None
    if call.device.recorder.ops == before + 1:  # else another thread may have changed it meanwhile
        host_copies.keep_values(result._sky, values)
    return result


def _finish_sized(call: BoundCall, sizes: dict[object, object], key: object) -> object:
    """Record a call whose result's size depends on values. `sizes` tells what such results look like, under `key`."""
    known = sizes.get(key)
    if type(known) is Entry:
        return _finish(call, known, expected=True)
    result = ask(call)
    if type(result) is RemoteTensor and result._sky.root is None and result._sky.meta.plain:
        entry = Entry([Output(result._sky.meta)]).settle(call)
        entry.number = _signature(call, entry)
        sizes[key] = entry
    return result


def learn(
    info: OpInfo, device: SkyDevice, key: object, args: tuple[Any, ...], kwargs: dict[str, object] | None
) -> Entry | None:
    """Infer a call that never came before by its shape rule, or for `out=` that of the form without, and remember it
    under `key`; None: ask `record`.

    The short way, for arguments that the fast path has taken: tensors, numbers (no symbols), lists of them, constants.
    """
    if (info.asks_cuda_for_shape or info.asks_worker_for_halves) and inference.kind_decides(info, device, args):
        return None
    if kwargs and kwargs.get("check_errors"):  # `record` has the worker tell whether it raises
        return None
    looks: list[Any] = []
    templates: list[object] = []
    has_values = False
    for a, how in zip(args, info.kinds, strict=False):
        kind = type(a)
        if kind is RemoteTensor:
            meta = a._sky.meta
            if meta.known:
                return None
            looks.append(meta)
            templates.append(commands.TENSOR)
        elif how == TENSORS and kind is list:
            items = [None if item is None else item._sky.meta for item in a]
            if len(items) > _MANY_TENSORS or KnownMeta in map(type, items):
                return None
            looks.append(items)
            templates.append(commands.TENSORS)
        elif kind is torch.Tensor:
            looks.append(meta_of(a))
            templates.append((commands.HOST_SCALAR, torch_codec.DTYPE_NAMES[a.dtype]))
            has_values = True
        else:
            if kind in SYMBOLS or (kind is list and not SYMBOLS.isdisjoint(map(type, a))):
                return None
            looks.append(a)
            templates.append(commands.VALUE if how in _VALUES and kind in _NUMBERS else template_of(a, how, device))
    named: dict[str, object] = {}
    keywords: list[Any] = []
    if kwargs:
        kinds = info.keyword_kinds
        for name, a in kwargs.items():
            if name == "pin_memory":
                refuse_to_pin(a)
            elif type(a) is RemoteTensor:
                named[name] = meta = a._sky.meta
                if meta.known:
                    return None
                keywords.append((name, commands.TENSOR))
            elif type(a) in SYMBOLS:
                return None
            else:
                named[name] = a
                keywords.append((name, template_of(a, kinds[name], device)))
    if info.rule is None:
        if has_values or inference.resized_targets(info, looks, named) != []:
            return None
        written = [look for name, look in named.items() if name in info.writes]
        entry = Entry.of_targets(info.returns, written)  # type: ignore[arg-type]  # an `out=` form returns nothing else
    else:
        found = info.rule(*looks, **named)
        if found is None or (has_values and (named or not inference.is_fresh(found))):
            return None
        entry = Entry.of_rule(found)
    if not takes_dtypes(info, looks, named, entry.made):
        return None
    if not (entry.simple or entry.targets):
        usual = (entry.nothing and not info.synchronizes) or entry.listed is not None or entry.several is not None
        if not usual or len(entry.made) > _MANY_TENSORS:
            return None
    if entry.shares_first and _infers() != args[0].is_inference():
        return None
    if info.writes and may_overlap(info, looks, named):
        entry.guard()
    entry.number = number_of_signature(
        device, info.name, tuple(templates), tuple(keywords), tuple(entry.output_templates)
    )
    device.misses += 1
    device.remember(key, entry)
    return entry


def _unalias(call: BoundCall, positions: list[int]) -> BoundCall:
    """Gives tensors that are about to look otherwise a value of their own, where others hold the same one."""
    shared = [call.tensors[i] for i in positions if getattr(call.tensors[i]._sky, "is_shared", False)]
    for tensor in shared:
        tensor._sky = run(BoundCall(info_of(torch.ops.aten.alias.default), (tensor,), {}))._sky
    return BoundCall(call.info, call.args, call.kwargs) if shared else call


def _signature(call: BoundCall, entry: Entry) -> int:
    keywords = tuple(call.keyword_templates.items())
    outputs = tuple(entry.output_templates)
    return number_of_signature(call.device, call.info.name, call.templates, keywords, outputs)


def remember_line(device: SkyDevice) -> None:
    """Notes the user's line for the op that was just recorded."""
    frame = _getframe(1)
    if _record_lines:
        frame = user_frame(frame)
    device.recorder.emit_line((frame.f_code, frame.f_lasti))


def _finish(call: BoundCall, entry: Entry, expected: bool) -> Any:
    device = call.device
    command = [entry.number, *call.operands]
    if expected:
        command = [commands.EXPECT, expectation(entry, call.key), *command]
    results: list[object] = []
    for output in entry.outputs:
        if output.argument is not None:
            results.append(call.argument(output.argument))
        elif output.tensor is not None:
            results.append(call.tensors[output.tensor])
        elif output.items is not None:
            made = [_result(call, meta, shares) for meta, shares in output.items]
            command.append([tensor._sky.slot for tensor in made])
            results.append(made)
        elif output.meta is not None:
            tensor = _result(call, output.meta, output.shares)
            command.append(tensor._sky.slot)
            results.append(tensor)
        else:
            results.append(output.value)
    for name in call.info.changed_lists:
        count_changes(call.argument(name))
    if entry.changed:
        _record_change(call, entry, command)
    else:
        device.recorder.emit(command)
    remember_line(device)
    if call.info.changes:
        known_results.forget_written_by(call)
    device.recorder.send_if_due()
    if call.info.synchronizes:
        device.session.synchronize()
    if len(results) == 1:
        return results[0]
    return tuple(results) if results else None


@shielded
def _record_change(call: BoundCall, entry: Entry, command: list[object]) -> None:
    """Both or neither: the worker changes what a tensor looks like, and so do we."""
    call.device.recorder.emit(command)
    for position, meta in entry.changed:
        set_metadata(call.tensors[position], meta)


def _result(call: BoundCall, meta: Meta, shares: int | None) -> RemoteTensor:
    """A fresh tensor; a view of the call's tensor with number `shares`, if that is given."""
    if shares is None:
        made = new_tensor(call.device, meta)
        if call.info.derived and call.tensors:
            derive(made._sky, call.info, call.args, call.kwargs)
        known_results.note_memory(call, made._sky)
        return made
    base = call.tensors[shares]
    owner = base._sky.root or base._sky
    handle = call.device.new_handle(meta, owner)
    if owner.copied and not meta.size:
        host_copies.know_element(handle, owner)
    return make_view(meta, handle, base)


def new_tensor(device: SkyDevice, meta: Meta) -> RemoteTensor:
    """A fresh tensor with a storage of its own."""
    return make_tensor(meta, device.new_handle(meta))


def ask(call: BoundCall, key: object = None, record: Callable[[list[object]], None] | None = None) -> Any:
    """Runs an op whose results only the worker knows: their sizes depend on values, or nothing here can infer them.

    Costs one round trip. Errors are the worker's, raised here and now.

    Args:
        key: if given, what the worker tells is remembered under it, for the next call that looks the same.
        record: what records the command; by default it goes into the stream.
    """
    info, device = call.info, call.device
    for written_list in info.changed_lists:
        count_changes(call.argument(written_list))
    call = _unalias(call, written_tensors(call))
    handles = record_unknown(call, record)
    if info.changes:
        known_results.forget_written_by(call)
    if info.synchronizes:
        device.session.synchronize()
    inputs = [tensor._sky.slot for tensor in call.tensors]
    written = written_tensors(call)
    slots = [handle.slot for handle in handles] + [inputs[i] for i in written]
    rows = device.session.describe(info.name, slots, inputs)
    found = iter([wrap_result(call, handle, row) for handle, row in zip(handles, rows, strict=False)])
    changed = []
    for i, (fields, _) in zip(written, rows[len(handles) :], strict=True):
        if fields is None or fields == "list":
            raise ProtocolError(f"the worker says that {info.name} made no tensor of a tensor")
        if fields[0] == torch_codec.NESTED:  # these keep their sizes
            continue
        meta = described_meta(fields)
        if meta is not call.tensors[i]._sky.meta:
            changed.append((i, meta))
    for i, meta in changed:
        set_metadata(call.tensors[i], meta)
    outputs = []
    results = []
    for name in info.returns:
        output, result = (Output(argument=name), call.argument(name)) if name is not None else next(found)
        outputs.append(output)
        results.append(result)
    if key is not None and all(
        output.argument is not None or output.meta is not None or result is None
        for output, result in zip(outputs, results, strict=True)
    ):
        entry = Entry(outputs, changed).settle(call)
        entry.number = _signature(call, entry)
        if info.writes and may_overlap(info, *inference.looks_of(call)):
            entry.guard()
        device.remember(key, entry)
    if len(results) == 1:
        return results[0]
    return tuple(results) if results else None


def record_unknown(call: BoundCall, record: Callable[[list[object]], None] | None = None) -> list[Handle]:
    """Record a call of whose results nothing is known yet, and return their handles; `record` is that of `ask`."""
    returns, device = call.info.returns, call.device
    asked = Entry([Output(argument=argument) for argument in returns])
    asked.output_templates = [commands.IGNORED if argument is not None else commands.NEW for argument in returns]
    handles = [device.new_handle(None) for argument in returns if argument is None]
    command = [_signature(call, asked), *call.operands, *(h.slot for h in handles)]
    if record is not None:
        record(command)
    else:
        device.recorder.emit(command)
        remember_line(device)
    return handles


def dispatch(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Runs an op that PyTorch hands over without a remote tensor among its arguments: factories, and kernels that
    were registered for the device.
    """
    return record(info_of(func), func, args, kwargs)


__all__ = [
    "dispatch",
    "record",
    "record_as",
    "record_unknown",
    "remember_line",
    "run",
]
