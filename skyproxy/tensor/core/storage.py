"""Storages of remote tensors: who shares memory with whom, at which (invented) address, and how large it is.

The bytes are on the worker; here a storage is the handle of the tensor that first had it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from skyproxy import torch_codec
from skyproxy.errors import ConfigurationError, UnsupportedOpError
from skyproxy.tensor.core import known_values
from skyproxy.tensor.core.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.core.metadata import Meta, meta_of, plain_meta
from skyproxy.tensor.core.prefetching import READER
from skyproxy.tensor.core.remote_tensor import RemoteTensor, adopt, make_tensor
from skyproxy.tensor.core.transfers import download, upload
from skyproxy.tensor.dispatch.mixed_devices import mixed_devices_error
from skyproxy.tensor.dispatch.op_info import Plan, implements

StorageBase = torch._C.StorageBase
_ALIGNMENT_BYTES = 512
_next_address = 1 << 40
_lock = threading.Lock()


class Memory:
    """Address and size of one storage.

    Attributes:
        key: unique for the life of the process; what PyTorch calls `_cdata`.
        address: where it would lie, aligned as CUDA aligns; moves when the storage grows. Never given twice.
        byte_count: its size.
        face: a weak reference to the storage object that stands for it, or None.
    """

    __slots__ = ("address", "byte_count", "face", "key")

    def __init__(self, byte_count: int) -> None:
        self.face: weakref.ref[SkyStorage] | None = None
        self.resize(byte_count)
        self.key = self.address

    def resize(self, byte_count: int) -> None:
        global _next_address
        with _lock:
            self.address = _next_address
            _next_address += (byte_count // _ALIGNMENT_BYTES + 1) * _ALIGNMENT_BYTES
        self.byte_count = byte_count


def _bytes_needed(meta: Meta) -> int:
    return torch_codec.storage_extent(meta.size, meta.stride, meta.offset) * meta.dtype.itemsize


def memory_of(handle: Handle) -> Memory:
    """The memory that a handle's tensor lies in.

    Raises:
        NotImplementedError: sparse tensors have none of their own.
    """
    root = handle.root or handle
    try:
        return root.memory
    except AttributeError:
        if root.meta.layout is not torch.strided:
            raise NotImplementedError("Cannot access storage of a sparse tensor") from None
        memory = root.memory = Memory(_bytes_needed(root.meta))
        return memory


def note_change(handle: Handle, meta: Meta) -> None:
    """A tensor is about to look like `meta`: its storage grows if it must, and never shrinks, as in PyTorch."""
    if meta.layout is torch.strided and handle.meta is not None and handle.meta.layout is torch.strided:
        memory, needed = memory_of(handle), _bytes_needed(meta)
        if needed > memory.byte_count:
            memory.resize(needed)


class MemorySlice(Memory):
    """A part of another storage's memory; has a key of its own, as PyTorch's storages of slices do.

    Attributes:
        whole: the other storage.
        start: where in it, in bytes.
    """

    __slots__ = ("start", "whole")

    def __init__(self, whole: Handle, start: int, stop: int) -> None:
        super().__init__(stop - start)
        self.address = memory_of(whole).address + start
        self.whole, self.start = whole, start

    def moved(self, meta: Meta) -> Meta:
        """The look, in the whole storage, of what has a look in this part."""
        if self.start % meta.dtype.itemsize:
            raise RuntimeError(
                f"a part of a storage that begins at byte {self.start} holds no {meta.dtype} tensor on sky"
            )
        if _bytes_needed(meta) > self.byte_count:
            raise RuntimeError("Trying to resize storage that is not resizable")
        return plain_meta(meta.size, meta.dtype, meta.stride, meta.offset + self.start // meta.dtype.itemsize)


def _slice(root: Handle, start: int, stop: int) -> Handle:
    """A part of a storage, in bytes, as a storage: to the worker, it is one more view."""
    memory = memory_of(root)
    if isinstance(memory, MemorySlice):
        root, start, stop = memory.whole, memory.start + start, memory.start + stop
    part: Handle = view_of(root, plain_meta((stop - start,), torch.uint8, None, start))._sky
    part.root = None  # it holds its whole by its memory
    part.memory = MemorySlice(root, start, stop)  # type: ignore[attr-defined]
    return part


def view_of(root: Handle, meta: Meta) -> RemoteTensor:
    """A new tensor on the storage of `root`; the storage grows if it must."""
    memory = memory_of(root)
    if isinstance(memory, MemorySlice):
        root, meta = memory.whole, memory.moved(meta)
    device = root.device
    handle = device.new_handle(meta, root)
    known_values.inherit(root, handle)
    name = torch_codec.DTYPE_NAMES[meta.dtype]
    device.session.do("view_storage", handle.slot, root.slot, name, meta.offset, list(meta.size), list(meta.stride))
    note_change(handle, meta)
    return make_tensor(meta, handle)


class SkyStorage(torch.UntypedStorage):
    """The storage of a remote tensor: `SkyStorage(root)`, or what `torch.UntypedStorage` takes, with a device.

    To PyTorch's C++ it is a storage of our device that has its size, and no memory. What would read that memory is
    answered here.
    """

    _root: Handle

    @staticmethod
    def __new__(cls: type[SkyStorage], *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Handle):
            return torch.UntypedStorage(*args, **kwargs)
        (root,) = args
        byte_count = memory_of(root).byte_count
        storage = torch._C._construct_storage_from_data_pointer(0, root.device.torch_device, byte_count)
        storage.__class__ = cls
        storage._root = root
        return storage

    def _memory(self) -> Memory:
        return memory_of(self._root)

    @property
    def sky_device(self) -> SkyDevice:
        return self._root.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._root.device.torch_device

    @property
    def _cdata(self) -> int:  # type: ignore[override]
        return self._memory().key

    def data_ptr(self) -> int:
        memory = self._memory()
        return memory.address if memory.byte_count else 0

    def nbytes(self) -> int:
        return self._memory().byte_count

    def __len__(self) -> int:
        return self._memory().byte_count

    def size(self) -> int:
        return self._memory().byte_count

    def element_size(self) -> int:
        return 1

    def get_device(self) -> int:
        return self._root.device.index

    def resizable(self) -> bool:
        return not isinstance(self._memory(), MemorySlice)

    def resize_(self, size: int) -> SkyStorage:  # type: ignore[override]
        if not self.resizable():
            raise RuntimeError("Trying to resize storage that is not resizable")
        if size < 0:
            raise RuntimeError(f"Trying to resize a storage to {size} bytes")
        known_values.forget(self._root)
        self._root.device.session.do("resize_storage", self._root.slot, size)
        self._memory().resize(size)
        return self

    def as_bytes(self) -> RemoteTensor:
        """All of the storage as a uint8 tensor of one dimension, sharing its memory."""
        return view_of(self._root, plain_meta((self.nbytes(),), torch.uint8))

    def cpu(self) -> torch.UntypedStorage:
        """A copy of all bytes on the CPU. Waits."""
        ahead = READER.ahead
        return download(self.as_bytes() if ahead is None else ahead.bytes_of(self)).untyped_storage()

    def clone(self) -> SkyStorage:
        return SkyStorage(self.as_bytes().clone()._sky)  # type: ignore[attr-defined]

    def copy_(self, source: Any, non_blocking: bool | None = None) -> SkyStorage:  # type: ignore[override]
        if isinstance(source, torch.TypedStorage):
            source = source._untyped_storage
        if source.nbytes() != self.nbytes():
            raise RuntimeError(
                f"size does not match, self was {self.nbytes()} bytes but src was {source.nbytes()} bytes"
            )
        values = source.as_bytes() if isinstance(source, SkyStorage) else _bytes_of(source.cpu())
        self.as_bytes().copy_(values)
        return self

    def fill_(self, value: int) -> SkyStorage:
        self.as_bytes().fill_(value)
        return self

    def to(self, *, device: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
        device = torch.device(device)
        if device.type != "sky":
            return self.cpu() if device.type == "cpu" else self.cpu().to(device=device)
        return SkyStorage(self.as_bytes().to(device, copy=True)._sky)  # type: ignore[attr-defined]

    def tolist(self) -> list[int]:
        return list(self.cpu())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.nbytes())
            if step != 1:
                raise RuntimeError(f"Trying to slice with a step of {step}, but only a step of 1 is supported")
            return SkyStorage(_slice(self._root, start, max(start, stop)))
        return self.as_bytes()[self._position(index)].item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.as_bytes()[index if isinstance(index, slice) else self._position(index)] = value

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("bytes of a storage cannot be deleted")

    def _position(self, index: int) -> int:
        size = self.nbytes()
        if not -size <= index < size:
            raise IndexError(f"index {index} out of range for storage of size {size}")
        return index

    def new(self) -> SkyStorage:  # type: ignore[override]
        return SkyStorage(torch.empty(0, dtype=torch.uint8, device=self.device)._sky)  # type: ignore[attr-defined]

    def _byteswap(self, element_size: int) -> None:
        """Reverses the bytes of each element."""
        elements = self.as_bytes()[: self.nbytes() // element_size * element_size].view(-1, element_size)
        elements.copy_(elements.flip(1))

    def _set_cdata(self, *unused: Any) -> NoReturn:
        raise RuntimeError(
            f"a storage on {self.device} is no memory of this process, and cannot be exchanged by address"
        )

    _swap_data_ptr_ = _resize_with_addr_ = _set_cdata

    def __repr__(self) -> str:
        return f"[torch.storage.UntypedStorage(device={self.device}) of size {len(self)}]"

    __str__ = __repr__

    def __copy__(self) -> SkyStorage:
        return self.clone()

    def _write_file(self, *args: Any) -> None:
        self.cpu()._write_file(*args)

    def _set_from_file(self, file: Any, offset: Any, is_real_file: bool, element_size: int) -> None:
        values = torch.UntypedStorage(self.nbytes())
        values._set_from_file(file, offset, is_real_file, element_size)  # type: ignore[attr-defined]
        self.copy_(values)

    def is_pinned(self, device: Any = "cuda") -> bool:
        return False

    def pin_memory(self, device: Any = "cuda") -> Any:
        raise TypeError(f"cannot pin storages on {self.device}; only CPU memory can be pinned")

    def is_shared(self) -> bool:
        return False

    def share_memory_(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"memory on {self.device} belongs to this process's session and cannot be shared with others. Share a copy "
            "on the CPU: x.cpu().share_memory_()"
        )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


def _new_storage(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.UntypedStorage.__new__`, where the device may be ours: PyTorch's own asks it for an allocator."""
    device = kwargs.get("device")
    device = torch.device(device) if device is not None else None
    if device is None or device.type != "sky":
        return StorageBase.__new__(cls, *args, **kwargs)
    if kwargs.get("allocator") is not None:
        raise TypeError(f"torch.UntypedStorage(): a storage on {device} takes no allocator")
    if not args or (len(args) == 1 and isinstance(args[0], int)):
        byte_count = args[0] if args else 0
        if byte_count < 0:
            raise RuntimeError(f"torch.UntypedStorage(): a storage cannot have {byte_count} bytes")
        return SkyStorage(torch.empty(byte_count, dtype=torch.uint8, device=device)._sky)  # type: ignore[attr-defined]
    return storage_from_bytes(StorageBase.__new__(torch.UntypedStorage, *args), DEVICES.of(device))


