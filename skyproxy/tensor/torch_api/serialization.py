"""Saving, loading and copying remote tensors, in PyTorch's own formats: files that anyone can read without skyproxy."""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch
from torch import _utils

from skyproxy import patching, torch_codec
from skyproxy.errors import ConfigurationError, SkyproxyError
from skyproxy.tensor.core.attributes import user_attributes
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.memory import memory_of
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.core.prefetching import READER, reading_ahead
from skyproxy.tensor.core.remote_tensor import RemoteTensor, adopt
from skyproxy.tensor.core.storage import SkyStorage, bytes_of, storage_from_bytes, view_of
from skyproxy.tensor.core.torch_private import fake_tensors, function_modes

_PRIORITY = 5  # before PyTorch's own, which have 10 and more and would answer for any device
_IN_BLOCKS = "tensors are fetched in blocks before they are written, not with one round trip each"
_compressed = (torch.sparse_csr, torch.sparse_bsr)
_print_and_drop: object = Queue._on_queue_feeder_error  # type: ignore[attr-defined]
Reduced: TypeAlias = tuple[Callable[..., object], tuple[object, ...]]


# --- torch.save and torch.load ---------------------------------------------------------------------------------------


def _tag(storage: object) -> str | None:
    if not isinstance(storage, SkyStorage):
        return None
    if READER.ahead is not None:
        READER.ahead.add_storage(storage)  # asked for once everything is pickled
    return str(storage.device)


def _saving(save: Callable[..., object]) -> Callable[..., object]:
    """`torch.save`, whose storages come in blocks."""

    @functools.wraps(save)
    def save_in_blocks(*args: object, **kwargs: object) -> None:
        with reading_ahead():
            save(*args, **kwargs)

    return save_in_blocks


def _restore(storage: Any, location: str) -> Any:
    """A storage from a file, on the device that `location` ("sky:1") names; uploaded once, whatever shares it."""
    if not location.startswith("sky"):
        return None
    try:
        device = DEVICES.of(location)
    except ConfigurationError as error:
        raise RuntimeError(
            f"Attempting to deserialize object on {location}, which does not exist here: {error} Or use torch.load "
            "with map_location to map your storages to an existing device."
        ) from error
    if isinstance(storage, torch.TypedStorage):  # `torch.package` reads these
        moved = _restore(storage._untyped_storage, location)
        return torch.TypedStorage(wrap_storage=moved, dtype=storage.dtype, _internal=True)
    if isinstance(storage, SkyStorage):
        return storage
    return storage_from_bytes(storage, device, uninitialized=getattr(storage, "_torch_load_uninitialized", False))


def _is_storage(obj: object) -> bool:
    return isinstance(obj, SkyStorage) or type(obj) in torch._storage_classes


def _telling_readers(reduce: Callable[..., Reduced]) -> Callable[..., Reduced]:
    """Raise an error of a queue's own thread where the value would be read.

    That thread prints what goes wrong while it pickles, and drops the value: a reader, such as a `DataLoader`, would
    wait for it for ever. Executors have a handler of their own, which tells the future.
    """

    @functools.wraps(reduce)
    def reduce_or_tell(value: object, *args: object) -> Reduced:
        try:
            return reduce(value, *args)
        except SkyproxyError as error:
            if _print_and_drop not in getattr(threading.current_thread(), "_args", ()):
                raise
            return _raise, (error,)

    return reduce_or_tell


def _raise(error: SkyproxyError) -> None:
    """Raise what kept another process from sending a tensor."""
    error.add_note("This was raised in the process that was to send a tensor.")
    raise error


@_telling_readers
def _reduce_ex(self: RemoteTensor, protocol: int) -> Reduced:
    """As PyTorch writes a tensor of any other device; nothing in it names skyproxy but the location "sky:1"."""
    state = user_attributes(self)
    if isinstance(self, torch.nn.Parameter):
        hooks: OrderedDict[int, object] = OrderedDict()
        arguments = (self.data, self.requires_grad, hooks)
        if state:
            return _utils._rebuild_parameter_with_state, (*arguments, state)
        return _utils._rebuild_parameter, arguments
    rebuild, parts = _reduce_sparse(self) if self.layout is not torch.strided else _reduce_strided(self)
    if state:
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, parts, state)
    return rebuild, parts


def _reduce_strided(tensor: torch.Tensor) -> Reduced:
    bits = {name: True for name, is_set in (("conj", tensor.is_conj()), ("neg", tensor.is_neg())) if is_set}
    metadata = (bits,) if bits else ()
    storage = tensor.untyped_storage()
    hooks: OrderedDict[int, object] = OrderedDict()
    place = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.requires_grad, hooks)
    if tensor.dtype in torch.storage._new_dtypes():
        return _utils._rebuild_tensor_v3, (storage, *place, tensor.dtype, *metadata)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    return _utils._rebuild_tensor_v2, (typed, *place, *metadata)


