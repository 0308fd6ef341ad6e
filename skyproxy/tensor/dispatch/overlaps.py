"""Memory that an operation writes and reads at once: most kernels refuse that, so the worker is asked, at the line.

What overlaps how is told as ATen's `MemoryOverlap.cpp` tells it: nothing of tensors with gaps. Which kernels refuse it
only the worker says: what takes elements one by one takes a tensor that is read where it is written, others may not.
Looks alone tell most operations, once, that they have nothing to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import torch

from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch.op_info import OpInfo

_strided = torch.strided


def may_overlap(info: OpInfo, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether tensors that look so would be in each other's way if they shared their memory.

    Args:
        info: the operation, which writes into arguments.
        args: its arguments, with looks in the place of tensors.
        kwargs: the same by name.
    """
    by_element = info.is_pointwise or info.for_each
    return any(
        _collide(target, other, by_element)
        for target, other in _pairs(info, args, kwargs)
        if isinstance(target, Meta) and isinstance(other, Meta)
    )


def overlaps(info: OpInfo, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether tensors of a call share their memory, and are in each other's way there."""
    if not kwargs and info.changes == 1:
        own = args[0]._sky  # type: ignore[attr-defined]  # it is written, hence a remote tensor
        root = own.root or own
        for a in args[1:]:
            kind = type(a)
            if kind is list or (kind is RemoteTensor and (a._sky.root or a._sky) is root):  # type: ignore[attr-defined]
                break
        else:  # the usual case
            return False
    by_element = info.is_pointwise or info.for_each
    for target, other in _pairs(info, args, kwargs):
        if type(target) is RemoteTensor and type(other) is RemoteTensor:
            first, second = target._sky, other._sky
            if first is second:
                if not by_element:
                    return True
            elif (first.root or first) is (second.root or second) and _collide(first.meta, second.meta, by_element):
                return True
    return False


def _pairs(info: OpInfo, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[object, object]]:
    """Each tensor that is written with each that is read; in operations for each item of lists, of the same place."""
    named = [*zip(info.names, args, strict=False), *kwargs.items()]
    read = [a for name, a in named if name not in info.writes]
    for name, target in named:
        if name not in info.writes or (type(target) is list and not info.for_each):
            continue
        for a in read:
            if type(target) is list:
                # A tensor with a memory of its own, as the factor of an optimizer has it, is not searched for.
                if type(a) is list:
                    yield from zip(target, a, strict=False)
                elif isinstance(a, Meta) or (type(a) is RemoteTensor and a._sky.root is not None):
                    yield from zip(target, repeat(a), strict=False)
            elif type(a) is list:
                yield from zip(repeat(target), a, strict=False)
            else:
                yield target, a


def _collide(target: Meta, other: Meta, by_element: bool) -> bool:
    """Return whether these two views of one memory overlap, other than by being the same, if that is all right."""
    if target is other:  # which may be one tensor; kernels refuse that even where it has no elements
        return not by_element
    if target.layout is not _strided or other.layout is not _strided or 0 in (*target.size, *other.size):
        return False
    if not (_is_dense(target) and _is_dense(other)):
        return False  # as far as ATen knows, which finds that too hard to tell
    begin, end = _range(target)
    other_begin, other_end = _range(other)
    if begin == other_begin and end == other_end and target.stride == other.stride and by_element:
        return False
    return begin < other_end and other_begin < end


def _range(meta: Meta) -> tuple[int, int]:
    """The first byte of a dense tensor in its memory, and the first behind it."""
    width = meta.dtype.itemsize
    count = 1
    for size in meta.size:
        count *= size
    return meta.offset * width, (meta.offset + count) * width


def _is_dense(meta: Meta) -> bool:
    """Return whether the elements lie in memory without gaps, in any order, and none upon another."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(meta.stride, meta.size, strict=False) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


__all__ = ["may_overlap", "overlaps"]
