"""Shape rules for what reduces dimensions, or goes along one of them.

See `shapes.rules`; this module completes its table. Results are row-major, whatever the order of memory of the input.
"""

from __future__ import annotations

import math

import torch

from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.shapes.elementwise import Ints, broadcast_sizes, promoted
from skyproxy.tensor.shapes.rules import FLOATS, INTEGERS, RuleResult, rule
from skyproxy.tensor.shapes.selections import DTYPES, RULES, are_row_major, axis_of, fresh, plain

Dims = int | list[int] | tuple[int, ...] | None


def _reduce(x: Meta, dims: Dims, keepdim: bool) -> Ints | None:
    """The size of a reduction; None where it is not plain. No dimensions are all of them."""
    if not (x.plain and x.dtype in DTYPES and 0 not in x.size and len(x.size) <= 64 and type(keepdim) is bool):
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
    return _extreme(x, dim, keepdim) if x.dtype is not torch.bool else None


@rule("kthvalue")
def _kth_value(x: Meta, k: int, dim: int = -1, keepdim: bool = False) -> RuleResult:
    at = axis_of(x, dim)
    fits = at is not None and type(k) is int and x.dtype is not torch.bool and 0 < k <= x.size[at]
    return _extreme(x, dim, keepdim) if fits else None


@rule("cummax cummin")
def _extreme_so_far(x: Meta, dim: int) -> RuleResult:
    fits = plain(x) and axis_of(x, dim) is not None
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
    return [fresh((), x.dtype)] if plain(x) and (x.dtype in FLOATS or x.dtype in INTEGERS) else None


@rule("any all any.dim all.dim any.dims all.dims")
def _truth(x: Meta, dim: Dims = None, keepdim: bool = False) -> RuleResult:
    """An empty list of dimensions are none, and the result is row-major, which PyTorch's fake kernel does not say."""
    if dim == [] and x.layout is torch.strided:
        return [fresh(x.size, torch.uint8 if x.dtype is torch.uint8 else torch.bool)]
    size = _reduce(x, dim, keepdim) if x.dtype is not torch.uint8 else None
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
    """The kernel for no elements has other strides than PyTorch's fake one."""
    at = axis_of(x, dim) if dim is not None else None
    if at is not None and x.plain and x.dtype in DTYPES and 0 in x.size and x.size[at]:
        size: Ints | None = (*x.size[:at], *[1] * keepdim, *x.size[at + 1 :])
    else:
        size = _reduce(x, None if dim is None else [dim], keepdim) if x.size else None
    return None if size is None else [fresh(size, x.dtype), fresh(size, x.dtype)]


@rule("nansum")
def _sum_of_numbers(
    x: Meta, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> RuleResult:
    """An empty list of dimensions are all, and for PyTorch's fake kernel none: nothing that has a sum is left to it."""
    counts = x.dtype in INTEGERS or x.dtype is torch.bool
    if isinstance(dim, list | tuple) and not dim and x.layout is torch.strided and not (dtype or x.dtype).is_complex:
        kept = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        return [fresh((1,) * len(x.size) if keepdim else (), kept)]
    size = _reduce(x, dim, keepdim) if (counts or x.dtype in FLOATS) and dtype is None else None
    return None if size is None else [fresh(size, torch.int64 if counts else x.dtype)]


@rule("count_nonzero count_nonzero.dim_IntList")
def _count(x: Meta, dim: Dims = None) -> RuleResult:
    size = _reduce(x, dim, False)
    return None if size is None else [fresh(size, torch.int64)]


_REDUCTIONS = frozenset({"sum", "prod", "mean", "max", "min", "amax", "amin"})


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
    if bounds.dtype not in (torch.int32, torch.int64) or reduction not in _REDUCTIONS:
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
    widens = dtype is None or (dtype in FLOATS and promoted(x.dtype, dtype) is dtype)
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS and widens else None
    if size is None or (type(order) is not int and type(order) is not float):
        return None
    if 0 in x.size and (order < 0 or order == math.inf):
        return None  # of no elements there is no largest one, and no smallest
    return [fresh(size, dtype or x.dtype)]


@rule("norm.ScalarOpt_dim")
def _norm_of_lines(x: Meta, order: object, dim: int, keepdim: bool = False) -> RuleResult:
    return _norm(x, 2 if order is None else order, dim, keepdim) if dim else None


@rule("logsumexp")
def _logsumexp(x: Meta, dim: Dims, keepdim: bool = False) -> RuleResult:
    size = _reduce(x, dim, keepdim) if x.dtype in FLOATS and dim else None
    return None if size is None else [fresh(size, x.dtype)]


__all__ = ["RULES"]
