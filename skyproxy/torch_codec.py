"""Between PyTorch's values and the protocol's: dtypes, layouts, devices, metadata, bytes, overload names.

Both sides use it, so that what one writes the other reads. Nothing here touches a socket.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from skyproxy.errors import UnsupportedOpError

DTYPE_NAMES: dict[torch.dtype, str] = {
    value: name
    for name, value in sorted(vars(torch).items(), key=lambda item: len(item[0]))
    if isinstance(value, torch.dtype)
}
"""Every dtype's longest name: "float32", not "float"."""
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
LAYOUT_NAMES: dict[torch.layout, str] = {
    value: name for name, value in vars(torch).items() if isinstance(value, torch.layout)
}
LAYOUTS: dict[str, torch.layout] = {name: layout for layout, name in LAYOUT_NAMES.items()}
MEMORY_FORMAT_NAMES: dict[torch.memory_format, str] = {
    value: name for name, value in vars(torch).items() if isinstance(value, torch.memory_format)
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {name: fmt for fmt, name in MEMORY_FORMAT_NAMES.items()}

# Tags of constants in a signature.
PLAIN = ""
DTYPE = "dtype"
LAYOUT = "layout"
MEMORY_FORMAT = "memory_format"
DEVICE = "device"

ALLOWED_NAMESPACES = frozenset({"aten", "torchvision", "quantized"})
"""Namespaces whose ops a client records as they are; which of them a worker takes is up to the worker."""
FORBIDDEN_OPS = frozenset(
    {
        "aten::from_file",  # reads the worker's files
        "aten::_record_function_enter",
        "aten::set_data",
    }
)
CHANGES_UNSAID = frozenset(
    {
        "aten::batch_norm",
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
        "aten::cudnn_batch_norm",
        "aten::instance_norm",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
    }
)
"""Ops that change running statistics without a word of it in their schemas."""


_SHAPING_TYPES = frozenset({"int", "SymInt", "List[int]", "List[SymInt]", "List[float]"})
_SHAPED_BY_ALL_NUMBERS = ("aten::arange", "aten::range", "aten::linspace", "aten::logspace")


def shapes_results(argument_type: object, op: str) -> bool:
    """Return whether the value of a number argument, and not its type alone, can change what the results look like.

    Args:
        argument_type: as the op's schema gives it.
        op: the op's name.
    """
    text = bare_type(argument_type)
    if text in _SHAPING_TYPES:
        return True
    return text in ("number", "float", "complex") and op.startswith(_SHAPED_BY_ALL_NUMBERS)


def bare_type(argument_type: object) -> str:
    """A schema's type without its "Optional"."""
    text = str(argument_type)
    while text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    return text


class Description(NamedTuple):
    """A tensor's form, without its values.

    Attributes:
        size: the shape.
        stride: in elements; empty for layouts that have none.
        offset: storage offset, in elements.
        dtype: the element type.
        layout: strided or a sparse layout.
        conjugate: whether the conjugate bit is set.
        negative: whether the negative bit is set.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    layout: torch.layout = torch.strided
    conjugate: bool = False
    negative: bool = False


def describe(tensor: torch.Tensor) -> Description:
    """The description of a real, fake or meta tensor."""
    if tensor.layout is not torch.strided:
        return Description(tuple(tensor.shape), (), 0, tensor.dtype, tensor.layout)
    return Description(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        torch.strided,
        tensor.is_conj(),
        tensor.is_neg(),
    )


NESTED = "nested"
"""Stands first in what describes a strided nested tensor; its dtype, and its components' places follow."""


def encode_nested(tensor: torch.Tensor) -> list[object]:
    """Describe a strided nested tensor."""
    parts = tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets()
    return [NESTED, DTYPE_NAMES[tensor.dtype], *(part.tolist() for part in parts)]


def encode_description(d: Description) -> list[object]:
    """A description as msgpack can carry it: `[dtype, size, stride, offset]`, and three more fields where unusual."""
    head = [DTYPE_NAMES[d.dtype], list(d.size), list(d.stride), d.offset]
    if d.layout is torch.strided and not d.conjugate and not d.negative:
        return head
    return [*head, LAYOUT_NAMES[d.layout], d.conjugate, d.negative]


def is_described(tensor: torch.Tensor, fields: object) -> bool:
    """Return True if a tensor is plain and looks like this, in a fraction of the time of decoding both; False leaves
    it to `decode_description` to tell whether they differ.
    """
    return (
        tensor.layout is torch.strided
        and fields == [DTYPE_NAMES.get(tensor.dtype), [*tensor.shape], [*tensor.stride()], tensor.storage_offset()]
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def decode_description(fields: Sequence[Any]) -> Description:
    """The reverse of `encode_description`.

    Raises:
        ValueError: the fields are not a description.
    """
    if len(fields) not in (4, 7):
        raise ValueError(f"a description has 4 or 7 fields, not {len(fields)}")
    dtype, size, stride, offset = fields[:4]
    if len(fields) == 4:
        return Description(tuple(size), tuple(stride), offset, DTYPES[dtype])
    return Description(tuple(size), tuple(stride), offset, DTYPES[dtype], LAYOUTS[fields[4]], fields[5], fields[6])


def encode_constant(value: object) -> list[object]:
    """A non-tensor argument as `[tag, value]`.

    Raises:
        UnsupportedOpError: nothing on the wire can stand for `value`.
    """
    if value is None or isinstance(value, bool | int | float | complex | str):
        return [PLAIN, value]
    if isinstance(value, torch.dtype):
        return [DTYPE, DTYPE_NAMES[value]]
    if isinstance(value, torch.layout):
        return [LAYOUT, LAYOUT_NAMES[value]]
    if isinstance(value, torch.memory_format):
        return [MEMORY_FORMAT, MEMORY_FORMAT_NAMES[value]]
    if isinstance(value, torch.device):
        return [DEVICE, [value.type, value.index]]
    if isinstance(value, list | tuple):
        parts = [encode_constant(item) for item in value]
        if all(tag == PLAIN for tag, _ in parts):
            return [PLAIN, [item for _, item in parts]]
    raise UnsupportedOpError(
        f"an argument of type {type(value).__name__} cannot be sent to a worker: {value!r:.80}. "
        "Operations take tensors, numbers, strings, dtypes, layouts and lists of these."
    )


def decode_constant(tag: str, value: Any) -> Any:
    """The reverse of `encode_constant`.

    Raises:
        KeyError, ValueError: unknown tag or name.
    """
    if tag == PLAIN:
        return value
    if tag == DTYPE:
        return DTYPES[value]
    if tag == LAYOUT:
        return LAYOUTS[value]
    if tag == MEMORY_FORMAT:
        return MEMORY_FORMATS[value]
    if tag == DEVICE:
        kind, index = value
        return torch.device(kind, index) if index is not None else torch.device(kind)
    raise ValueError(f"unknown constant tag {tag!r}")


# Tags of arguments inside a compiled graph, beside those of constants.
NODE = "node"
LIST = "list"

GRAPH_FUNCTIONS: dict[str, Callable[..., object]] = {
    f"python::{function.__name__}": function
    for function in (
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg),
        *(operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_),
        *(operator.or_, operator.getitem, max, min),
        *(torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int, torch.sym_ite),
    )
}
"""The Python functions that a compiled graph may call, on numbers and on tuples of results, beside the allowed ops."""


def encode_graph_argument(value: object, number_of: Callable[[object], int | None]) -> list[object]:
    """An argument of a node in a compiled graph, as `[tag, value]`.

    Args:
        value: a node, a constant, or a list of these.
        number_of: the number of a node; None for what is none.

    Raises:
        UnsupportedOpError: nothing on the wire can stand for `value`.
    """
    number = number_of(value)
    if number is not None:
        return [NODE, number]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [LIST, [encode_graph_argument(item, number_of) for item in value]]
    return encode_constant(value)


def decode_graph_argument(fields: Any, node: Callable[[int], object]) -> Any:
    """The reverse of `encode_graph_argument`.

    Raises:
        KeyError, ValueError, IndexError: the fields are not an argument.
    """
    tag, value = fields
    if tag == NODE:
        return node(value)
    if tag == LIST:
        return [decode_graph_argument(item, node) for item in value]
    return decode_constant(tag, value)


def storage_extent(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """Elements that a storage needs to hold this view, from its own start. 0 for empty tensors."""
    if 0 in size:
        return 0
    last = offset
    for n, s in zip(size, stride, strict=True):  # not `sum`: a generator takes twice as long
        last += (n - 1) * s
    return last + 1


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements lie in memory without gaps or overlap, in any order of dimensions."""
    if 0 in size:
        return True
    expected = 1
    for s, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if s != expected:
            return False
        expected *= n
    return True


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a fresh row-major tensor."""
    rank = len(size)
    if rank < 2:
        return (1,) * rank
    # Written out for the usual ranks: every new shape asks this several times.
    if rank == 4:
        _, b, c, d = size
        d = d or 1
        c = (c or 1) * d
        return ((b or 1) * c, c, d, 1)
    if rank == 3:
        _, b, c = size
        c = c or 1
        return ((b or 1) * c, c, 1)
    if rank == 2:
        return (size[1] or 1, 1)
    if rank == 5:
        _, b, c, d, e = size
        e = e or 1
        d = (d or 1) * e
        c = (c or 1) * d
        return ((b or 1) * c, c, d, e, 1)
    stride = [1] * rank
    running = 1
    for at in range(rank - 1, 0, -1):
        running *= size[at] or 1
        stride[at - 1] = running
    return tuple(stride)


def packed_stride(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides in which a tensor's values travel: its own where it is dense, else row-major."""
    return stride if is_dense(size, stride) else contiguous_stride(size)


def byte_count(description: Description) -> int:
    """Bytes of the values of a strided tensor."""
    return math.prod(description.size) * description.dtype.itemsize


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, in memory order; writable, and borrowed: keep the tensor alive.

    Works for every dtype, those that numpy lacks included.
    """
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def empty_packed(description: Description, *, pin: bool = False) -> torch.Tensor:
    """A fresh CPU tensor that receives the values of a tensor of this description."""
    stride = packed_stride(description.size, description.stride)
    return torch.empty_strided(description.size, stride, dtype=description.dtype, device="cpu", pin_memory=pin)
