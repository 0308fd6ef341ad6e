"""Shape rules for what selects and moves: indexing, gathering, sorting, turning.

See `shapes.rules`; this module completes its table. Most rules answer for row-major tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, check_extent, plain_meta
from skyproxy.tensor.shapes.elementwise import broadcast_sizes
from skyproxy.tensor.shapes.in_place import RULES
from skyproxy.tensor.shapes.kernel_strides import in_kernel_order, indexed_stride
from skyproxy.tensor.shapes.rules import (
    FLOATS,
    INTEGERS,
    TARGET,
    RuleResult,
    keeps_target,
    preserved,
    rule,
)
from skyproxy.tensor.shapes.strides import suggests_channels_last
from skyproxy.torch_codec import contiguous_stride

Ints = tuple[int, ...]
_COMPLEX = frozenset({torch.complex64, torch.complex128})
DTYPES = FLOATS | INTEGERS | {torch.bool}


def are_row_major(*tensors: object) -> bool:
    """Return whether all are row-major tensors that are not empty."""
    if not plain(*tensors):
        return False
    for t in tensors:  # noqa: SIM110  # as in `plain`
        if t.stride != contiguous_stride(t.size):  # type: ignore[attr-defined]  # it is a `Meta`
            return False
    return True


def fresh(size: Ints, dtype: torch.dtype) -> tuple[Meta, None]:
    """A row-major result."""
    return plain_meta(size, dtype), None


def plain(*tensors: object) -> bool:
    """Return whether all are tensors that are not empty, in any order of memory, with gaps or repeated elements."""
    for t in tensors:  # noqa: SIM110  # most rules ask this, and a generator takes twice as long
        if type(t) is not Meta or not t.plain or 0 in t.size or t.dtype not in DTYPES:
            return False
    return True


def _lies_in_order(x: Meta) -> bool:
    """Return whether elements come in row-major order, be it with gaps; of a plain tensor that is not empty."""
    if x.stride == contiguous_stride(x.size):
        return True
    return all(s > 0 for s in x.stride) and all(
        a >= b * n for a, b, n in zip(x.stride, x.stride[1:], x.size[1:], strict=False)
    )


def axis_of(x: Meta, dim: int) -> int | None:
    """The dimension as a number from zero; None where there is no such one."""
    rank = len(x.size)
    return dim % rank if rank and type(dim) is int and -rank <= dim < rank else None


_INTEGER = frozenset({int})


def are_integers(values: Sequence[object]) -> bool:
    """Return whether it is a list of integers."""
    return type(values) in (list, tuple) and _INTEGER.issuperset(map(type, values))


# --- indexing --------------------------------------------------------------------------------------------------------


_POSITIONS = frozenset({torch.int64, torch.int32})


def _indexed_size(x: Meta, indices: Sequence[Meta | None]) -> Ints | None:
    """The size of `x[indices]` for tensors of integers among the indices; None where it is not that plain."""
    places: list[int] = []
    sizes: list[Ints] = []
    for at, index in enumerate(indices):
        if index is not None:
            if not plain(index) or index.dtype not in _POSITIONS:
                return None
            places.append(at)
            sizes.append(index.size)
    if not places or len(indices) > len(x.size):
        return None
    size = broadcast_sizes(sizes)
    if size is None:
        return None
    first, last = places[0], places[-1]
    if last - first == len(places) - 1:
        return (*x.size[:first], *size, *x.size[last + 1 :])
    return (*size, *[n for at, n in enumerate(x.size) if at not in places])


def _has_elements(x: Meta) -> bool:
    """Return whether a tensor, of complex numbers too, is not empty."""
    return x.plain and 0 not in x.size and (x.dtype in DTYPES or x.dtype in _COMPLEX)


@rule("index.Tensor")
def _index(x: Meta, indices: Sequence[Meta | None]) -> RuleResult:
    size = _indexed_size(x, indices) if _has_elements(x) else None
    if size is None or (_lies_in_order(x) and are_row_major(*filter(None, indices))):
        return None if size is None else [fresh(size, x.dtype)]
    stride = indexed_stride(x, indices)
    return None if stride is None else [(plain_meta(size, x.dtype, stride), None)]


def _can_be_put(x: Meta, indices: Sequence[Meta | None], values: Meta) -> bool:
    size = _indexed_size(x, indices) if _has_elements(x) and values.plain and x.dtype is values.dtype else None
    return size is not None and broadcast_sizes((size, values.size)) == size


@rule("index_put")
def _index_put(x: Meta, indices: Sequence[Meta | None], values: Meta, accumulate: bool = False) -> RuleResult:
    fits = _can_be_put(x, indices, values) or (plain(x) and _can_be_put_by_mask(x, indices, values))
    look = preserved(x) if fits else None
    return None if look is None else [(look, None)]


@rule("index_put_")
def _index_put_in_place(x: Meta, indices: Sequence[Meta | None], values: Meta, accumulate: bool = False) -> RuleResult:
    fits = _can_be_put(x, indices, values) or _can_be_put_by_mask(x, indices, values)
    return TARGET if fits and keeps_target(x) else None


def _can_be_put_by_mask(x: Meta, indices: Sequence[Meta | None], values: Meta) -> bool:
    """Return whether a mask of the first dimensions chooses what one value is put into, however much that is."""
    mask = indices[0] if len(indices) == 1 else None
    if type(mask) is not Meta or mask.dtype is not torch.bool or not mask.plain or not mask.size:
        return False
    if x.size[: len(mask.size)] != mask.size or values.dtype is not x.dtype or not values.plain:
        return False
    # How many rows the mask chooses, the worker sees.
    return values.size == () or (len(values.size) > 0 and values.size[1:] == x.size[len(mask.size) :])


def _fits(x: Meta, dim: int, index: Meta) -> bool:
    at = axis_of(x, dim)
    fits = at is not None and x.plain and index.plain and 0 not in x.size and 0 not in index.size
    fits = fits and index.dtype is torch.int64 and len(index.size) == len(x.size) and x.dtype in DTYPES
    return fits and all(n <= m for i, (n, m) in enumerate(zip(index.size, x.size, strict=True)) if i != at)


@rule("gather")
def _gather(x: Meta, dim: int, index: Meta, *, sparse_grad: bool = False) -> RuleResult:
    return [fresh(index.size, x.dtype)] if _fits(x, dim, index) else None


@rule("scatter.src scatter_add scatter_reduce.two")
def _scatter(x: Meta, dim: int, index: Meta, source: Meta, *how: object, **options: object) -> RuleResult:
    fits = _fits(x, dim, index) and source.plain and source.dtype is x.dtype and len(source.size) == len(x.size)
    fits = fits and all(n <= m for n, m in zip(index.size, source.size, strict=True))
    return [fresh(x.size, x.dtype)] if fits else None


@rule("scatter.reduce")
def _scatter_combined(x: Meta, dim: int, index: Meta, source: Meta, *, reduce: object) -> RuleResult:
    return _scatter(x, dim, index, source) if x.dtype in FLOATS else None


@rule("index_reduce")
def _index_reduce(
    x: Meta, dim: int, index: Meta, source: Meta, how: object, *, include_self: object = True
) -> RuleResult:
    return _index_add(x, dim, index, source) if x.dtype in FLOATS else None


@rule("scatter.value")
def _scatter_number(x: Meta, dim: int, index: Meta, value: object) -> RuleResult:
    kinds = (int, float, bool) if x.dtype in FLOATS else (bool,) if x.dtype is torch.bool else (int, bool)
    return [fresh(x.size, x.dtype)] if type(value) in kinds and _fits(x, dim, index) else None


@rule("index_fill.int_Scalar index_fill.int_Tensor")
def _index_fill(x: Meta, dim: int, index: Meta, value: object) -> RuleResult:
    kinds = (int, float, bool) if x.dtype in FLOATS else (bool,) if x.dtype is torch.bool else (int, bool)
    fits = plain(x, index) and index.dtype is torch.int64 and len(index.size) == 1 and axis_of(x, dim) is not None
    known = value.size == () and value.dtype is x.dtype and value.plain if type(value) is Meta else type(value) in kinds
    look = preserved(x) if fits and known else None
    return None if look is None else [(look, None)]


@rule("put")
def _put(x: Meta, index: Meta, source: Meta, accumulate: object = False) -> RuleResult:
    fits = plain(x, source) and index.plain and index.dtype is torch.int64 and source.dtype is x.dtype
    look = preserved(x) if fits and math.prod(index.size) == math.prod(source.size) else None
    return None if look is None else [(look, None)]


@rule("renorm")
def _renorm(x: Meta, order: object, dim: int, most: object) -> RuleResult:
    fits = plain(x) and x.dtype in FLOATS and len(x.size) > 1 and axis_of(x, dim) is not None
    return [fresh(x.size, x.dtype)] if fits and type(order) in (int, float) and order > 0 else None  # type: ignore[operator]


@rule("masked_scatter")
def _masked_scatter(x: Meta, mask: Meta, source: Meta) -> RuleResult:
    fits = are_row_major(x, mask) and source.plain and mask.dtype is torch.bool and source.dtype is x.dtype
    return [fresh(x.size, x.dtype)] if fits and mask.size == x.size else None


@rule("isin.Tensor_Tensor")
def _isin(x: Meta, among: Meta, **options: object) -> RuleResult:
    fits = x.plain and are_row_major(among) and x.dtype is among.dtype and x.dtype is not torch.bool
    return [fresh(x.size, torch.bool)] if fits else None


@rule("isin.Tensor_Scalar")
def _isin_number(x: Meta, number: object, **options: object) -> RuleResult:
    fits = are_row_major(x) and type(number) in (int, float) and x.dtype is not torch.bool
    return [fresh(x.size, torch.bool)] if fits else None


@rule("searchsorted.Scalar")
def _search_number(
    sequence: Meta, value: object, *, out_int32: bool = False, right: bool = False, **rest: object
) -> RuleResult:
    fits = are_row_major(sequence) and sequence.dtype in FLOATS and len(sequence.size) == 1
    if not fits or type(value) not in (int, float) or any(option is not None for option in rest.values()):
        return None
    return [fresh((), torch.int32 if out_int32 else torch.int64)]


@rule("searchsorted.Tensor")
def _search(
    sequence: Meta, values: Meta, *, out_int32: bool = False, right: bool = False, **rest: object
) -> RuleResult:
    fits = (
        are_row_major(sequence, values) and sequence.dtype is values.dtype is not torch.bool and len(sequence.size) > 0
    )
    fits = fits and (len(sequence.size) == 1 or sequence.size[:-1] == values.size[:-1])
    if not fits or any(option is not None for option in rest.values()):
        return None
    return [fresh(values.size, torch.int32 if out_int32 else torch.int64)]


@rule("slice_backward select_backward")
def _selection_backward(gradient: Meta, size: Sequence[int], *rest: object) -> RuleResult:
    return [fresh(tuple(size), gradient.dtype)] if are_integers(size) and gradient.plain else None


@rule("embedding_dense_backward")
def _embedding_backward(gradient: Meta, indices: Meta, count: int, *rest: object) -> RuleResult:
    fits = plain(gradient) and are_row_major(indices) and gradient.dtype in FLOATS
    fits = fits and gradient.size[:-1] == indices.size
    return [fresh((count, gradient.size[-1]), gradient.dtype)] if fits and type(count) is int else None


# --- order -----------------------------------------------------------------------------------------------------------


@rule("sort")
def _sort(x: Meta, dim: int = -1, descending: bool = False) -> RuleResult:
    look = preserved(x) if plain(x) and axis_of(x, dim) is not None else None
    return None if look is None else [(look, None), (plain_meta(look.size, torch.int64, look.stride), None)]


@rule("sort.stable")
def _stable_sort(x: Meta, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> RuleResult:
    return _sort(x, dim, descending)


@rule("argsort")
def _argsort(x: Meta, dim: int = -1, descending: bool = False) -> RuleResult:
    return [fresh(x.size, torch.int64)] if are_row_major(x) and axis_of(x, dim) is not None else None


@rule("topk")
def _topk(x: Meta, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> RuleResult:
    at = axis_of(x, dim)
    if at is None or not plain(x) or x.dtype is torch.bool or type(k) is not int or not 0 < k <= x.size[at]:
        return None
    size = (*x.size[:at], k, *x.size[at + 1 :])
    return [fresh(size, x.dtype), fresh(size, torch.int64)]


@rule("flip")
def _flip(x: Meta, dims: Sequence[int]) -> RuleResult:
    places = [axis_of(x, dim) for dim in dims]
    look = preserved(x) if plain(x) and None not in places and len(set(places)) == len(places) else None
    return None if look is None else [(look, None)]


@rule("roll")
def _roll(x: Meta, shifts: Sequence[int], dims: Sequence[int] = ()) -> RuleResult:
    places = [axis_of(x, dim) for dim in dims]
    fits = plain(x) and are_integers(shifts) and None not in places
    fits = fits and (len(shifts) == len(places) > 0 or (not places and len(shifts) == 1))
    return in_kernel_order("roll", [plain_meta(x.size, x.dtype)], x, shifts, dims) if fits else None


@rule("rot90")
def _rot90(x: Meta, k: int = 1, dims: Sequence[int] = (0, 1)) -> RuleResult:
    places = [axis_of(x, dim) for dim in dims]
    fits = plain(x) and type(k) is int and len(places) == 2 and None not in places and places[0] != places[1]
    if not fits:
        return None
    size = list(x.size)
    if k % 2:
        first, second = places
        size[first], size[second] = size[second], size[first]  # type: ignore[index]  # none of them is None
    return in_kernel_order("rot90", [plain_meta(tuple(size), x.dtype)], x, k, dims)


@rule("repeat_interleave.Tensor")
def _positions(repeats: Meta, *, output_size: int | None = None) -> RuleResult:
    fits = plain(repeats) and repeats.dtype in (torch.int64, torch.int32) and len(repeats.size) == 1
    return [fresh((output_size,), repeats.dtype)] if fits and type(output_size) is int else None


@rule("narrow_copy")
def _narrow_copy(x: Meta, dim: int, start: object, length: object) -> RuleResult:
    at = axis_of(x, dim)
    if at is None or not plain(x) or type(start) is not int or type(length) is not int:
        return None
    if start < 0 or length < 1 or start + length > x.size[at]:
        return None
    return [fresh((*x.size[:at], length, *x.size[at + 1 :]), x.dtype)]


@rule("repeat")
def _repeat(x: Meta, repeats: Sequence[int]) -> RuleResult:
    extra = len(repeats) - len(x.size)
    if not plain(x) or extra < 0 or not all(type(n) is int and n > 0 for n in repeats):
        return None
    return [fresh(tuple(n * m for n, m in zip(repeats, (1,) * extra + x.size, strict=True)), x.dtype)]


def suggests_row_major(x: Meta) -> bool:
    """Return whether PyTorch sees no channels-last format in a tensor."""
    return not suggests_channels_last(x.size, x.stride)


# --- like another one ------------------------------------------------------------------------------------------------


@rule("new_zeros new_ones new_empty")
def _new(
    x: Meta,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    **rest: object,
) -> RuleResult:
    chosen = x.dtype if dtype is None else dtype
    known = chosen in DTYPES or chosen in _COMPLEX
    fits = x.plain and layout in (None, torch.strided) and not rest.get("pin_memory") and known
    return [fresh(tuple(size), chosen)] if fits and are_integers(size) and min(size, default=0) >= 0 else None


@rule("new_full")
def _new_full(x: Meta, size: Sequence[int], value: object, **options: object) -> RuleResult:
    return _new(x, size, **options) if type(value) in (int, float, bool) else None


@rule("new_empty_strided")
def _new_strided(
    x: Meta, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **options: object
) -> RuleResult:
    found = _new(x, size, dtype=dtype, **options)
    if found is None or not are_integers(stride) or len(stride) != len(size):
        return None
    chosen = x.dtype if dtype is None else dtype
    check_extent(size, stride, chosen)
    return [(plain_meta(tuple(size), chosen, tuple(stride)), None)] if min(stride, default=0) >= 0 else None


@rule("index_add index_copy")
def _index_add(x: Meta, dim: int, index: Meta, source: Meta, *, alpha: object = 1) -> RuleResult:
    at = axis_of(x, dim)
    fits = (
        at is not None
        and are_row_major(x, index)
        and source.plain
        and index.dtype is torch.int64
        and len(index.size) == 1
    )
    if not fits or source.dtype is not x.dtype or at is None:
        return None
    if type(alpha) is not int and not (type(alpha) is float and x.dtype in FLOATS):
        return None
    return [fresh(x.size, x.dtype)] if source.size == (*x.size[:at], *index.size, *x.size[at + 1 :]) else None


@rule("diag_embed")
def _diag_embed(x: Meta, offset: int = 0, dim1: int = -2, dim2: int = -1) -> RuleResult:
    rank = len(x.size) + 1
    if not plain(x) or not all(type(n) is int for n in (offset, dim1, dim2)):
        return None
    if not x.size or not all(-rank <= d < rank for d in (dim1, dim2)) or dim1 % rank == dim2 % rank:
        return None
    side = x.size[-1] + abs(offset)
    size = list(x.size[:-1])
    for d in sorted((dim1 % rank, dim2 % rank)):
        size.insert(d, side)
    return [fresh(tuple(size), x.dtype)]


__all__ = ["DTYPES", "RULES", "are_integers", "are_row_major", "axis_of", "fresh", "plain", "suggests_row_major"]
