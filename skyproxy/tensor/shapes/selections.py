"""Shape rules for what selects, moves and reduces: indexing, gathering, sorting, padding, reductions.

See `shapes.rules`; this module completes its table. Most rules answer for row-major tensors only.
"""

from __future__ import annotations

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
    row_major,
    rule,
)
from skyproxy.tensor.shapes.strides import suggests_channels_last

Ints = tuple[int, ...]
_DTYPES = FLOATS | INTEGERS | {torch.bool}
Dims = int | list[int] | tuple[int, ...] | None


def are_row_major(*tensors: object) -> bool:
    """Return whether all are row-major tensors that are not empty."""
    return plain(*tensors) and all(map(row_major, tensors))  # type: ignore[arg-type]


def fresh(size: Ints, dtype: torch.dtype) -> tuple[Meta, None]:
    """A row-major result."""
    return plain_meta(size, dtype), None


def plain(*tensors: object) -> bool:
    """Return whether all are tensors that are not empty, in any order of memory, with gaps or repeated elements."""
    for t in tensors:  # noqa: SIM110  # most rules ask this, and a generator takes twice as long
        if type(t) is not Meta or not t.plain or 0 in t.size or t.dtype not in _DTYPES:
            return False
    return True


def _are_in_order(*tensors: object) -> bool:
    """Return whether all are tensors that are not empty and whose elements come in row-major order, be it with gaps."""
    return all(
        type(t) is Meta
        and t.plain
        and 0 not in t.size
        and t.dtype in _DTYPES
        and all(s > 0 for s in t.stride)
        and all(a >= b * n for a, b, n in zip(t.stride, t.stride[1:], t.size[1:], strict=False))
        for t in tensors
    )


def axis_of(x: Meta, dim: int) -> int | None:
    """The dimension as a number from zero; None where there is no such one."""
    rank = len(x.size)
    return dim % rank if rank and type(dim) is int and -rank <= dim < rank else None


def are_integers(values: Sequence[object]) -> bool:
    """Return whether it is a list of integers."""
    return type(values) in (list, tuple) and all(type(n) is int for n in values)


# --- indexing --------------------------------------------------------------------------------------------------------


def _indexed_size(x: Meta, indices: Sequence[Meta | None]) -> Ints | None:
    """The size of `x[indices]` for tensors of integers among the indices; None where it is not that plain."""
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    if not given or len(indices) > len(x.size):
        return None
    if not all(are_row_major(index) and index.dtype in (torch.int64, torch.int32) for _, index in given):
        return None
    size = broadcast_sizes([index.size for _, index in given])
    if size is None:
        return None
    places = [at for at, _ in given]
    rest = tuple(n for at, n in enumerate(x.size) if at not in places)
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    return (*rest[:first], *size, *rest[first:])


@rule("index.Tensor")
def _index(x: Meta, indices: Sequence[Meta | None]) -> RuleResult:
    size = _indexed_size(x, indices) if plain(x) else None
    if size is None or _are_in_order(x):
        return None if size is None else [fresh(size, x.dtype)]
    stride = indexed_stride(x, indices)
    return None if stride is None else [(plain_meta(size, x.dtype, stride), None)]


def _can_be_put(x: Meta, indices: Sequence[Meta | None], values: Meta) -> bool:
    size = _indexed_size(x, indices) if plain(x) and values.plain and x.dtype is values.dtype else None
    return size is not None and broadcast_sizes((size, values.size)) == size


@rule("index_put")
def _index_put(x: Meta, indices: Sequence[Meta | None], values: Meta, accumulate: bool = False) -> RuleResult:
    look = preserved(x) if _can_be_put(x, indices, values) else None
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
    return x.size[: len(mask.size)] == mask.size and values.size == () and values.dtype is x.dtype


def _fits(x: Meta, dim: int, index: Meta) -> bool:
    at = axis_of(x, dim)
    fits = at is not None and x.plain and index.plain and 0 not in x.size and 0 not in index.size
    fits = fits and index.dtype is torch.int64 and len(index.size) == len(x.size) and x.dtype in _DTYPES
    return fits and all(n <= m for i, (n, m) in enumerate(zip(index.size, x.size, strict=True)) if i != at)


@rule("gather")
def _gather(x: Meta, dim: int, index: Meta, *, sparse_grad: bool = False) -> RuleResult:
    return [fresh(index.size, x.dtype)] if _fits(x, dim, index) else None


