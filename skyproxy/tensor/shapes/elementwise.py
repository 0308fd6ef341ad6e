"""Sizes, strides and dtypes of elementwise results, as PyTorch's `TensorIterator` computes them.

A port of `TensorIteratorBase::build` (aten/src/ATen/TensorIterator.cpp) and of `at::native::result_type`: strides of
dimensions of size one, ambiguous orders and empty tensors come out as they do there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from skyproxy.tensor.core.metadata import Meta
from skyproxy.torch_codec import contiguous_stride

Ints = tuple[int, ...]
_MOST = 1 << 63
NUMBERS = frozenset({int, float, bool, complex})


def broadcast_sizes(sizes: Sequence[Ints]) -> Ints | None:
    """The common size of operands; None where they do not broadcast."""
    first = sizes[0]
    if sizes.count(first) == len(sizes):
        return first
    rank = max(map(len, sizes))
    result = [1] * rank
    for size in sizes:
        at = rank - len(size)
        for n in size:
            if n != 1:
                if result[at] == 1:
                    result[at] = n
                elif result[at] != n:
                    return None
            at += 1
    return tuple(result)


def is_contiguous(size: Ints, stride: Ints) -> bool:
    """Return whether the elements lie in row-major order without gaps, whatever the strides of idle dimensions."""
    if 0 in size:
        return True
    expected = 1
    for at in range(len(size) - 1, -1, -1):
        n = size[at]
        if n != 1:
            if stride[at] != expected:
                return False
            expected *= n
    return True


def channels_last_stride(size: Ints) -> Ints:
    """The strides of a fresh tensor of four (or five) dimensions in its channels-last format."""
    stride = [0] * len(size)
    running = 1
    for at in (1, *range(len(size) - 1, 1, -1), 0):
        stride[at] = running
        running *= size[at]
    return tuple(stride)


def is_channels_last(size: Ints, stride: Ints) -> bool:
    """Return whether four dimensions lie in channels-last order, whatever the strides of idle dimensions."""
    if len(size) != 4:
        return False
    expected = 1
    for at in (1, 3, 2, 0):
        if size[at] != 1:
            if stride[at] != expected:
                return False
            expected *= size[at]
    return True


def is_dense(size: Ints, stride: Ints) -> bool:
    """Return whether C++ flags the tensor as dense and without overlap."""
    if is_contiguous(size, stride):
        return True
    expected = 1
    for s, n in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if s != expected:
            return False
        expected *= n
    return True


def elementwise_stride(size: Ints, operands: list[tuple[Ints, Ints]], with_numbers: bool = False) -> Ints:
    """The strides of a fresh elementwise result.

    Args:
        size: the common size.
        operands: size and stride of each operand that has dimensions.
        with_numbers: whether there are others, too.
    """
    usual = contiguous_stride(size)
    if operands.count((size, usual)) == len(operands) and (not with_numbers or 0 not in size):
        return usual
    if _all_descend(size, operands):
        return usual
    if not with_numbers and all(own == size for own, _ in operands):
        if all(is_contiguous(size, stride) for _, stride in operands):
            return usual
        if len(size) == 4 and all(is_channels_last(size, stride) for _, stride in operands):
            return channels_last_stride(size)
        first = operands[0][1]
        if all(stride == first for _, stride in operands) and is_dense(size, first):
            return first
    rank = len(size)
    # What is row-major by itself does not ask for another order, however it is broadcast: of two dimensions, the outer
    # one has the larger stride, or the inner one has one element, or none of it is there.
    if rank < 2 or (0 not in size and all(stride == contiguous_stride(own) for own, stride in operands)):
        return usual
    rows = []
    for own, stride in operands:
        if own == size:
            rows.append(stride)
        else:
            extra = rank - len(own)
            kept = tuple(0 if n == 1 and size[extra + i] != 1 else stride[i] for i, n in enumerate(own))
            rows.append((0,) * extra + kept)
    order = _order(size, rows)
    if order == list(range(rank - 1, -1, -1)):
        return usual
    result = [0] * rank
    running = 1
    for dim in order:
        result[dim] = running
        running *= size[dim]
    return tuple(result)


def _all_descend(size: Ints, operands: list[tuple[Ints, Ints]]) -> bool:
    """Return whether strides of every operand get smaller from dimension to dimension: most slices, and broadcasting.

    No two dimensions are exchanged then. Dimensions that are broadcast do not count; other zeros take more thought.
    """
    rank = len(size)
    for own, stride in operands:
        last = _MOST
        if own == size:
            for step in stride:
                if not 0 < step < last:
                    return False
                last = step
        else:
            at = rank - len(own)
            for n, step in zip(own, stride):
                if step and (n != 1 or size[at] == 1):
                    if step >= last:
                        return False
                    last = step
                at += 1
    return True


def _order(size: Ints, rows: list[Ints]) -> list[int]:
    """The dimensions from the fastest to the slowest: an insertion sort, for some comparisons are ambiguous."""
    order = list(range(len(size) - 1, -1, -1))
    for start in range(1, len(size)):
        right = start
        for left in range(start - 1, -1, -1):
            found = _comes_after(order[left], order[right], size, rows)
            if found > 0:
                order[left], order[right] = order[right], order[left]
                right = left
            elif found < 0:
                break
    return order


def _comes_after(dim0: int, dim1: int, size: Ints, rows: list[Ints]) -> int:
    for row in rows:
        stride0, stride1 = row[dim0], row[dim1]
        if stride0 == 0 or stride1 == 0:
            continue
        if stride0 != stride1:
            return -1 if stride0 < stride1 else 1
        if size[dim0] > size[dim1]:
            return 1
    return 0


def preserved_stride(size: Ints, stride: Ints) -> Ints:
    """The strides of a copy that preserves the format: dense ones stay, gaps and overlaps are closed."""
    return stride if is_dense(size, stride) else elementwise_stride(size, [(size, stride)])


# --- dtypes ----------------------------------------------------------------------------------------------------------


@cache
def promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype that two dtypes promote to."""
    return torch.promote_types(a, b)


