"""Shape rules for functions of each element that are less usual: special functions, and those of complex numbers.

See `shapes.rules`; this module completes its table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import broadcast_sizes, elementwise, fractional, preserved_stride, result_dtype
from skyproxy.tensor.shapes.kernel_strides import in_kernel_order
from skyproxy.tensor.shapes.networks import FULL_PRECISION
from skyproxy.tensor.shapes.rules import FLOATS, INTEGERS, RuleResult, row_major, rule
from skyproxy.tensor.shapes.selections import are_row_major, fresh, plain
from skyproxy.tensor.shapes.transforms import RULES
from skyproxy.torch_codec import storage_extent

_COMPLEX = frozenset({torch.complex64, torch.complex128})
_SPECIAL = (
    "special_erfcx special_log_ndtr special_ndtri special_bessel_j0 "
    "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai"
)
_OF_COMPLEX_NUMBERS = (
    "exp log sqrt rsqrt reciprocal sin cos tan tanh sigmoid acos acosh asin asinh atan atanh cosh sinh expm1 exp2 "
    "log10 log1p log2 neg square"
)


def _result(operands: Sequence[object], dtype: torch.dtype) -> RuleResult:
    found = elementwise(operands, dtype)
    return None if found is None else [(plain_meta(found[0], dtype, found[1]), None)]


@rule("special_entr special_i0e special_i1 special_i1e")
def _special_of_half_precision(x: Meta) -> RuleResult:
    return _result((x,), x.dtype) if x.dtype in FLOATS else _special(x)


@rule(_SPECIAL)
def _special(x: Meta) -> RuleResult:
    fits = x.dtype in FULL_PRECISION or x.dtype in INTEGERS or x.dtype is torch.bool
    return _result((x,), fractional(x.dtype)) if fits else None


def _add_complex_form(name: str) -> None:
    """Register a rule for a function that knows of complex numbers beside the one for real ones."""
    of_real_numbers = RULES["aten::" + name]

    @rule(name)
    def function(x: Meta) -> RuleResult:
        return _result((x,), x.dtype) if x.dtype in _COMPLEX else of_real_numbers(x)


for _name in _OF_COMPLEX_NUMBERS.split():
    _add_complex_form(_name)


@rule("pow.Tensor_Tensor")
def _power(a: Meta, b: Meta) -> RuleResult:
    dtype = result_dtype((a, b))
    return _result((a, b), dtype) if dtype in FLOATS or dtype in INTEGERS else None


@rule("special_zeta special_zeta.other_scalar special_zeta.self_scalar")
def _zeta(a: object, b: object) -> RuleResult:
    halves = any(type(x) is Meta and x.dtype in FLOATS - FULL_PRECISION for x in (a, b))
    return None if halves else _function_of_two(a, b)


@rule("igamma igammac")
def _function_of_two(a: object, b: object) -> RuleResult:
    operands = (a, b)
    if not all(type(x) in (Meta, int, float) for x in operands):
        return None
    dtype = result_dtype(operands)
    return _result(operands, dtype) if dtype in FLOATS else None


@rule("angle")
def _angle(x: Meta) -> RuleResult:
    if x.dtype in _COMPLEX:
        return [fresh(x.size, x.dtype.to_real())] if plain_complex(x) else None
    fits = x.dtype in FLOATS or x.dtype in INTEGERS or x.dtype is torch.bool
    return _result((x,), fractional(x.dtype)) if fits else None


def plain_complex(*tensors: Meta) -> bool:
    """Return whether all are tensors of complex numbers, and not empty, in any order of memory."""
    return all(t.plain and t.dtype in _COMPLEX and 0 not in t.size for t in tensors)


@rule("frexp.Tensor")
def _mantissa_and_exponent(x: Meta) -> RuleResult:
    if not plain(x) or x.dtype not in FULL_PRECISION:
        return None
    stride = preserved_stride(x.size, x.stride)
    return [(plain_meta(x.size, x.dtype, stride), None), (plain_meta(x.size, torch.int32, stride), None)]


@rule("mvlgamma")
def _multivariate_log_gamma(x: Meta, order: object) -> RuleResult:
    return [fresh(x.size, x.dtype)] if plain(x) and x.dtype in FLOATS and type(order) is int and order > 0 else None


@rule("poisson bernoulli.p")
def _draw(x: Meta, *chance: object, **options: object) -> RuleResult:
    fits = plain(x) and x.dtype in FULL_PRECISION and not options
    return [fresh(x.size, x.dtype)] if fits and all(type(p) is float for p in chance) else None


@rule("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor")
def _normal(mean: object, deviation: object = 1.0, **options: object) -> RuleResult:
    looks = [a for a in (mean, deviation) if type(a) is Meta]
    fits = all(look.plain for look in looks) and all(type(a) in (Meta, int, float) for a in (mean, deviation))
    if not fits or options or looks[-1].dtype is not looks[0].dtype:
        return None
    size = broadcast_sizes([look.size for look in looks])
    if size is None or (looks[0].dtype not in FULL_PRECISION and 0 not in size):
        return None  # but for no numbers: these are drawn in every dtype
    return [fresh(size, looks[0].dtype)]


@rule("addr")
def _outer_sum(x: Meta, a: Meta, b: Meta, **numbers: object) -> RuleResult:
    fits = plain(x, a, b) and x.dtype is a.dtype is b.dtype and x.dtype in FLOATS and len(a.size) == len(b.size) == 1
    if not fits or x.size != (a.size[0], b.size[0]):
        return None
    return in_kernel_order("addr", [plain_meta(x.size, x.dtype)], x, a, b)


@rule("fake_quantize_per_tensor_affine_cachemask")
def _fake_quantize(x: Meta, scale: object, *numbers: object) -> RuleResult:
    if not plain(x) or x.dtype is not torch.float32 or type(scale) is not float:
        return None
    stride = preserved_stride(x.size, x.stride)
    return [(plain_meta(x.size, x.dtype, stride), None), (plain_meta(x.size, torch.bool, stride), None)]


@rule("rrelu_with_noise")
def _random_leaks(
    x: Meta,
    noise: Meta,
    lower: object = 0.125,
    upper: object = 1 / 3,
    training: object = False,
    generator: object = None,
) -> RuleResult:
    fits = (
        plain(x, noise)
        and x.dtype in FLOATS
        and x.dtype is not torch.float16
        and noise.dtype is x.dtype
        and noise.size == x.size
    )
    # With another order of memory, the kernel lays `noise` out anew.
    if not fits or generator is not None or not are_row_major(x, noise):
        return None
    return [fresh(x.size, x.dtype)]


@rule("rrelu_with_noise_backward")
def _random_leaks_backward(
    gradient: Meta, x: Meta, noise: Meta, lower: object, upper: object, training: object, is_result: object
) -> RuleResult:
    fits = plain(gradient, x, noise) and x.dtype in FLOATS and gradient.dtype is noise.dtype is x.dtype
    if not fits or not gradient.size == x.size == noise.size:
        return None
    usual = in_kernel_order("leaky_relu_backward", [plain_meta(x.size, x.dtype)], gradient, x)
    # Bounds that lie close together choose the other formula, but what is inferred holds for all bounds.
    return None if training and _result((noise, gradient), x.dtype) != usual else usual


@rule("_trilinear")
def _three_factors(
    a: Meta,
    b: Meta,
    c: Meta,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> RuleResult:
    if not plain(a, b, c) or not a.dtype is b.dtype is c.dtype or a.dtype not in FLOATS:
        return None
    sizes = []
    for x, dims in zip((a, b, c), (expand1, expand2, expand3), strict=True):
        size = list(x.size)
        for d in dims:
            size.insert(d, 1)
        sizes.append(tuple(size))
    whole = broadcast_sizes(sizes) if len(set(map(len, sizes))) == 1 else None
    if whole is None or any(not 0 <= d < len(whole) for d in sumdim):
        return None
    return [fresh(tuple([n for d, n in enumerate(whole) if d not in sumdim]), a.dtype)]


@rule("_pdist_forward")
def _distances(x: Meta, order: object = 2.0) -> RuleResult:
    fits = are_row_major(x) and x.dtype in FULL_PRECISION and len(x.size) == 2 and x.size[0] > 1
    return [fresh((x.size[0] * (x.size[0] - 1) // 2,), x.dtype)] if fits else None


@rule("_pdist_backward")
def _distances_backward(gradient: Meta, x: Meta, order: object, distances: Meta) -> RuleResult:
    fits = plain(gradient, x, distances) and x.dtype in FULL_PRECISION and gradient.dtype is distances.dtype is x.dtype
    fits = fits and row_major(x) and len(x.size) == 2 and gradient.size == distances.size
    return [fresh(x.size, x.dtype)] if fits and gradient.size == (x.size[0] * (x.size[0] - 1) // 2,) else None


@rule("_weight_norm_interface")
def _weight_norm(v: Meta, g: Meta, dim: int = 0) -> RuleResult:
    fits = are_row_major(v, g) and v.dtype in FULL_PRECISION and g.dtype is v.dtype and type(dim) is int
    if not fits or not _is_norm_of(v, g, dim):
        return None
    return [fresh(v.size, v.dtype), fresh(g.size, g.dtype)]


def _is_norm_of(v: Meta, g: Meta, dim: int) -> bool:
    """Return whether one may be what the other's slices along a dimension, its first or its last, are scaled to."""
    rank = len(v.size)
    return dim in (0, rank - 1) and g.size == tuple([n if d == dim else 1 for d, n in enumerate(v.size)])


