"""Values to plain data, see `skyproxy.payloads.plain`: what a worker does for a client that does not trust it."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack
import torch

from skyproxy import torch_codec
from skyproxy.payloads import rebuilding
from skyproxy.payloads.pickling import PLAIN, Pickled
from skyproxy.payloads.plain import ATOMS, FACTORIES, HEAD, MAX_DEPTH, PATHS, Code, NotPlainError
from skyproxy.payloads.tensors import Refer, TensorTable
from skyproxy.protocol.messages import Buffer

_OUT_OF_BAND_BYTES = 64 << 10
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


class PlainWriter:
    """Writes one value.

    Args:
        refer: for a tensor that goes by reference, what its row ends with; None for one that goes by value.
    """

    def __init__(self, refer: Refer) -> None:
        self._tensors = TensorTable(refer)
        self._codes: list[int] = []
        self._atoms: list[object] = []
        self._buffers: list[Buffer] = []
        self._known: dict[int, int] = {}
        self._count = 0
        self._keep: list[object] = []
        self._open: set[int] = set()
        self._path: list[str] = []
        self._hashed = 0

    def write(self, value: object) -> Pickled:
        """Return the value as bytes.

        Raises:
            NotPlainError: something in it is not plain data.
        """
        try:
            self.put(value)
        except NotPlainError:
            raise
        except RecursionError:
            raise NotPlainError("value that is nested too deeply", self._path[:20]) from None
        except Exception as error:  # code of the value's class
            raise NotPlainError(f"{rebuilding.full_name(type(value))} ({error!r:.80})", self._path) from error
        document = self._document()
        contents = self._tensors.contents()
        pieces: list[Buffer] = [document, *self._buffers, *map(torch_codec.byte_view, contents)]
        table = self._tensors
        keep = [self._keep, self._buffers, contents]
        return Pickled(pieces, table.rows, table.bases(), table.references, "", keep, PLAIN)

    def _document(self) -> bytes:
        codes, atoms = _pack(self._codes), _pack(self._atoms)
        return HEAD.pack(len(codes)) + codes + atoms

    # --- values

    def put(self, value: Any) -> None:
        """Write a value behind those that were written."""
        kind = type(value)
        if kind in ATOMS and not (kind is bytes and len(value) >= _OUT_OF_BAND_BYTES):
            self._codes.append(Code.ATOM)
            self._atoms.append(value)
        elif kind is int:
            self._put_int(value)
        elif id(value) in self._known and not (self._hashed and not isinstance(value, torch.Tensor)):
            self._codes += (Code.REF, self._known[id(value)])
        else:
            if id(value) in self._open:
                raise NotPlainError(f"{kind.__qualname__} that contains itself", self._path)
            if len(self._path) >= MAX_DEPTH:
                raise NotPlainError("value that is nested too deeply", self._path[:20])
            self._keep.append(value)
            writer = _WRITERS.get(kind) or _writer_of_kin(value)
            if writer is None:
                raise NotPlainError(rebuilding.full_name(kind), self._path)
            writer(self, value)

    def _put_int(self, value: int) -> None:
        if _MIN_INT <= value <= _MAX_INT:
            self._codes.append(Code.ATOM)
            self._atoms.append(value)
        else:
            self._codes.append(Code.BIG_INT)
            self._atoms.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def note(self, value: object) -> None:
        """Give a value its number, by which it is named when it comes again. Called where the reader has made it."""
        self._known[id(value)] = self._count
        self._count += 1

    def begin(self, code: Code, *numbers: int) -> None:
        """Write what follows is made into."""
        self._codes += (code, *numbers)

    def atom(self, *values: object) -> None:
        """Write atoms that belong to the code before."""
        self._atoms += values

    def buffer(self, content: Buffer) -> int:
        """Have bytes travel beside the document; return their number."""
        self._buffers.append(content)
        return len(self._buffers) - 1

    def part(self, value: object, place: str) -> None:
        """Write a part of the present value; `place` leads there, as in an expression."""
        self._path.append(place)
        try:
            self.put(value)
        finally:
            self._path.pop()

    def attempt(self, write: Callable[[], object]) -> bool:
        """Return whether `write` has written only what is plain data; if not, nothing of it is left."""
        codes, atoms, buffers, count = len(self._codes), len(self._atoms), len(self._buffers), self._count
        try:
            write()
        except Exception:  # also what code of the value's class raises
            del self._codes[codes:], self._atoms[atoms:], self._buffers[buffers:]
            self._count = count
            self._known = {name: number for name, number in self._known.items() if number < count}
            return False
        return True

    def attributes(self, items: Mapping[str, object]) -> None:
        """Write those of a value's attributes that are plain data, and how many they are."""
        place, written = len(self._codes), 0
        self._codes.append(0)
        for name, item in items.items():
            if type(name) is str and self.attempt(partial(self.pairs, [(name, item)])):
                written += 1
        self._codes[place] = written

    def parts(self, values: Iterable[object]) -> None:
        """Write the items of a sequence."""
        for index, value in enumerate(values):
            self.part(value, f"[{index}]")

    def pairs(self, items: Iterable[tuple[object, object]]) -> None:
        """Write keys and values."""
        for key, value in items:
            self.hashed_part(key)
            self.part(value, f"[{key!r:.40}]" if type(key) in (str, int) else "[...]")

    def hashed_part(self, value: object) -> None:
        """Write a value that is hashed where it arrives: in full, for a tuple of tuples would take for ever."""
        self._hashed += 1
        try:
            self.part(value, "(a key)")
        finally:
            self._hashed -= 1

    def hashed_parts(self, values: Iterable[object]) -> None:
        """Write the items of a set."""
        for value in values:
            self.hashed_part(value)

    def inside(self, value: object, write: Callable[[], object]) -> None:
        """Write the parts of a value that can only be made once they are there."""
        self._open.add(id(value))
        try:
            write()
        finally:
            self._open.discard(id(value))
        self.note(value)


