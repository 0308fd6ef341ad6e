"""Rules for ops that write into their first argument, and leave it looking as it was.

They say where that plainly works; for what is written at a growing position, each step has another offset, hence
another look. See `shapes.rules`; this module completes its table.
"""

from __future__ import annotations

import torch

from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.shapes.elementwise import NUMBERS, fractional, result_dtype
from skyproxy.tensor.shapes.layers import RULES
from skyproxy.tensor.shapes.rules import FLOATS, INTEGERS, TARGET, RuleResult, castable, keeps_target, rule

_REAL = frozenset({float, int, bool})
_NOTHING: frozenset[type] = frozenset()
_TAKEN_WHOLE: dict[torch.dtype, frozenset[type]] = {
    torch.bool: frozenset({bool, int}),
    **dict.fromkeys(INTEGERS, frozenset({int, bool})),
    **dict.fromkeys(FLOATS, _REAL),
}
"""The kinds of numbers that tensors of a dtype take without loss, but for digits."""
_FLOAT_UNARY = (
    "abs_ acos_ acosh_ asin_ asinh_ atan_ atanh_ ceil_ cos_ cosh_ erf_ erfc_ exp_ exp2_ expm1_ floor_ frac_ "
    "hardsigmoid_ hardswish_ lgamma_ log_ log10_ log1p_ log2_ mish_ neg_ nan_to_num_ reciprocal_ relu_ round_ rsqrt_ "
    "sigmoid_ sign_ silu_ sin_ sinh_ sqrt_ square_ tan_ tanh_ trunc_ zero_ "
    "digamma_ erfinv_ i0_ sinc_ cauchy_ elu_ exponential_ "
    "geometric_ hardtanh_ leaky_relu_ "
    "log_normal_ normal_ pow_.Scalar random_ threshold_ uniform_ deg2rad_ rad2deg_ logit_ round_.decimals sgn_"
)


def _target_if(fits: bool) -> RuleResult:
    return TARGET if fits else None


@rule("add_.Tensor mul_.Tensor add_.Scalar mul_.Scalar")
def _sum_or_product(target: Meta, other: object, alpha: object = 1) -> RuleResult:
    """These know of masks, too."""
    if target.dtype is torch.bool:
        return _target_if(type(alpha) is int and alpha == 1 and keeps_target(target, other))
    return _arithmetic(target, other, alpha)


@rule("sub_.Tensor sub_.Scalar")
def _arithmetic(target: Meta, other: object, alpha: object = 1) -> RuleResult:
    fits = type(alpha) is int or (type(alpha) is float and target.dtype in FLOATS)
    return _target_if(fits and target.dtype is not torch.bool and keeps_target(target, other))


@rule(
    "pow_.Tensor hypot_ atan2_ nextafter_ copysign_.Tensor copysign_.Scalar xlogy_.Tensor div_.Tensor_mode "
    "div_.Scalar_mode heaviside_ igamma_ igammac_"
)
def _fraction_in_place(target: Meta, other: object, *, rounding_mode: object = None) -> RuleResult:
    alike = other.dtype is target.dtype if type(other) is Meta else type(other) in (int, float)
    return _target_if(alike and target.dtype in FLOATS and keeps_target(target, other))


@rule("floor_divide_.Tensor floor_divide_.Scalar fmod_.Tensor fmod_.Scalar remainder_.Tensor remainder_.Scalar")
def _remainder_in_place(target: Meta, other: object) -> RuleResult:
    if target.dtype not in INTEGERS:
        return _fraction_in_place(target, other)
    alike = other.dtype is target.dtype if type(other) is Meta else type(other) is int
    return _target_if(alike and keeps_target(target, other))


_COUNTED = FLOATS | INTEGERS | {torch.bool}


@rule("logical_not_")
def _logical_not(target: Meta) -> RuleResult:
    return _target_if(target.dtype in _COUNTED and keeps_target(target))


