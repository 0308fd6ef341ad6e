"""Shape rules for the layers of networks whose inputs change in length, and for what makes tensors anew.

See `shapes.rules`; this module completes its table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, check_extent, plain_meta
from skyproxy.tensor.shapes.elementwise import broadcast_sizes, elementwise, preserved_stride
from skyproxy.tensor.shapes.rules import FLOATS, INTEGERS, RULES, RuleResult, in_format, row_major, rule

_COMPLEX = frozenset({torch.complex64, torch.complex128})
_DTYPES_OF_NUMBERS: dict[type, torch.dtype | None] = {float: None, int: torch.int64, bool: torch.bool}
_EXACT = frozenset({torch.float32, torch.float64})
"""The dtypes of which statistics look the same on every device."""


def _fresh_result(size: tuple[int, ...], dtype: torch.dtype) -> RuleResult:
    return [(plain_meta(size, dtype), None)]


def _is_float(x: Meta) -> bool:
    """Return whether it is a tensor of fractions in any order of memory, and not empty."""
    return x.plain and x.dtype in FLOATS and 0 not in x.size


# --- products --------------------------------------------------------------------------------------------------------


@rule("linear")
def _linear(x: Meta, weight: Meta, bias: Meta | None = None) -> RuleResult:
    fits = _can_multiply(x, weight) and len(weight.size) == 2 and len(x.size) >= 1 and x.size[-1] == weight.size[1]
    if not fits or (bias is not None and not (_can_multiply(weight, bias) and bias.size == weight.size[:1])):
        return None
    return _fresh_result((*x.size[:-1], weight.size[0]), x.dtype)


def _can_multiply(a: Meta, b: Meta) -> bool:
    return a.plain and b.plain and a.dtype is b.dtype and a.dtype in FLOATS and 0 not in a.size and 0 not in b.size


@rule("matmul")
def _matmul(a: Meta, b: Meta) -> RuleResult:
    rank, other = len(a.size), len(b.size)
    if not _can_multiply(a, b) or not rank or not other or (rank == 1 and other > 2):
        return None
    if a.size[-1] != b.size[-2 if other > 1 else 0]:
        return None
    batch = broadcast_sizes((a.size[:-2], b.size[:-2])) if rank > 1 else ()
    if batch is None:
        return None
    return _fresh_result((*batch, *a.size[-2:-1], *(b.size[-1:] if other > 1 else ())), a.dtype)


@rule("mv")
def _mv(a: Meta, b: Meta) -> RuleResult:
    fits = len(a.size) == 2 and len(b.size) == 1 and a.size[1] == b.size[0] and a.dtype is b.dtype
    fits = fits and a.plain and b.plain and (a.dtype in FLOATS or a.dtype in INTEGERS)
    return [(plain_meta(a.size[:1], a.dtype), None)] if fits else None


@rule("addmv")
def _addmv(bias: Meta, a: Meta, b: Meta, **numbers: object) -> RuleResult:
    found = _mv(a, b) if bias.plain and bias.dtype is a.dtype in FLOATS and 0 not in a.size else None
    return found if found is not None and bias.size in (a.size[:1], (1,), ()) else None


@rule("addbmm")
def _addbmm(bias: Meta, a: Meta, b: Meta, **numbers: object) -> RuleResult:
    fits = _can_multiply(a, b) and bias.plain and bias.dtype is a.dtype and len(a.size) == len(b.size) == 3
    if not fits or a.size[0] != b.size[0] or a.size[2] != b.size[1]:
        return None
    size = (a.size[1], b.size[2])
    return _fresh_result(size, a.dtype) if broadcast_sizes((bias.size, size)) == size else None


@rule("dot vdot")
def _dot(a: Meta, b: Meta) -> RuleResult:
    fits = len(a.size) == len(b.size) == 1 and a.size == b.size and a.dtype is b.dtype and a.plain and b.plain
    return [(plain_meta((), a.dtype), None)] if fits and (a.dtype in FLOATS or a.dtype in INTEGERS) else None


# --- layers ----------------------------------------------------------------------------------------------------------


NORMS = (
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_batch_norm_with_update"),
    *("_batch_norm_with_update_functional", "native_layer_norm", "native_group_norm"),
)
"""Norms whose second and third result are statistics of their first argument."""


def statistics_dtype(x: Meta, parts: Sequence[Meta]) -> torch.dtype | None:
    """The dtype of what the CPU's norms note of their input; None where its dtype and that of the weights do not fit.

    Other devices note float32 for tensors of half precision, and are asked.
    """
    if not parts:
        return x.dtype if x.dtype in FLOATS else None
    kinds = {part.dtype for part in parts}
    fits = x.dtype in FLOATS and (kinds == {x.dtype} or (kinds == {torch.float32} and x.dtype not in _EXACT))
    return kinds.pop() if fits else None


def _normed_dtype(x: Meta, shape: Sequence[int], weight: Meta | None, bias: Meta | None) -> torch.dtype | None:
    """The dtype of the statistics of a norm over the last dimensions; None where its operands do not go together."""
    normed = tuple(shape)
    rank = len(x.size) - len(normed)
    if not _is_float(x) or not normed or rank < 0 or x.size[rank:] != normed:
        return None
    if weight is None and bias is None:
        return x.dtype
    parts = [t for t in (weight, bias) if t is not None]
    return None if any(t.size != normed or not row_major(t) for t in parts) else statistics_dtype(x, parts)


@rule("layer_norm")
def _whole_layer_norm(
    x: Meta, shape: Sequence[int], weight: Meta | None = None, bias: Meta | None = None, *options: object
) -> RuleResult:
    return None if _normed_dtype(x, shape, weight, bias) is None else _fresh_result(x.size, x.dtype)


@rule("native_layer_norm")
def _layer_norm(x: Meta, shape: Sequence[int], weight: Meta | None, bias: Meta | None, eps: float) -> RuleResult:
    dtype = _normed_dtype(x, shape, weight, bias)
    if dtype is None:
        return None
    size = x.size
    sums = plain_meta(size[: len(size) - len(shape)] + (1,) * len(shape), dtype)
    return [(plain_meta(size, x.dtype), None), (sums, None), (sums, None)]


@rule("native_dropout")
def _dropout(x: Meta, p: float, train: bool | None) -> RuleResult:
    if not (_is_float(x) and train is True and type(p) is float and 0 < p < 1):
        return None
    mask = plain_meta(x.size, torch.bool, preserved_stride(x.size, x.stride))
    product = elementwise([x, mask], x.dtype)
    return None if product is None else [(plain_meta(x.size, x.dtype, product[1]), None), (mask, None)]


@rule("bernoulli")
def _coins(x: Meta, **options: object) -> RuleResult:
    return _fresh_result(x.size, x.dtype) if x.plain and x.dtype in FLOATS and not options else None


@rule("index_select")
def _index_select(x: Meta, dim: int, index: Meta) -> RuleResult:
    rank = len(x.size)
    fits = x.plain and 0 not in x.size and (x.dtype in FLOATS or x.dtype in INTEGERS or x.dtype is torch.bool)
    fits = fits and index.plain and index.dtype in (torch.int64, torch.int32) and len(index.size) == 1
    if not fits or not rank or not -rank <= dim < rank or 0 in index.size:
        return None
    dim %= rank
    return _fresh_result((*x.size[:dim], index.size[0], *x.size[dim + 1 :]), x.dtype)


@rule("argmax argmin")
def _argmax(x: Meta, dim: int | None = None, keepdim: bool = False) -> RuleResult:
    rank = len(x.size)
    counts = _is_float(x) or (x.plain and x.dtype in INTEGERS and 0 not in x.size)
    if dim is None and counts:
        return _fresh_result((1,) * rank if keepdim else (), torch.int64)
    if not (counts and type(dim) is int and rank and -rank <= dim < rank):
        return None
    dim %= rank
    return _fresh_result((*x.size[:dim], *[1] * keepdim, *x.size[dim + 1 :]), torch.int64)


@rule("cumsum cumprod")
def _cumulate(x: Meta, dim: int, *, dtype: torch.dtype | None = None) -> RuleResult:
    """Integers and masks are added up in 64 bits, where nothing else is asked for."""
    rank, counts = len(x.size), x.dtype in INTEGERS or x.dtype is torch.bool
    if not x.plain or 0 in x.size or not rank or not -rank <= dim < rank or not (counts or x.dtype in FLOATS):
        return None
    if dtype is not None and dtype not in FLOATS and dtype not in INTEGERS:
        return None
    return _fresh_result(x.size, dtype or (torch.int64 if counts else x.dtype))


@rule("tril triu")
def _triangle(x: Meta, diagonal: int = 0) -> RuleResult:
    return _fresh_result(x.size, x.dtype) if x.plain and len(x.size) >= 2 and 0 not in x.size else None


@rule("bitwise_not")
def _inversion(x: Meta) -> RuleResult:
    found = elementwise([x]) if x.dtype is torch.bool or x.dtype in INTEGERS else None
    return None if found is None else [(plain_meta(found[0], x.dtype, found[1]), None)]


@rule("logical_not")
def _negation(x: Meta) -> RuleResult:
    found = elementwise([x]) if x.dtype is torch.bool or x.dtype in INTEGERS or x.dtype in FLOATS else None
    return None if found is None else [(plain_meta(found[0], torch.bool, found[1]), None)]


@rule("slice_backward select_backward")
def _part_backward(grad: Meta, size: Sequence[int], *place: object) -> RuleResult:
    fits = grad.plain and all(type(n) is int and n >= 0 for n in size) and all(type(n) is int for n in place)
    return _fresh_result(tuple(size), grad.dtype) if fits else None


# --- fresh tensors ---------------------------------------------------------------------------------------------------


def _options(dtype: torch.dtype | None, layout: torch.layout | None, unknown: dict[str, object]) -> bool:
    unknown.pop("device", None)
    unknown.pop("pin_memory", None)
    return layout in (None, torch.strided) and (dtype is None or type(dtype) is torch.dtype) and not unknown


@rule("empty.memory_format")
def _empty(size: Sequence[int], *, memory_format: torch.memory_format | None = None, **options: object) -> RuleResult:
    found = _fill(size, **options)
    if found is None or memory_format in (None, torch.contiguous_format):
        return found
    (row_by_row, _) = found[0]
    look = in_format(row_by_row, memory_format) if memory_format is torch.channels_last else None  # type: ignore[arg-type]
    return None if look is None else [(look, None)]


@rule("zeros ones")
def _fill(
    size: Sequence[int], *, dtype: torch.dtype | None = None, layout: torch.layout | None = None, **options: object
) -> RuleResult:
    """Without a dtype, they have the default one, which what is remembered belongs to."""
    chosen = torch.get_default_dtype() if dtype is None else dtype
    if not _options(dtype, layout, options) or not all(type(n) is int and n >= 0 for n in size):
        return None
    fits = chosen in FLOATS or chosen in INTEGERS or chosen is torch.bool or chosen in _COMPLEX
    return _fresh_result(tuple(size), chosen) if fits else None


@rule("rand randn")
def _draw(size: Sequence[int], *, dtype: torch.dtype | None = None, **options: object) -> RuleResult:
    return _fill(size, dtype=dtype, **options) if dtype is None or dtype in FLOATS or dtype in _COMPLEX else None


@rule("scalar_tensor")
def _scalar_tensor(value: object, **options: object) -> RuleResult:
    fits = type(value) in _DTYPES_OF_NUMBERS or (type(value) is complex and options.get("dtype") in _COMPLEX)
    return _fill((), **options) if fits else None


@rule("eye")
def _eye(n: int, **options: object) -> RuleResult:
    return _fill((n, n), **options)


@rule("eye.m")
def _wide_eye(n: int, m: int, **options: object) -> RuleResult:
    return _fill((n, m), **options)


_LARGEST: dict[torch.dtype | None, int] = {
    **{dtype: torch.iinfo(dtype).max for dtype in INTEGERS},
    **{dtype: int(2 / torch.finfo(dtype).eps) for dtype in FLOATS},
}
"""Up to which number tensors of a dtype hold each integer."""


@rule("randint")
def _randint(
    high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, **options: object
) -> RuleResult:
    return _randint_from(0, high, size, dtype=dtype, **options)


@rule("randint.low")
def _randint_from(
    low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = torch.int64, **options: object
) -> RuleResult:
    fits = type(low) is type(high) is int and low < high and dtype in _LARGEST
    smallest = 0 if dtype is torch.uint8 else -_LARGEST.get(dtype, 0) - 1
    return _fill(size, dtype=dtype, **options) if fits and smallest <= low and high - 1 <= _LARGEST[dtype] else None


@rule("randperm")
def _randperm(n: int, *, dtype: torch.dtype | None = torch.int64, **options: object) -> RuleResult:
    return _fill((n,), dtype=dtype, **options) if n <= _LARGEST.get(dtype, -1) else None


@rule("linspace")
def _linspace(start: object, end: object, steps: object, **options: object) -> RuleResult:
    fits = all(type(n) in (int, float) for n in (start, end)) and options.get("dtype") in (None, *FLOATS, *_COMPLEX)
    return _fill((steps,), **options) if fits else None


@rule("empty_permuted")
def _empty_permuted(size: Sequence[int], order: Sequence[int], **options: object) -> RuleResult:
    found = _fill(size, **options)
    if found is None or len(order) != len(size) or {*order} != {*range(len(size))}:
        return None
    (plain_look, _) = found[0]
    stride, running = [0] * len(size), 1
    for d in reversed(order):
        stride[d] = running
        running *= max(size[d], 1)
    return [(plain_meta(tuple(size), plain_look.dtype, tuple(stride)), None)]  # type: ignore[union-attr]


@rule("empty_strided")
def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **options: object
) -> RuleResult:
    found = _fill(size, dtype=dtype, **options)
    if found is None or len(size) != len(stride) or not all(type(n) is int for n in stride):
        return None
    chosen = torch.get_default_dtype() if dtype is None else dtype
    check_extent(size, stride, chosen)
    return [(plain_meta(tuple(size), chosen, tuple(stride)), None)] if min(stride, default=0) >= 0 else None


@rule("full")
def _full(
    size: Sequence[int],
    value: object,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    **options: object,
) -> RuleResult:
    if type(value) is complex:
        dtype = torch.get_default_dtype().to_complex() if dtype is None else dtype
        return _fill(size, dtype=dtype, layout=layout, **options) if dtype in _COMPLEX else None
    if dtype is None:
        dtype = _DTYPES_OF_NUMBERS.get(type(value))
    if type(value) not in _DTYPES_OF_NUMBERS:
        return None
    return _fill(size, dtype=dtype, layout=layout, **options)


@rule("zeros_like ones_like empty_like rand_like randn_like")
def _filled_like(
    x: Meta,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    memory_format: torch.memory_format | None = None,
    **options: object,
) -> RuleResult:
    look = in_format(x, memory_format)
    fits = _options(dtype, layout, options) and look is not None
    return [(plain_meta(look.size, dtype or x.dtype, look.stride), None)] if fits and look is not None else None


@rule("full_like")
def _full_like(x: Meta, value: object, **options: object) -> RuleResult:
    return _filled_like(x, **options) if type(value) in (int, float, bool) else None


@rule("randint_like randint_like.low_dtype")
def _randint_like(x: Meta, *bounds: object, **options: object) -> RuleResult:
    fits = x.dtype in FLOATS and all(type(n) is int and 0 <= n < 1 << 8 for n in bounds) and sorted(bounds) == [*bounds]  # type: ignore[type-var]
    return _filled_like(x, **options) if fits and bounds[-1] != 0 and len(set(bounds)) == len(bounds) else None


@rule("normal.float_float")
def _normal(mean: float, deviation: float, size: Sequence[int], **options: object) -> RuleResult:
    return _draw(size, **options) if type(mean) is type(deviation) is float and deviation >= 0 else None


@rule("logspace")
def _logspace(start: object, end: object, steps: object, base: object = 10.0, **options: object) -> RuleResult:
    return _linspace(start, end, steps, **options) if type(base) in (int, float) else None


@rule("fft_fftfreq")
def _frequencies(n: int, d: object = 1.0, **options: object) -> RuleResult:
    fits = options.get("dtype") is None or options["dtype"] in _EXACT
    return _fill((n,), **options) if fits and type(n) is int and n > 0 else None


@rule("fft_rfftfreq")
def _frequencies_of_half(n: int, d: object = 1.0, **options: object) -> RuleResult:
    return _frequencies(n // 2 + 1, d, **options) if type(n) is int and n > 0 else None


def _elements_below(rows: int, columns: int, offset: int) -> int:
    """Count the elements of a lower triangle: of rows that grow by one, and then of whole ones."""
    first = min(columns, 1 + offset) if offset > 0 else int(rows + offset > 0)
    last = max(0, min(columns, rows + offset))
    growing = last - first + 1
    whole = max(0, min(rows, rows + offset)) - growing
    return (first + last) * growing // 2 + max(whole, 0) * columns


@rule("tril_indices")
def _lower_indices(rows: int, columns: int, offset: int = 0, **options: object) -> RuleResult:
    fits = all(type(n) is int for n in (rows, columns, offset)) and rows > 0 and columns > 0
    fits = fits and options.get("dtype", torch.int64) is torch.int64
    return _fill((2, _elements_below(rows, columns, offset)), **{"dtype": torch.int64, **options}) if fits else None


@rule("triu_indices")
def _upper_indices(rows: int, columns: int, offset: int = 0, **options: object) -> RuleResult:
    fits = all(type(n) is int for n in (rows, columns, offset)) and rows > 0 and columns > 0
    if not fits or options.get("dtype", torch.int64) is not torch.int64:
        return None
    count = rows * columns - _elements_below(rows, columns, offset - 1)
    return _fill((2, count), **{"dtype": torch.int64, **options})


@rule("hann_window bartlett_window hamming_window blackman_window")
def _window(length: int, **options: object) -> RuleResult:
    return _fill((length,), **options) if options.get("dtype") is None or options["dtype"] in FLOATS else None


__all__ = ["RULES", "statistics_dtype"]