@rule("_weight_norm_interface_backward")
def _weight_norm_backward(gradient: Meta, v: Meta, g: Meta, norms: Meta, dim: int) -> RuleResult:
    fits = are_row_major(gradient, v, g, norms) and v.dtype in FULL_PRECISION and type(dim) is int
    fits = fits and gradient.dtype is g.dtype is norms.dtype is v.dtype and gradient.size == v.size
    if not fits or norms.size != g.size or not _is_norm_of(v, g, dim):
        return None
    return [fresh(v.size, v.dtype), fresh(g.size, g.dtype)]


@rule("multi_margin_loss")
def _multi_margin(
    x: Meta, target: Meta, p: object = 1, margin: object = 1, weight: object = None, reduction: int = 1
) -> RuleResult:
    """One row has a target of one element, with a dimension or without; the losses have as many as it has."""
    fits = plain(x, target) and x.dtype in FULL_PRECISION and target.dtype is torch.int64 and len(x.size) <= 2
    if not fits or p not in (1, 2) or reduction not in (0, 1, 2):
        return None
    rows, classes = (1, 1, *x.size)[-2:]
    weighted = weight is None or (type(weight) is Meta and (weight.size, weight.dtype) == ((classes,), x.dtype))
    if not weighted or not classes or target.size not in ((rows,), () if rows == 1 else (rows,)):
        return None
    return [fresh(() if reduction else target.size, x.dtype)]


