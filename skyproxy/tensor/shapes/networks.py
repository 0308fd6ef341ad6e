"""Shape rules for layers of networks and their gradients: norms, losses, activations.

See `shapes.rules`; this module completes its table. Rules answer for row-major tensors only, but for elementwise ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import (
    broadcast_sizes,
    channels_last_stride,
    elementwise,
    elementwise_stride,
    preserved_stride,
    result_dtype,
)
from skyproxy.tensor.shapes.joins import RULES
from skyproxy.tensor.shapes.kernel_strides import in_kernel_order
from skyproxy.tensor.shapes.layers import statistics_dtype
from skyproxy.tensor.shapes.rules import FLOATS, INTEGERS, RuleResult, preserved, rule
from skyproxy.tensor.shapes.selections import are_row_major, fresh, plain
from skyproxy.tensor.shapes.strides import suggests_channels_last
from skyproxy.torch_codec import contiguous_stride

FULL_PRECISION = frozenset({torch.float32, torch.float64})
"""The dtypes of which statistics look the same on every device."""


def _follows(gradient: Meta, output: Meta) -> bool:
    """Return whether a gradient is one of a row-major output; it may be expanded itself, as that of a sum is."""
    return whole_floats(output) and gradient.plain and gradient.dtype is output.dtype and gradient.size == output.size


def whole_floats(*tensors: Meta) -> bool:
    """Return whether the tensors are row-major, and of one and the same floating-point dtype."""
    if not are_row_major(*tensors):
        return False
    dtype = tensors[0].dtype
    if dtype not in FLOATS:
        return False
    for t in tensors:  # noqa: SIM110  # most rules ask this, and a generator takes twice as long
        if t.dtype is not dtype:
            return False
    return True


# --- elementwise -----------------------------------------------------------------------------------------------------


def _look_of_one_dtype(*operands: Meta) -> Meta | None:
    dtype = operands[0].dtype
    if dtype not in FLOATS:
        return None
    for a in operands:
        if type(a) is not Meta or a.dtype is not dtype:
            return None
    found = elementwise(operands)
    return None if found is None else plain_meta(found[0], dtype, found[1])


def _elementwise_of_one_dtype(*operands: Meta) -> RuleResult:
    look = _look_of_one_dtype(*operands)
    return None if look is None else [(look, None)]


@rule("addcmul addcdiv")
def _addcmul(x: Meta, a: Meta, b: Meta, *, value: object = 1) -> RuleResult:
    return _elementwise_of_one_dtype(x, a, b) if type(value) in (int, float) else None


@rule("glu")
def _glu(x: Meta, dim: int = -1) -> RuleResult:
    rank = len(x.size)
    if not plain(x) or type(dim) is not int or not -rank <= dim < rank or x.size[dim] % 2:
        return None
    dim %= rank
    half = plain_meta((*x.size[:dim], x.size[dim] // 2, *x.size[dim + 1 :]), x.dtype, x.stride)
    return _elementwise_of_one_dtype(half, half)


@rule("_cdist_forward")
def _distances(a: Meta, b: Meta, order: float, mode: object) -> RuleResult:
    fits = plain(a, b) and a.dtype is b.dtype and a.dtype in FULL_PRECISION and len(a.size) == len(b.size) >= 2
    fits = (
        fits and a.size[:-2] == b.size[:-2] and a.size[-1] == b.size[-1] and type(order) in (int, float) and order >= 0
    )
    return [fresh((*a.size[:-1], b.size[-2]), a.dtype)] if fits else None


@rule("_prelu_kernel")
def _prelu(x: Meta, weight: Meta) -> RuleResult:
    fits = type(weight) is Meta and plain(x, weight) and weight.dtype is x.dtype and x.dtype in FLOATS
    fits = fits and broadcast_sizes([x.size, weight.size]) == x.size
    return in_kernel_order("_prelu_kernel", [plain_meta(x.size, x.dtype)], x) if fits else None


@rule("complex polar")
def _complex(real: Meta, imaginary: Meta) -> RuleResult:
    look = _look_of_one_dtype(real, imaginary) if real.dtype in FULL_PRECISION else None
    return None if look is None else [(plain_meta(look.size, real.dtype.to_complex(), look.stride), None)]


@rule("lerp.Scalar")
def _lerp(x: Meta, end: Meta, weight: object) -> RuleResult:
    return _elementwise_of_one_dtype(x, end) if type(weight) in (int, float) else None


@rule("lerp.Tensor")
def _lerp_between(x: Meta, end: Meta, weight: Meta) -> RuleResult:
    return _elementwise_of_one_dtype(x, end, weight)


@rule("tanh_backward sigmoid_backward")
def _gate_backward(gradient: Meta, output: Meta) -> RuleResult:
    """In recurrent networks the output is a part of all gates."""
    return (
        _elementwise_of_one_dtype(gradient, output) if gradient.size == output.size and 0 not in output.size else None
    )


@rule("gelu_backward silu_backward")
def _activation_backward(gradient: Meta, x: Meta, *numbers: object, **options: object) -> RuleResult:
    fits = are_row_major(x) and gradient.size == x.size and all(type(n) in (int, float) for n in numbers)
    return _elementwise_of_one_dtype(gradient, x) if fits else None


@rule("threshold_backward")
def _threshold_backward(gradient: Meta, x: Meta, threshold: object) -> RuleResult:
    """As above, but the kernel iterates over the input first."""
    return _elementwise_of_one_dtype(x, gradient) if gradient.size == x.size else None


@rule("isnan isposinf isneginf signbit")
def _predicate(x: Meta) -> RuleResult:
    fits = (x.dtype in FLOATS or x.dtype in INTEGERS) and 0 not in x.size
    found = elementwise((x,)) if fits else None
    return None if found is None else [(plain_meta(found[0], torch.bool, found[1]), None)]


@rule("isinf")
def _isinf(x: Meta) -> RuleResult:
    """Zeros in the same format for integers. The parts of complex numbers lie two apart, and one is as the other."""
    if not x.plain:
        return None
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        return [(plain_meta(x.size, torch.bool, preserved_stride(x.size, x.stride)), None)]
    step = 2 if x.dtype.is_complex else 1
    positive = elementwise_stride(x.size, [(x.size, tuple(step * n for n in x.stride))])
    compared = elementwise((plain_meta(x.size, x.dtype, positive), 0.0))
    return None if compared is None else [(plain_meta(x.size, torch.bool, compared[1]), None)]


@rule("ldexp.Tensor")
def _ldexp(x: Meta, exponent: Meta) -> RuleResult:
    """The product with a power of two, which follows the exponent, or is row-major where `pow` takes the two as a
    number. Where exponents are integers, a first operand of the result's size is copied, and changed in place.
    """
    numbers, positions = (not (a.dtype.is_floating_point or a.dtype.is_complex) for a in (x, exponent))
    own = result_dtype([2.0, exponent]) if numbers else exponent.dtype
    dtype = result_dtype([x, plain_meta(exponent.size, own)])
    follows = not numbers and (positions or x.dtype is not torch.float32)
    power = plain_meta(exponent.size, dtype, preserved_stride(exponent.size, exponent.stride) if follows else None)
    found = elementwise((x, power), dtype)
    if found is not None and positions and x.dtype.is_floating_point and found[0] == x.size:
        found = x.size, preserved_stride(x.size, x.stride)
    return None if found is None else [(plain_meta(found[0], dtype, found[1]), None)]


@rule("one_hot")
def _one_hot(classes: Meta, count: int = -1) -> RuleResult:
    fits = classes.plain and classes.dtype is torch.int64 and type(count) is int and count > 0
    return [fresh((*classes.size, count), torch.int64)] if fits else None


@rule("clamp clamp_min clamp_max")
def _clamp(x: Meta, *bounds: object) -> RuleResult:
    fits = (x.dtype in FLOATS or x.dtype in INTEGERS) and all(n is None or type(n) in (int, float) for n in bounds)
    given = [n for n in bounds if n is not None]
    dtype = result_dtype((x, *given)) if fits else None
    found = elementwise((x,), dtype) if given and dtype is not None else None
    return None if found is None or dtype is None else [(plain_meta(found[0], dtype, found[1]), None)]


@rule("clamp.Tensor")
def _clamp_between(x: Meta, low: Meta | None = None, high: Meta | None = None) -> RuleResult:
    given = [a for a in (x, low, high) if a is not None]
    if len(given) < 2 or not all(type(a) is Meta for a in given):
        return None
    dtype = result_dtype(given)
    found = elementwise(given, dtype) if dtype in FLOATS or dtype in INTEGERS else None
    return None if found is None else [(plain_meta(found[0], dtype, found[1]), None)]


@rule("_softmax_backward_data _log_softmax_backward_data")
def _softmax_backward(gradient: Meta, output: Meta, dim: int, dtype: torch.dtype) -> RuleResult:
    # Of another dtype the gradient comes as `gradient` is or as `dtype` says, which depends on the device.
    fits = _follows(gradient, output) and dtype is output.dtype and output.size
    return [fresh(output.size, output.dtype)] if fits and -len(output.size) <= dim < len(output.size) else None


# --- losses ----------------------------------------------------------------------------------------------------------


@rule("smooth_l1_loss")
def _bent_loss(x: Meta, target: Meta, reduction: int = 1, bend: float = 1.0) -> RuleResult:
    return _loss(x, target, reduction) if type(bend) in (int, float) and bend > 0 else None


@rule("huber_loss")
def _huber_loss(x: Meta, target: Meta, reduction: int = 1, bend: float = 1.0) -> RuleResult:
    """Of the first operand's dtype, whatever the target's: the kernel writes into what was made like it."""
    if not _are_compared(x, target) or x.dtype is target.dtype or reduction not in (0, 1, 2):
        return _bent_loss(x, target, reduction, bend)
    return [fresh((), x.dtype)] if reduction else in_kernel_order("huber_loss", [_row_major(x)], x, target, 0)


@rule("mse_loss")
def _loss(x: Meta, target: Meta, reduction: int = 1) -> RuleResult:
    fits = plain(x, target) and x.dtype in FLOATS and x.dtype is target.dtype and x.size == target.size
    if not fits or reduction not in (0, 1, 2) or (reduction == 0 and not whole_floats(x, target)):
        return None
    return [fresh((), x.dtype) if reduction else fresh(x.size, x.dtype)]


@rule("mse_loss_backward smooth_l1_loss_backward huber_loss_backward")
def _loss_backward(gradient: Meta, x: Meta, target: Meta, reduction: int, *numbers: object) -> RuleResult:
    """Row-major and of the first operand's dtype: the kernels write into zeros that were made so."""
    fits = plain(gradient) and _are_compared(x, target) and gradient.size in ((), x.size)
    return [fresh(x.size, x.dtype)] if fits else None