def _reduce_sparse(tensor: torch.Tensor) -> Reduced:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced())
        return _utils._rebuild_sparse_tensor, (tensor.layout, parts)
    by_rows = tensor.layout in _compressed
    outer = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    inner = tensor.col_indices() if by_rows else tensor.row_indices()
    return _utils._rebuild_sparse_tensor, (tensor.layout, (outer, inner, tensor.values(), tensor.size()))


def _set_tensor_metadata(tensor: torch.Tensor, metadata: dict[str, bool]) -> None:
    """A file's conjugate and negative bits: for a remote tensor the worker must know of them."""
    if type(tensor) is not RemoteTensor:
        torch._C._set_tensor_metadata(tensor, metadata)  # type: ignore[attr-defined]
        return
    with torch.no_grad():
        if metadata.get("conj"):
            adopt(tensor, tensor.conj()._sky)  # type: ignore[attr-defined]
        if metadata.get("neg"):
            adopt(tensor, tensor._neg_view()._sky)  # type: ignore[attr-defined]


# --- multiprocessing -------------------------------------------------------------------------------------------------


@_telling_readers
def _reduce_for_process(storage: SkyStorage) -> Reduced:
    # As bytes and not in shared memory: whoever reads them may do so long after, when this copy is gone.
    values = bytes_of(storage.cpu())
    return _rebuild_in_process, (bytearray(torch_codec.byte_view(values)), str(storage.device))


def _rebuild_in_process(values: bytearray, location: str) -> SkyStorage:
    """The storage of a tensor that another process has passed on: a copy in this process's session.

    Raises:
        SkyproxyError: the device does not exist in this process, or belongs to the process that it was forked from.
    """
    here = torch.frombuffer(values, dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8, device="cpu")
    return storage_from_bytes(here.untyped_storage(), DEVICES.of(location))


# --- copy.deepcopy ---------------------------------------------------------------------------------------------------


def _deepcopy_storage(self: SkyStorage, memo: dict[object, Any]) -> SkyStorage:
    copies = memo.setdefault("torch", {})
    if self._cdata not in copies:
        copies[self._cdata] = self.clone()
    result: SkyStorage = copies[self._cdata]
    return result


def _deepcopy(self: RemoteTensor, memo: dict[Any, Any]) -> torch.Tensor:
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.  "
            "If you were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm usage, "
            "see https://github.com/pytorch/pytorch/pull/103001"
        )
    if id(self) in memo:
        known: RemoteTensor = memo[id(self)]
        return known
    is_parameter = isinstance(self, torch.nn.Parameter)
    if is_parameter and type(self) is RemoteTensor:
        memo[id(self)] = parameter = _copy_parameter(self)
        return parameter
    for mode in function_modes():
        if isinstance(mode, fake_tensors.FakeCopyMode):  # it knows PyTorch's own method only
            return mode.__torch_function__(torch.Tensor.__deepcopy__, (), (self, memo))  # type: ignore[arg-type]
    with torch.no_grad():
        result = _copy_tensor(self.detach(), memo)  # type: ignore[arg-type]
        result.requires_grad_(self.requires_grad)
        if is_parameter:  # an instance of a user's class, which PyTorch copies like any tensor
            result._is_param = True
        if self.grad is not None:
            result.grad = self.grad.__deepcopy__(memo)
        result.__dict__.update(copy.deepcopy(user_attributes(self), memo))
    memo[id(self)] = result
    return result


def _copy_parameter(parameter: RemoteTensor) -> RemoteTensor:
    """A copy as `Parameter.__deepcopy__` makes it: of the values alone, without the gradient and attributes."""
    values = parameter.detach().clone(memory_format=torch.preserve_format)
    return torch.nn.Parameter(values, parameter.requires_grad)  # type: ignore[return-value]


def _copy_tensor(tensor: RemoteTensor, memo: dict[Any, Any]) -> RemoteTensor:
    """A copy; tensors that share memory share it in the copy too."""
    meta: Meta = tensor._sky.meta
    if meta.layout is not torch.strided:
        return tensor.clone()  # type: ignore[return-value]
    memory, copies = memory_of(tensor._sky), memo.setdefault("torch", {})
    whole = meta.offset == 0 and tensor.numel() * meta.dtype.itemsize == memory.byte_count
    if memory.key not in copies and meta.plain and whole:
        result = tensor.clone()
        if result.stride() == tensor.stride():  # the common case, a whole storage: one op
            copies[memory.key] = result.untyped_storage()
            return result  # type: ignore[return-value]
    storage = _deepcopy_storage(tensor.untyped_storage(), memo)  # type: ignore[arg-type]
    fresh: Any = view_of(storage._root, plain_meta(meta.size, meta.dtype, meta.stride, meta.offset))
    # As PyTorch copies: the values without the bits, which ends the sharing.
    if meta.conjugate:
        fresh = fresh.conj_physical()
    return fresh.neg() if meta.negative else fresh  # type: ignore[no-any-return]


