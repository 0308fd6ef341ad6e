"""cloudpickle, with tensors beside the pickle."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as _cloudpickle
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads.exceptions import reduce_exception
from skyproxy.payloads.projects import project_by_value, reduce_decorated
from skyproxy.payloads.tensors import Refer, Row, TensorReader, TensorTable, is_strided_nested
from skyproxy.protocol.messages import Buffer
from skyproxy.runtime.sent_classes import complete, find_stand_in, reduce_type_parameter
from skyproxy.runtime.sources import SourceTable

PICKLE = "pickle"
PLAIN = "plain"
_HIDDEN_ATTRIBUTES = frozenset({"_sky", "_sky_storage", "_is_param"})


@dataclass(slots=True)
class Pickled:
    """An object as bytes.

    Attributes:
        pieces: the pickle or the plain data, its out-of-band buffers, then the bytes of storages; borrowed, see `keep`.
        tensors: a row for each tensor.
        bases: for each storage, which of its bytes the piece begins with.
        references: the tensors that went by reference, in the order of their rows.
        by_value: the name of a function that travels as code, if any does.
        keep: what owns the memory of the pieces.
        not_plain: what of it is not plain data, where plain data was asked for.
        is_simple: whether it is a pickle that `unpickle_simple` reads.
        form: `PICKLE`, or `PLAIN` for what `skyproxy.payloads.plain` has written.
    """

    pieces: list[Buffer]
    tensors: list[Row]
    bases: list[int]
    references: list[torch.Tensor]
    by_value: str = ""
    keep: list[object] = field(default_factory=list)
    form: str = PICKLE
    not_plain: str = ""
    is_simple: bool = False

    @property
    def tables(self) -> dict[str, object]:
        """The tables that must travel with the pieces."""
        tables: dict[str, object] = {"tensors": self.tensors, "bases": self.bases, "form": self.form}
        if self.is_simple:
            tables["simple"] = True
        return {**tables, "not_plain": self.not_plain} if self.not_plain else tables


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one object.

    Args:
        refer: for a tensor that goes by reference, what its row ends with; None for one that goes by value.
        refer_device: the same for a device that only one side knows; what stands for it.
        sends_projects: whether those of the user's own modules travel as code that a worker cannot import. What comes
            back names them: who sent a class gets that very class, and who can import one gets that.
        sends_lines: whether functions that travel as code bring the lines of their definitions.
    """

    def __init__(
        self,
        refer: Refer,
        refer_device: Callable[[torch.device], object] = lambda device: None,
        *,
        sends_projects: bool = False,
        sends_lines: bool = False,
    ) -> None:
        self._file = io.BytesIO()
        self._buffers: list[PickleBuffer] = []
        # Not a method of ours: the pickler would hold itself, and with it all that it has pickled, until Python's
        # collector comes. `append` returns None, which means out of band.
        super().__init__(self._file, protocol=5, buffer_callback=self._buffers.append)
        self._refer_device = refer_device
        self._sends_projects = sends_projects
        self._sends_lines = sends_lines
        self._sources = SourceTable()
        self._tensors = TensorTable(refer)
        self._by_value = ""

    def pickle(self, value: object) -> Pickled:
        """Pickle a value.

        Raises:
            Exception: something in `value` cannot be pickled; whatever its class raised.
        """
        with project_by_value() if self._sends_projects else contextlib.nullcontext():
            self.dump(value)
        contents = self._tensors.contents()
        pieces: list[Buffer] = [self._file.getvalue(), *(buffer.raw() for buffer in self._buffers)]
        pieces += [torch_codec.byte_view(content) for content in contents]
        keep = [self._buffers, contents]
        table = self._tensors
        return Pickled(pieces, table.rows, table.bases(), table.references, self._by_value, keep)

    def reducer_override(self, obj: object) -> Any:
        if is_wrapper(obj):
            return _reduce_wrapper(obj)
        if isinstance(obj, torch.Tensor) and is_strided_nested(obj):
            return _make_nested, (obj.detach().unbind(), obj.requires_grad)
        if isinstance(obj, types.ModuleType) and obj.__name__ == "torch.sky":
            # cloudpickle imports submodules that a function may mean, and takes `torch` beside `import skyproxy as sky`
            # for this one. Workers have the real devices, and no such module.
            return types.ModuleType, (obj.__name__,)
        if isinstance(obj, type) and obj.__module__ == "torch.sky" and obj.__name__ == "RemoteTensor":
            return getattr, (sys.modules["skyproxy"], obj.__name__)  # it is a public name in both modules
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # `torch.ops`, the lazy modules of transformers: cloudpickle knows plain modules only.
            if sys.modules.get(obj.__name__) is obj or sys.modules.get(getattr(obj.__spec__, "name", "")) is obj:
                return importlib.import_module, (obj.__name__,)
        if type(obj) is types.CodeType:
            return self._sources.reduce(obj, with_lines=self._sends_lines)
        special: Callable[[Any], object] | None = _SPECIAL.get(type(obj))
        if isinstance(obj, BaseException):
            special = reduce_exception
        elif isinstance(obj, torch._C.Generator):
            special = _reduce_generator
        if special is not None and (reduced := special(obj)) is not NotImplemented:
            return reduced
        if self._sends_projects and isinstance(obj, types.FunctionType):
            reduced = reduce_decorated(obj)
            if reduced is not NotImplemented:
                return reduced
        reduced = super().reducer_override(obj)
        if isinstance(obj, type):
            reduced = complete(obj, reduced)
        if reduced is not NotImplemented and not self._by_value and isinstance(obj, types.FunctionType):
            self._by_value = obj.__qualname__
        return reduced

    def persistent_id(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if type(obj) is torch.device:
            row = self._refer_device(obj)
            return None if row is None else ("device", row)
        return None

    def _tensor(self, tensor: torch.Tensor) -> object:
        known = self._tensors.knows(tensor)
        number = self._tensors.add(tensor)
        if number is None:
            return None
        if known:
            return "tensor", number, None
        state = {name: value for name, value in tensor.__dict__.items() if name not in _HIDDEN_ATTRIBUTES}
        return "tensor", number, state or None


def _reduce_cached_property(found: functools.cached_property[Any]) -> object:
    # On Python 3.11 it has a lock.
    return functools.cached_property, (found.func,), {"attrname": found.attrname, "__doc__": found.__doc__}


def _reduce_cached_function(function: functools._lru_cache_wrapper[Any]) -> object:
    found = _cloudpickle._lookup_module_and_qualname(function)
    if found is not None and not _cloudpickle._is_registered_pickle_by_value(found[0]):
        return NotImplemented  # the worker imports it
    parameters = function.cache_parameters()
    return _make_cached_function, (function.__wrapped__, parameters["maxsize"], parameters["typed"])


def _make_cached_function(function: Callable[..., object], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def _reduce_weak_mapping(
    mapping: weakref.WeakKeyDictionary[Any, Any] | weakref.WeakValueDictionary[Any, Any],
) -> object:
    return type(mapping), (dict(mapping),)


def _reduce_generator(generator: torch.Generator) -> object:
    # Its device may have another name there. A tensor with the state would stay on a worker, and has to be on the CPU.
    return _make_generator, (generator.device, generator.get_state().numpy().tobytes())


def _make_generator(device: torch.device, state: bytes) -> torch.Generator:
    return torch.Generator(device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _make_nested(rows: Sequence[torch.Tensor], requires_grad: bool) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows)).requires_grad_(requires_grad)


def _reduce_packed_sequence(sequence: torch.nn.utils.rnn.PackedSequence) -> object:
    data, batch_sizes, *indices = sequence
    return _make_packed_sequence, (type(sequence), data, batch_sizes.tolist(), *indices)


def _make_packed_sequence(kind: Any, data: torch.Tensor, batch_sizes: list[int], *indices: object) -> object:
    return kind(data, torch.tensor(batch_sizes, dtype=torch.int64, device="cpu"), *indices)  # whatever device data has


_SPECIAL: dict[type, Callable[[Any], object]] = {
    torch.nn.utils.rnn.PackedSequence: _reduce_packed_sequence,
    functools.cached_property: _reduce_cached_property,
    functools._lru_cache_wrapper: _reduce_cached_function,
    weakref.WeakKeyDictionary: _reduce_weak_mapping,  # `functools.singledispatch` has one
    weakref.WeakValueDictionary: _reduce_weak_mapping,
    **dict.fromkeys((typing.ParamSpec, typing.TypeVarTuple, typing.NewType), reduce_type_parameter),
}
"""Types that pickle and cloudpickle cannot write so that they can be read, though they are made of what can be."""


def pickle_simple(value: object) -> Pickled:
    """Pickle what consists of numbers, strings and containers of them as a `Pickler` would, in a tenth of the time."""
    return Pickled([pickle.dumps(value, protocol=5)], [], [], [], is_simple=True)


class _SimpleUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "complex"):  # pickle has no code for these numbers
            return complex
        raise ProtocolError(f"a simple value with {module}.{name} in it")


