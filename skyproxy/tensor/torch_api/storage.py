"""PyTorch's storages, where the device may be ours: how they are made and copied, and what tensors tell of theirs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from skyproxy import patching
from skyproxy.tensor.core.addresses import is_invented
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.memory import memory_of
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.storage import SkyStorage, root_of, storage_from_bytes
from skyproxy.tensor.core.torch_private import StorageBase
from skyproxy.tensor.ops.set_storage import set_
from skyproxy.tensor.torch_api.tensor_methods import telling


def _new_storage(cls: type[object], *args: Any, **kwargs: Any) -> Any:
    """`torch.UntypedStorage.__new__`, where the device may be ours: PyTorch's own asks it for an allocator."""
    device = kwargs.get("device")
    device = torch.device(device) if device is not None else None
    if device is None or device.type != "sky":
        return StorageBase.__new__(cls, *args, **kwargs)
    if kwargs.get("allocator") is not None:
        raise TypeError(f"torch.UntypedStorage(): a storage on {device} takes no allocator")
    if not args and len(kwargs.keys() & {"size", "sequence"}) == 1:
        args = (kwargs.get("size", kwargs.get("sequence")),)
    if not args or (len(args) == 1 and type(args[0]) is int):
        byte_count = args[0] if args else 0
        if byte_count < 0:
            raise RuntimeError(f"torch.UntypedStorage(): a storage cannot have {byte_count} bytes")
        return SkyStorage(torch.empty(byte_count, dtype=torch.uint8, device=device)._sky)  # type: ignore[attr-defined]
    return storage_from_bytes(StorageBase.__new__(torch.UntypedStorage, *args), DEVICES.of(device))


def _copy_into(self: torch.UntypedStorage, source: object, non_blocking: bool | None = None) -> object:
    """`torch.UntypedStorage.copy_`, where the source may be ours."""
    if isinstance(source, SkyStorage):
        source = source.cpu()
    return StorageBase.copy_(self, source, non_blocking)  # type: ignore[attr-defined]


def _new_wrapped_storage(self: Any, untyped_storage: torch.UntypedStorage) -> Any:
    """`torch.TypedStorage._new_wrapped_storage`, which takes no subclass."""
    if not isinstance(untyped_storage, SkyStorage):
        return _wrap_cpu_storage(self, untyped_storage)
    return torch.TypedStorage(wrap_storage=untyped_storage, dtype=self.dtype, _internal=True)


_wrap_cpu_storage = torch.TypedStorage._new_wrapped_storage


def _untyped_storage(self: RemoteTensor) -> SkyStorage:
    """`Tensor.untyped_storage`: as in PyTorch, the same object while the tensor lives.

    Programs remember storages by `id()`. One that is made for each question would die at once, and the next one, of
    another tensor, might get its number.
    """
    root = root_of(self)
    memory = memory_of(root)
    face = memory.face() if memory.face is not None else None
    if face is None or torch.UntypedStorage.nbytes(face) != memory.byte_count:  # C++ knows the old size
        face = SkyStorage(root)
        memory.face = weakref.ref(face)
    self._sky_dict["_sky_storage"] = face  # no weak reference to the tensor: what has one is not swapped with another
    return face  # type: ignore[return-value]


@telling("data_ptr")
def _data_ptr(self: RemoteTensor) -> int:
    memory = memory_of(self._sky)
    return memory.address + self.storage_offset() * self.element_size() if self.numel() else 0  # type: ignore[return-value]


def _is_set_to(self: RemoteTensor, tensor: torch.Tensor) -> bool:
    return type(tensor) is RemoteTensor and tensor._sky.meta is self._sky.meta and root_of(tensor) is root_of(self)


def _share_memory(self: RemoteTensor) -> object:
    return self.untyped_storage().share_memory_()


def _pin_memory(self: RemoteTensor, device: torch.device | str | int | None = None) -> object:
    raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")


def _counting_uses(count: Callable[[int], int]) -> Callable[[int], int]:
    def storage_use_count(address: int) -> int:
        """Count the tensors that have a storage, by its `_cdata`; a remote one has one, for the worker counts them."""
        return 1 if is_invented(address) else count(address)

    return storage_use_count


_METHODS: dict[str, Callable[..., object]] = {
    "untyped_storage": _untyped_storage,
    "data_ptr": _data_ptr,
    "set_": set_,
    "is_set_to": _is_set_to,
    "is_shared": lambda self: False,
    "share_memory_": _share_memory,
    "is_pinned": lambda self, device=None: False,
    "pin_memory": _pin_memory,
}


def _install_for_devices() -> None:
    if hasattr(torch._C, "_storage_Use_Count"):
        patching.wrap(
            torch._C,
            "_storage_Use_Count",
            _counting_uses,
            why="C++ would read the storage at the invented address of a remote one, and crash",
            test="tests/tensor/torch_api/test_storage.py::test_uses_of_a_storage_are_counted_without_a_crash",
            when=patching.When.FIRST_DEVICE,
        )


def install() -> None:
    """Gives remote tensors the methods above.

    Raises:
        ConfigurationError: this torch's tensors lack one of them.
    """
    patching.require(torch._C, "_construct_storage_from_data_pointer")
    patching.require(torch.Tensor, *_METHODS)
    tests = "tests/tensor/core/test_storage.py"
    patching.replace(
        torch.UntypedStorage,
        "__new__",
        staticmethod(_new_storage),
        why="PyTorch's constructor would allocate through an allocator that a Python device does not have, and crash",
        test=f"{tests}::test_a_storage_is_made_as_on_the_cpu",
    )
    patching.replace(
        torch.UntypedStorage,
        "copy_",
        _copy_into,
        why="bytes of a remote storage are copied by the worker",
        test=f"{tests}::test_bytes_go_from_storage_to_storage_whatever_the_device",
    )
    patching.replace(
        torch.TypedStorage,
        "_new_wrapped_storage",
        _new_wrapped_storage,
        why="PyTorch's own takes no subclass of `UntypedStorage`, and remote storages are of one",
        test=f"{tests}::test_a_storage_is_made_as_on_the_cpu",
    )
    for name, function in _METHODS.items():
        setattr(RemoteTensor, name, function)
    DEVICES.before_new[_install_for_devices] = None
