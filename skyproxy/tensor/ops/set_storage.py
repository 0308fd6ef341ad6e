"""`Tensor.set_` in all its forms, and what autograd asks of the storages of tensors and tangents."""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.core import known_values
from skyproxy.tensor.core.devices import Handle
from skyproxy.tensor.core.memory import bytes_needed, memory_of
from skyproxy.tensor.core.metadata import Meta, meta_of, plain_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor, adopt, is_wrapper_class
from skyproxy.tensor.core.storage import SkyStorage, root_of, view_of
from skyproxy.tensor.core.torch_private import OpOverload, StorageBase, TensorBase
from skyproxy.tensor.dispatch.mixed_devices import mixed_devices_error
from skyproxy.tensor.dispatch.op_info import OpInfo, implements


def set_(self: RemoteTensor, *args: object, **kwargs: object) -> RemoteTensor:
    """`Tensor.set_`: another storage, and another place in it. Python's arguments, which name storages."""
    source = kwargs.get("source", args[0] if args else None)
    if not args and not kwargs:
        value = _empty_like(self)
    else:
        value = _value_to_set(self, source, args, kwargs)
    whole = source if len(args) + len(kwargs) == 1 else None
    if isinstance(whole, torch.Tensor) and whole.requires_grad and torch.is_grad_enabled():
        value.requires_grad_()  # the tensor gets a history then, which has no derivative
    value.__dict__["_is_to_be_taken_over"] = True
    # Autograd comes first, and counts versions; then it calls `_set_op`.
    return TensorBase.set_(self, value)  # type: ignore[call-overload,no-any-return]


def _storage_elsewhere(own: torch.device, other: torch.device) -> RuntimeError:
    """The error of a tensor that is to take over a storage of another device, in PyTorch's words."""
    return RuntimeError(
        f'Attempted to set the storage of a tensor on device "{own}" to a storage on different device "{other}".  This '
        "is no longer allowed; the devices must match."
    )


def _value_to_set(self: RemoteTensor, source: Any, args: Any, kwargs: Any) -> Any:
    """Make what a tensor becomes by `set_`: a view of the source's storage.

    PyTorch itself tells its sizes, or refuses them, by the same call on the meta device.
    """
    if getattr(source, "device", self.device) != self.device:
        raise _storage_elsewhere(self.device, source.device)
    stand_in = _on_meta(source)
    target = torch.empty(self.shape, dtype=self.dtype, device="meta")
    if "source" in kwargs:
        target.set_(*args, **{**kwargs, "source": stand_in})
    else:
        target.set_(stand_in, *args[1:], **kwargs)
    meta = meta_of(target)
    stride = kwargs.get("stride", args[3] if len(args) > 3 else ())
    if any(step < 0 for step in stride):  # which the meta device takes for no storage
        raise RuntimeError(
            f"Storage size calculation overflowed with sizes={list(meta.size)} and strides={list(stride)}"
        )
    if isinstance(source, RemoteTensor):
        root = root_of(source)
        known_values.forget(root)  # both will be written
    else:
        root = _get_untyped_storage(source)._root
    _check_bounds(self, meta, memory_of(root).byte_count)
    return _view_like(self, root, meta)


def _empty_like(self: torch.Tensor) -> torch.Tensor:
    stride = self.stride() if self.shape == (0,) else (1,)  # PyTorch changes nothing of one that has this size
    return _with_bits_of(self, torch.empty_strided((0,), stride, dtype=self.dtype, device=self.device))


def _view_like(self: torch.Tensor, root: Handle, meta: Meta) -> torch.Tensor:
    return _with_bits_of(self, view_of(root, plain_meta(meta.size, meta.dtype, meta.stride, meta.offset)))