def _pack(values: Sequence[object]) -> bytes:
    """The values as a run of msgpack: as a list, without what would say that it is one."""
    packed = msgpack.packb(values, unicode_errors="surrogatepass")
    count = len(values)
    return packed[1 if count < 16 else 3 if count < 1 << 16 else 5 :]  # type: ignore[no-any-return]


def to_plain(value: object, refer: Refer) -> Pickled:
    """Return a value as plain bytes.

    Args:
        value: of tensors, numbers, strings, bytes, None, arrays, containers of these, and records and exceptions.
        refer: for a tensor that goes by reference, what its row ends with; None for one that goes by value.

    Raises:
        NotPlainError: something in it is not plain data.
    """
    return PlainWriter(refer).write(value)


def _only_atoms(values: Iterable[object]) -> bool:
    kinds = set(map(type, values))
    if int in kinds:
        kinds.discard(int)
        numbers = [value for value in values if type(value) is int]
        if min(numbers) < _MIN_INT or max(numbers) > _MAX_INT:
            return False
    if bytes in kinds and any(type(value) is bytes and len(value) >= _OUT_OF_BAND_BYTES for value in values):
        return False
    return kinds <= ATOMS


def _put_list(writer: PlainWriter, value: list[object]) -> None:
    writer.note(value)
    if _only_atoms(value):
        writer.begin(Code.ATOM_LIST, len(value))
        writer.atom(*value)
    else:
        writer.begin(Code.LIST, len(value))
        writer.parts(value)


def _put_tuple(writer: PlainWriter, value: tuple[object, ...]) -> None:
    if _only_atoms(value):
        writer.begin(Code.ATOM_TUPLE, len(value))
        writer.atom(*value)
        writer.note(value)
    else:
        writer.begin(Code.TUPLE, len(value))
        writer.inside(value, lambda: writer.parts(value))