def _copy_into(self: torch.UntypedStorage, source: Any, non_blocking: bool | None = None) -> Any:
    """`torch.UntypedStorage.copy_`, where the source may be ours."""
    if isinstance(source, SkyStorage):
        source = source.cpu()
    return StorageBase.copy_(self, source, non_blocking)


def _new_wrapped_storage(self: Any, untyped_storage: torch.UntypedStorage) -> Any:
    """`torch.TypedStorage._new_wrapped_storage`, which takes no subclass."""
    if not isinstance(untyped_storage, SkyStorage):
        return _wrap_cpu_storage(self, untyped_storage)
    return torch.TypedStorage(wrap_storage=untyped_storage, dtype=self.dtype, _internal=True)


_wrap_cpu_storage = torch.TypedStorage._new_wrapped_storage


def storage_from_bytes(storage: torch.UntypedStorage, device: SkyDevice, *, uninitialized: bool = False) -> SkyStorage:
    """A new storage on a device, with the bytes of a CPU storage unless only the size matters."""
    if uninitialized:
        return SkyStorage(torch.empty(storage.nbytes(), dtype=torch.uint8, device=device.torch_device)._sky)  # type: ignore[attr-defined]
    values = _bytes_of(storage)
    handle = upload(values, device)._sky
    if values.numel() <= known_values.MOST_BYTES:
        known_values.know(handle, values.clone())
    return SkyStorage(handle)