@rule("scatter.src scatter_add scatter_reduce.two")
def _scatter(x: Meta, dim: int, index: Meta, source: Meta, *how: object, **options: object) -> RuleResult:
    fits = _fits(x, dim, index) and source.plain and source.dtype is x.dtype and len(source.size) == len(x.size)
    fits = fits and all(n <= m for n, m in zip(index.size, source.size, strict=True))
    return [fresh(x.size, x.dtype)] if fits else None


@rule("scatter.value")
def _scatter_number(x: Meta, dim: int, index: Meta, value: object) -> RuleResult:
    kinds = (int, float, bool) if x.dtype in FLOATS else (bool,) if x.dtype is torch.bool else (int, bool)
    return [fresh(x.size, x.dtype)] if type(value) in kinds and _fits(x, dim, index) else None


@rule("index_fill.int_Scalar")
def _index_fill(x: Meta, dim: int, index: Meta, value: object) -> RuleResult:
    kinds = (int, float, bool) if x.dtype in FLOATS else (bool,) if x.dtype is torch.bool else (int, bool)
    fits = plain(x, index) and index.dtype is torch.int64 and len(index.size) == 1 and axis_of(x, dim) is not None
    look = preserved(x) if fits and type(value) in kinds else None
    return None if look is None else [(look, None)]


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


@rule("repeat")
def _repeat(x: Meta, repeats: Sequence[int]) -> RuleResult:
    extra = len(repeats) - len(x.size)
    if not plain(x) or extra < 0 or not all(type(n) is int and n > 0 for n in repeats):
        return None
    return [fresh(tuple(n * m for n, m in zip(repeats, (1,) * extra + x.size, strict=True)), x.dtype)]


def suggests_row_major(x: Meta) -> bool:
    """Return whether PyTorch sees no channels-last format in a tensor."""
    return not suggests_channels_last(x.size, x.stride)


# --- reductions ------------------------------------------------------------------------------------------------------


