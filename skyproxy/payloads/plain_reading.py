"""Plain data to values, see `skyproxy.payloads.plain`: what a client does with what a stranger sent."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import types
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgpack
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads import rebuilding
from skyproxy.payloads.plain import ATOMS, FACTORIES, HEAD, MAX_DEPTH, PATHS, Code
from skyproxy.payloads.rebuilding import UnknownClassError
from skyproxy.payloads.tensors import Row, TensorReader

T = TypeVar("T")


class PlainReader:
    """Reads one value; whatever the bytes say, only plain data comes of them.

    Args:
        pieces: as `memory_for` had them made.
        tables: what came with them.
        referred: for a row of a reference and its number among references, the tensor.
    """

    def __init__(
        self, pieces: Sequence[Any], tables: dict[str, Any], referred: Callable[[Row, int], torch.Tensor]
    ) -> None:
        first = len(pieces) - len(tables["bases"])
        if first < 1:
            raise ProtocolError("a payload without a document")
        self._buffers = pieces[1:first]
        self._tensors = TensorReader(tables["tensors"], tables["bases"], pieces[first:], referred)
        self._document = memoryview(pieces[0])
        self._codes: list[object] = []
        self._atoms: list[object] = []
        self._code = self._atom = 0
        self._made: list[object] = []
        self._depth = self._hashed = 0

    def read(self) -> Any:
        """Return the value.

        Raises:
            UnknownClassError: an object's class is not here; the exception says which.
            ProtocolError: this is not plain data.
        """
        try:
            (size,) = HEAD.unpack_from(self._document)
            self._codes = _flat(self._document[HEAD.size : HEAD.size + size])
            self._atoms = _flat(self._document[HEAD.size + size :])
            value = self.get()
        except (UnknownClassError, ProtocolError):
            raise
        except Exception as error:  # whatever is wrong with the bytes
            if raised_by_handler(error):
                raise
            raise ProtocolError(f"what the worker sent is not plain data: {error!r:.200}") from error
        if self._code != len(self._codes) or self._atom != len(self._atoms):
            raise ProtocolError("what the worker sent has more than one value")
        return value

    def get(self) -> Any:
        """Return the next value."""
        code = self.number()
        if code == Code.ATOM:
            return self.atom()
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH:
            raise ProtocolError("what the worker sent is nested too deeply")
        value = _READERS[code](self)
        self._depth -= 1
        return value

    def number(self) -> int:
        """Return the next number of the structure."""
        value = self._codes[self._code]
        if type(value) is not int or value < 0:
            raise ValueError("a number that is none")
        self._code += 1
        return value

    def atom(self) -> Any:
        """Return the next atom."""
        self._atom += 1
        return self._atoms[self._atom - 1]

    def atoms(self, count: int) -> list[Any]:
        """Return that many atoms."""
        end = self._atom + count
        if end > len(self._atoms):
            raise ValueError("atoms are missing")
        values = self._atoms[self._atom : end]
        self._atom = end
        return values

    def text(self) -> str:
        """Return the next atom, a string."""
        value = self.atom()
        if type(value) is not str:
            raise TypeError("something else in place of a string")
        return value

    def note(self, value: T) -> T:
        """Take note of a value that may be named again; return it."""
        self._made.append(value)
        return value

    def get_many(self, count: int) -> Iterable[object]:
        """Give that many values, one after another."""
        return (self.get() for _ in range(count))

    def get_hashed(self) -> object:
        """Return a value that is about to be hashed."""
        self._hashed += 1
        value = self.get()
        self._hashed -= 1
        return value

    def pairs(self, count: int) -> Iterable[tuple[Any, object]]:
        """Give that many keys and values."""
        return ((self.get_hashed(), self.get()) for _ in range(count))

    def named_again(self) -> object:
        """Return a value that was made before."""
        value = self._made[self.number()]
        if self._hashed and not isinstance(value, torch.Tensor):
            raise ValueError("a key by name")  # a tuple of tuples that repeats itself takes forever to hash
        return value

    def buffer(self, number: int) -> Any:
        """Return bytes that travelled beside the document."""
        return self._buffers[number]


def from_plain(
    pieces: Sequence[object], tables: dict[str, object], referred: Callable[[Row, int], torch.Tensor]
) -> object:
    """Return the value that `to_plain` has written; arguments and errors are those of `PlainReader`."""
    return PlainReader(pieces, tables, referred).read()


def _flat(content: memoryview) -> list[object]:
    """Single msgpack values, one behind another; lists, tables and extensions are refused before they take memory."""
    unpacker = msgpack.Unpacker(
        max_buffer_size=0,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
        max_str_len=len(content),
        max_bin_len=len(content),
        unicode_errors="surrogatepass",
    )
    unpacker.feed(bytes(content))
    values = list(unpacker)
    if unpacker.tell() != len(content):
        raise ValueError("half an atom")
    if not set(map(type, values)) <= ATOMS | {int}:
        raise ValueError("an atom that is none")
    return values


def _get_list(reader: PlainReader) -> list[object]:
    count, value = reader.number(), reader.note([])
    for item in reader.get_many(count):
        value.append(item)
    return value


def _get_tuple(reader: PlainReader) -> tuple[object, ...]:
    items: list[object] = []
    for item in reader.get_many(reader.number()):
        items.append(item)
    return reader.note(tuple(items))


def _get_atom_dict(reader: PlainReader) -> dict[object, object]:
    count = reader.number()
    value: dict[object, object] = reader.note({})
    keys = reader.atoms(count)
    value.update(zip(keys, reader.atoms(count), strict=True))
    return value


def _filling(make: Callable[[PlainReader], Any]) -> Callable[[PlainReader], object]:
    """The reader of a table that is made first, and filled then."""

    def read(reader: PlainReader) -> object:
        count, value = reader.number(), reader.note(make(reader))
        for key, item in reader.pairs(count):
            dict.__setitem__(value, key, item)
        return value

    return read


def _make_default_dict(reader: PlainReader) -> object:
    name = reader.atom()
    return collections.defaultdict(None if name is None else FACTORIES[name])


def _get_ordered_dict(reader: PlainReader) -> Any:
    count = reader.number()
    value: collections.OrderedDict[object, object] = reader.note(collections.OrderedDict())
    for key, item in reader.pairs(count):
        value[key] = item
    return value


def _get_state_dict(reader: PlainReader) -> object:
    value = _get_ordered_dict(reader)
    value._metadata = reader.get()
    return value


def _get_set(reader: PlainReader) -> set[object]:
    count = reader.number()
    value: set[object] = reader.note(set())
    for _ in range(count):
        value.add(reader.get_hashed())
    return value


def _get_frozenset(reader: PlainReader) -> object:
    return reader.note(frozenset([reader.get_hashed() for _ in range(reader.number())]))


def _get_deque(reader: PlainReader) -> object:
    count, most = reader.number(), reader.atom()
    value: collections.deque[object] = reader.note(collections.deque(maxlen=most))
    for item in reader.get_many(count):
        value.append(item)
    return value


def _numbers(reader: PlainReader) -> list[Any]:
    values = [reader.get(), reader.get(), reader.get()]
    if not all(value is None or type(value) is int for value in values):
        raise TypeError("something else in place of a number")
    return values


def _get_slice(reader: PlainReader) -> slice:
    return slice(*[reader.get(), reader.get(), reader.get()])


def _get_tensor(reader: PlainReader) -> torch.Tensor:
    tensor: torch.Tensor = reader.note(reader._tensors.get(reader.number()))
    for name, item in reader.pairs(reader.number()):
        if rebuilding.is_free_attribute(name):
            tensor.__dict__[name] = item
    return tensor


def _get_sparse(reader: PlainReader) -> Any:
    indices, values, size, coalesced = reader.get(), reader.get(), reader.get(), reader.get()
    tensor = torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    return reader.note(tensor._coalesced_(True) if coalesced is True and _is_sorted(indices, size) else tensor)


def _is_sorted(indices: torch.Tensor, size: Sequence[int]) -> bool:
    """Return whether indices are in order and differ, as those of a coalesced tensor."""
    place = torch.zeros(indices.shape[1], dtype=torch.int64, device="cpu")
    for row, length in zip(indices, size):
        place = place * length + row
    return bool((place[1:] > place[:-1]).all())


def _get_size(reader: PlainReader) -> torch.Size:
    return torch.Size(reader.atoms(reader.number()))


def _get_device(reader: PlainReader) -> torch.device:
    kind, index = reader.text(), reader.atom()
    return torch.device(kind) if index is None else torch.device(kind, index)


def _numpy_dtype(reader: PlainReader) -> Any:
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(reader.get())
    if dtype.hasobject:
        raise TypeError("an array of Python objects")
    return dtype


def _get_array(reader: PlainReader) -> object:
    import numpy

    content = reader.buffer(reader.number())
    shape = [reader.number() for _ in range(min(reader.number(), 64))]
    place = len(reader._made)
    reader.note(None)
    fortran = reader.atom()
    array = numpy.frombuffer(content, _numpy_dtype(reader)) if len(content) else None
    if array is None:
        array = numpy.empty(shape, _numpy_dtype_of_empty(reader, shape))
    else:
        array = array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
    reader._made[place] = array
    return array


def _numpy_dtype_of_empty(reader: PlainReader, shape: Sequence[int]) -> Any:
    dtype = _numpy_dtype(reader)
    if 0 not in shape and dtype.itemsize:
        raise ValueError("an array without its bytes")
    return dtype


def _get_numpy_scalar(reader: PlainReader) -> object:
    import numpy

    content = reader.atom()
    return numpy.frombuffer(content, _numpy_dtype(reader), 1)[0]


def _get_namespace(reader: PlainReader) -> types.SimpleNamespace:
    count, value = reader.number(), reader.note(types.SimpleNamespace())
    for name, item in reader.pairs(count):
        vars(value)[str(name)] = item
    return value


def _get_dataclass(reader: PlainReader) -> object:
    count, module, qualname = reader.number(), reader.text(), reader.text()
    value: object = reader.note(object.__new__(rebuilding.find_dataclass(module, qualname)))
    for _ in range(count):
        name = reader.text()
        rebuilding.set_field(value, name, reader.get())
    return value


def _get_named_tuple(reader: PlainReader) -> object:
    count, module, qualname = reader.number(), reader.text(), reader.text()
    return reader.note(rebuilding.make_named_tuple(module, qualname, list(reader.get_many(count))))


def _get_return_type(reader: PlainReader) -> object:
    count, name = reader.number(), reader.text()
    return reader.note(rebuilding.RETURN_TYPES[name](list(reader.get_many(count))))


def _get_exception(reader: PlainReader) -> Exception:
    module, qualname, text = reader.text(), reader.text(), reader.text()
    arguments = reader.get()
    state = dict(reader.pairs(reader.number()))
    kind = rebuilding.find_exception(module, qualname)
    try:
        error = rebuilding.build_exception(kind, arguments, state)
    except Exception as problem:
        if raised_by_handler(problem):
            raise
        raise UnknownClassError(f"{module}.{qualname}: {text:.200}") from problem
    return reader.note(error)


_READERS: dict[int, Callable[[PlainReader], object]] = {
    Code.REF: PlainReader.named_again,
    Code.LIST: _get_list,
    Code.ATOM_LIST: lambda reader: reader.note(reader.atoms(reader.number())),
    Code.TUPLE: _get_tuple,
    Code.ATOM_TUPLE: lambda reader: reader.note(tuple(reader.atoms(reader.number()))),
    Code.DICT: _filling(lambda reader: {}),
    Code.ATOM_DICT: _get_atom_dict,
    Code.SET: _get_set,
    Code.FROZENSET: _get_frozenset,
    Code.BIG_INT: lambda reader: int.from_bytes(reader.atom(), "little", signed=True),
    Code.COMPLEX: lambda reader: complex(*reader.atoms(2)),
    Code.BYTEARRAY: lambda reader: reader.note(bytearray(memoryview(reader.atom()))),
    Code.LARGE_BYTES: lambda reader: reader.note(bytes(memoryview(reader.buffer(reader.number())))),
    Code.LARGE_BYTEARRAY: lambda reader: reader.note(bytearray(memoryview(reader.buffer(reader.number())))),
    Code.ORDERED_DICT: _get_ordered_dict,
    Code.STATE_DICT: _get_state_dict,
    Code.DEFAULT_DICT: _filling(_make_default_dict),
    Code.COUNTER: _filling(lambda reader: collections.Counter()),
    Code.DEQUE: _get_deque,
    Code.RANGE: lambda reader: range(*_numbers(reader)),
    Code.SLICE: _get_slice,
    Code.ELLIPSIS: lambda reader: ...,
    Code.TENSOR: _get_tensor,
    Code.SPARSE: _get_sparse,
    Code.SIZE: _get_size,
    Code.DEVICE: _get_device,
    Code.DTYPE: lambda reader: torch_codec.DTYPES[reader.text()],
    Code.LAYOUT: lambda reader: torch_codec.LAYOUTS[reader.text()],
    Code.MEMORY_FORMAT: lambda reader: torch_codec.MEMORY_FORMATS[reader.text()],
    Code.ARRAY: _get_array,
    Code.NUMPY_SCALAR: _get_numpy_scalar,
    Code.NUMPY_DTYPE: _numpy_dtype,
    Code.DATE: lambda reader: datetime.date.fromordinal(reader.atom()),
    Code.DATETIME: lambda reader: datetime.datetime.fromisoformat(reader.text()).replace(fold=reader.atom()),
    Code.TIME: lambda reader: datetime.time.fromisoformat(reader.text()).replace(fold=reader.atom()),
    Code.TIMEDELTA: lambda reader: datetime.timedelta(*reader.atoms(3)),
    Code.DECIMAL: lambda reader: decimal.Decimal(reader.text()),
    Code.FRACTION: lambda reader: fractions.Fraction(*map(int, reader.text().split("/"))),
    Code.UUID: lambda reader: uuid.UUID(bytes=bytes(memoryview(reader.atom()))),
    Code.PATH: lambda reader: PATHS[reader.text()](reader.text()),
    Code.ENUM: lambda reader: rebuilding.find_member(reader.text(), reader.text(), reader.text()),
    Code.DATACLASS: _get_dataclass,
    Code.NAMESPACE: _get_namespace,
    Code.NAMED_TUPLE: _get_named_tuple,
    Code.RETURN_TYPE: _get_return_type,
    Code.EXCEPTION: _get_exception,
}