def _with_bits_of(self: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a tensor another one's conjugate and negative bits: `set_` leaves them, whatever its source has."""
    if self.is_conj():
        value = value.conj()
    return torch.ops.aten._neg_view(value) if self.is_neg() else value


def _get_untyped_storage(storage: object) -> Any:
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


def _on_meta(source: object) -> Any:
    """A storage or tensor like `source` on the meta device; what is neither stays what it is."""
    if isinstance(source, RemoteTensor):
        meta: Meta = source._sky.meta
        storage = torch.UntypedStorage(memory_of(source._sky).byte_count, device="meta")
        empty = torch.empty(0, dtype=meta.dtype, device="meta")
        return empty.set_(storage, meta.offset, meta.size, meta.stride)
    if isinstance(source, SkyStorage):
        return torch.UntypedStorage(source.nbytes(), device="meta")
    if isinstance(source, torch.TypedStorage):
        return torch.TypedStorage(
            wrap_storage=_on_meta(_get_untyped_storage(source)), dtype=source.dtype, _internal=True
        )
    return source


def _check_bounds(tensor: torch.Tensor, meta: Meta, byte_count: int) -> None:
    """Raise where PyTorch does not let the storage grow: its sizes stay, so it does not look whether they fit."""
    needed = bytes_needed(meta)
    if tuple(tensor.shape) == meta.size and needed > byte_count:
        raise RuntimeError(
            f"setStorage: sizes {list(meta.size)}, strides {list(meta.stride)}, storage offset {meta.offset}, and "
            f"itemsize {meta.dtype.itemsize} requiring a storage size of {needed} are out of bounds for storage of "
            f"size {byte_count}"
        )


def set_to_part(
    self: torch.Tensor, source: torch.Tensor, storage_offset: int, size: object, stride: object = ()
) -> torch.Tensor:
    """`aten::set_.source_Tensor_storage_offset`, which PyTorch divides by asking the source for its C++ storage."""
    if type(self) is not RemoteTensor or self.device != source.device:
        raise mixed_devices_error("aten::set_", self.device, source.device)
    return set_(self, source, storage_offset, size, stride)


@implements("aten::set_", "aten::set_.source_Tensor")
def _set_op(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """Finish `set_` below autograd: the tensor takes over another's place in its storage."""
    target = args[0]
    source: Any = args[1] if len(args) > 1 else kwargs.get("source")
    if type(target) is not RemoteTensor:
        if is_wrapper_class(type(target)):
            return NotImplemented  # its own dispatch is off or comes next
        raise _storage_elsewhere(target.device, source.device)
    if source is None:
        value = _empty_like(target)
    elif source.device != target.device:
        raise _storage_elsewhere(target.device, source.device)
    elif source.dtype is not target.dtype:
        value = _value_to_set(target, source, (source,), {})  # raises
    elif source.__dict__.pop("_is_to_be_taken_over", False):
        value = source
    else:
        root = root_of(source)
        known_values.forget(root)
        value = _view_like(target, root, source._sky.meta)  # its own handle: each may change its look later
    adopt(target, value._sky)  # type: ignore[attr-defined]
    return target


@implements("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset")
def _set_storage_op(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """A call that came from C++, for which a storage keeps the size that it had when it was made."""
    target, source, *place = args
    if type(target) is not RemoteTensor:
        return NotImplemented
    if not isinstance(source, SkyStorage):
        raise UnsupportedOpError(f"{info.name}: a storage in C++ does not name a worker's. Use Tensor.set_ in Python.")
    if place and place[0] == 0 and tuple(place[1]) == (StorageBase.nbytes(source) // target.element_size(),):  # type: ignore[attr-defined]
        place = []
    adopt(target, _value_to_set(target, source, (source, *place), kwargs)._sky)
    return target


@implements("inductor::resize_storage_bytes_")
def _resize_storage_bytes(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
    """Resize a storage in a graph, as FSDP does; PyTorch's own kernel would resize the one that C++ knows."""
    tensor, size = args
    tensor.untyped_storage().resize_(int(size))


@implements("aten::_has_same_storage_numel")
def _has_same_storage_numel(
    info: OpInfo, func: OpOverload, args: tuple[torch.Tensor, torch.Tensor], kwargs: dict[str, object]
) -> bool:
    """Forward-mode AD asks this of a tensor and its tangent, before the one takes the other as it is."""
    a, b = args
    return bool(a.device == b.device and _storage_numel(a) == _storage_numel(b))


@implements("aten::_new_zeros_with_same_feature_meta")
def _new_zeros_with_same_feature_meta(
    info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]
) -> torch.Tensor:
    """Make zeros like a tensor, for a tangent to be copied into that lies otherwise, or on another device.

    PyTorch's own would ask C++ for the size of the tensor's storage. The tangent's first dimensions may be a batch.
    """
    tangent, like = args[:2]
    batch = tangent.shape[: kwargs.get("self_num_batch_dims", 0)]
    count = _storage_numel(like)
    strides: list[int] = []
    for size in reversed(batch):
        strides.insert(0, count)
        count *= size
    zeros = torch.zeros(count, dtype=like.dtype, device=like.device)
    return zeros.as_strided((*batch, *like.shape), (*strides, *like.stride()), like.storage_offset())


def _storage_numel(tensor: torch.Tensor) -> int:
    remote = type(tensor) is RemoteTensor
    byte_count = memory_of(tensor._sky).byte_count if remote else tensor.untyped_storage().nbytes()  # type: ignore[attr-defined]
    return int(byte_count // tensor.element_size())