def _are_compared(x: Meta, target: Meta) -> bool:
    fits = plain(x, target) and x.dtype in FLOATS and (target.dtype in FLOATS or target.dtype in INTEGERS)
    return fits and x.size == target.size


@rule("soft_margin_loss")
def _soft_margin(x: Meta, target: Meta, reduction: int = 1) -> RuleResult:
    if not _are_compared(x, target) or reduction not in (0, 1, 2):
        return None
    return [fresh((), x.dtype)] if reduction else in_kernel_order("soft_margin_loss", [_row_major(x)], x, target, 0)


def _row_major(x: Meta) -> Meta:
    return plain_meta(x.size, x.dtype)


@rule("log_sigmoid_backward")
def _log_sigmoid_backward(gradient: Meta, x: Meta, buffer: Meta) -> RuleResult:
    fits = plain(gradient, x) and x.dtype in FLOATS and gradient.dtype is x.dtype and gradient.size == x.size
    look = preserved(gradient) if fits and buffer.dtype is x.dtype and buffer.size in (x.size, (0,)) else None
    return None if look is None else [(look, None)]


@rule("nll_loss_forward")
def _nll(x: Meta, target: Meta, weight: Meta | None, reduction: int, ignored: object) -> RuleResult:
    fits = whole_floats(x) and are_row_major(target) and target.dtype is torch.int64
    if not fits or len(x.size) != 2 or target.size != x.size[:1] or reduction not in (0, 1, 2):
        return None
    if weight is not None and not (whole_floats(x, weight) and weight.size == x.size[1:]):
        return None
    return [fresh(() if reduction else target.size, x.dtype), fresh((), x.dtype)]