@rule(
    " ".join(
        f"{name}_.{kind}" for name in ("bitwise_and", "bitwise_or", "bitwise_xor") for kind in ("Tensor", "Scalar")
    )
)
def _bitwise(target: Meta, other: object) -> RuleResult:
    exact = target.dtype is torch.bool or target.dtype in INTEGERS
    alike = (
        other.dtype is target.dtype
        if type(other) is Meta
        else type(other) is bool or (type(other) is int and target.dtype is not torch.bool)
    )
    return _target_if(exact and alike and keeps_target(target, other))


@rule("cumsum_ cumprod_")
def _cumulate(target: Meta, dim: int, *, dtype: object = None) -> RuleResult:
    rank = len(target.size)
    fits = type(dim) is int and -rank <= dim < rank and 0 not in target.size and dtype is None
    return _target_if(fits and target.dtype in FLOATS and keeps_target(target))


@rule("masked_scatter_")
def _masked_scatter(target: Meta, mask: Meta, source: Meta) -> RuleResult:
    fits = mask.plain and source.plain and mask.dtype is torch.bool and mask.size == target.size
    return _target_if(fits and source.dtype is target.dtype and target.dtype in _COUNTED and keeps_target(target))


@rule("addmm_")
def _addmm(target: Meta, a: Meta, b: Meta, **numbers: object) -> RuleResult:
    fits = len(a.size) == len(b.size) == 2 and a.plain and b.plain and a.size[1] == b.size[0]
    fits = fits and target.size == (a.size[0], b.size[1]) and a.dtype is b.dtype is target.dtype
    return _target_if(fits and target.dtype in FLOATS and keeps_target(target))


@rule("addmv_")
def _addmv(target: Meta, a: Meta, b: Meta, **numbers: object) -> RuleResult:
    fits = len(a.size) == 2 and a.plain and b.plain and b.size == a.size[1:] and target.size == a.size[:1]
    fits = fits and a.dtype is b.dtype is target.dtype
    return _target_if(fits and target.dtype in FLOATS and keeps_target(target))


@rule("baddbmm_")
def _baddbmm(target: Meta, a: Meta, b: Meta, **numbers: object) -> RuleResult:
    fits = len(a.size) == len(b.size) == 3 and a.plain and b.plain and a.size[2] == b.size[1]
    fits = fits and a.size[0] == b.size[0] and target.size == (a.size[0], a.size[1], b.size[2])
    fits = fits and a.dtype is b.dtype is target.dtype
    return _target_if(fits and target.dtype in FLOATS and keeps_target(target))


@rule("logical_and_ logical_or_ logical_xor_")
def _logical(target: Meta, other: object) -> RuleResult:
    """Operands are not converted: each is asked whether it is zero."""
    return _target_if(type(other) is Meta and other.dtype is target.dtype and keeps_target(target, other))


@rule("clamp_min_.Tensor clamp_max_.Tensor")
def _clamp(target: Meta, bound: object) -> RuleResult:
    fits = type(bound) is Meta and (bound.dtype is target.dtype or result_dtype((target, bound)) is target.dtype)
    fits = fits and (target.dtype in FLOATS or target.dtype in INTEGERS)
    return _target_if(fits and keeps_target(target, bound))


@rule("div_.Tensor div_.Scalar")
def _division(target: Meta, other: object) -> RuleResult:
    fits = keeps_target(target, other) and castable(fractional(result_dtype((target, other))), target.dtype)
    return _target_if(fits)


@rule("copy_")
def _copy(target: Meta, source: Meta, non_blocking: bool = False) -> RuleResult:
    real = type(source) is Meta and (not source.dtype.is_complex or target.dtype is source.dtype)
    return _target_if(real and _can_take_values(target, source))


def _can_take_values(target: Meta, source: Meta) -> bool:
    """Return whether a tensor takes the values of another one that broadcasts to it, whatever their dtypes."""
    if not source.plain or len(source.size) > len(target.size) or not keeps_target(target):
        return False
    tail = target.size[len(target.size) - len(source.size) :]
    return all(n in (1, m) for n, m in zip(source.size, tail, strict=True))