@rule("multi_margin_loss_backward")
def _multi_margin_backward(gradient: Meta, x: Meta, target: Meta, *rest: object) -> RuleResult:
    fits = plain(gradient) and are_row_major(x, target) and x.dtype in FULL_PRECISION and gradient.dtype is x.dtype
    fits = fits and len(x.size) == 2 and target.size == x.size[:1] and gradient.size in ((), target.size)
    return [fresh(x.size, x.dtype)] if fits else None


@rule("multilabel_margin_loss_forward")
def _multilabel_margin(x: Meta, target: Meta, reduction: int = 1) -> RuleResult:
    fits = are_row_major(x, target) and x.dtype in FULL_PRECISION and target.dtype is torch.int64
    if not fits or len(x.size) not in (1, 2) or target.size != x.size or reduction not in (0, 1, 2):
        return None
    return [fresh(() if reduction else x.size[:-1], x.dtype), fresh(x.size, x.dtype)]


@rule("multilabel_margin_loss_backward")
def _multilabel_margin_backward(gradient: Meta, x: Meta, target: Meta, reduction: int, chosen: Meta) -> RuleResult:
    fits = plain(gradient) and are_row_major(x, target, chosen) and x.dtype in FULL_PRECISION
    fits = fits and gradient.dtype is x.dtype and len(x.size) in (1, 2) and target.size == chosen.size == x.size
    return [fresh(x.size, x.dtype)] if fits and gradient.size in ((), x.size[:-1]) else None


@rule("histogram.bin_ct")
def _histogram(
    x: Meta, bins: object = 100, *, range: object = None, weight: object = None, density: object = False
) -> RuleResult:
    fits = plain(x) and x.dtype in FULL_PRECISION and type(bins) is int and bins > 0 and weight is None
    return [fresh((bins,), x.dtype), fresh((bins + 1,), x.dtype)] if fits and type(bins) is int else None


@rule("_segment_reduce_backward")
def _segments_backward(gradient: Meta, output: Meta, data: Meta, reduce: object, **options: object) -> RuleResult:
    fits = are_row_major(gradient, output, data) and gradient.dtype is output.dtype is data.dtype
    return [fresh(data.size, data.dtype)] if fits and data.dtype in FLOATS and gradient.size == output.size else None


@rule("_embedding_bag _embedding_bag_forward_only")
def _bags(
    weight: Meta,
    indices: Meta,
    offsets: Meta,
    scale_by_frequency: object = False,
    mode: int = 0,
    sparse: object = False,
    scales: Meta | None = None,
    with_last: bool = False,
    padding: int = -1,
) -> RuleResult:
    """As the CPU's kernels note their work: CUDA's are asked."""
    fits = plain(weight) and are_row_major(indices, offsets) and weight.dtype in FLOATS and not with_last
    fits = fits and len(weight.size) == 2 and len(indices.size) == len(offsets.size) == 1 and mode in (0, 1, 2)
    if not fits or indices.dtype is not torch.int64 or offsets.dtype is not torch.int64:
        return None
    if scales is not None and (not are_row_major(scales) or scales.dtype is not weight.dtype or mode != 0):
        return None
    if scales is not None and scales.size != indices.size:
        return None
    bags, width = offsets.size[0], weight.size[1]
    extent = storage_extent(weight.size, weight.stride)
    if weight.stride[1] != 1 and extent < weight.size[0] * width:
        return None  # elements share memory: a worker copies them to rows, for the kernel would read behind them
    added = mode == 0 and padding < 0 and weight.stride[1] == 1 and weight.dtype is not torch.float64
    most = (bags, width) if mode == 2 else (bags,)
    counted = [fresh(size, torch.int64) for size in ((0,) if added else indices.size, (bags,), most)]
    return [fresh((bags, width), weight.dtype), *counted]


__all__ = ["RULES"]
