"""Shape rules for what moves windows over images: convolutions, pooling, interpolation, and their gradients.

See `shapes.rules`; this module adds to its table.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.attention import RULES
from skyproxy.tensor.shapes.elementwise import Ints, channels_last_stride
from skyproxy.tensor.shapes.networks import FULL_PRECISION, whole_floats
from skyproxy.tensor.shapes.rules import FLOATS, RuleResult, rule
from skyproxy.tensor.shapes.selections import are_integers, fresh, plain, suggests_row_major
from skyproxy.tensor.shapes.strides import suggests_channels_last
from skyproxy.torch_codec import contiguous_stride

_Steps = tuple[tuple[int, int], ...]
"""For each dimension that a window moves along: how far beyond its beginning it must reach, and how far it moves."""


def _steps_of(rank: int, halves: bool, *rows: Sequence[int]) -> _Steps | None:
    """Return the steps of a window; None where its numbers are none.

    Args:
        rank: the number of dimensions; a single number stands for all of them.
        halves: whether padding must not be more than half of the kernel, as in pooling.
        rows: kernel, stride, padding and dilation.
    """
    return _remembered_steps(rank, halves, *map(tuple, rows))


@functools.lru_cache(1024)
def _remembered_steps(rank: int, halves: bool, *given: Ints) -> _Steps | None:
    """Return the same for tuples: they come again with every new shape."""
    if any(type(n) is not int for a in given for n in a):
        return None
    rows = [a * rank if len(a) == 1 else a for a in given]
    if not all(len(a) == rank for a in rows):
        return None
    sides, steps, pads, gaps = rows
    if min(*sides, *steps, *gaps) < 1 or min(pads) < 0 or (halves and any(2 * p > k for p, k in zip(pads, sides))):
        return None
    return tuple((g * (k - 1) + 1 - 2 * p, s) for k, s, p, g in zip(sides, steps, pads, gaps))


def _places(area: Ints, steps: _Steps) -> Ints | None:
    """Return in how many places of an area a window fits; None where it fits nowhere."""
    found: Ints = ()
    for n, (reach, step) in zip(area, steps):
        places = (n - reach) // step + 1
        if places < 1:
            return None
        found += (places,)
    return found


@functools.lru_cache(1024)
def _pooling_steps(rank: int, ceil: bool, *given: Ints) -> tuple[tuple[int, int, int, int], ...] | None:
    """Return the steps of pooling, each with what is added before places are counted, and the padding behind."""
    steps = _remembered_steps(rank, True, *given)
    if steps is None:
        return None
    pads = given[2] if len(given[2]) == rank else given[2] * rank
    return tuple((reach, step, step - 1 if ceil else 0, pad) for (reach, step), pad in zip(steps, pads))


def _pooled_area(area: Ints, rank: int, rows: Sequence[Sequence[int]], ceil: bool) -> Ints | None:
    """Return the area of what pooling gives.

    Args:
        rows: kernel, stride, padding and dilation.
        ceil: whether the last window may begin inside and end outside; it does not begin in the padding behind.
    """
    steps = _pooling_steps(rank, ceil, *map(tuple, rows))
    if steps is None:
        return None
    found: Ints = ()
    for n, (reach, step, more, pad) in zip(area, steps):
        if n < reach:
            return None
        places = (n - reach + more) // step
        found += (places if places * step >= n + pad else places + 1,)
    return found


def _pair(values: Sequence[int]) -> tuple[int, ...] | None:
    if type(values) not in (list, tuple) or len(values) not in (1, 2) or not all(type(n) is int for n in values):
        return None
    return tuple(values) * 2 if len(values) == 1 else tuple(values)


def _pooled_size(
    x: Meta, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> tuple[int, ...] | None:
    if not plain(x) or x.dtype not in FLOATS or len(x.size) not in (3, 4):
        return None
    area = _pooled_area(x.size[-2:], 2, (kernel, stride or kernel, padding, dilation), ceil)
    return None if area is None else x.size[:-2] + area


def _results_in_format(x: Meta, size: Ints, *dtypes: torch.dtype) -> RuleResult:
    """Results in the format that `suggest_memory_format` reads from the input."""
    stride = (channels_last_stride if suggests_channels_last(x.size, x.stride) else contiguous_stride)(size)
    return [(plain_meta(size, dtype, stride), None) for dtype in dtypes]


def _values_and_places(size: Ints, dtype: torch.dtype) -> RuleResult:
    """Row-major results of pooling that tells where it found its values."""
    stride = contiguous_stride(size)
    return [(plain_meta(size, dtype, stride), None), (plain_meta(size, torch.int64, stride), None)]


@rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(x: Meta, groups: int) -> RuleResult:
    """Always a fresh tensor, where the formula that fake tensors take may be a view of the input."""
    fits = x.plain and len(x.size) > 2 and 0 not in x.size and groups > 0
    return _results_in_format(x, x.size, x.dtype) if fits and not x.size[1] % groups else None


@rule("max_pool2d")
def _maximum_of_windows(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> RuleResult:
    size = _pooled_size(x, kernel, stride, padding, dilation, ceil)
    return None if size is None else _results_in_format(x, size, x.dtype)


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
    return None if size is None else _results_in_format(x, size, x.dtype, torch.int64)


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
    size = _pooled_size(x, kernel, stride, padding, (1,), ceil) if divisor != 0 else None
    return None if size is None else _results_in_format(x, size, x.dtype)


def _pooled_volume(
    x: Meta, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool
) -> Ints | None:
    if len(x.size) not in (4, 5) or not whole_floats(x) or not suggests_row_major(x):
        return None
    area = _pooled_area(x.size[-3:], 3, (kernel, stride or kernel, padding, dilation), ceil)
    return None if area is None else x.size[:-3] + area


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
    return None if size is None else _values_and_places(size, x.dtype)


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
    fits = divisor != 0 and x.dtype in FULL_PRECISION
    size = _pooled_volume(x, kernel, stride, padding, (1,), ceil) if fits else None
    sides = kernel if len(kernel) == 3 else [*kernel] * 3
    # Unlike others, this one refuses windows that only fit with the padding.
    return [fresh(size, x.dtype)] if size is not None and all(map(operator.ge, x.size[-3:], sides)) else None


@rule("affine_grid_generator")
def _affine_grid(theta: Meta, size: Sequence[int], aligned: object) -> RuleResult:
    fits = plain(theta) and theta.dtype in FULL_PRECISION and all(type(n) is int and n > 0 for n in size)
    rank = len(size) - 2
    fits = fits and rank in (2, 3) and theta.size == (size[0], rank, rank + 1)
    return [fresh((size[0], *size[2:], rank), theta.dtype)] if fits else None


@rule("fractional_max_pool2d fractional_max_pool3d")
def _fractional_pool(x: Meta, kernel: Sequence[int], size: Sequence[int], samples: Meta) -> RuleResult:
    """The kernel is placed by random numbers, and must leave room for that."""
    rank = len(kernel)
    fits = whole_floats(x) and x.dtype in FULL_PRECISION and are_integers(kernel) and are_integers(size)
    fits = fits and len(size) == rank in (2, 3) and len(x.size) in (rank + 1, rank + 2) and plain(samples)
    if not fits or samples.dtype is not x.dtype or min(*size, *kernel) < 1:
        return None
    batch = x.size[0] if len(x.size) == rank + 2 else 1
    if samples.size != (batch, x.size[-rank - 1], rank):
        return None
    if any(n + k - 1 > m for n, k, m in zip(size, kernel, x.size[-rank:], strict=True)):
        return None
    return _values_and_places((*x.size[:-rank], *size), x.dtype)


@rule("fractional_max_pool2d_backward fractional_max_pool3d_backward")
def _fractional_pool_backward(
    gradient: Meta, x: Meta, kernel: Sequence[int], size: Sequence[int], indices: Meta
) -> RuleResult:
    fits = whole_floats(x) and x.dtype is gradient.dtype and plain(gradient, indices) and are_integers(size)
    fits = fits and x.dtype in FULL_PRECISION and len(size) in (2, 3) and len(x.size) > len(size)
    pooled = (*x.size[: len(x.size) - len(size)], *size)
    return [fresh(x.size, x.dtype)] if fits and gradient.size == indices.size == pooled else None


@rule("_adaptive_avg_pool2d")
def _adaptive_pool(x: Meta, size: Sequence[int]) -> RuleResult:
    area = _pair(size)
    fits = area is not None and plain(x) and x.dtype in FLOATS and len(x.size) in (3, 4)
    return _results_in_format(x, (*x.size[:-2], *area), x.dtype) if fits and area and min(area) > 0 else None


@rule("_adaptive_avg_pool3d")
def _adaptive_pool_of_volumes(x: Meta, size: Sequence[int]) -> RuleResult:
    fits = whole_floats(x) and len(x.size) in (4, 5) and suggests_row_major(x) and are_integers(size) and len(size) == 3
    return [fresh((*x.size[:-3], *size), x.dtype)] if fits and min(size) > 0 else None


@rule("adaptive_max_pool3d")
def _adaptive_maximum_of_volumes(x: Meta, size: Sequence[int]) -> RuleResult:
    found = _adaptive_pool_of_volumes(x, size)
    return None if found is None else [*found, fresh((*x.size[:-3], *size), torch.int64)]


@rule("grid_sampler_3d")
def _sampled_volumes(x: Meta, grid: Meta, *rest: object) -> RuleResult:
    fits = whole_floats(x, grid) and len(x.size) == len(grid.size) == 5 and x.size[0] == grid.size[0]
    return [fresh((*x.size[:2], *grid.size[1:4]), x.dtype)] if fits and grid.size[4] == 3 else None


@rule("conv_tbc")
def _convolution_by_time(x: Meta, weight: Meta, bias: Meta, pad: int = 0) -> RuleResult:
    fits = whole_floats(x, weight, bias) and len(x.size) == len(weight.size) == 3 and type(pad) is int and pad >= 0
    if not fits or x.size[2] != weight.size[1] or bias.size != weight.size[2:]:
        return None
    time = x.size[0] - weight.size[0] + 1 + 2 * pad
    return [fresh((time, x.size[1], weight.size[2]), x.dtype)] if time > 0 else None


@rule(
    "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d"
)
def _resampling(x: Meta, size: Sequence[int], *scales: object) -> RuleResult:
    fits = plain(x) and x.dtype in FLOATS and len(x.size) == len(size) + 2
    fits = fits and all(type(n) is int and n > 0 for n in size)
    return _results_in_format(x, (*x.size[:2], *size), x.dtype) if fits else None


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
    steps = _steps_of(rank, False, weight.size[2:], stride, padding, dilation)
    area = None if steps is None else _places(x.size[2:], steps)
    return None if area is None else (x.size[0], weight.size[0], *area)


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
    fits = whole_floats(x, *parts) and type(groups) is int and groups > 0
    fits = fits and rank in (1, 2, 3) and len(weight.size) == rank + 2 and not x.size[1] % groups
    if not fits or not suggests_row_major(x) or not suggests_row_major(weight) or x.size[1] != weight.size[0]:
        return None
    channels = weight.size[1] * groups
    if bias is not None and bias.size != (channels,):
        return None
    rows = stride, padding, dilation, extra
    steps = _transposed_steps(rank, weight.size[2:], *map(tuple, rows)) if all(map(are_integers, rows)) else None
    if steps is None:
        return None
    area = [n * step + more for n, (step, more) in zip(x.size[2:], steps)]
    return (x.size[0], channels, *area) if min(area) > 0 else None


@functools.lru_cache(1024)
def _transposed_steps(
    rank: int, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, extra: Ints
) -> _Steps | None:
    """Return, for each dimension, by what a size is multiplied, and how much is added; None where numbers are none."""
    rows = [a * rank if len(a) == 1 else a for a in (stride, padding, dilation, extra)]
    if any(len(a) != rank for a in rows):
        return None
    steps, pads, gaps, more = rows
    if min(*steps, *gaps) < 1 or min(*pads, *more) < 0 or any(m >= max(s, g) for m, s, g in zip(more, steps, gaps)):
        return None
    return tuple((s, g * (k - 1) + m + 1 - 2 * p - s) for k, s, p, g, m in zip(kernel, steps, pads, gaps, more))


@rule("im2col")
def _columns(
    x: Meta, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> RuleResult:
    if not plain(x) or x.dtype not in FLOATS or len(x.size) != 4:
        return None
    steps = _steps_of(2, False, kernel, stride, padding, dilation)
    area = None if steps is None else _places(x.size[2:], steps)
    if area is None:
        return None
    window = math.prod(kernel) ** (2 // len(kernel))
    return [fresh((x.size[0], x.size[1] * window, area[0] * area[1]), x.dtype)]


@rule("max_pool1d")
def _max_pool_of_lines(
    x: Meta,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> RuleResult:
    if not plain(x) or x.dtype not in FLOATS or len(x.size) not in (2, 3):
        return None
    places = _pooled_area(x.size[-1:], 1, (kernel, stride or kernel, padding, dilation), ceil)
    return None if places is None else [fresh(x.size[:-1] + places, x.dtype)]


__all__ = ["RULES", "convolved"]