@rule("fill_.Tensor")
def _fill(target: Meta, value: object) -> RuleResult:
    return _target_if(type(value) is Meta and value.size == () and value.dtype is target.dtype and keeps_target(target))


@rule("masked_fill_.Scalar masked_fill_.Tensor")
def _masked_fill(target: Meta, mask: object, value: object) -> RuleResult:
    fits = type(mask) is Meta and mask.dtype is torch.bool and _can_take_values(target, mask)
    if type(value) is Meta:
        fits = fits and value.size == () and value.plain and value.dtype is target.dtype
    else:
        kinds = (int, float, bool) if target.dtype in FLOATS else (bool,) if target.dtype is torch.bool else (int,)
        fits = fits and type(value) in kinds
    return _target_if(fits and target.dtype in _COUNTED)


@rule(_FLOAT_UNARY)
def _unary(target: Meta, *numbers: object, **named: object) -> RuleResult:
    fits = target.dtype in FLOATS and keeps_target(target)
    return _target_if(fits and all(a is None or type(a) in _REAL for a in (*numbers, *named.values())))


@rule("fill_.Scalar")
def _fill_with_number(target: Meta, value: object) -> RuleResult:
    return _target_if(target.dtype in _COUNTED and type(value) in _REAL and keeps_target(target))


@rule("clamp_ clamp_max_ clamp_min_")
def _clamp_by_numbers(target: Meta, *bounds: object, **named: object) -> RuleResult:
    """Integers stay integers with bounds that are such, only."""
    if target.dtype not in INTEGERS:
        return _unary(target, *bounds, **named)
    fits = all(a is None or type(a) is int for a in (*bounds, *named.values()))
    return _target_if(fits and keeps_target(target))


@rule("bernoulli_.float")
def _bernoulli(target: Meta, p: float = 0.5, **named: object) -> RuleResult:
    return _unary(target, **named) if type(p) in _REAL and 0 <= p <= 1 else None


@rule("random_.to")
def _random_below(target: Meta, high: int, **named: object) -> RuleResult:
    return _random_between(target, 0, high, **named)


@rule("random_.from")
def _random_between(target: Meta, low: int, high: int | None, **named: object) -> RuleResult:
    if target.dtype in INTEGERS:
        kept = torch.iinfo(target.dtype)
        fits = type(low) is int and type(high) is int and kept.min <= low < high <= kept.max
        return _target_if(fits and not named and keeps_target(target))
    fits = type(low) is int and (high is None or (type(high) is int and low < high <= 1 << 8))
    return _unary(target, **named) if fits and abs(low) <= 1 << 8 else None


@rule("relu_ abs_ neg_ sign_ square_ zero_ ceil_ floor_ round_ trunc_")
def _integers_in_place(target: Meta) -> RuleResult:
    return _target_if(keeps_target(target)) if target.dtype in INTEGERS else _unary(target)


@rule("clamp_.Tensor")
def _clamp_between(target: Meta, *bounds: object) -> RuleResult:
    given = [a for a in bounds if a is not None]
    fits = all(type(a) is Meta and a.dtype is target.dtype for a in given) and len(given) > 0
    return _target_if(fits and (target.dtype in FLOATS or target.dtype in INTEGERS) and keeps_target(target, *given))


@rule("put_")
def _put(target: Meta, index: Meta, source: Meta, accumulate: object = False) -> RuleResult:
    fits = index.plain and index.dtype is torch.int64 and source.plain and source.dtype is target.dtype
    fits = fits and target.dtype in _COUNTED and 0 not in target.size and index.size == source.size
    return _target_if(fits and keeps_target(target))


@rule("embedding_renorm_")
def _renorm_rows(target: Meta, indices: Meta, most: object, order: object) -> RuleResult:
    fits = target.dtype in FLOATS and len(target.size) == 2 and indices.plain
    fits = fits and indices.dtype in (torch.int64, torch.int32) and keeps_target(target)
    return _target_if(fits and target.stride[1] == 1 and 0 not in (*target.size, *indices.size))


