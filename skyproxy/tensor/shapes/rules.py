"""Shape rules of our own, for ops that are hot and whose shapes change from call to call.

A rule takes what the op takes, with a `Meta` in place of each tensor, and gives `(meta, shares)` for each result,
`shares` being the number of the tensor whose storage it shares, or None; `(None, None)` stands for a result that is
None. It gives None where it does not apply, and
PyTorch's fake tensors are asked instead, which cost several times as much. It must be exactly right where it answers:
tests hold every rule against PyTorch, and the worker checks each result once more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import (
    NUMBERS,
    broadcast_sizes,
    channels_last_stride,
    elementwise,
    fractional,
    preserved_stride,
    result_dtype,
)
from skyproxy.tensor.shapes.views import VIEW_RULES
from skyproxy.torch_codec import contiguous_stride

Look = tuple[Meta | None, int | None]
RuleAnswer = Sequence[Look | list[tuple[Meta, int | None]]]
RuleResult = RuleAnswer | None
Rule = Callable[..., RuleResult]
TARGET: RuleAnswer = []
"""The answer for an in-place op that plainly works: its first argument, looking as before. Compared by identity."""
RULES: dict[str, Rule] = dict(VIEW_RULES)

_ARITHMETIC = (
    "maximum minimum clamp_min.Tensor clamp_max.Tensor fmod.Tensor remainder.Tensor fmax fmin floor_divide fmod.Scalar "
    "remainder.Scalar floor_divide.Scalar"
)
_BITWISE = " ".join(
    f"bitwise_{name}.{kind}" for name in ("and", "or", "xor") for kind in ("Tensor", "Scalar", "Scalar_Tensor")
)
_SHIFTS = (
    "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor "
    "bitwise_right_shift.Tensor_Scalar __lshift__.Scalar __rshift__.Scalar __lshift__.Tensor __rshift__.Tensor"
)
_TRUE_DIVISION = (
    "div.Tensor atan2 div.Scalar true_divide.Tensor xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other copysign.Tensor "
    "copysign.Scalar special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar"
)
_OF_FRACTIONS = "hypot logaddexp logaddexp2 nextafter"
_COMPARISONS = (
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar "
    "ge.Scalar"
)
_FLOAT_UNARY = (
    "silu gelu hardswish softplus leaky_relu elu dropout mish hardsigmoid frac round.decimals hardshrink softshrink "
    "celu threshold"
)
_FRACTIONAL_UNARY = (
    "exp log sqrt rsqrt reciprocal sin cos tanh sigmoid erf acos acosh asin asinh atan atanh cosh sinh tan expm1 exp2 "
    "log10 log1p log2 erfc erfinv lgamma digamma sinc i0 logit"
)
_SIGNED_UNARY = "neg abs relu square floor ceil round trunc sign sgn"
_WITH_SCALARS = "pow.Tensor_Scalar"
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a shape rule for these overloads of aten, whose names are separated by spaces."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES["aten::" + name] = function
        return function

    return register


def keeps_target(target: object, *others: object) -> bool:
    """Return whether an elementwise op of these operands can write its result into the first of them."""
    if type(target) is not Meta or not target.plain or is_written_twice(target):
        return False
    sizes = [target.size]
    for a in others:
        if type(a) is Meta:
            if not a.plain:
                return False
            sizes.append(a.size)
        elif type(a) not in NUMBERS:
            return False
    if broadcast_sizes(sizes) != target.size:
        return False
    common = result_dtype((target, *others))
    return common is target.dtype or castable(common, target.dtype)


def is_written_twice(meta: Meta) -> bool:
    """Return whether elements of an expanded tensor share their memory."""
    return 0 in meta.stride and any(n > 1 and s == 0 for n, s in zip(meta.size, meta.stride, strict=False))


castable = functools.cache(torch.can_cast)


def row_major(meta: Meta) -> bool:
    """Return whether a plain tensor lies in memory row by row, without gaps."""
    return meta.plain and meta.stride == contiguous_stride(meta.size)


def preserved(meta: Meta) -> Meta | None:
    """Sizes and strides of a copy that preserves the format: dense ones stay as they are."""
    if not meta.plain:
        return None
    stride = preserved_stride(meta.size, meta.stride)
    same = stride == meta.stride and not meta.offset
    return meta if same else plain_meta(meta.size, meta.dtype, stride)


def in_format(meta: Meta, memory_format: torch.memory_format | None) -> Meta | None:
    """Sizes and strides of a copy in a format; None where that takes more thought."""
    if memory_format in (None, torch.preserve_format):
        return preserved(meta)
    if memory_format is torch.contiguous_format:
        return plain_meta(meta.size, meta.dtype) if meta.plain else None
    fits = memory_format is torch.channels_last and meta.plain and len(meta.size) == 4
    return plain_meta(meta.size, meta.dtype, channels_last_stride(meta.size)) if fits else None


def _result(operands: tuple[object, ...], dtype: torch.dtype, common: torch.dtype | None = None) -> RuleResult:
    """The answer for an elementwise op, converted to `common` before it computes."""
    found = elementwise(operands, dtype if common is None else common)
    return None if found is None else [(plain_meta(found[0], dtype, found[1]), None)]


def _shape_rule(like: Meta, dtype: torch.dtype) -> RuleResult:
    return [(plain_meta(like.size, dtype, like.stride), None)]


def _has_tensor(*operands: object) -> bool:
    """Return whether all are tensors or numbers, and there is a tensor among them."""
    found = False
    for a in operands:
        if type(a) is Meta:
            found = True
        elif type(a) not in NUMBERS:
            return False
    return found


_COMPLEX = frozenset({torch.complex64, torch.complex128})


@rule("add.Tensor mul.Tensor add.Scalar mul.Scalar")
def _sum_or_product(a: object, b: object, alpha: object = 1) -> RuleResult:
    """These know of masks and complex numbers, too."""
    if not _has_tensor(a, b):
        return None
    dtype = result_dtype((a, b))
    if dtype in _COMPLEX or dtype is torch.bool:
        return _result((a, b), dtype) if type(alpha) is int and alpha == 1 else None
    return _arithmetic(a, b, alpha)


@rule(_ARITHMETIC)
def _arithmetic(a: object, b: object, alpha: object = 1) -> RuleResult:
    if not _has_tensor(a, b):
        return None
    dtype = result_dtype((a, b))
    fits = dtype in FLOATS or dtype in INTEGERS
    fits = fits and (type(alpha) is int or (type(alpha) is float and dtype in FLOATS))
    return _result((a, b), dtype) if fits else None


@rule("sub.Tensor sub.Scalar")
def _subtraction(a: object, b: object, alpha: object = 1) -> RuleResult:
    masks = any(type(x) is bool or (type(x) is Meta and x.dtype is torch.bool) for x in (a, b))
    return None if masks else _arithmetic(a, b, alpha)


@rule("rsub.Tensor rsub.Scalar")
def _reversed_subtraction(a: object, b: object, alpha: object = 1) -> RuleResult:
    return _subtraction(b, a, alpha)  # where formats differ, the first operand's counts


@rule(_BITWISE + " gcd lcm")
def _bitwise(a: object, b: object) -> RuleResult:
    if not _has_tensor(a, b):
        return None
    dtype = result_dtype((a, b))
    return _result((a, b), dtype) if dtype is torch.bool or dtype in INTEGERS else None


@rule(_SHIFTS)
def _shift(a: object, b: object) -> RuleResult:
    if not _has_tensor(a, b):
        return None
    dtype = result_dtype((a, b))
    return _result((a, b), dtype) if dtype in INTEGERS else None


@rule(_OF_FRACTIONS)
def _function_of_fractions(a: object, b: object) -> RuleResult:
    if not _has_tensor(a, b) or any(type(x) is bool for x in (a, b)):
        return None
    dtype = result_dtype((a, b))
    return _result((a, b), dtype) if dtype in FLOATS else None


@rule("pow.Scalar")
def _power_of_number(a: object, b: Meta) -> RuleResult:
    if not row_major(b) or 0 in b.size:
        return None
    if b.dtype in INTEGERS and type(a) is int:
        return _result((a, b), b.dtype)
    return _function_of_fractions(a, b)


@rule("heaviside")
def _step(a: Meta, b: Meta) -> RuleResult:
    return _result((a, b), a.dtype) if a.dtype is b.dtype and a.dtype in FLOATS else None


@rule("div.Tensor_mode div.Scalar_mode")
def _division_with_mode(a: object, b: object, *, rounding_mode: object = None) -> RuleResult:
    return _division(a, b) if rounding_mode is None else _arithmetic(a, b)


@rule(_TRUE_DIVISION)
def _division(a: object, b: object) -> RuleResult:
    if not _has_tensor(a, b):
        return None
    dtype = fractional(result_dtype((a, b)))
    return _result((a, b), dtype) if dtype in FLOATS else None


@rule("div.Tensor div.Scalar")
def _quotient(a: object, b: object) -> RuleResult:
    """Complex numbers are divided, too."""
    dtype = result_dtype((a, b)) if _has_tensor(a, b) else None
    return _result((a, b), dtype) if dtype is not None and dtype in _COMPLEX else _division(a, b)


@rule(_COMPARISONS)
def _comparison(a: object, b: object) -> RuleResult:
    if not _has_tensor(a, b):
        return None
    return _result((a, b), torch.bool, result_dtype((a, b)))


@rule("logical_and logical_or logical_xor")
def _logical(a: Meta, b: Meta) -> RuleResult:
    """Operands are not converted: each is asked whether it is zero."""
    alike = a.dtype is b.dtype or (row_major(a) and row_major(b))
    return _result((a, b), torch.bool, a.dtype) if alike and _has_tensor(a, b) else None


@rule(_FLOAT_UNARY)
def _unary(a: Meta, *rest: object, **kwargs: object) -> RuleResult:
    fits = a.dtype in FLOATS and not any(isinstance(r, Meta) for r in (*rest, *kwargs.values()))
    return _result((a,), a.dtype) if fits else None


@rule(_FRACTIONAL_UNARY)
def _fraction(a: Meta, *numbers: object) -> RuleResult:
    """Integers and masks become fractions first."""
    fits = a.dtype in FLOATS or a.dtype in INTEGERS or a.dtype is torch.bool
    return _result((a,), fractional(a.dtype)) if fits else None


@rule("deg2rad rad2deg")
def _degrees(a: Meta) -> RuleResult:
    return _fraction(a) if row_major(a) else None


@rule(_SIGNED_UNARY)
def _sign_rule(a: Meta, *numbers: object) -> RuleResult:
    return _result((a,), a.dtype) if a.dtype in FLOATS or a.dtype in INTEGERS else None


@rule("abs")
def _magnitude(a: Meta) -> RuleResult:
    if a.dtype not in _COMPLEX:
        return _sign_rule(a)
    look = preserved(a)
    return None if look is None or 0 in a.size else [(plain_meta(a.size, a.dtype.to_real(), look.stride), None)]


@rule("sgn")
def _direction(a: Meta) -> RuleResult:
    return _result((a,), a.dtype) if a.dtype in _COMPLEX else _sign_rule(a)


@rule("polygamma")
def _polygamma(order: int, a: Meta) -> RuleResult:
    return _fraction(a) if order >= 0 else None


@rule("hardtanh")
def _hardtanh(a: Meta, *bounds: object) -> RuleResult:
    like = preserved(a)
    fits = like is not None and a.dtype in FLOATS and 0 not in a.size and not any(type(n) is Meta for n in bounds)
    return _shape_rule(like, a.dtype) if fits and like is not None else None


@rule("nan_to_num")
def _without_nan(a: Meta, *numbers: object) -> RuleResult:
    like = preserved(a)
    fits = like is not None and (a.dtype in FLOATS or a.dtype in INTEGERS) and 0 not in a.size
    return _shape_rule(like, a.dtype) if fits and like is not None else None


@rule(_WITH_SCALARS)
def _with_scalars(a: Meta, *scalars: object, **kwargs: object) -> RuleResult:
    numbers = [*scalars, *kwargs.values()]
    if type(a) is Meta and a.dtype is torch.bool and all(type(n) is bool for n in numbers):
        return _result((a,), torch.bool)  # fake tensors say that it is an integer
    if type(a) is not Meta or not all(n is None or type(n) in (int, float) for n in numbers):
        return None
    if a.dtype in INTEGERS:
        dtype = torch.get_default_dtype() if float in map(type, numbers) else a.dtype
        return _result((a,), dtype, dtype)
    return _result((a,), a.dtype) if a.dtype in FLOATS or a.dtype in _COMPLEX else None


@rule("where.self")
def _where(condition: Meta, a: object, b: object) -> RuleResult:
    if condition.dtype is not torch.bool or not _has_tensor(a, b):
        return None
    dtype = result_dtype((a, b))
    operands = [_convert(x, dtype) for x in (a, b)]  # but not the condition
    found = elementwise((condition, *operands)) if None not in operands else None
    return None if found is None else [(plain_meta(found[0], dtype, found[1]), None)]


def _convert(a: object, dtype: torch.dtype) -> object:
    """An operand after it was converted to a dtype; None for a tensor that is not plain."""
    if type(a) is not Meta or a.dtype is dtype or not a.size:
        return a
    return plain_meta(a.size, dtype, preserved_stride(a.size, a.stride)) if a.plain else None


@rule("masked_fill.Scalar masked_fill.Tensor")
def _masked_fill(a: Meta, mask: Meta, value: object) -> RuleResult:
    kinds = (int, float, bool) if a.dtype in FLOATS else (bool,) if a.dtype is torch.bool else (int, bool)
    fits = (a.dtype in FLOATS or a.dtype in INTEGERS or a.dtype is torch.bool) and mask.dtype is torch.bool
    if not fits or (type(value) not in kinds and type(value) is not Meta):
        return None
    if type(value) is Meta and (value.size != () or value.dtype is not a.dtype):
        return None
    size = broadcast_sizes((a.size, mask.size)) if a.plain and mask.plain else None
    return None if size is None else [(plain_meta(size, a.dtype), None)]


@rule("clone")
def _clone(a: Meta, memory_format: torch.memory_format | None = None) -> RuleResult:
    like = in_format(a, memory_format)
    return _shape_rule(like, a.dtype) if like is not None else None


@rule("_to_copy")
def _to_copy(
    a: Meta, dtype: torch.dtype | None = None, *, memory_format: torch.memory_format | None = None, **kwargs: object
) -> RuleResult:
    like = in_format(a, memory_format)
    if like is None or kwargs.keys() - {"layout"} or kwargs.get("layout") not in (None, torch.strided):
        return None
    return _shape_rule(like, dtype if dtype is not None else a.dtype)


@rule("mm")
def _mm(a: Meta, b: Meta) -> RuleResult:
    fits = len(a.size) == len(b.size) == 2 and a.size[1] == b.size[0] and a.dtype is b.dtype and a.plain and b.plain
    return [(plain_meta((a.size[0], b.size[1]), a.dtype), None)] if fits else None


@rule("bmm")
def _bmm(a: Meta, b: Meta) -> RuleResult:
    fits = len(a.size) == len(b.size) == 3 and a.size[0] == b.size[0] and a.size[2] == b.size[1]
    if not (fits and a.dtype is b.dtype and a.plain and b.plain):
        return None
    return [(plain_meta((a.size[0], a.size[1], b.size[2]), a.dtype), None)]


@rule("baddbmm")
def _baddbmm(bias: Meta, a: Meta, b: Meta, **kwargs: object) -> RuleResult:
    found = _bmm(a, b) if bias.plain and bias.dtype is a.dtype and a.dtype in FLOATS else None
    size = found[0][0].size if found else None  # type: ignore[union-attr]
    return found if size is not None and 0 not in size and broadcast_sizes((bias.size, size)) == size else None


@rule("addmm")
def _addmm(bias: Meta, a: Meta, b: Meta, **kwargs: object) -> RuleResult:
    found = _mm(a, b) if bias.plain and bias.dtype is a.dtype else None
    size = found[0][0].size if found else None  # type: ignore[union-attr]
    return found if size is not None and broadcast_sizes((bias.size, size)) == size else None


@rule("_softmax _log_softmax")
def _softmax(a: Meta, dim: int, half_to_float: bool) -> RuleResult:
    rank, fits = len(a.size) or 1, not half_to_float and a.dtype in FLOATS and a.plain
    return [(plain_meta(a.size, a.dtype), None)] if fits and -rank <= dim < rank else None


@rule("embedding")
def _embedding(weight: Meta, indices: Meta, *rest: object) -> RuleResult:
    fits = len(weight.size) == 2 and weight.plain and indices.plain and indices.dtype in (torch.int64, torch.int32)
    return [(plain_meta((*indices.size, weight.size[1]), weight.dtype), None)] if fits else None


@rule("amax amin")
def _extreme(a: Meta, dim: Sequence[int] = (), keepdim: bool = False) -> RuleResult:
    """Of every dtype, and of all dimensions where none is named."""
    if not a.plain or a.dtype.is_complex:
        return None
    found = _reduction(plain_meta(a.size, torch.float32, a.stride, a.offset), list(dim) or range(len(a.size)), keepdim)
    return [(plain_meta(found[0][0].size, a.dtype), None)] if found else None  # type: ignore[union-attr]


@rule("mean.dim")
def _reduction(
    a: Meta, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> RuleResult:
    rank = len(a.size)
    counts = a.dtype in FLOATS or (a.dtype in _COMPLEX and dtype is None)
    if not (dim and counts and (dtype is None or dtype in FLOATS) and a.plain and rank and 0 not in a.size):
        return None
    if not all(type(d) is int and -rank <= d < rank for d in dim):
        return None
    dims = {d % rank for d in dim}
    if len(dims) != len(dim):
        return None
    size = tuple(1 if i in dims else n for i, n in enumerate(a.size) if keepdim or i not in dims)
    return [(plain_meta(size, dtype or a.dtype), None)]


@rule("sum.dim_IntList")
def _sum_of_lines(
    a: Meta, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> RuleResult:
    """Integers and masks are counted in 64 bits, where nothing else is asked for. No dimensions are all of them."""
    dim = dim or range(len(a.size))
    if a.dtype in INTEGERS or a.dtype is torch.bool:
        counted = plain_meta(a.size, torch.float32, a.stride, a.offset) if a.plain else None
        found = _reduction(counted, dim, keepdim) if counted is not None else None
        return [(plain_meta(found[0][0].size, dtype or torch.int64), None)] if found else None  # type: ignore[union-attr]
    return _reduction(a, dim, keepdim, dtype=dtype)


@rule("sum")
def _whole_sum(a: Meta, *, dtype: torch.dtype | None = None) -> RuleResult:
    if a.plain and (a.dtype in INTEGERS or a.dtype is torch.bool) and dtype is None:
        return [(plain_meta((), torch.int64), None)]
    return _whole_reduction(a, dtype=dtype)


@rule("mean")
def _whole_reduction(a: Meta, *, dtype: torch.dtype | None = None) -> RuleResult:
    kept = a.dtype in FLOATS or (a.dtype in _COMPLEX and dtype is None)
    fits = a.plain and kept and (dtype is None or dtype in FLOATS)
    return [(plain_meta((), dtype or a.dtype), None)] if fits else None


@rule("arange.start arange arange.start_step")
def _arange(
    start: float, end: float | None = None, step: float = 1, *, dtype: torch.dtype | None = None, **options: object
) -> RuleResult:
    if end is None:
        start, end = 0, start
    numbers = (start, end, step)
    known = options.get("layout") in (None, torch.strided) and not options.keys() - {"layout", "device", "pin_memory"}
    if (
        not known
        or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
        or step == 0
        or (end - start) * step < 0
    ):
        return None
    if all(type(n) is int for n in numbers):
        count = int(-((start - end) // step))
        dtype = torch.int64 if dtype is None else dtype
    elif dtype is None or dtype in FLOATS:
        count = math.ceil((end - start) / step)
        dtype = torch.get_default_dtype() if dtype is None else dtype
    else:
        return None
    fits = dtype in FLOATS or dtype in INTEGERS
    return [(plain_meta((count,), dtype), None)] if fits and count < 1 << 48 else None


@rule("histc")
def _histogram(a: Meta, bins: int = 100, *bounds: object) -> RuleResult:
    # PyTorch's fake kernel refuses integers for the CPU; workers of every kind count them.
    fits = a.plain and (a.dtype in FLOATS or a.dtype in INTEGERS) and bins > 0
    return [(plain_meta((bins,), a.dtype), None)] if fits else None
