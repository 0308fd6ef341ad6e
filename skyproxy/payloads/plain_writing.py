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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads import rebuilding
from skyproxy.payloads.exceptions import parts_of
from skyproxy.payloads.pickling import Pickled
from skyproxy.payloads.plain import ATOMS, FACTORIES, PATHS, Code, NotPlainError
from skyproxy.payloads.plain_writer import MAX_INT, MIN_INT, OUT_OF_BAND_BYTES, PlainWriter, WriteFunction
from skyproxy.payloads.tensors import Refer


def _has_only_atoms(values: Iterable[object]) -> bool:
    kinds = set(map(type, values))
    if int in kinds:
        kinds.discard(int)
        numbers = [value for value in values if type(value) is int]
        if min(numbers) < MIN_INT or max(numbers) > MAX_INT:
            return False
    if bytes in kinds and any(type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES for value in values):
        return False
    return kinds <= ATOMS


def _put_list(writer: PlainWriter, value: list[object]) -> None:
    writer.note(value)
    if _has_only_atoms(value):
        writer.begin(Code.ATOM_LIST, len(value))
        writer.atom(*value)
    else:
        writer.begin(Code.LIST, len(value))
        writer.parts(value)


def _put_tuple(writer: PlainWriter, value: tuple[object, ...]) -> None:
    if _has_only_atoms(value):
        writer.begin(Code.ATOM_TUPLE, len(value))
        writer.atom(*value)
        writer.note(value)
    else:
        writer.begin(Code.TUPLE, len(value))
        writer.write_parts(value, lambda: writer.parts(value))


def _put_dict(writer: PlainWriter, value: dict[object, object]) -> None:
    writer.note(value)
    if _has_only_atoms(value.keys()) and _has_only_atoms(value.values()):
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
    writer.write_parts(value, lambda: writer.hashed_parts(value))


def _put_bytes(writer: PlainWriter, value: bytes) -> None:
    writer.begin(Code.LARGE_BYTES, writer.buffer(value))
    writer.note(value)


def _put_bytearray(writer: PlainWriter, value: bytearray) -> None:
    writer.note(value)
    if len(value) >= OUT_OF_BAND_BYTES:
        writer.begin(Code.LARGE_BYTEARRAY, writer.buffer(value))
    else:
        writer.begin(Code.BYTEARRAY)
        writer.atom(bytes(value))


def _put_ordered_dict(writer: PlainWriter, value: collections.OrderedDict[object, object]) -> None:
    metadata = vars(value).get("_metadata")  # of a state dict
    if set(vars(value)) - {"_metadata"}:
        raise NotPlainError("OrderedDict with attributes", writer.path)
    writer.note(value)
    writer.begin(Code.ORDERED_DICT if metadata is None else Code.STATE_DICT, len(value))
    writer.pairs(value.items())
    if metadata is not None:
        writer.part(metadata, "._metadata")


def _put_default_dict(writer: PlainWriter, value: collections.defaultdict[object, object]) -> None:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise NotPlainError("defaultdict with a function", writer.path)
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
    number = writer.tensors.add(value)
    if number is None:
        if value.layout is torch.sparse_coo and type(value) is torch.Tensor:
            writer.begin(Code.SPARSE)
            parts = value._indices(), value._values(), tuple(value.shape), value.is_coalesced()
            writer.write_parts(value, lambda: writer.parts(parts))
            return
        raise NotPlainError(f"{rebuilding.full_name(type(value))} of the layout {value.layout}", writer.path)
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
        raise NotPlainError(f"combination of members of {rebuilding.full_name(type(value))}", writer.path)
    writer.begin(Code.ENUM)
    writer.atom(*rebuilding.name_of(type(value)), value.name)


def _put_dataclass(writer: PlainWriter, value: object) -> None:
    kind = type(value)
    names = rebuilding.field_names(kind)
    extra = set(getattr(value, "__dict__", ())) - set(names)
    if extra or not rebuilding.may_be_the_programs(kind):
        raise NotPlainError(rebuilding.full_name(kind), writer.path)
    present = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    writer.note(value)
    writer.begin(Code.DATACLASS, len(present))
    writer.atom(*rebuilding.name_of(kind))
    for name, item in present:
        writer.atom(name)
        writer.part(item, f".{name}")


def _put_named_tuple(writer: PlainWriter, value: tuple[object, ...]) -> None:
    if not rebuilding.may_be_the_programs(type(value)):
        raise NotPlainError(rebuilding.full_name(type(value)), writer.path)
    writer.begin(Code.NAMED_TUPLE, len(value))
    writer.atom(*rebuilding.name_of(type(value)))
    writer.write_parts(value, lambda: writer.parts(value))


def _put_return_type(writer: PlainWriter, value: tuple[object, ...]) -> None:
    writer.begin(Code.RETURN_TYPE, len(value))
    writer.atom(type(value).__name__)
    writer.write_parts(value, lambda: writer.parts(value))


def _put_exception(writer: PlainWriter, error: BaseException) -> None:
    """Whatever is plain of it: its class, so that it can be caught, and its text, come in any case."""
    try:
        arguments, state = parts_of(error)
    except Exception as problem:  # code of the user's class
        if raised_by_handler(problem):
            raise
        arguments, state = error.args, {}
    if isinstance(error, BaseExceptionGroup):
        arguments = (error.message, list(error.exceptions))
    writer.begin(Code.EXCEPTION)
    writer.atom(*rebuilding.name_of(type(error)), _text_of(error))

    def write() -> None:
        if not writer.attempt(lambda: writer.part(arguments, ".args")):
            writer.part((_text_of(error),), ".args")
        writer.attributes(state)

    writer.write_parts(error, write)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # code of the user's class
        if raised_by_handler(problem):
            raise
        return ""