@rule("addcmul_ addcdiv_")
def _fuse(target: Meta, first: Meta, second: Meta, *, value: object = 1) -> RuleResult:
    fits = target.dtype in FLOATS and type(first) is type(second) is Meta and type(value) in _REAL
    return _target_if(fits and first.dtype is second.dtype is target.dtype and keeps_target(target, first, second))


@rule("lerp_.Scalar lerp_.Tensor")
def _lerp(target: Meta, end: object, weight: object) -> RuleResult:
    others = [a for a in (end, weight) if type(a) is Meta]
    alike = all(a.dtype is target.dtype for a in others) and type(weight) in (Meta, float, int)
    return _target_if(alike and target.dtype in FLOATS and keeps_target(target, *others))


def _axis_of(target: Meta, dim: int, index: Meta) -> int | None:
    """The dimension that an index of one dimension counts along, as a number from zero; None where it does not fit."""
    rank = len(target.size)
    fits = type(index) is Meta and index.plain and len(index.size) == 1 and index.dtype in (torch.int64, torch.int32)
    if not fits or not rank or type(dim) is not int or not -rank <= dim < rank or not keeps_target(target):
        return None
    return dim % rank


@rule("index_add_ index_copy_")
def _index_add(target: Meta, dim: int, index: Meta, source: Meta, *, alpha: object = 1) -> RuleResult:
    at = _axis_of(target, dim, index)
    if at is None or type(source) is not Meta or not source.plain or source.dtype is not target.dtype:
        return None
    size = (*target.size[:at], index.size[0], *target.size[at + 1 :])
    return _target_if(source.size == size and type(alpha) is int and index.dtype is torch.int64)


@rule("index_fill_.int_Scalar")
def _index_fill(target: Meta, dim: int, index: Meta, value: object) -> RuleResult:
    fits = _axis_of(target, dim, index) is not None and index.dtype is torch.int64
    return _target_if(fits and type(value) in _TAKEN_WHOLE.get(target.dtype, _NOTHING))


@rule("scatter_.src scatter_add_ scatter_.value")
def _scatter(target: Meta, dim: int, index: Meta, source: Meta) -> RuleResult:
    rank = len(target.size)
    fits = type(index) is Meta and index.plain and index.dtype is torch.int64 and len(index.size) == rank > 0
    if not fits or type(dim) is not int or not -rank <= dim < rank or not keeps_target(target):
        return None
    if any(n > m for i, (n, m) in enumerate(zip(index.size, target.size, strict=True)) if i != dim % rank):
        return None
    if type(source) is not Meta:
        return _target_if(type(source) in _TAKEN_WHOLE.get(target.dtype, _NOTHING))
    fits = source.plain and source.dtype is target.dtype and len(source.size) == rank
    return _target_if(fits and all(n <= m for n, m in zip(index.size, source.size, strict=True)))


@rule("scatter_.reduce scatter_.value_reduce")
def _scatter_combined(target: Meta, dim: int, index: Meta, source: Meta, *, reduce: object) -> RuleResult:
    return _scatter(target, dim, index, source) if target.dtype in FLOATS else None


@rule("scatter_reduce_.two")
def _scatter_reduced(
    target: Meta, dim: int, index: Meta, source: Meta, how: object, *, include_self: object = True
) -> RuleResult:
    return _scatter(target, dim, index, source) if target.dtype in FLOATS and type(source) is Meta else None


@rule("tril_ triu_")
def _triangle(target: Meta, diagonal: object = 0) -> RuleResult:
    return _target_if(len(target.size) >= 2 and type(diagonal) is int and keeps_target(target))


_COMPARISONS = "eq_ ne_ lt_ le_ gt_ ge_"


@rule(" ".join(f"{name}.{kind}" for name in _COMPARISONS.split() for kind in ("Tensor", "Scalar")))
def _comparison(target: Meta, other: object) -> RuleResult:
    same = type(other) in NUMBERS or (type(other) is Meta and other.dtype is target.dtype)
    return _target_if(same and (target.dtype in FLOATS or target.dtype in INTEGERS) and keeps_target(target, other))


__all__ = ["RULES"]