# --- methods of RemoteTensor -----------------------------------------------------------------------------------------


def _root(tensor: RemoteTensor) -> Handle:
    memory_of(tensor._sky)
    return tensor._sky.root or tensor._sky


_faces = WeakTensorKeyDictionary()
"""The storage object of each tensor that was asked for it: as in PyTorch, it stays the same one while the tensor lives.

Programs remember storages by `id()`. One that is made for each question dies at once, and the next one, of another
tensor, may get its number.
"""


def _untyped_storage(self: RemoteTensor) -> SkyStorage:
    root = _root(self)
    memory = memory_of(root)
    face = memory.face() if memory.face is not None else None
    if face is None or torch.UntypedStorage.nbytes(face) != memory.byte_count:  # C++ knows the size that it had
        face = SkyStorage(root)
        memory.face = weakref.ref(face)
    _faces[self] = face
    return face


def _data_ptr(self: RemoteTensor) -> int:
    memory = memory_of(self._sky)
    return memory.address + self.storage_offset() * self.element_size() if self.numel() else 0


def _set(self: RemoteTensor, *args: Any, **kwargs: Any) -> RemoteTensor:
    """`Tensor.set_`: another storage, and another place in it. Python's arguments, which name storages."""
    source = kwargs.get("source", args[0] if args else None)
    if not args and not kwargs:
        value: torch.Tensor = torch.empty(0, dtype=self.dtype, device=self.device)
    else:
        value = _value_to_set(self, source, args, kwargs)
    value.__dict__["_is_to_be_taken_over"] = True
    # Autograd has a say, and counts versions; it comes back to `_set_op`.
    return torch._C.TensorBase.set_(self, value)  # type: ignore[call-overload,no-any-return]