def unpickle_simple(piece: object) -> object:
    """The value of `pickle_simple`: no code of anybody's runs.

    Raises:
        ProtocolError: there is more in the bytes.
    """
    try:
        return _SimpleUnpickler(io.BytesIO(piece)).load()  # type: ignore[arg-type]
    except ProtocolError:
        raise
    except Exception as error:  # whatever is wrong with the bytes
        if raised_by_handler(error):
            raise
        raise ProtocolError(f"a simple value that cannot be read: {error!r:.200}") from error


def is_wrapper(value: object) -> bool:
    """Return whether this is a tensor made of other tensors, which can be taken apart and put together again."""
    return isinstance(value, torch.Tensor) and torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)


def _reduce_wrapper(tensor: Any) -> object:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return _rebuild_wrapper, (type(tensor), inner, context, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)


def _rebuild_wrapper(
    kind: Any, inner: dict[str, torch.Tensor], context: object, size: object, stride: object, requires_grad: bool
) -> object:
    return kind.__tensor_unflatten__(inner, context, size, stride).requires_grad_(requires_grad)


class Unpickler(pickle.Unpickler):
    """Makes the object again, by code that the pickle chooses: only of a peer that is trusted.

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
        bases: list[int] = tables["bases"]
        first = len(pieces) - len(bases)
        if first < 1:
            raise ProtocolError("a payload without a pickle")
        super().__init__(io.BytesIO(pieces[0]), buffers=pieces[1:first])
        self._tensors = TensorReader(tables["tensors"], bases, pieces[first:], referred)
        self._device = device

    def unpickle(self) -> Any:
        """Unpickle the value.

        Raises:
            Exception: a module or a class is missing here, or whatever the object's own code raises.
        """
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        return find_stand_in(module, name) or super().find_class(module, name)

    def persistent_load(self, name: Any) -> object:
        if name[0] == "device":
            return self._device(name[1])
        _, number, state = name
        tensor = self._tensors.get(number)
        if state:
            tensor.__dict__.update(state)
        return tensor