def _put_array(writer: PlainWriter, value: Any) -> None:
    import numpy

    if value.dtype.hasobject:
        raise NotPlainError("numpy array of Python objects", writer.path)
    if not value.dtype.itemsize:
        raise NotPlainError("numpy array of elements without bytes", writer.path)
    fortran = bool(value.flags.f_contiguous and not value.flags.c_contiguous)
    content = numpy.ascontiguousarray(value.T if fortran else value).reshape(-1).view(numpy.uint8)
    writer.note(value)
    writer.begin(Code.ARRAY, writer.buffer(content.data), value.ndim, *value.shape)
    writer.atom(fortran)
    writer.part(_dtype_fields(value.dtype), ".dtype")


def _put_numpy_scalar(writer: PlainWriter, value: Any) -> None:
    if value.dtype.hasobject or not value.dtype.itemsize:
        raise NotPlainError(rebuilding.full_name(type(value)), writer.path)
    writer.begin(Code.NUMPY_SCALAR)
    writer.atom(value.tobytes())
    writer.part(_dtype_fields(value.dtype), ".dtype")


def _put_numpy_dtype(writer: PlainWriter, value: Any) -> None:
    if value.hasobject:
        raise NotPlainError("numpy dtype of Python objects", writer.path)
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


def _atom_writer(code: Code, atoms: Callable[[Any], Sequence[object]]) -> Callable[[PlainWriter, object], None]:
    """The writer of a value that is a few atoms."""

    def put(writer: PlainWriter, value: object) -> None:
        writer.begin(code)
        writer.atom(*atoms(value))

    return put


def _put_datetime(writer: PlainWriter, value: datetime.datetime | datetime.time) -> None:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise NotPlainError(rebuilding.full_name(type(value.tzinfo)), writer.path)
    writer.begin(Code.DATETIME if type(value) is datetime.datetime else Code.TIME)
    writer.atom(value.isoformat(), value.fold)


_WRITERS: dict[type, WriteFunction] = {
    list: _put_list,
    tuple: _put_tuple,
    dict: _put_dict,
    set: _put_set,
    frozenset: _put_frozenset,
    bytes: _put_bytes,
    bytearray: _put_bytearray,
    complex: _atom_writer(Code.COMPLEX, lambda value: (value.real, value.imag)),
    collections.OrderedDict: _put_ordered_dict,
    collections.defaultdict: _put_default_dict,
    collections.Counter: _put_counter,
    collections.deque: _put_deque,
    range: _put_range,
    slice: _put_slice,
    types.EllipsisType: _atom_writer(Code.ELLIPSIS, lambda value: ()),
    types.SimpleNamespace: _put_namespace,
    torch.Tensor: _put_tensor,
    torch.nn.Parameter: _put_tensor,
    torch.Size: _put_size,
    torch.device: _put_device,
    torch.dtype: _atom_writer(Code.DTYPE, lambda value: (torch_codec.DTYPE_NAMES[value],)),
    torch.layout: _atom_writer(Code.LAYOUT, lambda value: (torch_codec.LAYOUT_NAMES[value],)),
    torch.memory_format: _atom_writer(Code.MEMORY_FORMAT, lambda value: (torch_codec.MEMORY_FORMAT_NAMES[value],)),
    datetime.date: _atom_writer(Code.DATE, lambda value: (value.toordinal(),)),
    datetime.datetime: _put_datetime,
    datetime.time: _put_datetime,
    datetime.timedelta: _atom_writer(Code.TIMEDELTA, lambda value: (value.days, value.seconds, value.microseconds)),
    decimal.Decimal: _atom_writer(Code.DECIMAL, lambda value: (str(value),)),
    fractions.Fraction: _atom_writer(Code.FRACTION, lambda value: (str(value),)),
    uuid.UUID: _atom_writer(Code.UUID, lambda value: (value.bytes,)),
    **dict.fromkeys(PATHS.values(), _atom_writer(Code.PATH, lambda value: (type(value).__name__, str(value)))),
    **dict.fromkeys(rebuilding.RETURN_TYPES.values(), _put_return_type),
}


def write_as(known: type, kind: type) -> None:
    """Write values of a class as those of another one: what only one side knows comes back as the other's own.

    Args:
        known: a class that is plain data.
        kind: the one whose values are written so, from now on.
    """
    _WRITERS[kind] = _WRITERS[known]


def _find_function(value: object) -> WriteFunction | None:
    """Return the function that writes values of this one's class; None where they are not plain data."""
    kind = type(value)
    if kind in _WRITERS:
        return _WRITERS[kind]
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


def to_plain(value: object, refer: Refer) -> Pickled:
    """Return a value as plain bytes.

    Args:
        value: of tensors, numbers, strings, bytes, None, arrays, containers of these, and records and exceptions.
        refer: for a tensor that goes by reference, what its row ends with; None for one that goes by value.

    Raises:
        NotPlainError: something in it is not plain data.
    """
    return PlainWriter(refer, _find_function).write(value)
