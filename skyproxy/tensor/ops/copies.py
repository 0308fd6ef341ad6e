"""Copies as ops: `Tensor.to`, `copy_` and `item` between any two places, and comparing what is on one device."""

from __future__ import annotations

import sys
from ctypes import string_at
from typing import Any

import torch

from skyproxy.errors import ProtocolError
from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core import host_copies, known_values
from skyproxy.tensor.core.devices import DEVICES, Handle
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.pieces import copied, copy_into
from skyproxy.tensor.core.prefetching import READER, moment_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor, is_wrapper_class
from skyproxy.tensor.core.torch_private import OpOverload
from skyproxy.tensor.core.transfers import OWN_CLASSES, download, move, upload
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, info_of, plain_op
from skyproxy.tensor.dispatch.recording import run
from skyproxy.tensor.ops.companions import companions_of

aten = torch.ops.aten
_ALONE = 3
"""References to a handle that one tensor holds: the tensor's, a local name, and that of who counts."""
_DTYPES_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@implements("aten::_to_copy")
def _to_copy(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """`Tensor.to`: within the device an ordinary op; across devices values move, and are converted on the side where
    they are smaller.
    """
    (tensor,) = args
    target = kwargs.get("device")
    if (
        type(tensor) in OWN_CLASSES
        and target is not None
        and target.type == "sky"
        and kwargs.get("dtype", tensor.dtype) is tensor.dtype
        and kwargs.get("layout", tensor.layout) is tensor.layout
        and kwargs.get("memory_format") is None
    ):
        return upload(tensor, DEVICES.at(target.index))
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    if type(tensor) is not RemoteTensor:
        if target is None or target.type != "sky":
            return NotImplemented
        device = DEVICES.of(target)
        if type(tensor) in _DTYPES_OF_NUMBERS:  # C++ gives the number of a tensor that it has made of one: TorchScript
            tensor = torch.scalar_tensor(tensor, dtype=_DTYPES_OF_NUMBERS[type(tensor)], device="cpu")
        dtype = rest.pop("dtype", None)
        layout = rest.pop("layout", None)
        if layout is not None and layout is not tensor.layout:
            tensor = tensor.to_sparse(layout=layout) if layout is not torch.strided else tensor.to_dense()
        format_ = rest.pop("memory_format", None)
        if format_ is not None and format_ is not torch.preserve_format:
            tensor = copied(tensor, memory_format=format_)
        if dtype is not None and dtype is not tensor.dtype:
            if dtype.itemsize > tensor.dtype.itemsize and tensor.device.type == "cpu":
                return _convert(upload(tensor, device), dtype)
            tensor = copied(tensor, dtype)
        return upload(tensor, device)
    own = tensor._sky.device
    if target is None or (target.type == "sky" and (target.index is None or target.index == own.index)):
        return _record(tensor, rest)
    if target.type == "sky":
        device = DEVICES.of(target)
        return _record(move(tensor, device), rest) if rest else move(tensor, device)
    if target.type == "meta":
        return func(torch.empty_like(_look_alike(tensor._sky.meta)), **rest)
    needed = {
        name: value
        for name, value in rest.items()
        if value is not None and value is not torch.preserve_format and value is not getattr(tensor, name, None)
    }
    if "dtype" in needed and needed["dtype"].itemsize < tensor.dtype.itemsize:
        tensor = _convert(tensor, needed.pop("dtype"))
    result = download(tensor)
    if needed or target.type != "cpu":
        simple = target.type == "cpu" and needed.keys() <= {"dtype", "memory_format"}
        result = copied(result, **needed) if simple else func(result, device=target, **needed)
    return result


def _look_alike(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")


def _convert(tensor: RemoteTensor, dtype: torch.dtype) -> object:
    return _record(tensor, {"dtype": dtype})


_plain_to_copy = plain_op(aten._to_copy.default)
_plain_copy_ = plain_op(aten.copy_.default)


def _record(tensor: RemoteTensor, rest: dict[str, object]) -> object:
    return dispatch_remote(None, _plain_to_copy, None, (tensor,), rest)


@implements("aten::copy_")
def _copy_(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """`dst.copy_(src)` between any two places."""
    target, source = args[:2]
    if not isinstance(source, torch.Tensor):  # a number, which PyTorch wraps in a tensor for other devices
        return _copy_within(
            info, target, torch.scalar_tensor(source, dtype=_DTYPES_OF_NUMBERS[type(source)], device="cpu")
        )
    if type(target) is RemoteTensor and type(source) is RemoteTensor:
        device = target._sky.device
        if source._sky.device is not device:
            source = move(source, device)
        return dispatch_remote(None, _plain_copy_, None, (target, source))
    if type(target) is RemoteTensor:
        if is_wrapper_class(type(source)):
            return NotImplemented
        if source.device.type == "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if source.dtype.itemsize > target.dtype.itemsize and not source.dtype.is_complex:
            source = copied(source, target.dtype)
        return _copy_within(info, target, upload(source, target._sky.device))
    if type(source) is RemoteTensor:
        return copy_into(target, download(source))
    return NotImplemented


def _copy_within(info: OpInfo, target: RemoteTensor, source: torch.Tensor) -> RemoteTensor:
    result: RemoteTensor = run(BoundCall(info, (target, source), {}))
    return result


@implements("aten::_copy_from", "aten::_copy_from_and_resize")
def _copy_from(info: OpInfo, func: OpOverload, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> object:
    source, target = args[:2]
    if info.name.endswith("resize") and target.shape != source.shape:
        target.resize_(source.shape)
    return target.copy_(source)


@implements("aten::_local_scalar_dense")
def _item(info: OpInfo, func: OpOverload, args: tuple[RemoteTensor], kwargs: dict[str, object]) -> object:
    """The one place where a Python number is made of a remote tensor: never a guess, always the worker's value."""
    (tensor,) = args
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    if not isinstance(tensor, RemoteTensor):  # a fake tensor: `torch.tensor` asks past its mode
        raise RuntimeError("the tensor has elements, but no values: it is a fake one, as code that is traced has them")
    handle = tensor._sky
    handle.device.values_read += 1
    known = known_values.value_of(handle)
    if known is not None:
        return known.item()
    number = host_copies.number_of(handle)
    if number is not None:
        return number
    if READER.ahead is not None or not handle.meta.plain or tensor.is_complex():
        return download(tensor).item()
    recorder, owner = handle.device.recorder, handle.root or handle
    before = moment_of(recorder)
    companions = companions_of(handle.device.session)
    value = companions.take(handle) if not (owner.copied and owner.copy.final) else None
    shared = bool(handle.meta.size) or owner is not handle or sys.getrefcount(handle) != _ALONE + 1
    kept = shared and host_copies.readable(handle)
    if value is None:
        if kept and owner.meta.size:
            number = _read_whole(handle)
            if number is not None:
                return number
        elif shared and not kept:
            number = _read_ahead(tensor)
            if number is not None:
                return number
        value = companions.ask(handle)
    _check_kind(value, tensor.dtype)
    if not shared:  # only this tensor and these names hold it, so it has no views whose changes would go unseen
        known_values.know(handle, _as_tensor(value, tensor.dtype))
        if moment_of(recorder) != before:  # another thread may have changed it meanwhile
            known_values.forget(handle)
    elif kept and not owner.meta.size and owner.meta.dtype is tensor.dtype:
        _keep(owner, _as_tensor(value, tensor.dtype), before)
    return value


def _check_kind(value: object, dtype: torch.dtype) -> None:
    if type(value) is not (float if dtype.is_floating_point else bool if dtype is torch.bool else int):
        raise ProtocolError(f"the worker sent {value!r:.40} for the value of a tensor of {dtype}")


def _as_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a number that a worker sent as a tensor of the dtype that it was asked for."""
    try:
        return torch.tensor(value, dtype=dtype, device="cpu")
    except (RuntimeError, OverflowError) as error:
        if raised_by_handler(error):
            raise
        raise ProtocolError(f"the worker sent {value} for the value of a tensor of {dtype}") from error


def _keep(owner: Handle, whole: torch.Tensor, before: tuple[int, int]) -> None:
    """Remember the bytes of a storage that were asked for after a `moment_of` its recorder."""
    copy = host_copies.keep(owner, string_at(whole.data_ptr(), whole.nbytes), asked=True)
    if moment_of(owner.device.recorder) != before and copy is not None:  # another thread may have changed it meanwhile
        host_copies.forget_written([owner])


def _read_whole(handle: Handle) -> bool | int | float | None:
    """Ask for all of the small storage that a number lies in: the next number of it will be known."""
    owner = handle.root or handle
    before = moment_of(owner.device.recorder)
    _keep(owner, owner.device.session.fetch(owner.slot, owner.meta.description), before)
    return host_copies.number_of(handle)


def _read_ahead(tensor: RemoteTensor) -> bool | int | float | None:
    """Ask for a number and for those behind it, where the program reads one after another of a large storage."""
    handle = tensor._sky
    found = host_copies.elements_ahead(handle)
    if found is None:
        return None
    copy, count = found
    row: RemoteTensor = run(
        BoundCall(info_of(torch.ops.aten.as_strided.default), (tensor, (count,), (1,), handle.meta.offset), {})
    )
    values = handle.device.session.fetch(row._sky.slot, row._sky.meta.description)
    host_copies.keep_ahead(copy, handle, string_at(values.data_ptr(), values.nbytes))
    return host_copies.number_of(handle)


@implements("aten::equal")
def _equal(info: OpInfo, func: OpOverload, args: tuple[torch.Tensor, torch.Tensor], kwargs: dict[str, object]) -> bool:
    a, b = args
    if type(a) is RemoteTensor and type(b) is RemoteTensor and a._sky.device is b._sky.device:
        device = a._sky.device
        return bool(device.session.call("equal", a._sky.slot, b._sky.slot))
    places = {str(x.device) for x in args}
    raise RuntimeError(f"Expected all tensors to be on the same device, but found {' and '.join(sorted(places))}!")