def _put_dict(writer: PlainWriter, value: dict[object, object]) -> None:
    writer.note(value)
    if _only_atoms(value.keys()) and _only_atoms(value.values()):
        writer.begin(Code.ATOM_DICT, len(value))
        writer.atom(*value.keys())
        writer.atom(*value.values())
    else:
        writer.begin(Code.DICT, len(value))
        writer.pairs(value.items())


def _put_set(writer: PlainWriter, value: set[object]) -> None:
    writer.note(value)
    writer.begin(Code.SET, len(value))
    writer.hashed_parts(value)


def _put_frozenset(writer: PlainWriter, value: frozenset[object]) -> None:
    writer.begin(Code.FROZENSET, len(value))
    writer.inside(value, lambda: writer.hashed_parts(value))


def _put_bytes(writer: PlainWriter, value: bytes) -> None:
    writer.begin(Code.LARGE_BYTES, writer.buffer(value))
    writer.note(value)


def _put_bytearray(writer: PlainWriter, value: bytearray) -> None:
    writer.note(value)
    if len(value) >= _OUT_OF_BAND_BYTES:
        writer.begin(Code.LARGE_BYTEARRAY, writer.buffer(value))
    else:
        writer.begin(Code.BYTEARRAY)
        writer.atom(bytes(value))


def _put_ordered_dict(writer: PlainWriter, value: collections.OrderedDict[object, object]) -> None:
    metadata = vars(value).get("_metadata")  # of a state dict
    if set(vars(value)) - {"_metadata"}:
        raise NotPlainError("OrderedDict with attributes", writer._path)
    writer.note(value)
    writer.begin(Code.ORDERED_DICT if metadata is None else Code.STATE_DICT, len(value))
    writer.pairs(value.items())
    if metadata is not None:
        writer.part(metadata, "._metadata")


def _put_default_dict(writer: PlainWriter, value: collections.defaultdict[object, object]) -> None:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise NotPlainError("defaultdict with a function", writer._path)
    writer.note(value)
    writer.begin(Code.DEFAULT_DICT, len(value))
    writer.atom(name)
    writer.pairs(value.items())


def _put_counter(writer: PlainWriter, value: collections.Counter[object]) -> None:
    writer.note(value)
    writer.begin(Code.COUNTER, len(value))
    writer.pairs(value.items())


def _put_deque(writer: PlainWriter, value: collections.deque[object]) -> None:
    writer.note(value)
    writer.begin(Code.DEQUE, len(value))
    writer.atom(value.maxlen)
    writer.parts(value)


def _put_slice(writer: PlainWriter, value: slice) -> None:
    writer.begin(Code.SLICE)
    for part in (value.start, value.stop, value.step):
        writer.part(part, ".start")


def _put_range(writer: PlainWriter, value: range) -> None:
    writer.begin(Code.RANGE)
    for part in (value.start, value.stop, value.step):
        writer.part(part, ".start")


def _put_tensor(writer: PlainWriter, value: torch.Tensor) -> None:
    number = writer._tensors.add(value)
    if number is None:
        if value.layout is torch.sparse_coo and type(value) is torch.Tensor:
            writer.begin(Code.SPARSE)
            parts = value._indices(), value._values(), tuple(value.shape), value.is_coalesced()
            writer.inside(value, lambda: writer.parts(parts))
            return
        raise NotPlainError(f"{rebuilding.full_name(type(value))} of the layout {value.layout}", writer._path)
    writer.note(value)
    writer.begin(Code.TENSOR, number)
    writer.attributes({name: item for name, item in vars(value).items() if rebuilding.is_free_attribute(name)})


def _put_size(writer: PlainWriter, value: torch.Size) -> None:
    writer.begin(Code.SIZE, len(value))
    writer.atom(*map(int, value))


def _put_device(writer: PlainWriter, value: torch.device) -> None:
    writer.begin(Code.DEVICE)
    writer.atom(value.type, value.index)


