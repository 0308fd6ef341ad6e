"""The path of every operation on remote tensors: found in the shape cache, recorded, wrapped.

The hot path of the whole product, written for speed: one pass over the arguments builds the cache key and the command
together. Whatever is unusual, or not in the cache yet, leaves for `recording.record`, which does the same thing with
all the care it needs; both must build the same keys.
"""

from __future__ import annotations

import sys
from heapq import heappop
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from skyproxy import patching
from skyproxy.errors import SELF_EXPLAINING
from skyproxy.interrupts import raised_by_handler, shielded
from skyproxy.protocol.commands import EXPECT
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.host_copies import forget_copy, know_element
from skyproxy.tensor.core.remote_tensor import RemoteTensor, run_on_wrappers
from skyproxy.tensor.core.torch_private import OpOverload, make_wrapper_subclass, rule_registry
from skyproxy.tensor.core.user_lines import FOREIGN, OUTERMOST
from skyproxy.tensor.dispatch.binding import is_host_number, number_of
from skyproxy.tensor.dispatch.derived_copies import derive
from skyproxy.tensor.dispatch.entries import expectation
from skyproxy.tensor.dispatch.known_results import forget_lists, key_of_reader
from skyproxy.tensor.dispatch.mixed_devices import MixedDevicesError
from skyproxy.tensor.dispatch.number_classes import class_of, key_of, keys_of
from skyproxy.tensor.dispatch.op_info import FIXED, FIXED_TYPES, NUMBER, SCALAR, TENSOR, TENSORS, comes_first, info_of
from skyproxy.tensor.dispatch.overlaps import overlaps
from skyproxy.tensor.dispatch.recording import count_changes, learn, record
from skyproxy.torch_codec import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from skyproxy.tensor.core.devices import Handle, SkyDevice
    from skyproxy.tensor.core.metadata import Meta
    from skyproxy.tensor.dispatch.entries import Entry
    from skyproxy.tensor.dispatch.op_info import Arguments, OpInfo
    from skyproxy.tensor.shapes.rules import Look

_make_wrapper = make_wrapper_subclass
_getframe = sys._getframe
_in_inference_mode = torch.is_inference_mode_enabled
_record_lines = SETTINGS.record_lines


def multiplies_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a worker, where nothing requires gradients, takes a product the way PyTorch would take it here.

    A batch times a matrix is one product if the matrix requires gradients, in `torch.no_grad()` too; otherwise it
    depends on the batch's strides whether it is one or several, whose last bits differ.
    """
    rank = a.dim()
    if rank > 2:
        if b.dim() > 2 or not b.requires_grad:
            return True
        # As `should_fold` of ATen looks at them: those of dimensions of size one count.
        size, stride = a.shape, a.stride()
        if rank == 3:
            return stride[0] == stride[1] * size[1]
        return all(stride[n] == stride[n + 1] * size[n + 1] for n in range(rank - 2))
    return b.dim() < 3 or not a.requires_grad


def one_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` for a batch and a matrix (or vector), in either order, with all items of the batch as rows of one."""
    if b.dim() > 2:
        product = one_product(b.mT, a.t())
        return product.mT.contiguous() if a.dim() == 2 else product
    rows = a.flatten(0, -2)  # not `reshape(-1, n)`, which no n of zero allows
    return (rows.mm(b) if b.dim() == 2 else rows.mv(b)).view(*a.shape[:-1], *b.shape[1:])


@comes_first("aten::matmul", "aten::linear")
def _multiply(info: OpInfo, args: Arguments) -> object:
    """A product that a worker would take in another way."""
    if multiplies_alike(args[0], args[1]):
        return None
    if info.name != "aten::linear":
        return one_product(args[0], args[1])
    bias = args[2] if len(args) > 2 else None
    # Transposed weights of inference require no gradients; with a bias, and no gaps, it is one product in any case.
    if args[1].is_inference() or (bias is not None and args[0].is_contiguous()):
        return None
    product = one_product(args[0], args[1].t())
    return product if bias is None else product.add_(bias)


