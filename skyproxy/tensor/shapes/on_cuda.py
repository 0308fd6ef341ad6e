"""Shape rules for workers with CUDA, of operators whose kernels there lay out their results otherwise than the CPU's.

See `shapes.rules`. A rule that knows nothing of a call means: ask the worker. The orders of memory are those of ATen's
kernels for cuFFT, cuSOLVER and group norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.networks import FULL_PRECISION, grouped_dtype
from skyproxy.tensor.shapes.rules import Rule, RuleResult
from skyproxy.tensor.shapes.selections import fresh
from skyproxy.tensor.shapes.transforms import (
    COMPLEX,
    are_matrices,
    are_square,
    can_be_transformed,
    column_look,
    transform_look,
)

CUDA_RULES: dict[str, Rule] = {}
_MOST_AT_ONCE = 3
"""Dimensions that one plan of cuFFT transforms."""


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        CUDA_RULES["aten::" + name] = function
        return function

    return register


def _is_one_plan(dim: Sequence[int]) -> bool:
    """Return whether ATen transforms all dimensions at once; where they begin with these two, two plans are faster."""
    return len(dim) <= _MOST_AT_ONCE and tuple(dim[:2]) != (0, 1)


@_rule("_fft_r2c")
def _transform_of_real(x: Meta, dim: Sequence[int], norm: object, onesided: object) -> RuleResult:
    """All dimensions at once, or the last one, and then the others as complex numbers."""
    # cuFFT takes real numbers that lie as complex ones would; others are copied before.
    if not can_be_transformed(x, dim, FULL_PRECISION) or x.offset % 2 or (len(dim) > 1 and not onesided):
        return None
    last, dtype = dim[-1], x.dtype.to_complex()
    size = (*x.size[:last], x.size[last] // 2 + 1, *x.size[last + 1 :]) if onesided else x.size
    if _is_one_plan(dim):
        return [(transform_look(x, dim, size, dtype, sorted_but=len(dim)), None)]
    look = transform_look(x, dim[-1:], size, dtype, sorted_but=0)
    rest = list(dim[:-1])
    while rest:
        rest.sort(key=lambda d: -look.stride[d])
        rest, chosen = rest[:-_MOST_AT_ONCE], rest[-_MOST_AT_ONCE:]
        look = transform_look(look, chosen, size, dtype, sorted_but=0)
    return [(look, None)]


@_rule("_fft_c2r")
def _transform_to_real(x: Meta, dim: Sequence[int], norm: object, length: int) -> RuleResult:
    """A row-major copy is transformed, which cuFFT may write to."""
    if not can_be_transformed(x, dim, COMPLEX) or type(length) is not int or length < 1:
        return None
    last = dim[-1]
    if length // 2 + 1 != x.size[last] or len(dim) > 1 + _MOST_AT_ONCE:
        return None
    size, dtype = (*x.size[:last], length, *x.size[last + 1 :]), x.dtype.to_real()
    if _is_one_plan(dim):
        return [(transform_look(plain_meta(x.size, x.dtype), dim, size, dtype, sorted_but=len(dim)), None)]
    between = transform_look(x, dim[:-1], x.size, x.dtype, sorted_but=0)
    return [(transform_look(between, dim[-1:], size, dtype, sorted_but=0), None)]


@_rule("_linalg_svd")
def _singular_values(
    a: Meta, full_matrices: object = False, compute_uv: object = True, *, driver: object = None
) -> RuleResult:
    """Right singular vectors lie row by row; those of complex matrices are conjugates, which the worker tells."""
    if not are_matrices(a) or driver is not None or (a.dtype.is_complex and compute_uv):
        return None
    *batch, rows, columns = a.size
    rank = min(rows, columns)
    values = fresh((*batch, rank), a.dtype.to_real())
    if not compute_uv:
        return [fresh((0,), a.dtype), values, fresh((0,), a.dtype)]
    left = column_look((*batch, rows, rows if full_matrices else rank), a.dtype)
    return [left, values, fresh((*batch, columns if full_matrices else rank, columns), a.dtype)]


@_rule("linalg_eig")
def _eigen_decomposition(a: Meta) -> RuleResult:
    if not are_square(a):
        return None
    dtype = a.dtype.to_complex()
    return [fresh(a.size[:-1], dtype), fresh(a.size, dtype)]


@_rule("group_norm")
def _group_norm(
    x: Meta, groups: int, weight: Meta | None = None, bias: Meta | None = None, *options: object
) -> RuleResult:
    """Row-major, whatever the images' order is."""
    is_one = all(t is None or t.dtype is x.dtype for t in (weight, bias))
    return [fresh(x.size, x.dtype)] if is_one and grouped_dtype(x, weight, bias, groups) is not None else None


__all__ = ["CUDA_RULES"]
