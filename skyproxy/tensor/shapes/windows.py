"""Shape rules for what moves windows over images: convolutions, pooling, interpolation, and their gradients.

See `shapes.rules`; this module adds to its table.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.attention import RULES
from skyproxy.tensor.shapes.elementwise import Ints, channels_last_stride
from skyproxy.tensor.shapes.networks import FULL_PRECISION, whole_floats
from skyproxy.tensor.shapes.rules import FLOATS, RuleResult, rule
from skyproxy.tensor.shapes.selections import fresh, plain, suggests_row_major
from skyproxy.tensor.shapes.strides import suggests_channels_last


def _pair(values: Sequence[int], otherwise: Sequence[int] = ()) -> tuple[int, ...] | None:
    values = values or otherwise
    if type(values) is list and len(values) == 2 and type(values[0]) is type(values[1]) is int:
        return values[0], values[1]
    if type(values) not in (list, tuple) or len(values) not in (1, 2) or not all(type(n) is int for n in values):
        return None
    return tuple(values) * 2 if len(values) == 1 else tuple(values)


def _pooled_size(
    x: Meta, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> tuple[int, ...] | None:
    sides = _pair(kernel)
    steps, pads, gaps = _pair(stride, kernel), _pair(padding, [0]), _pair(dilation, [1])
    if None in (sides, steps, pads, gaps) or ceil or not plain(x) or x.dtype not in FLOATS or len(x.size) != 4:
        return None
    assert sides is not None
    assert steps is not None
    assert pads is not None
    assert gaps is not None
    if min(sides) < 1 or min(steps) < 1 or min(gaps) < 1 or any(p < 0 or 2 * p > k for p, k in zip(pads, sides)):
        return None
    area = [(n + 2 * p - g * (k - 1) - 1) // s + 1 for n, k, s, p, g in zip(x.size[2:], sides, steps, pads, gaps)]
    return (*x.size[:2], *area) if min(area) > 0 else None


def _result_in_format(x: Meta, size: tuple[int, ...], dtype: torch.dtype) -> tuple[Meta, None]:
    """A result in the format that `suggest_memory_format` reads from the input."""
    stride = channels_last_stride(size) if suggests_channels_last(x.size, x.stride) else None
    return plain_meta(size, dtype, stride), None


@rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(x: Meta, groups: int) -> RuleResult:
    """Always a fresh tensor, where the formula that fake tensors take may be a view of the input."""
    fits = plain(x) and x.dtype in FLOATS and len(x.size) > 2 and 0 not in x.size and groups > 0
    return [_result_in_format(x, x.size, x.dtype)] if fits and not x.size[1] % groups else None


@rule("max_pool2d_with_indices")
def _max_pool(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> RuleResult:
    size = _pooled_size(x, kernel, stride, padding, dilation, ceil)
    return None if size is None else [_result_in_format(x, size, x.dtype), _result_in_format(x, size, torch.int64)]


@rule("avg_pool2d")
def _avg_pool(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    counted: object = True,
    divisor: object = None,
) -> RuleResult:
    size = _pooled_size(x, kernel, stride, padding, (1,), ceil) if divisor is None else None
    return None if size is None else [_result_in_format(x, size, x.dtype)]


def _pooled_volume(
    x: Meta, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> Ints | None:
    rows = [list(a) * 3 if len(a) == 1 else list(a) for a in (kernel, stride or kernel, padding, dilation)]
    fits = whole_floats(x) and suggests_row_major(x) and len(x.size) in (4, 5) and not ceil
    if not fits or not all(len(a) == 3 and all(type(n) is int for n in a) for a in rows):
        return None
    sides, steps, pads, gaps = rows
    if min(*sides, *steps, *gaps) < 1 or any(p < 0 or 2 * p > k for p, k in zip(pads, sides)):
        return None
    area = [(n + 2 * p - g * (k - 1) - 1) // s + 1 for n, k, s, p, g in zip(x.size[-3:], sides, steps, pads, gaps)]
    return (*x.size[:-3], *area) if min(area) > 0 else None


@rule("max_pool3d_with_indices")
def _max_pool_of_volumes(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> RuleResult:
    size = _pooled_volume(x, kernel, stride, padding, dilation, ceil)
    return None if size is None else [fresh(size, x.dtype), fresh(size, torch.int64)]


@rule("avg_pool3d")
def _avg_pool_of_volumes(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    counted: object = True,
    divisor: object = None,
) -> RuleResult:
    fits = divisor is None and x.dtype in FULL_PRECISION
    size = _pooled_volume(x, kernel, stride, padding, (1,), ceil) if fits else None
    sides = kernel if len(kernel) == 3 else [*kernel] * 3
    # Unlike others, this one refuses windows that only fit with the padding.
    return [fresh(size, x.dtype)] if size is not None and all(map(operator.ge, x.size[-3:], sides)) else None


@rule("affine_grid_generator")
def _affine_grid(theta: Meta, size: Sequence[int], aligned: object) -> RuleResult:
    fits = whole_floats(theta) and theta.dtype in FULL_PRECISION and all(type(n) is int and n > 0 for n in size)
    fits = fits and len(size) == 4 and theta.size == (size[0], 2, 3)
    return [fresh((size[0], *size[2:], 2), theta.dtype)] if fits else None


@rule("_adaptive_avg_pool2d")
def _adaptive_pool(x: Meta, size: Sequence[int]) -> RuleResult:
    area = _pair(size)
    fits = area is not None and whole_floats(x) and len(x.size) == 4 and suggests_row_major(x)
    return [fresh((*x.size[:2], *area), x.dtype)] if fits and area is not None and min(area) > 0 else None


@rule(
    "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d"
)
def _resampling(x: Meta, size: Sequence[int], *scales: object) -> RuleResult:
    fits = plain(x) and x.dtype in FLOATS and len(x.size) == len(size) + 2
    fits = fits and all(type(n) is int and n > 0 for n in size)
    return [_result_in_format(x, (*x.size[:2], *size), x.dtype)] if fits else None


@rule(
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa"
)
def _interpolation(x: Meta, size: Sequence[int], aligned: object, *scales: object) -> RuleResult:
    return _resampling(x, size)


def _convolution_size(
    x: Meta,
    weight: Meta,
    bias: Meta | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Ints | None:
    parts = [t for t in (weight, bias) if t is not None]
    rank = len(x.size) - 2
    if not all(t.plain and t.dtype is x.dtype and 0 not in t.size for t in (x, *parts)):
        return None
    if x.dtype not in FLOATS or rank not in (1, 2, 3) or len(weight.size) != rank + 2:
        return None
    # One dimension is computed as two, where another order of memory counts as a format if one of them is of size one.
    if rank != 2 and not (whole_floats(*parts) and (whole_floats(x) or (rank == 1 and 1 not in x.size))):
        return None
    if type(groups) is not int or groups < 1:
        return None
    if (
        x.size[1] != weight.size[1] * groups
        or weight.size[0] % groups
        or (bias is not None and bias.size != weight.size[:1])
    ):
        return None
    spread = [list(a) * rank if len(a) == 1 else list(a) for a in (stride, padding, dilation)]
    if any(len(a) != rank or not all(type(n) is int for n in a) for a in spread):
        return None
    steps, pads, gaps = spread
    if min(steps) < 1 or min(pads) < 0 or min(gaps) < 1:
        return None
    area = [
        (n + 2 * p - g * (k - 1) - 1) // s + 1 for n, k, s, p, g in zip(x.size[2:], weight.size[2:], steps, pads, gaps)
    ]
    return (x.size[0], weight.size[0], *area) if min(area) > 0 else None


@rule("convolution")
def _convolution(
    x: Meta,
    weight: Meta,
    bias: Meta | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> RuleResult:
    look = convolved(x, weight, stride, padding, dilation, transposed, extra, groups, bias)
    return None if look is None else [(look, None)]


def convolved(
    x: Meta,
    weight: Meta,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
    bias: Meta | None = None,
) -> Meta | None:
    """Return what a convolution gives; None where that takes more thought."""
    in_format = not (suggests_row_major(x) and suggests_row_major(weight))
    if transposed:
        size = _transposed_convolution_size(x, weight, bias, stride, padding, dilation, extra, groups)
    else:
        size = _convolution_size(x, weight, bias, stride, padding, dilation, groups)
    # Some devices have other orders of memory for float64, and for volumes.
    if size is None or (in_format and (transposed or len(size) != 4 or x.dtype is torch.float64)):
        return None
    return plain_meta(size, x.dtype, channels_last_stride(size) if in_format else None)


def _transposed_convolution_size(
    x: Meta,
    weight: Meta,
    bias: Meta | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> tuple[int, ...] | None:
    """The size of a transposed convolution over images or lines; None where that takes more thought."""
    parts = [t for t in (weight, bias) if t is not None]
    rank = len(x.size) - 2
    fits = whole_floats(x, *parts) and x.dtype in FULL_PRECISION and type(groups) is int and groups > 0
    fits = fits and rank in (1, 2) and len(weight.size) == rank + 2 and not x.size[1] % groups
    if not fits or not suggests_row_major(x) or not suggests_row_major(weight) or x.size[1] != weight.size[0]:
        return None
    channels = weight.size[1] * groups
    rows = [list(a) * rank if len(a) == 1 else list(a) for a in (stride, padding, dilation, extra)]
    if any(len(a) != rank or not all(type(n) is int for n in a) for a in rows):
        return None
    steps, pads, gaps, more = rows
    if bias is not None and bias.size != (channels,):
        return None
    if (
        min(steps) < 1
        or min(pads) < 0
        or min(gaps) < 1
        or min(more) < 0
        or any(m >= max(s, g) for m, s, g in zip(more, steps, gaps))
    ):
        return None
    area = [
        (n - 1) * s - 2 * p + g * (k - 1) + m + 1
        for n, k, s, p, g, m in zip(x.size[2:], weight.size[2:], steps, pads, gaps, more)
    ]
    return (x.size[0], channels, *area) if min(area) > 0 else None


@rule("im2col")
def _columns(
    x: Meta, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> RuleResult:
    sides, gaps, pads, steps = (_pair(a) for a in (kernel, dilation, padding, stride))
    if sides is None or gaps is None or pads is None or steps is None or not plain(x) or x.dtype not in FLOATS:
        return None
    if len(x.size) != 4 or min(*sides, *gaps, *steps) < 1 or min(pads) < 0:
        return None
    area = [(n + 2 * p - g * (k - 1) - 1) // s + 1 for n, k, s, p, g in zip(x.size[2:], sides, steps, pads, gaps)]
    size = (x.size[0], x.size[1] * sides[0] * sides[1], area[0] * area[1])
    return [fresh(size, x.dtype)] if min(area) > 0 else None


@rule("max_pool1d")
def _max_pool_of_lines(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> RuleResult:
    options = (kernel, stride or kernel, padding, dilation)
    if ceil or not plain(x) or x.dtype not in FLOATS or len(x.size) not in (2, 3) or any(len(a) != 1 for a in options):
        return None
    (length,), (step,), (pad,), (gap,) = options
    if length < 1 or step < 1 or gap < 1 or not 0 <= 2 * pad <= length:
        return None
    count = (x.size[-1] + 2 * pad - gap * (length - 1) - 1) // step + 1
    return [fresh((*x.size[:-1], count), x.dtype)] if count > 0 else None


__all__ = ["RULES", "convolved"]
