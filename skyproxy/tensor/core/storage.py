"""`SkyStorage`: the storage of a remote tensor, as PyTorch sees it. The bytes are on the worker."""

from __future__ import annotations

from typing import NoReturn

import torch

from skyproxy import torch_codec
from skyproxy.tensor.core import host_copies, known_values
from skyproxy.tensor.core.devices import Handle, SkyDevice
from skyproxy.tensor.core.memory import Memory, MemorySlice, memory_of, note_change
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.core.prefetching import READER
from skyproxy.tensor.core.remote_tensor import RemoteTensor, make_tensor
from skyproxy.tensor.core.torch_private import construct_storage
from skyproxy.tensor.core.transfers import download, upload


def _slice(root: Handle, start: int, stop: int) -> Handle:
    """A part of a storage, in bytes, as a storage: to the worker, it is one more view."""
    memory = memory_of(root)
    if isinstance(memory, MemorySlice):
        root, start, stop = memory.whole, memory.start + start, memory.start + stop
    part: Handle = view_of(root, plain_meta((stop - start,), torch.uint8, None, start))._sky
    host_copies.escape(root)  # its parts have addresses of their own
    part.root = None  # it keeps the whole tensor alive through its memory
    part.memory = MemorySlice(root, start, stop)
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
    def __new__(cls: type[SkyStorage], *args: object, **kwargs: object) -> SkyStorage:
        if len(args) != 1 or kwargs or not isinstance(args[0], Handle):
            return torch.UntypedStorage(*args, **kwargs)  # type: ignore[return-value]
        root = args[0]
        byte_count = memory_of(root).byte_count
        storage = construct_storage(0, root.device.torch_device, byte_count)
        storage.__class__ = cls  # type: ignore[assignment]
        storage._root = root  # type: ignore[attr-defined]
        return storage  # type: ignore[return-value]

    def _memory(self) -> Memory:
        return memory_of(self._root)

    @property
    def sky_device(self) -> SkyDevice:
        return self._root.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._root.device.torch_device

    @property
    def _cdata(self) -> int:
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

    def resize_(self, size: int) -> SkyStorage:
        if not self.resizable():
            raise RuntimeError("Trying to resize storage that is not resizable")
        if size < 0:
            raise RuntimeError(f"Trying to resize a storage to {size} bytes")
        known_values.forget(self._root)
        host_copies.forget_written([self._root])
        session = self._root.device.session
        session.do("resize_storage", self._root.slot, size)
        session.recorder.hidden_writes += 1  # what is on its way here was asked for before
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

    def copy_(self, source: torch.UntypedStorage | torch.TypedStorage, non_blocking: bool | None = None) -> SkyStorage:  # type: ignore[override]
        if isinstance(source, torch.TypedStorage):
            source = source._untyped_storage
        if source.nbytes() != self.nbytes():
            raise RuntimeError(
                f"size does not match, self was {self.nbytes()} bytes but src was {source.nbytes()} bytes"
            )
        values = source.as_bytes() if isinstance(source, SkyStorage) else bytes_of(source.cpu())
        self.as_bytes().copy_(values)
        return self

    def fill_(self, value: int) -> SkyStorage:
        self.as_bytes().fill_(value)
        return self

    def to(self, *, device: torch.device | str | int, non_blocking: bool = False) -> object:
        device = torch.device(device)
        if device.type != "sky":
            return self.cpu() if device.type == "cpu" else self.cpu().to(device=device)
        return SkyStorage(self.as_bytes().to(device, copy=True)._sky)  # type: ignore[attr-defined]

    def tolist(self) -> list[int]:
        return list(self.cpu())

    def __getitem__(self, index: int | slice) -> SkyStorage | float:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.nbytes())
            if step != 1:
                raise RuntimeError(f"Trying to slice with a step of {step}, but only a step of 1 is supported")
            return SkyStorage(_slice(self._root, start, max(start, stop)))
        return self.as_bytes()[self._position(index)].item()

    def __setitem__(self, index: int | slice, value: int) -> None:
        if not isinstance(index, slice) and not 0 <= index < self.nbytes():
            raise RuntimeError("out of bounds")  # PyTorch's words; it reads from the end, but does not write there
        self.as_bytes()[index] = value

    def __delitem__(self, index: object) -> NoReturn:
        raise TypeError("bytes of a storage cannot be deleted")

    def _position(self, index: int) -> int:
        size = self.nbytes()
        if not -size <= index < size:
            raise IndexError(f"index {index} out of range for storage of size {size}")
        return index

    def new(self) -> SkyStorage:
        return SkyStorage(torch.empty(0, dtype=torch.uint8, device=self.device)._sky)  # type: ignore[attr-defined]

    def _byteswap(self, element_size: int) -> None:
        """Reverses the bytes of each element."""
        elements = self.as_bytes()[: self.nbytes() // element_size * element_size].view(-1, element_size)
        elements.copy_(elements.flip(1))

    def _set_cdata(self, *unused: object) -> NoReturn:
        raise RuntimeError(
            f"a storage on {self.device} is no memory of this process, and cannot be exchanged by address"
        )

    _swap_data_ptr_ = _resize_with_addr_ = _set_cdata

    def __repr__(self) -> str:
        return f"[torch.storage.UntypedStorage(device={self.device}) of size {len(self)}]"

    __str__ = __repr__

    def __copy__(self) -> SkyStorage:
        return self.clone()

    def _write_file(self, *args: object) -> None:
        self.cpu()._write_file(*args)

    def _set_from_file(self, file: object, offset: object, is_real_file: bool, element_size: int) -> None:
        values = torch.UntypedStorage(self.nbytes())
        values._set_from_file(file, offset, is_real_file, element_size)
        self.copy_(values)

    def is_pinned(self, device: torch.device | str | int | None = "cuda") -> bool:
        return False

    def pin_memory(self, device: torch.device | str | int | None = "cuda") -> object:
        raise TypeError(f"cannot pin storages on {self.device}; only CPU memory can be pinned")

    def is_shared(self) -> bool:
        return False

    def share_memory_(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(
            f"memory on {self.device} belongs to this process's session and cannot be shared with others. Share a copy "
            "on the CPU: x.cpu().share_memory_()"
        )


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a CPU storage as a uint8 tensor of one dimension, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def storage_from_bytes(storage: torch.UntypedStorage, device: SkyDevice, *, uninitialized: bool = False) -> SkyStorage:
    """A new storage on a device, with the bytes of a CPU storage unless only the size matters."""
    if uninitialized:
        return SkyStorage(torch.empty(storage.nbytes(), dtype=torch.uint8, device=device.torch_device)._sky)  # type: ignore[attr-defined]
    values = bytes_of(storage)
    handle = upload(values, device)._sky
    if values.numel() <= known_values.MOST_BYTES:
        known_values.know(handle, values.clone())
    return SkyStorage(handle)


def root_of(tensor: RemoteTensor) -> Handle:
    """The handle of the tensor that first had the memory that this one lies in."""
    memory_of(tensor._sky)
    return tensor._sky.root or tensor._sky