def _put_enum(writer: PlainWriter, value: enum.Enum) -> None:
    if type(value).__members__.get(value.name) is not value:
        raise NotPlainError(f"combination of members of {rebuilding.full_name(type(value))}", writer._path)
    writer.begin(Code.ENUM)
    writer.atom(*rebuilding.name_of(type(value)), value.name)


def _put_dataclass(writer: PlainWriter, value: object) -> None:
    kind = type(value)
    names = rebuilding.field_names(kind)
    extra = set(getattr(value, "__dict__", ())) - set(names)
    if extra or not rebuilding.may_be_the_programs(kind):
        raise NotPlainError(rebuilding.full_name(kind), writer._path)
    present = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    writer.note(value)
    writer.begin(Code.DATACLASS, len(present))
    writer.atom(*rebuilding.name_of(kind))
    for name, item in present:
        writer.atom(name)
        writer.part(item, f".{name}")


def _put_named_tuple(writer: PlainWriter, value: tuple[object, ...]) -> None:
    if not rebuilding.may_be_the_programs(type(value)):
        raise NotPlainError(rebuilding.full_name(type(value)), writer._path)
    writer.begin(Code.NAMED_TUPLE, len(value))
    writer.atom(*rebuilding.name_of(type(value)))
    writer.inside(value, lambda: writer.parts(value))


def _put_return_type(writer: PlainWriter, value: tuple[object, ...]) -> None:
    writer.begin(Code.RETURN_TYPE, len(value))
    writer.atom(type(value).__name__)
    writer.inside(value, lambda: writer.parts(value))


def _put_exception(writer: PlainWriter, error: BaseException) -> None:
    """Whatever is plain of it: its class, so that it can be caught, and its text, come in any case."""
    try:
        arguments, state = rebuilding.parts_of(error)
    except Exception:  # code of the user's class
        arguments, state = error.args, {}
    if isinstance(error, BaseExceptionGroup):
        arguments = (error.message, list(error.exceptions))
    writer.begin(Code.EXCEPTION)
    writer.atom(*rebuilding.name_of(type(error)), _text_of(error))

    def write() -> None:
        if not writer.attempt(lambda: writer.part(arguments, ".args")):
            writer.part((_text_of(error),), ".args")
        writer.attributes(state)

    writer.inside(error, write)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # code of the user's class
        return ""


def _put_array(writer: PlainWriter, value: Any) -> None:
    import numpy

    if value.dtype.hasobject:
        raise NotPlainError("numpy array of Python objects", writer._path)
    if not value.dtype.itemsize:
        raise NotPlainError("numpy array of elements without bytes", writer._path)
    fortran = bool(value.flags.f_contiguous and not value.flags.c_contiguous)
    content = numpy.ascontiguousarray(value.T if fortran else value).reshape(-1).view(numpy.uint8)
    writer.note(value)
    writer.begin(Code.ARRAY, writer.buffer(content.data), value.ndim, *value.shape)
    writer.atom(fortran)
    writer.part(_dtype_fields(value.dtype), ".dtype")


def _put_numpy_scalar(writer: PlainWriter, value: Any) -> None:
    if value.dtype.hasobject or not value.dtype.itemsize:
        raise NotPlainError(rebuilding.full_name(type(value)), writer._path)
    writer.begin(Code.NUMPY_SCALAR)
    writer.atom(value.tobytes())
    writer.part(_dtype_fields(value.dtype), ".dtype")


def _put_numpy_dtype(writer: PlainWriter, value: Any) -> None:
    if value.hasobject:
        raise NotPlainError("numpy dtype of Python objects", writer._path)
    writer.begin(Code.NUMPY_DTYPE)
    writer.part(_dtype_fields(value), ".descr")


def _dtype_fields(dtype: Any) -> object:
    import numpy

    fields = numpy.lib.format.dtype_to_descr(dtype)
    if numpy.lib.format.descr_to_dtype(fields) != dtype:
        raise NotPlainError(f"numpy array of the dtype {dtype}", ())
    return fields