# --- safetensors -----------------------------------------------------------------------------------------------------


def _opening(plain: Callable[..., object]) -> Callable[..., object]:
    """`safetensors.safe_open` knows devices by a list of names that ours is not in, or by the accelerator's number."""

    @functools.wraps(plain, updated=())
    def safe_open(filename: object, framework: str, device: object = "cpu", **options: object) -> object:
        if isinstance(device, str | torch.device) and str(device).partition(":")[0] == "sky":
            device = DEVICES.of(device).index
        return plain(filename, framework, device, **options)

    return safe_open


def _patch_safetensors() -> None:
    try:
        import safetensors.torch
    except ImportError:
        return
    plain = safetensors.safe_open
    patching.replace_everywhere(
        "safe_open",
        plain,
        _opening(plain),
        why="safetensors knows devices by a list of names that ours is not in",
        test="tests/tensor/torch_api/test_serialization.py::test_safetensors_open_lazily_on_a_worker",
    )
    for name in ("save", "save_file"):
        plain = getattr(safetensors.torch, name)
        patching.replace_everywhere(
            name,
            plain,
            _saving_tensors(plain),
            why=_IN_BLOCKS,
            test="tests/tensor/core/test_prefetching.py::test_safetensors_are_written_in_blocks",
        )


def _saving_tensors(save: Callable[..., object]) -> Callable[..., object]:
    """Return what writes a dict of tensors, which come in blocks."""

    @functools.wraps(save)
    def save_in_blocks(tensors: dict[str, torch.Tensor], *args: object, **kwargs: object) -> object:
        with reading_ahead(tensors.values()):
            return save(tensors, *args, **kwargs)

    return save_in_blocks


def _install_for_devices() -> None:
    """Replace what reads and writes remote tensors when the first device comes to exist: before, there are none."""
    if patching.is_replaced(torch, "is_storage"):
        return
    patching.replace(
        torch,
        "is_storage",
        _is_storage,
        why="`torch.save` finds the storages to write by this function, and it compares exact classes",
        test="tests/tensor/torch_api/test_serialization.py::test_a_storage_can_be_saved_by_itself",
        when=patching.When.FIRST_DEVICE,
    )
    patching.replace(
        _utils,
        "set_tensor_metadata",
        _set_tensor_metadata,
        why="PyTorch's own calls a function that each device must have in C++",
        test="tests/tensor/torch_api/test_serialization.py::test_the_conjugate_bit_of_a_file_reaches_the_worker",
        when=patching.When.FIRST_DEVICE,
    )
    patching.replace_everywhere(
        "save",
        torch.serialization.save,
        _saving(torch.serialization.save),
        why=_IN_BLOCKS,
        test="tests/tensor/core/test_prefetching.py::test_a_checkpoint_is_saved_in_blocks",
        when=patching.When.FIRST_DEVICE,
    )


def install() -> None:
    """Teaches PyTorch to save, load and copy remote tensors.

    Raises:
        ConfigurationError: this torch writes tensors in another way.
    """
    patching.require(_utils, "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
    patching.require(torch._C, "_set_tensor_metadata")
    patching.require(torch, "_storage_classes")
    torch.serialization.register_package(_PRIORITY, _tag, _restore)
    packages: list[Any] = torch.serialization._package_registry
    patching.registered(
        "torch.serialization._package_registry",
        lambda: packages.remove((_PRIORITY, _tag, _restore)),
        why="`torch.load` names a device that does not exist here, and `torch.save` asks for all values at once",
        test="tests/tensor/torch_api/test_serialization.py::test_a_device_that_does_not_exist_is_named",
    )
    ForkingPickler.register(SkyStorage, _reduce_for_process)
    reducers: dict[type, object] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    patching.registered(
        "multiprocessing.reduction.ForkingPickler._extra_reducers",
        lambda: reducers.pop(SkyStorage, None),
        why="PyTorch writes storages of classes that it does not know so that it cannot read them again",
        test="tests/tensor/torch_api/test_serialization.py::test_tensors_are_passed_to_other_processes",
    )
    RemoteTensor.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign]
    RemoteTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign,assignment]
    SkyStorage.__deepcopy__ = _deepcopy_storage  # type: ignore[method-assign,assignment]
    # `torch.save` writes down the name that the class of a storage has in torch.
    SkyStorage.__module__ = "torch.storage"
    SkyStorage.__name__ = SkyStorage.__qualname__ = "UntypedStorage"
    _patch_safetensors()
    DEVICES.before_new[_install_for_devices] = None
