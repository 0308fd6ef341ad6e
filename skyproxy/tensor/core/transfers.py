"""Values on the move: from the CPU to a worker, back, and between workers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch

from skyproxy.errors import UnsupportedOpError
from skyproxy.protocol import commands
from skyproxy.tensor.core import known_values
from skyproxy.tensor.core.devices import DEVICES, SkyDevice
from skyproxy.tensor.core.metadata import Meta, intern_meta, meta_of
from skyproxy.tensor.core.prefetching import READER
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.dispatch.op_info import Plan, implements
from skyproxy.torch_codec import Description, is_dense, packed_stride

aten = torch.ops.aten
_ALONE = 3
"""References to a handle that one tensor holds: the tensor's, a local name, and that of who counts."""
_DTYPES_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def upload(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    """A copy of a CPU tensor on a worker's device. The bytes are read before this returns."""
    if (
        type(tensor) in _OWN_CLASSES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.nbytes <= device.session.settings.max_inline_bytes
        and not (tensor.is_conj() or tensor.is_neg())
    ):
        return _upload_inline(tensor, device)
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return _upload_sparse(tensor, device)
    if tensor.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        tensor = tensor.clone()  # closes the gaps in the order of the strides, as PyTorch's own copies do
    meta = meta_of(tensor) if tensor.storage_offset() == 0 else meta_of(torch.empty_like(tensor, device="meta"))
    handle = device.new_handle(meta)
    device.session.upload(handle.slot, tensor, device.place)
    if not meta.size:
        known_values.know(handle, tensor.clone())
    return make_tensor(meta, handle)


_OWN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def _upload_inline(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    """The short way of a small contiguous tensor, which travels with the commands."""
    meta = intern_meta(Description(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype))
    handle = device.new_handle(meta)
    count = tensor.nbytes
    values = ctypes.string_at(tensor.data_ptr(), count) if count else b""
    device.session.upload_bytes(handle.slot, meta.description, values, device.place)
    if not meta.size:
        known_values.know(handle, tensor.detach().clone())
    return make_tensor(meta, handle)


def _upload_sparse(tensor: torch.Tensor, device: SkyDevice) -> RemoteTensor:
    place = device.torch_device
    if tensor.layout is torch.sparse_coo:
        result = torch.sparse_coo_tensor(
            tensor._indices().to(place), tensor._values().to(place), tensor.shape, check_invariants=False
        )
        return result._coalesced_(tensor.is_coalesced())
    parts = (
        (tensor.crow_indices(), tensor.col_indices())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        else (tensor.ccol_indices(), tensor.row_indices())
    )
    return torch.sparse_compressed_tensor(
        parts[0].to(place),
        parts[1].to(place),
        tensor.values().to(place),
        tensor.shape,
        layout=tensor.layout,
        check_invariants=False,
    )


def download(tensor: RemoteTensor) -> torch.Tensor:
    """A copy of a remote tensor on the CPU, in the strides that PyTorch's `preserve_format` gives. Waits."""
    handle = tensor._sky
    meta: Meta = handle.meta
    if meta.layout is not torch.strided:
        return _download_sparse(tensor)
    ahead = READER.ahead
    if ahead is None and READER.guess is not None:
        ahead = READER.guess.ahead_of(handle)
    result = ahead.take(handle) if ahead is not None else None
    if result is None:
        result = handle.device.session.fetch(handle.slot, meta.description)
    return _as_preserved(result, meta)


def start_download(tensor: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Callable[[], bool]]:
    """Asks for a tensor's values without waiting.

    Returns:
        A function that waits for the values, as a CPU tensor, and one that tells whether it would wait.
    """
    if type(tensor) is not RemoteTensor or tensor.layout is not torch.strided:
        value = tensor.detach().cpu() if type(tensor) is RemoteTensor else tensor.detach().clone().cpu()
        return lambda: value, lambda: True
    meta: Meta = tensor._sky.meta
    session = tensor._sky.device.session
    waiter = session.start_fetch(tensor._sky.slot, meta.description)

    def finish() -> torch.Tensor:
        return _as_preserved(session.fetched(waiter, meta.description, counted=not waiter.done), meta)

    return finish, lambda: waiter.done


def _as_preserved(result: torch.Tensor, meta: Meta) -> torch.Tensor:
    """Values travel dense; gaps are closed as `preserve_format` would, which for overlaps is not row-major."""
    if result.stride() == meta.stride or packed_stride(meta.size, meta.stride) == meta.stride:
        return result
    like = torch.empty_like(torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta"))
    if like.stride() == result.stride():
        return result
    return torch.empty_strided(meta.size, like.stride(), dtype=meta.dtype).copy_(result)


def _download_sparse(tensor: RemoteTensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.is_coalesced()
        indices, values = tensor._indices().cpu(), tensor._values().cpu()
        result = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
        return result._coalesced_(coalesced)
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer = tensor.crow_indices() if rows else tensor.ccol_indices()
    inner = tensor.col_indices() if rows else tensor.row_indices()
    return torch.sparse_compressed_tensor(
        outer.cpu(), inner.cpu(), tensor.values().cpu(), tensor.shape, layout=tensor.layout, check_invariants=False
    )


def move(tensor: RemoteTensor, device: SkyDevice) -> RemoteTensor:
    """A copy on another `sky` device."""
    source = tensor._sky.device
    if source.session is device.session:
        handle = device.new_handle(tensor._sky.meta)
        device.session.do("copy_to_device", handle.slot, tensor._sky.slot, device.place)
        meta = plain_copy_meta(tensor._sky.meta)
        handle.meta = meta
        return make_tensor(meta, handle)
    return upload(download(tensor), device)


def plain_copy_meta(meta: Meta) -> Meta:
    """What a copy with `preserve_format` looks like."""
    if meta.layout is not torch.strided:
        return meta
    return meta_of(torch.empty_like(torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")))


@implements("aten::_to_copy")
def _to_copy(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    """`Tensor.to`: within the device an ordinary op; across devices values move, and are converted on the side where
    they are smaller."""
    (tensor,) = args
    target = kwargs.get("device")
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    if type(tensor) is not RemoteTensor:
        if target is None or target.type != "sky":
            return NotImplemented
        device = DEVICES.of(target)
        dtype = rest.pop("dtype", None)
        layout = rest.pop("layout", None)
        if layout is not None and layout is not tensor.layout:
            tensor = tensor.to_sparse(layout=layout) if layout is not torch.strided else tensor.to_dense()
        format_ = rest.pop("memory_format", None)
        if format_ is not None and format_ is not torch.preserve_format:
            tensor = tensor.clone(memory_format=format_)
        if dtype is not None and dtype is not tensor.dtype:
            if dtype.itemsize > tensor.dtype.itemsize and tensor.device.type == "cpu":
                return _convert(upload(tensor, device), dtype)
            tensor = tensor.to(dtype)
        return upload(tensor, device)
    own = tensor._sky.device
    if target is None or (target.type == "sky" and (target.index is None or target.index == own.index)):
        return _within(func, tensor, rest)
    if target.type == "sky":
        device = DEVICES.of(target)
        return _within(func, move(tensor, device), rest) if rest else move(tensor, device)
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
        result = func(result, device=target, **needed)
    return result


def _look_alike(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="meta")


def _convert(tensor: RemoteTensor, dtype: torch.dtype) -> Any:
    return _within(aten._to_copy.default, tensor, {"dtype": dtype})


def _within(func: Any, tensor: RemoteTensor, rest: dict[str, Any]) -> Any:
    from skyproxy.tensor.dispatch.op_info import plan_of
    from skyproxy.tensor.dispatch.recording import Call, run

    return run(Call(plan_of(func), (tensor,), rest))


@implements("aten::copy_")
def _copy_(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    """`dst.copy_(src)` between any two places."""
    target, source = args[:2]
    if not isinstance(source, torch.Tensor):  # a number, which PyTorch wraps in a tensor for other devices
        return _copy_within(plan, target, torch.scalar_tensor(source, dtype=_DTYPES_OF_NUMBERS[type(source)]))
    if type(target) is RemoteTensor and type(source) is RemoteTensor:
        device = target._sky.device
        if source._sky.device is not device:
            source = move(source, device)
        return _copy_within(plan, target, source)
    if type(target) is RemoteTensor:
        if source.device.type == "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if source.dtype.itemsize > target.dtype.itemsize and not source.dtype.is_complex:
            source = source.to(target.dtype)
        return _copy_within(plan, target, upload(source, target._sky.device))
    if type(source) is RemoteTensor:
        target.copy_(download(source))
        return target
    return NotImplemented


def _copy_within(plan: Plan, target: RemoteTensor, source: torch.Tensor) -> RemoteTensor:
    from skyproxy.tensor.dispatch.recording import Call, run

    result: RemoteTensor = run(Call(plan, (target, source), {}))
    return result


@implements("aten::_copy_from", "aten::_copy_from_and_resize")
def _copy_from(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    source, target = args[:2]
    if plan.name.endswith("resize") and target.shape != source.shape:
        target.resize_(source.shape)
    return target.copy_(source)


@implements("aten::_local_scalar_dense")
def _item(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    """The one place where a Python number is made of a remote tensor: never a guess, always the worker's value."""
    (tensor,) = args
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    handle = tensor._sky
    known = known_values.value_of(handle)
    if known is not None:
        return known.item()
    if READER.ahead is not None or not handle.meta.plain or tensor.is_complex():
        return download(tensor).item()
    recorder = handle.device.recorder
    before = recorder.ops
    value = handle.device.session.call("item", handle.slot)
    # Held by this tensor and the name here alone, it has no views whose changes would go unseen.
    if not handle.meta.size and handle.root is None and sys.getrefcount(handle) == _ALONE:
        known_values.know(handle, torch.tensor(value, dtype=tensor.dtype))
        if recorder.ops != before:  # another thread may have changed it meanwhile
            known_values.forget(handle)
    return value


@implements("aten::equal")
def _equal(plan: Plan, func: Any, args: Any, kwargs: Any) -> bool:
    a, b = args
    if type(a) is RemoteTensor and type(b) is RemoteTensor and a._sky.device is b._sky.device:
        device = a._sky.device
        return bool(device.session.call("equal", a._sky.slot, b._sky.slot))
    places = {str(x.device) for x in args}
    raise RuntimeError(f"Expected all tensors to be on the same device, but found {' and '.join(sorted(places))}!")


@implements("refused")
def _refused(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    raise UnsupportedOpError(f"{plan.name} cannot run on a worker. Move the tensor first: x.cpu()")


__all__ = ["commands", "download", "move", "upload"]