_MANY = 8
"""Items of a list from which it is worth being taken by functions of C."""
_handle_of_tensor = attrgetter("_sky")
_meta_of_handle = attrgetter("meta")
_slot_of_handle = attrgetter("slot")
_ONLY_REMOTE = {RemoteTensor}


def looks_of_many(items: list[object]) -> tuple[Handle, tuple[Meta, ...], list[int]] | None:
    """The first handle, the looks and the slots of many tensors; None if they are not all remote and of one device."""
    if set(map(type, items)) != _ONLY_REMOTE:
        return None
    handles = list(map(_handle_of_tensor, items))
    classes = set(map(type, handles))
    if len(classes) != 1 and any(handle.device is not handles[0].device for handle in handles):
        return None
    return handles[0], tuple(map(_meta_of_handle, handles)), list(map(_slot_of_handle, handles))


def new_tensors(device: SkyDevice, looks: Sequence[Look], owner: Handle | None) -> list[RemoteTensor | None]:
    """Fresh plain tensors; those that share the first argument's storage are views of `owner`."""
    handle_type, recorder, place = device.handle_type, device.recorder, device.torch_device
    free, held = recorder.free, recorder.held
    made: list[RemoteTensor | None] = []
    for meta, shares in looks:
        if meta is None:
            made.append(None)
            continue
        handle = handle_type()
        handle.meta = meta
        handle.root = owner if shares == 0 else None
        if free:  # as in `take_slot`: no call may end between
            handle.slot = slot = free[0]
            held[slot] = True
            heappop(free)
        else:
            recorder.take_slot(handle)
        if shares == 0 and not meta.size and owner.copied:  # type: ignore[union-attr]  # who shares has an owner
            know_element(handle, owner)  # type: ignore[arg-type]
        tensor = _make_wrapper(RemoteTensor, meta.size, meta.stride, meta.offset, None, meta.dtype, meta.layout, place)
        tensor._sky_dict = {"_sky": handle}
        made.append(tensor)
    return made