@rule("nll_loss_backward")
def _nll_backward(gradient: Meta, x: Meta, target: Meta, *rest: object) -> RuleResult:
    """Row-major, however the gradient lies: without a reduction, that of a sum is one number in each place."""
    fits = plain(gradient, x, target) and gradient.dtype is x.dtype and x.dtype in FLOATS and len(x.size) == 2
    fits = fits and target.dtype is torch.int64 and gradient.size in ((), x.size[:1])
    return [fresh(x.size, x.dtype)] if fits and target.size == x.size[:1] else None


@rule("_ctc_loss")
def _ctc_loss(
    chances: Meta,
    targets: Meta,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> RuleResult:
    """The paths that derivatives need are as many as the longest target has gaps and labels."""
    fits = plain(chances) and targets.plain and chances.dtype in FULL_PRECISION and len(chances.size) == 3
    lengths = (*input_lengths, *target_lengths)
    if not fits or not all(type(n) is int and n >= 0 for n in lengths):
        return None
    time, batch, labels = chances.size
    fits = len(input_lengths) == len(target_lengths) == batch and max(input_lengths) <= time and 0 <= blank < labels
    if not fits or targets.dtype not in (torch.int64, torch.int32):
        return None
    longest = max(target_lengths)
    whole = len(targets.size) == 2 and targets.size[0] == batch and targets.size[1] >= longest
    if not whole and targets.size != (sum(target_lengths),):
        return None
    return [fresh((batch,), chances.dtype), fresh((batch, time, 2 * longest + 1), chances.dtype)]


@rule("binary_cross_entropy")
def _loss_of_chances(x: Meta, target: Meta, weight: object = None, reduction: int = 1) -> RuleResult:
    fits = plain(x, target) and x.dtype in FLOATS and x.dtype is target.dtype and x.size == target.size
    if not fits or weight is not None:
        return None
    look = preserved(x) if reduction == 0 else plain_meta((), x.dtype)
    return None if look is None else [(look, None)]


@rule("binary_cross_entropy_with_logits")
def _loss_of_logits(
    x: Meta, target: Meta, weight: object = None, positive: object = None, reduction: int = 1
) -> RuleResult:
    """Weights do not change the mean or the sum of a loss."""
    weights = [a for a in (weight, positive) if a is not None]
    if weights and not (reduction in (1, 2) and plain(*weights) and _scales(x, weights)):
        return None
    return _loss(x, target, reduction)


def _scales(x: Meta, weights: Sequence[object]) -> bool:
    return all(type(a) is Meta and a.dtype is x.dtype and broadcast_sizes([x.size, a.size]) == x.size for a in weights)


# --- norms -----------------------------------------------------------------------------------------------------------


@rule("native_batch_norm")
def _batch_norm(
    x: Meta,
    weight: Meta | None,
    bias: Meta | None,
    mean: Meta | None,
    variance: Meta | None,
    training: object,
    momentum: object,
    eps: object,
) -> RuleResult:
    parts = [t for t in (weight, bias, mean, variance) if t is not None]
    dtype = statistics_dtype(x, parts) if plain(x) and len(x.size) >= 2 else None
    if dtype is None or any(not t.plain or t.size != x.size[1:2] for t in parts):
        return None
    if not training and (mean is None or variance is None):
        return None
    sums = fresh(x.size[1:2] if training else (0,), dtype)
    return [*in_kernel_order("native_batch_norm", [plain_meta(x.size, x.dtype)], x, *parts), sums, sums]


def grouped_dtype(x: Meta, weight: Meta | None, bias: Meta | None, groups: int) -> torch.dtype | None:
    """The dtype of the statistics of groups of channels; None where operands do not go together, or lie with gaps."""
    parts = [t for t in (weight, bias) if t is not None]
    fits = plain(x) and are_row_major(*parts) and len(x.size) >= 2
    in_format = suggests_channels_last(x.size, x.stride) if fits else False
    fits = fits and x.stride == (channels_last_stride if in_format else contiguous_stride)(x.size)
    if not fits or groups < 1 or x.size[1] % groups or any(t.size != x.size[1:2] for t in parts):
        return None
    return statistics_dtype(x, parts)


@rule("group_norm")
def _whole_group_norm(
    x: Meta, groups: int, weight: Meta | None = None, bias: Meta | None = None, *options: object
) -> RuleResult:
    fits = grouped_dtype(x, weight, bias, groups) is not None
    return [(plain_meta(x.size, x.dtype, x.stride), None)] if fits else None


@rule("native_group_norm")
def _group_norm(
    x: Meta, weight: Meta | None, bias: Meta | None, n: int, c: int, area: object, groups: int, eps: object
) -> RuleResult:
    dtype = grouped_dtype(x, weight, bias, groups)
    if dtype is None or x.size[:2] != (n, c):
        return None
    sums = fresh((n, groups), dtype)
    return [(plain_meta(x.size, x.dtype, x.stride), None), sums, sums]


@rule("log_sigmoid_forward")
def _log_sigmoid(x: Meta) -> RuleResult:
    """Workers with CUDA are asked: what they note for derivatives is empty."""
    return [fresh(x.size, x.dtype)] * 2 if plain(x) and x.dtype in FLOATS else None


__all__ = ["RULES"]