def _put_namespace(writer: PlainWriter, value: types.SimpleNamespace) -> None:
    writer.note(value)
    writer.begin(Code.NAMESPACE, len(vars(value)))
    writer.pairs(vars(value).items())


def _single(code: Code, atoms: Callable[[Any], Sequence[object]]) -> Callable[[PlainWriter, object], None]:
    """The writer of a value that is a few atoms."""

    def put(writer: PlainWriter, value: object) -> None:
        writer.begin(code)
        writer.atom(*atoms(value))

    return put


def _put_datetime(writer: PlainWriter, value: datetime.datetime | datetime.time) -> None:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise NotPlainError(rebuilding.full_name(type(value.tzinfo)), writer._path)
    writer.begin(Code.DATETIME if type(value) is datetime.datetime else Code.TIME)
    writer.atom(value.isoformat(), value.fold)


_WRITERS: dict[type, Callable[[PlainWriter, Any], None]] = {
    list: _put_list,
    tuple: _put_tuple,
    dict: _put_dict,
    set: _put_set,
    frozenset: _put_frozenset,
    bytes: _put_bytes,
    bytearray: _put_bytearray,
    complex: _single(Code.COMPLEX, lambda value: (value.real, value.imag)),
    collections.OrderedDict: _put_ordered_dict,
    collections.defaultdict: _put_default_dict,
    collections.Counter: _put_counter,
    collections.deque: _put_deque,
    range: _put_range,
    slice: _put_slice,
    types.EllipsisType: _single(Code.ELLIPSIS, lambda value: ()),
    types.SimpleNamespace: _put_namespace,
    torch.Tensor: _put_tensor,
    torch.nn.Parameter: _put_tensor,
    torch.Size: _put_size,
    torch.device: _put_device,
    torch.dtype: _single(Code.DTYPE, lambda value: (torch_codec.DTYPE_NAMES[value],)),
    torch.layout: _single(Code.LAYOUT, lambda value: (torch_codec.LAYOUT_NAMES[value],)),
    torch.memory_format: _single(Code.MEMORY_FORMAT, lambda value: (torch_codec.MEMORY_FORMAT_NAMES[value],)),
    datetime.date: _single(Code.DATE, lambda value: (value.toordinal(),)),
    datetime.datetime: _put_datetime,
    datetime.time: _put_datetime,
    datetime.timedelta: _single(Code.TIMEDELTA, lambda value: (value.days, value.seconds, value.microseconds)),
    decimal.Decimal: _single(Code.DECIMAL, lambda value: (str(value),)),
    fractions.Fraction: _single(Code.FRACTION, lambda value: (str(value),)),
    uuid.UUID: _single(Code.UUID, lambda value: (value.bytes,)),
    **dict.fromkeys(PATHS.values(), _single(Code.PATH, lambda value: (type(value).__name__, str(value)))),
    **dict.fromkeys(rebuilding.RETURN_TYPES.values(), _put_return_type),
}


def write_as(known: type, kind: type) -> None:
    """Write values of a class as those of another one: what only one side knows comes back as the other's own.

    Args:
        known: a class that is plain data.
        kind: the one whose values are written so, from now on.
    """
    _WRITERS[kind] = _WRITERS[known]


def _writer_of_kin(value: object) -> Callable[[PlainWriter, Any], None] | None:
    """Return the function that writes a value whose very class is not in the table."""
    kind = type(value)
    if isinstance(value, BaseException):
        return _put_exception
    if isinstance(value, enum.Enum):
        return _put_enum
    if rebuilding.is_named_tuple(kind):
        return _put_named_tuple
    if kind in PATHS.values():
        return _WRITERS[kind]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if kind is numpy.ndarray:
            return _put_array
        if isinstance(value, numpy.generic):
            return _put_numpy_scalar
        if isinstance(value, numpy.dtype):
            return _put_numpy_dtype
    return _put_dataclass if rebuilding.is_record(kind) else None