def _number_dtype(kind: type) -> torch.dtype:
    if kind is bool:
        return torch.bool
    if kind is int:
        return torch.int64
    default = torch.get_default_dtype()
    return default if kind is float else default.to_complex()


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if lower.is_complex:
        return lower  # without promotion, which unsigned integers have none of
    if higher is torch.bool or lower.is_floating_point:
        return promoted(higher, lower)
    return higher


def result_dtype(operands: Sequence[object]) -> torch.dtype:
    """The dtype that tensors (as `Meta`) and numbers have in common, as `torch.result_type` tells it."""
    if len(operands) == 2:  # the usual cases
        first, second = operands
        if type(first) is Meta:
            dtype = first.dtype
            if type(second) is Meta:
                if second.dtype is dtype:
                    return dtype
            elif dtype.is_floating_point and type(second) is not complex:
                return dtype
    found: list[torch.dtype | None] = [None, None, None]
    for a in operands:
        if type(a) is Meta:
            rank, dtype = 0 if a.size else 1, a.dtype
        else:
            rank, dtype = 2, _number_dtype(type(a))
        known = found[rank]
        found[rank] = dtype if known is None or known is dtype else promoted(known, dtype)
    result = _combine(found[0], _combine(found[1], found[2]))
    assert result is not None
    return result


def fractional(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a function of fractions is computed."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def elementwise(operands: Sequence[object], common: torch.dtype | None = None) -> tuple[Ints, Ints] | None:
    """Size and strides of an elementwise result; None where that takes more thought.

    Args:
        operands: the tensors, as `Meta`, and numbers that PyTorch makes tensors of.
        common: the dtype that operands are converted to before, if they are.
    """
    pairs: list[tuple[Ints, Ints]] = []
    sizes: list[Ints] = []
    with_numbers = False
    for a in operands:
        if type(a) is Meta:
            if not a.plain:
                return None
            size, stride = a.size, a.stride
            if not size:
                with_numbers = True
                continue
            if common is not None and a.dtype is not common:
                stride = preserved_stride(size, stride)
            pairs.append((size, stride))
            sizes.append(size)
        elif type(a) in NUMBERS:
            with_numbers = True
        else:
            return None
    if not pairs:
        return (), ()
    common_size = broadcast_sizes(sizes)
    return None if common_size is None else (common_size, elementwise_stride(common_size, pairs, with_numbers))