def _record(
    info: OpInfo, func: OpOverload, types: Iterable[type] | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Record a call of any op, or run it by the dispatch of another class among its operands."""
    try:
        result = record(info, func, args, kwargs)
    except Exception as error:
        # Users need not see this frame, too. With a local name for it, the operands would live until a collection.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        raise
    return result if result is not NotImplemented else run_on_wrappers(func, types, args, kwargs)


def dispatch_remote(
    cls: object,
    func: OpOverload,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> object:
    """`__torch_dispatch__` of remote tensors."""
    try:
        info = func._sky_info  # type: ignore[attr-defined]
    except AttributeError:
        info = info_of(func)
    if info.special is not None:
        try:
            taken = info.special(info, func, args, kwargs or {})
        except MixedDevicesError:
            given = run_on_wrappers(func, types, args, kwargs or {})
            if given is NotImplemented:
                raise
            return given
        except SELF_EXPLAINING as error:
            error.__traceback__ = None
            raise
        return taken if taken is not NotImplemented else run_on_wrappers(func, types, args, kwargs or {})
    if info.first is not None:
        try:
            taken = info.first(info, args)
        except SELF_EXPLAINING as error:
            error.__traceback__ = None
            raise
        if taken is not None:
            return taken
    device = None
    key: list[object] = [info]
    wire: list[object] = [0]
    root: Handle = None  # type: ignore[assignment]  # set together with the device
    for a in args:
        kind = type(a)
        if kind is RemoteTensor:
            handle = a._sky
            if handle.device is not device:
                if device is not None:
                    return _record(info, func, types, args, kwargs or {})
                device = handle.device
                root = handle
            key.append(handle.meta)
            wire.append(handle.slot)
        elif kind is float:
            key.append(float if -128 <= a <= 127 else class_of(a))
            wire.append(a)
        else:
            how = info.kinds[len(key) - 1]
            if how == TENSORS and kind is list:
                if len(a) > _MANY:
                    taken = looks_of_many(a)
                    if taken is None or (device is not None and taken[0].device is not device):
                        return _record(info, func, types, args, kwargs or {})
                    handle, metas, slots = taken
                    if device is None:
                        device = handle.device
                        root = handle
                    key.append(metas)
                    wire.append(slots)
                    continue
                looks: list[Meta | None] = []
                slots = []
                for item in a:
                    if type(item) is not RemoteTensor:
                        if item is None:
                            looks.append(None)
                            slots.append(0)
                            continue
                        return _record(info, func, types, args, kwargs or {})
                    handle = item._sky
                    if handle.device is not device:
                        if device is not None:
                            return _record(info, func, types, args, kwargs or {})
                        device = handle.device
                        root = handle
                    looks.append(handle.meta)
                    slots.append(handle.slot)
                key.append(tuple(looks))
                wire.append(slots)
            elif kind in FIXED_TYPES or how == FIXED:
                if kind is torch.device:
                    return _record(info, func, types, args, kwargs or {})
                key.append(tuple(a) if kind is list else a)
            elif how == NUMBER:
                if kind is list:
                    key.append(tuple(a))
                elif kind is int or a is None:
                    key.append(a)
                else:
                    return _record(info, func, types, args, kwargs or {})
                wire.append(a)
            elif how == SCALAR:
                if kind is int:
                    key.append(int if 0 < a <= 127 else class_of(a))
                else:
                    key.append(keys_of(a) if kind is list else kind if kind is not complex else class_of(a))
                wire.append(a)
            elif how == TENSOR and (kind is int or kind is bool or a is None or kind is complex):
                key.append(kind if (0 < a <= 127 if kind is int else kind is not complex) else class_of(a))
                wire.append(a if a is not None else 0)
            elif how == TENSOR and kind is torch.Tensor and is_host_number(info, len(key) - 1, a):
                number = number_of(a)
                key.append(("host", DTYPE_NAMES[a.dtype], key_of(number)))
                wire.append(number)
            else:
                return _record(info, func, types, args, kwargs or {})
    if device is None:
        return _record(info, func, types, args, kwargs or {})
    if kwargs:
        kinds = info.keyword_kinds
        for name, a in kwargs.items():
            if name == "pin_memory" and not a:
                continue
            key.append(name)
            kind = type(a)
            how = kinds[name]
            if kind is RemoteTensor and how == TENSOR:
                handle = a._sky
                if handle.device is not device:
                    return _record(info, func, types, args, kwargs)
                key.append(handle.meta)
                wire.append(handle.slot)
            elif kind in FIXED_TYPES or how == FIXED:
                # Of fractions the values count in `linspace` and its like, which take a device.
                if kind is torch.device and (a != device.torch_device or float in map(type, args)):
                    return _record(info, func, types, args, kwargs)
                key.append(tuple(a) if kind is list else a)
            elif how == SCALAR and kind is not list:
                key.append(key_of(a))
                wire.append(a)
            elif how == NUMBER and (kind is int or a is None):
                key.append(a)
                wire.append(a)
            elif how == TENSOR and a is None:
                key.append(kind)
                wire.append(0)
            else:
                return _record(info, func, types, args, kwargs)
    signature = tuple(key)
    try:
        entry: Entry | None = device.cache.get(signature)
    except TypeError as error:  # symbols among sizes have no hash
        if raised_by_handler(error):
            raise
        return _record(info, func, types, args, kwargs or {})
    if entry is None:
        plain = key_of_reader(info, args, kwargs, key)
        if plain is not None:
            signature = plain
            entry = device.cache.get(signature)
    if entry is None:
        entry = learn(info, device, signature, args, kwargs) if info.learns else None
        if entry is None:
            return _record(info, func, types, args, kwargs or {})
        wire[0] = entry.number
        if entry.made:
            wire = [EXPECT, expectation(entry, signature), *wire]
    else:
        wire[0] = entry.number
    # A view is an inference tensor if its base is one, whatever the mode is now.
    if entry.shares_first and _in_inference_mode() != args[0].is_inference():
        return _record(info, func, types, args, kwargs or {})
    recorder = device.recorder
    result: object
    if entry.simple:
        if entry.meta is not None:
            meta = entry.meta
            # By position: PyTorch looks up every name that it knows among names that are given.
            result = _make_wrapper(
                RemoteTensor, meta.size, meta.stride, meta.offset, None, meta.dtype, meta.layout, device.torch_device
            )
            handle = device.handle_type()
            handle.meta = meta
            if entry.shares_first:
                handle.root = root.root or root
                if handle.root.copied and not meta.size:
                    know_element(handle, handle.root)
            else:
                handle.root = None
                if info.derived and ((root.root or root).copied or (root.root is not None and not meta.size)):
                    derive(handle, info, args, kwargs)
            free, held = recorder.free, recorder.held
            if free:  # as in `take_slot`: no call may end between
                handle.slot = slot = free[0]
                held[slot] = True
                heappop(free)
            else:
                recorder.take_slot(handle)
            result._sky_dict = {"_sky": handle}  # smaller than what setting the attribute makes
            wire.append(handle.slot)
        else:
            result = args[0]
    elif entry.several is not None:
        owner = (root.root or root) if entry.shares_first else None
        result = several = tuple(new_tensors(device, entry.several, owner))
        wire.extend([made._sky.slot for made in several if made is not None])
    elif entry.nothing:
        result = None
        if info.for_each:  # kernels count such changes, of the tensors in their first list; not the dispatcher
            count_changes(args[0])
    elif entry.listed is not None:
        owner = (root.root or root) if entry.shares_first else None
        result = listed = new_tensors(device, entry.listed, owner)
        wire.append([made._sky.slot for made in listed])  # type: ignore[union-attr]  # none of them is None
    elif entry.may_overlap and overlaps(info, args, kwargs or {}):
        return _record(info, func, types, args, kwargs or {})
    elif entry.targets:
        given = kwargs or {}
        results = [given[name] for name in entry.targets]
        result = results[0] if len(results) == 1 else tuple(results)
    elif entry.may_overlap:
        result = args[0] if info.returns else None
        if info.for_each:
            count_changes(args[0])
    else:
        return _record(info, func, types, args, kwargs or {})
    stream = recorder.stream
    stream.extend(wire)
    try:
        frame = _getframe(1)
    except ValueError as error:
        if raised_by_handler(error):
            raise
        frame = OUTERMOST
    if _record_lines:
        while FOREIGN[frame.f_code.co_filename] and frame.f_back is not None:
            frame = frame.f_back
    recorder.lines.extend((frame.f_code, frame.f_lasti))
    if info.changes:
        if info.changes != 1:
            forget_lists(info, args, kwargs)
        elif (root.root or root).copied:
            forget_copy(root.root or root)
    if len(stream) > recorder.limit:
        try:
            recorder.send_some()
        except SELF_EXPLAINING as error:
            error.__traceback__ = None
            raise
    return result


@shielded  # autograd asks a fake tensor for its device where it must not throw, and for the rule of that question here
def find_rule(op: Any, tensor_class: type) -> object:
    """PyTorch's `find_torch_dispatch_rule`, which C++ asks before each operation on a tensor of a class in Python.

    The op itself keeps the table of its rules, which PyTorch looks up by name each time: 0.1 us of 2.7 to 4.4.
    """
    try:
        rules = op._sky_rules
    except AttributeError:
        rules = op._sky_rules = rule_registry.singleton.find(op.__qualname__).torch_dispatch_rules._data
    return rules.get(tensor_class) if rules else None


def _install_rule_search() -> None:
    if not patching.is_replaced(rule_registry, "find_torch_dispatch_rule"):
        patching.replace(
            rule_registry,
            "find_torch_dispatch_rule",
            find_rule,
            why="C++ asks before each operation for a rule of its op and class, whose table the op itself keeps here",
            test="tests/tensor/dispatch/test_hot_path.py::test_a_rule_that_somebody_registered_is_found",
            when=patching.When.FIRST_DEVICE,
        )


def install() -> None:
    """Makes remote tensors dispatch through here."""
    RemoteTensor.__torch_dispatch__ = classmethod(dispatch_remote)  # type: ignore[method-assign,assignment]
    DEVICES.before_new[_install_rule_search] = None