def _value_to_set(self: RemoteTensor, source: Any, args: Any, kwargs: Any) -> RemoteTensor:
    """What a tensor becomes by `set_`: a view of the source's storage.

    PyTorch itself tells its sizes, or refuses them, by the same call on the meta device.
    """
    if getattr(source, "device", self.device) != self.device:
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{self.device}" to a storage on different device '
            f'"{source.device}".  This is no longer allowed; the devices must match.'
        )
    stand_in = _on_meta(source)
    target = torch.empty(self.shape, dtype=self.dtype, device="meta")
    if "source" in kwargs:
        target.set_(*args, **{**kwargs, "source": stand_in})
    else:
        target.set_(stand_in, *args[1:], **kwargs)
    meta = meta_of(target)
    stride = kwargs.get("stride", args[3] if len(args) > 3 else ())
    if any(step < 0 for step in stride):  # which the meta device takes for none
        raise RuntimeError(
            f"Storage size calculation overflowed with sizes={list(meta.size)} and strides={list(stride)}"
        )
    if isinstance(source, RemoteTensor):
        root = _root(source)
        known_values.forget(root)  # both will be written
    else:
        root = _untyped(source)._root
    _check_bounds(self, meta, memory_of(root).byte_count)
    return view_of(root, meta)


def _untyped(storage: Any) -> Any:
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


def _on_meta(source: Any) -> Any:
    """A storage or tensor like `source` on the meta device; what is neither stays what it is."""
    if isinstance(source, RemoteTensor):
        meta: Meta = source._sky.meta
        storage = torch.UntypedStorage(memory_of(source._sky).byte_count, device="meta")
        empty = torch.empty(0, dtype=meta.dtype, device="meta")
        return empty.set_(storage, meta.offset, meta.size, meta.stride)  # type: ignore[call-overload]
    if isinstance(source, SkyStorage):
        return torch.UntypedStorage(source.nbytes(), device="meta")
    if isinstance(source, torch.TypedStorage):
        return torch.TypedStorage(wrap_storage=_on_meta(_untyped(source)), dtype=source.dtype, _internal=True)
    return source


def _check_bounds(tensor: torch.Tensor, meta: Meta, byte_count: int) -> None:
    """Raise where PyTorch does not let the storage grow: its sizes stay, so it does not look whether they fit."""
    needed = _bytes_needed(meta)
    if tuple(tensor.shape) == meta.size and needed > byte_count:
        raise RuntimeError(
            f"setStorage: sizes {list(meta.size)}, strides {list(meta.stride)}, storage offset {meta.offset}, and "
            f"itemsize {meta.dtype.itemsize} requiring a storage size of {needed} are out of bounds for storage of "
            f"size {byte_count}"
        )


