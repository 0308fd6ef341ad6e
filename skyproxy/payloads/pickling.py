"""cloudpickle, with tensors beside the pickle: by value as raw bytes of their storages, or as a reference.

A tensor is a row in a table, and the pickle names the row. So tensors that share memory, or are one object, do so
again on the other side, whichever way they travel.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any

import cloudpickle
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.payloads.exceptions import reduce_exception
from skyproxy.payloads.projects import project_by_value, reduce_decorated
from skyproxy.protocol.messages import Buffer
from skyproxy.torch_codec import Description

VALUE = "value"
REFERENCE = "reference"
_ALIGNMENT_BYTES = 16
_HIDDEN_ATTRIBUTES = frozenset({"_sky", "_is_param"})

Row = list[Any]
"""`[VALUE or REFERENCE, description, requires gradients, is a parameter, ...]`; then the number of the storage, or
whatever the one who made the reference put there."""


@dataclass(slots=True)
class Pickled:
    """An object as bytes.

    Attributes:
        pieces: the pickle, its out-of-band buffers, then the bytes of storages; borrowed, see `keep`.
        tensors: a row for each tensor.
        bases: for each storage, which of its bytes the piece begins with.
        references: the tensors that went by reference, in the order of their rows.
        by_value: the name of a function that travels as code, if any does.
        keep: what owns the memory of the pieces.
    """

    pieces: list[Buffer]
    tensors: list[Row]
    bases: list[int]
    references: list[torch.Tensor]
    by_value: str = ""
    keep: list[Any] = field(default_factory=list)

    @property
    def tables(self) -> dict[str, Any]:
        """What must travel with the pieces."""
        return {"tensors": self.tensors, "bases": self.bases}


class _Storage:
    """A storage that travels by value, and how much of it is needed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.number = 0
        self.storage = tensor.untyped_storage()
        self.low, self.high = self.storage.nbytes(), 0

    def need(self, description: Description, item_bytes: int) -> None:
        high = torch_codec.storage_extent(description.size, description.stride, description.offset) * item_bytes
        if high:
            low = description.offset * item_bytes
            self.low, self.high = min(self.low, low - low % _ALIGNMENT_BYTES), max(self.high, high)

    def content(self) -> torch.Tensor:
        low = min(self.low, self.high)
        everything = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        part: torch.Tensor = everything[low : self.high].cpu()
        return part


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one object.

    Args:
        refer: for a tensor that goes by reference, what its row ends with; None for one that goes by value.
        refer_device: the same for a device that only one side knows; what stands for it.
        sends_projects: whether those of the user's own modules travel as code that a worker cannot import. What comes
            back names them: who sent a class gets that very class, and who can import one gets that.
    """

    def __init__(
        self,
        refer: Callable[[torch.Tensor], list[Any] | None],
        refer_device: Callable[[torch.device], Any] = lambda device: None,
        *,
        sends_projects: bool = False,
    ) -> None:
        self._file = io.BytesIO()
        self._buffers: list[PickleBuffer] = []
        # Not a method of ours: the pickler would hold itself, and with it all that it has pickled, until Python's
        # collector comes. `append` returns None, which means out of band.
        super().__init__(self._file, protocol=5, buffer_callback=self._buffers.append)
        self._refer = refer
        self._refer_device = refer_device
        self._sends_projects = sends_projects
        self._numbers: dict[int, int] = {}
        self._met: list[torch.Tensor] = []
        self._rows: list[Row] = []
        self._references: list[torch.Tensor] = []
        self._storages: dict[int, _Storage] = {}
        self._by_value = ""

    def pickle(self, value: Any) -> Pickled:
        """Raises:
        Exception: something in `value` cannot be pickled; whatever its class raised.
        """
        with project_by_value() if self._sends_projects else contextlib.nullcontext():
            self.dump(value)
        contents = [storage.content() for storage in self._storages.values()]
        pieces: list[Buffer] = [self._file.getbuffer(), *(buffer.raw() for buffer in self._buffers)]
        pieces += [torch_codec.byte_view(content) for content in contents]
        bases = [min(storage.low, storage.high) for storage in self._storages.values()]
        keep = [self._file, self._buffers, contents, self._storages]
        return Pickled(pieces, self._rows, bases, self._references, self._by_value, keep)

    def reducer_override(self, obj: Any) -> Any:
        if is_wrapper(obj):
            return _reduce_wrapper(obj)
        if isinstance(obj, types.ModuleType) and obj.__name__ == "torch.sky":
            # cloudpickle imports submodules that a function may mean, and takes `torch` beside `import skyproxy as sky`
            # for this one. Workers have the real devices, and no such module.
            return types.ModuleType, (obj.__name__,)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # `torch.ops`, the lazy modules of transformers: cloudpickle knows plain modules only.
            if sys.modules.get(obj.__name__) is obj or sys.modules.get(getattr(obj.__spec__, "name", "")) is obj:
                return importlib.import_module, (obj.__name__,)
        if isinstance(obj, BaseException):
            reduced = reduce_exception(obj)
            if reduced is not NotImplemented:
                return reduced
        if self._sends_projects and isinstance(obj, types.FunctionType):
            reduced = reduce_decorated(obj)
            if reduced is not NotImplemented:
                return reduced
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and not self._by_value and isinstance(obj, types.FunctionType):
            self._by_value = obj.__qualname__
        return reduced

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if type(obj) is torch.device:
            row = self._refer_device(obj)
            return None if row is None else ("device", row)
        return None

    def _tensor(self, tensor: torch.Tensor) -> Any:
        number = self._numbers.get(id(tensor))
        if number is not None:
            return "tensor", number, None
        ending = self._refer(tensor)
        if ending is None and not _is_plain(tensor):
            return None
        description = torch_codec.describe(tensor)
        row = [
            VALUE if ending is None else REFERENCE,
            torch_codec.encode_description(description),
            bool(tensor.requires_grad),
            isinstance(tensor, torch.nn.Parameter),
        ]
        if ending is None:
            key = tensor.untyped_storage()._cdata
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = _Storage(tensor)
                storage.number = len(self._storages) - 1
            storage.need(description, tensor.element_size())
            row.append(storage.number)
        else:
            row += ending
            self._references.append(tensor)
        number = self._numbers[id(tensor)] = len(self._rows)
        self._met.append(tensor)  # so that its id stays its own
        self._rows.append(row)
        state = {name: value for name, value in tensor.__dict__.items() if name not in _HIDDEN_ATTRIBUTES}
        return "tensor", number, state or None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but values in a storage; PyTorch itself takes the others apart."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
    )


def is_wrapper(value: Any) -> bool:
    """Whether this is a tensor made of other tensors, which can be taken apart and put together again."""
    return isinstance(value, torch.Tensor) and torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)


def _reduce_wrapper(tensor: Any) -> Any:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return _rebuild_wrapper, (type(tensor), inner, context, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)


def _rebuild_wrapper(
    kind: Any, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any, requires_grad: bool
) -> Any:
    return kind.__tensor_unflatten__(inner, context, size, stride).requires_grad_(requires_grad)


def memory_for(tables: dict[str, Any], count: int) -> Callable[[int, int], tuple[Any, memoryview]]:
    """An `allocate` for the pieces of a payload: the bytes of storages come into tensors.

    Args:
        tables: what travels with the pieces.
        count: how many there are.
    """
    first = count - len(tables["bases"])

    def allocate(index: int, size: int) -> tuple[Any, memoryview]:
        if index < first:
            memory = bytearray(size)
            return memory, memoryview(memory)
        content = torch.empty(size, dtype=torch.uint8)
        return content, torch_codec.byte_view(content)

    return allocate


class Unpickler(pickle.Unpickler):
    """Makes the object again.

    Args:
        pieces: as `memory_for` had them made.
        tables: what came with them.
        referred: for a row of a reference and its number among references, the tensor.
        device: for what stands for a device, the device.
    """

    def __init__(
        self,
        pieces: Sequence[Any],
        tables: dict[str, Any],
        referred: Callable[[Row, int], torch.Tensor],
        device: Callable[[Any], torch.device] = torch.device,
    ) -> None:
        self._rows: list[Row] = tables["tensors"]
        self._bases: list[int] = tables["bases"]
        first = len(pieces) - len(self._bases)
        if first < 1:
            raise ProtocolError("a payload without a pickle")
        super().__init__(io.BytesIO(pieces[0]), buffers=pieces[1:first])
        self._contents: Sequence[torch.Tensor] = pieces[first:]
        self._referred = referred
        self._device = device
        self._made: dict[int, torch.Tensor] = {}
        self._order: dict[int, int] = {}
        for number, row in enumerate(self._rows):
            if row[0] == REFERENCE:
                self._order[number] = len(self._order)

    def unpickle(self) -> Any:
        """Raises:
        Exception: a module or a class is missing here, or whatever the object's own code raises.
        """
        return self.load()

    def persistent_load(self, name: Any) -> Any:
        if name[0] == "device":
            return self._device(name[1])
        _, number, state = name
        tensor = self._made.get(number)
        if tensor is None:
            row = self._rows[number]
            make = self._by_value if row[0] == VALUE else self._by_reference
            tensor = self._made[number] = make(number, row)
        if state:
            tensor.__dict__.update(state)
        return tensor

    def _by_reference(self, number: int, row: Row) -> torch.Tensor:
        return self._referred(row, self._order[number])

    def _by_value(self, number: int, row: Row) -> torch.Tensor:
        description = torch_codec.decode_description(row[1])
        content, base = self._contents[row[4]], self._bases[row[4]]
        offset = description.offset - base // description.dtype.itemsize
        tensor = torch.empty(0, dtype=description.dtype)
        if 0 in description.size:
            tensor = torch.empty_strided(description.size, description.stride, dtype=description.dtype)
        else:
            tensor.set_(content.untyped_storage(), offset, description.size, description.stride)
        if description.conjugate:
            tensor = torch._conj(tensor)
        if description.negative:
            tensor = torch._neg_view(tensor)
        return dressed(tensor, row)


def dressed(tensor: torch.Tensor, row: Row) -> torch.Tensor:
    """The tensor as a leaf that wants gradients, or as a parameter, if its row says so."""
    _, _, requires_grad, is_parameter = row[:4]
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