def _reduce(x: Meta, dims: Dims, keepdim: bool) -> Ints | None:
    """The size of a reduction; None where it is not plain. No dimensions are all of them."""
    if not (x.plain and x.dtype in _DTYPES and 0 not in x.size and len(x.size) <= 64 and type(keepdim) is bool):
        return None
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        places: list[int | None] = list(range(len(x.size)))
    else:
        places = [axis_of(x, dim) for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    if None in places or len(set(places)) != len(places):
        return None
    return tuple(1 if i in places else n for i, n in enumerate(x.size) if keepdim or i not in places)


@rule("max.dim min.dim")
def _extreme(x: Meta, dim: int, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, [dim], keepdim) if x.size else None
    return None if size is None else [fresh(size, x.dtype), fresh(size, torch.int64)]


@rule("median.dim nanmedian.dim mode")
def _median(x: Meta, dim: int = -1, keepdim: bool = False) -> RuleResult:
    return _extreme(x, dim, keepdim) if x.dtype in FLOATS else None


@rule("kthvalue")
def _kth_value(x: Meta, k: int, dim: int = -1, keepdim: bool = False) -> RuleResult:
    at = axis_of(x, dim)
    fits = at is not None and type(k) is int and x.dtype in FLOATS and 0 < k <= x.size[at]
    return _extreme(x, dim, keepdim) if fits else None


@rule("cummax cummin")
def _extreme_so_far(x: Meta, dim: int) -> RuleResult:
    fits = plain(x) and x.dtype in FLOATS and axis_of(x, dim) is not None
    return [fresh(x.size, x.dtype), fresh(x.size, torch.int64)] if fits else None


@rule("logcumsumexp")
def _logcumsumexp(x: Meta, dim: int) -> RuleResult:
    return [fresh(x.size, x.dtype)] if are_row_major(x) and x.dtype in FLOATS and axis_of(x, dim) is not None else None


@rule("bucketize.Tensor")
def _bucketize(x: Meta, bounds: Meta, *, out_int32: bool = False, right: bool = False) -> RuleResult:
    fits = are_row_major(x, bounds) and len(bounds.size) == 1 and bounds.dtype is x.dtype is not torch.bool
    return [fresh(x.size, torch.int32 if out_int32 else torch.int64)] if fits else None


@rule("multinomial")
def _multinomial(x: Meta, count: int, replacement: bool = False, **options: object) -> RuleResult:
    fits = are_row_major(x) and x.dtype in FLOATS and len(x.size) in (1, 2) and type(count) is int and count > 0
    fits = fits and x.size[-1] <= 1 << 24
    if not fits or options.keys() - {"generator"} or not (replacement or count <= x.size[-1]):
        return None
    return [fresh((*x.size[:-1], count), torch.int64)]


@rule("take")
def _take(x: Meta, index: Meta) -> RuleResult:
    fits = plain(x) and are_row_major(index) and index.dtype is torch.int64
    return [fresh(index.size, x.dtype)] if fits else None


@rule("max min")
def _extreme_of_all(x: Meta) -> RuleResult:
    return [fresh((), x.dtype)] if plain(x) else None


@rule("median nanmedian")
def _whole_median(x: Meta) -> RuleResult:
    return [fresh((), x.dtype)] if plain(x) and x.dtype in FLOATS else None


@rule("any all any.dim all.dim any.dims all.dims")
def _truth(x: Meta, dim: Dims = None, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype is not torch.uint8 and dim != [] else None
    return None if size is None else [fresh(size, torch.bool)]


@rule("prod.dim_int")
def _product(x: Meta, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> RuleResult:
    size = _reduce(x, [dim], keepdim) if dtype is None else None
    return None if size is None else [fresh(size, x.dtype if x.dtype in FLOATS else torch.int64)]


@rule("prod")
def _product_of_all(x: Meta, *, dtype: torch.dtype | None = None) -> RuleResult:
    return [fresh((), x.dtype if x.dtype in FLOATS else torch.int64)] if plain(x) and dtype is None else None


@rule("trace")
def _trace(x: Meta) -> RuleResult:
    fits = plain(x) and len(x.size) == 2
    return [fresh((), x.dtype if x.dtype in FLOATS else torch.int64)] if fits else None


@rule("dist")
def _distance(a: Meta, b: Meta, order: object = 2) -> RuleResult:
    fits = plain(a, b) and a.dtype is b.dtype and a.dtype in FLOATS and broadcast_sizes((a.size, b.size)) is not None
    return [fresh((), a.dtype)] if fits and type(order) in (int, float) else None


@rule("var.correction std.correction")
def _variance(x: Meta, dim: Dims = None, *, correction: object = None, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS else None
    return None if size is None else [fresh(size, x.dtype)]


@rule("var_mean.correction std_mean.correction")
def _variance_and_mean(x: Meta, dim: Dims = None, *, correction: object = None, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS else None
    return None if size is None else [fresh(size, x.dtype), fresh(size, x.dtype)]


@rule("aminmax")
def _range(x: Meta, *, dim: int | None = None, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, None if dim is None else [dim], keepdim) if x.size else None
    return None if size is None else [fresh(size, x.dtype), fresh(size, x.dtype)]


@rule("nansum")
def _sum_of_numbers(
    x: Meta, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS and dtype is None else None
    return None if size is None else [fresh(size, x.dtype)]


@rule("count_nonzero count_nonzero.dim_IntList")
def _count(x: Meta, dim: Dims = None) -> RuleResult:
    size = _reduce(x, dim, False)
    return None if size is None else [fresh(size, torch.int64)]


@rule("segment_reduce")
def _segments(
    x: Meta,
    reduction: object,
    *,
    lengths: Meta | None = None,
    indices: object = None,
    offsets: Meta | None = None,
    axis: int = 0,
    **options: object,
) -> RuleResult:
    """PyTorch 2.11 says the size of another result for an axis that is counted from the end."""
    bounds = lengths if offsets is None else offsets
    if not plain(x, bounds) or bounds is None or x.dtype not in FLOATS or indices is not None:
        return None
    axis += len(x.size) if axis < 0 else 0
    count = bounds.size[-1] - (bounds is offsets)
    if bounds.size[:-1] != x.size[:axis] or not 0 <= axis == len(bounds.size) - 1 or not count:
        return None
    return [fresh((*x.size[:axis], count, *x.size[axis + 1 :]), x.dtype)]


@rule("linalg_vector_norm")
def _norm(
    x: Meta, order: object = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS and dtype is None else None
    return [fresh(size, x.dtype)] if size is not None and type(order) in (int, float) else None


@rule("norm.ScalarOpt_dim")
def _norm_of_lines(x: Meta, order: object, dim: int, keepdim: bool = False) -> RuleResult:
    return _norm(x, 2 if order is None else order, dim, keepdim) if dim else None


@rule("logsumexp")
def _logsumexp(x: Meta, dim: Dims, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS and dim else None
    return None if size is None else [fresh(size, x.dtype)]


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
    fits = x.plain and layout in (None, torch.strided) and not rest.get("pin_memory") and chosen in _DTYPES
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
    if not fits or source.dtype is not x.dtype or type(alpha) is not int or at is None:
        return None
    return [fresh(x.size, x.dtype)] if source.size == (*x.size[:at], *index.size, *x.size[at + 1 :]) else None


__all__ = ["RULES", "are_integers", "are_row_major", "axis_of", "fresh", "plain", "suggests_row_major"]
