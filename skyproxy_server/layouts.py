"""Tensors held against descriptions of them: what differs, and the strides and sizes that a client believes in."""

from __future__ import annotations

from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import InferenceMismatchError, ProtocolError
from skyproxy.torch_codec import Description
from skyproxy_server.argument_checks import MAX_DIMENSIONS, UNUSABLE_DTYPES
from skyproxy_server.failures import Failed
from skyproxy_server.foreign_memory import clear_from


def decode_all(described: Any) -> list[Description]:
    """Decode the descriptions of an EXPECT command.

    Raises:
        ProtocolError: they are malformed.
    """
    try:
        return [torch_codec.decode_description(fields) for fields in described]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"malformed descriptions: {described!r:.100}") from error


def check_packed(description: Description) -> None:
    """Refuse what cannot be uploaded.

    Raises:
        ProtocolError: no tensor looks like this, or none that can live on a worker: sizes that are none, too many
            dimensions, a layout that is not strided.
    """
    numbers = (*description.size, *description.stride)
    if len(description.size) != len(description.stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ProtocolError(f"no tensor has the sizes {description.size!r:.60} and strides {description.stride!r:.60}")
    if len(description.size) > MAX_DIMENSIONS or description.layout is not torch.strided:
        raise ProtocolError("an upload is a strided tensor of up to 64 dimensions")
    if description.dtype in UNUSABLE_DTYPES:
        raise ProtocolError(f"tensors of {description.dtype} cannot live on a worker")


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values on its device, in the strides in which they travel."""
    # Resolving closes gaps in the order of the strides, and clients count on row-major where there were some.
    dense = torch_codec.is_dense(tuple(tensor.shape), tensor.stride())
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if dense else tensor.contiguous()


def check_inputs(name: str, read: list[object], believed: list[Any]) -> None:
    """Hold what an op reads against what the client believes of it.

    Raises:
        InferenceMismatchError: they differ; then what the client inferred from it would rest on nothing.
    """
    tensors = [value for value in read if isinstance(value, torch.Tensor | Failed)]
    for tensor, fields in zip(tensors, believed, strict=False):
        if isinstance(tensor, torch.Tensor) and not torch_codec.is_described(tensor, fields):
            actual, expected = torch_codec.describe(tensor), torch_codec.decode_description(fields)
            if actual != expected:
                raise _mismatch(f"{name} was given", actual, expected)


def conform(slots: dict[int, object], slot: int, expected: Description, *, fresh: bool, written: bool) -> bool:
    """Give the value in a slot the strides that the client believes in; return False if it had them.

    Strides of dimensions of size one, and of empty tensors, address nothing: there the same memory is looked at in
    another way. For others, a fresh value is copied.

    Args:
        slots: the values, by slot.
        slot: where it is.
        expected: what the client believes of it.
        fresh: whether the op made the value, with a memory of its own.
        written: whether the op changed the value in place.

    Raises:
        InferenceMismatchError: it differs in more than that.
    """
    value = slots[slot]
    if not isinstance(value, torch.Tensor):
        raise _mismatch("the operation gave", None, expected)
    actual = torch_codec.describe(value)
    if actual == expected:
        return False
    if _same_but_idle_strides(actual, expected):
        place = expected.size, expected.stride, expected.offset
        if written:
            value.as_strided_(*place)
        else:
            slots[slot] = torch.as_strided(value, *place)
        return True
    if fresh and _differs_in_strides_only(actual, expected):
        slots[slot] = _restride(value, expected)
        return True
    raise _mismatch("the operation gave", actual, expected)


def restore_look(value: object, description: Description, *, allowed: bool) -> bool:
    """Make a tensor that a failed op was to resize or restride look as the client believes; return if it does.

    It keeps its memory, which grows if it must.

    Args:
        value: the tensor; anything else needs no change.
        description: what it should look like.
        allowed: whether it may be changed.
    """
    if not isinstance(value, torch.Tensor):
        return True  # poisoned anyway
    actual = torch_codec.describe(value)
    if actual == description or _same_but_idle_strides(actual, description):
        return True
    if not (allowed and _differs_in_place_only(actual, description)):
        return False
    extent = torch_codec.storage_extent(description.size, description.stride, description.offset)
    try:
        storage = value.untyped_storage()
        former = storage.nbytes()
        if extent * value.element_size() > former:
            storage.resize_(extent * value.element_size())
            clear_from(value, former)
        value.as_strided_(description.size, description.stride, description.offset)
    except Exception:
        return False
    return True


def needed_bytes(tensor: torch.Tensor) -> int:
    """The bytes that the storage of a strided tensor, nested or not, must have for its sizes."""
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size().tolist(), tensor._nested_tensor_strides().tolist()
        parts = zip(sizes, strides, tensor._nested_tensor_storage_offsets().tolist(), strict=True)
        extents = [torch_codec.storage_extent(tuple(size), tuple(stride), offset) for size, stride, offset in parts]
        return max(extents, default=0) * tensor.element_size()
    extent = torch_codec.storage_extent(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return extent * tensor.element_size()


def _mismatch(what: str, actual: Description | None, expected: Description) -> InferenceMismatchError:
    return InferenceMismatchError(
        f"{what} {actual}, but the client had inferred {expected}. This is a bug of skyproxy; please report it. "
        "Until then, compute this operation on the CPU: x.cpu()"
    )


def _differs_in_strides_only(actual: Description, expected: Description) -> bool:
    bits = actual.conjugate or actual.negative
    return not bits and actual._replace(stride=(), offset=0) == expected._replace(stride=(), offset=0)


def _differs_in_place_only(actual: Description, expected: Description) -> bool:
    """Tell two strided tensors of one kind: one can be made of the other's memory."""
    return actual.layout is torch.strided and actual._replace(size=(), stride=(), offset=0) == expected._replace(
        size=(), stride=(), offset=0
    )


def _same_but_idle_strides(actual: Description, expected: Description) -> bool:
    """Tell two descriptions that address the same elements of a memory.

    Strides of dimensions of size one, and all of an empty tensor's, address nothing.
    """
    if 0 in actual.size:
        return actual._replace(stride=(), offset=0) == expected._replace(stride=(), offset=0)
    if actual._replace(stride=()) != expected._replace(stride=()):
        return False
    return all(n == 1 or a == e for n, a, e in zip(actual.size, actual.stride, expected.stride, strict=True))


def _restride(tensor: torch.Tensor, description: Description) -> torch.Tensor:
    size, stride, offset, dtype = description[:4]
    if offset:
        memory = torch.zeros(torch_codec.storage_extent(size, stride, offset), dtype=dtype, device=tensor.device)
        target = memory.as_strided(size, stride, offset)
    else:
        target = torch.empty_strided(size, stride, dtype=dtype, device=tensor.device)
    return target.copy_(tensor)