def set_to_part(
    self: torch.Tensor, source: torch.Tensor, storage_offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """`aten::set_.source_Tensor_storage_offset`, which PyTorch divides by asking the source for its C++ storage."""
    if type(self) is not RemoteTensor or self.device != source.device:
        raise mixed_devices_error("aten::set_", self.device, source.device)
    return _set(self, source, storage_offset, size, stride)


@implements("aten::set_", "aten::set_.source_Tensor")
def _set_op(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    """What is left of `set_` below autograd: the tensor takes over another's place in its storage."""
    target = args[0]
    source: Any = args[1] if len(args) > 1 else kwargs.get("source")
    if source is None:
        value = torch.empty(0, dtype=target.dtype, device=target.device)
    elif source.device != target.device:
        raise mixed_devices_error(plan.name, target.device, source.device)
    elif source.dtype is not target.dtype:
        value = _value_to_set(target, source, (source,), {})  # raises
    elif source.__dict__.pop("_is_to_be_taken_over", False):
        value = source
    else:
        root = _root(source)
        known_values.forget(root)
        value = view_of(root, source._sky.meta)  # its own handle: each may change its look later
    adopt(target, value._sky)
    return target


@implements("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset")
def _set_storage_op(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that came from C++, for which a storage keeps the size that it had when it was made."""
    target, source, *place = args
    if not isinstance(source, SkyStorage):
        raise UnsupportedOpError(f"{plan.name}: a storage in C++ does not name a worker's. Use Tensor.set_ in Python.")
    if place and place[0] == 0 and tuple(place[1]) == (StorageBase.nbytes(source) // target.element_size(),):
        place = []
    adopt(target, _value_to_set(target, source, (source, *place), kwargs)._sky)  # type: ignore[attr-defined]
    return target


def _is_set_to(self: RemoteTensor, tensor: torch.Tensor) -> bool:
    return type(tensor) is RemoteTensor and tensor._sky.meta is self._sky.meta and _root(tensor) is _root(self)


@implements("aten::_has_same_storage_numel")
def _has_same_storage_numel(plan: Plan, func: Any, args: Any, kwargs: Any) -> bool:
    """Forward-mode AD asks this of a tensor and its tangent, before the one takes the other as it is."""
    a, b = args
    return bool(a.device == b.device and _storage_numel(a) == _storage_numel(b))


@implements("aten::_new_zeros_with_same_feature_meta")
def _new_zeros_with_same_feature_meta(plan: Plan, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """What a tangent is copied into that lies otherwise than its tensor, or on another device: zeros like the tensor.

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


def _share_memory(self: RemoteTensor) -> Any:
    return self.untyped_storage().share_memory_()


def _pin_memory(self: RemoteTensor, device: Any = None) -> Any:
    raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")


_METHODS = {
    "untyped_storage": _untyped_storage,
    "data_ptr": _data_ptr,
    "set_": _set,
    "is_set_to": _is_set_to,
    "is_shared": lambda self: False,
    "share_memory_": _share_memory,
    "is_pinned": lambda self, device=None: False,
    "pin_memory": _pin_memory,
}


def install() -> None:
    """Gives remote tensors the methods above.

    Raises:
        ConfigurationError: this torch's tensors lack one of them.
    """
    if "_new_wrapped_storage" not in vars(torch.TypedStorage) or not hasattr(
        torch._C, "_construct_storage_from_data_pointer"
    ):
        raise ConfigurationError(f"torch {torch.__version__} makes storages in another way than skyproxy knows")
    torch.UntypedStorage.__new__ = staticmethod(_new_storage)  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.copy_ = _copy_into  # type: ignore[method-assign]
    torch.TypedStorage._new_wrapped_storage = _new_wrapped_storage  # type: ignore[method-assign]
    for name, function in _METHODS.items():
        if not hasattr(torch.Tensor, name):
            raise ConfigurationError(f"torch {torch.__version__} has no Tensor.{name}, which skyproxy replaces")
        setattr(RemoteTensor, name, function)
