"""Shape rules for gradients of layers, whose fake kernels are formulas of many steps: milliseconds for a new shape.

See `shapes.rules`; this module adds to its table. A gradient has the size and dtype of what it is a gradient of; the
order of memory in which kernels write it is what `kernel_strides` knows, or the format that an argument suggests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyproxy import torch_versions
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import channels_last_stride, elementwise, preserved_stride
from skyproxy.tensor.shapes.kernel_strides import in_kernel_order
from skyproxy.tensor.shapes.layers import statistics_dtype
from skyproxy.tensor.shapes.networks import FULL_PRECISION
from skyproxy.tensor.shapes.rules import FLOATS, Look, RuleResult, row_major, rule
from skyproxy.tensor.shapes.selections import are_row_major, fresh, plain, suggests_row_major
from skyproxy.tensor.shapes.strides import suggests_channels_last
from skyproxy.tensor.shapes.windows import RULES, convolved

_TAKES_ANY_ORDER = torch_versions.minor(torch.__version__) >= (2, 14)
"""Up to 2.13, the kernel for gradients of group norms reads both its tensors by one order of memory."""
_NOTHING: Look = (None, None)
"""The look of a gradient that nobody asked for."""
_NUMBERS = frozenset({int, float, bool, type(None)})


def _look_like(x: Meta) -> Meta:
    return plain_meta(x.size, x.dtype)


def _are_alike(*tensors: object) -> bool:
    """Return whether all are tensors of one floating-point dtype, and not empty, in any order of memory."""
    first = tensors[0]
    if type(first) is not Meta or first.dtype not in FLOATS:
        return False
    for t in tensors:  # noqa: SIM110  # as in `plain`
        if type(t) is not Meta or t.dtype is not first.dtype or not t.plain or 0 in t.size:
            return False
    return True


def _mask_looks(mask: Sequence[bool], looks: Sequence[Meta | None]) -> RuleResult:
    """Results of which only those exist that were asked for; None where one is asked for that cannot be."""
    found: list[Look] = [(look, None) if wanted else _NOTHING for wanted, look in zip(mask, looks, strict=False)]
    if len(mask) != len(looks) or [look for look, _ in found].count(None) != list(mask).count(False):
        return None
    return found


# --- elementwise -----------------------------------------------------------------------------------------------------


def _activation(name: str, place: int) -> None:
    """Register a rule for the gradient of an activation.

    Args:
        name: of the op.
        place: which argument the gradient looks like; the first one is the gradient of the result.
    """

    @rule(name)
    def backward(*args: object, **named: object) -> RuleResult:
        gradient, x = args[0], args[place]
        numbers = [a for at, a in enumerate(args) if at not in (0, place)]
        fits = _are_alike(gradient, x) and all(type(a) in _NUMBERS for a in (*numbers, *named.values()))
        if not fits or type(gradient) is not Meta or type(x) is not Meta or gradient.size != x.size:
            return None
        return in_kernel_order(name, [_look_like(x)], *args)


_BEHIND_THE_GRADIENT = (
    "mish_backward leaky_relu_backward softplus_backward hardswish_backward hardtanh_backward hardsigmoid_backward "
    "softshrink_backward hardshrink_backward logit_backward"
)
for _name in _BEHIND_THE_GRADIENT.split():
    _activation(_name, 1)
_activation("elu_backward", 5)


@rule("glu_backward")
def _glu(gradient: Meta, x: Meta, dim: int) -> RuleResult:
    """Row-major, however the operands lie: the kernel resizes what has no elements yet."""
    fits = _are_alike(gradient, x) and type(dim) is int and -len(x.size) <= dim < len(x.size)
    if not fits or x.size[dim] % 2:
        return None
    at = dim % len(x.size)
    return [fresh(x.size, x.dtype)] if gradient.size == (*x.size[:at], x.size[at] // 2, *x.size[at + 1 :]) else None


@rule("_prelu_kernel_backward")
def _prelu(gradient: Meta, x: Meta, weight: Meta) -> RuleResult:
    """Both of the size that all three have together, also the weight's."""
    found = elementwise([x, weight, gradient]) if _are_alike(gradient, x, weight) else None
    return None if found is None else [(plain_meta(found[0], x.dtype, found[1]), None)] * 2


@rule("native_dropout_backward")
def _dropout(gradient: Meta, mask: Meta, scale: object) -> RuleResult:
    fits = plain(gradient, mask) and gradient.dtype in FLOATS and mask.dtype is torch.bool
    if not fits or type(scale) is not float or gradient.size != mask.size:
        return None
    return in_kernel_order("native_dropout_backward", [_look_like(gradient)], gradient, mask, scale)


# --- losses ----------------------------------------------------------------------------------------------------------


def _loss(name: str) -> None:
    """Register a rule for the gradient of a loss that compares element by element."""

    @rule(name)
    def backward(gradient: Meta, x: Meta, target: Meta, *rest: object) -> RuleResult:
        fits = _are_alike(gradient, x, target) and x.size == target.size and gradient.size in ((), x.size)
        if not fits or any(type(a) not in _NUMBERS for a in rest):
            return None
        return in_kernel_order(name, [_look_like(x)], gradient, x, target, *rest)


_loss("binary_cross_entropy_backward")


@rule("soft_margin_loss_backward")
def _soft_margin(gradient: Meta, x: Meta, target: Meta, reduction: object) -> RuleResult:
    """Of the second operand's dtype, whatever the others': the kernel writes into what was made like it."""
    fits = plain(gradient, x, target) and x.dtype in FLOATS and target.dtype in FLOATS and 0 not in x.size
    fits = fits and type(reduction) is int and x.size == target.size and gradient.size in ((), x.size)
    return in_kernel_order("soft_margin_loss_backward", [_look_like(x)], gradient, x, target) if fits else None


def _can_be_classes(x: Meta, target: Meta, weight: Meta | None, reduction: object) -> bool:
    fits = plain(x, target) and x.dtype in FLOATS and target.dtype is torch.int64 and reduction in (0, 1, 2)
    fits = fits and len(x.size) == 4 and target.size == (x.size[0], *x.size[2:])
    return fits and (weight is None or (weight.dtype is x.dtype and weight.plain and weight.size == x.size[1:2]))


@rule("nll_loss2d_forward")
def _loss_of_images(x: Meta, target: Meta, weight: Meta | None, reduction: int, ignored: object) -> RuleResult:
    if not _can_be_classes(x, target, weight, reduction):
        return None
    return [fresh(() if reduction else target.size, x.dtype), fresh((), x.dtype)]


@rule("nll_loss2d_backward")
def _loss_of_images_backward(
    gradient: Meta, x: Meta, target: Meta, weight: Meta | None, reduction: int, *rest: object
) -> RuleResult:
    fits = _can_be_classes(x, target, weight, reduction) and gradient.plain and gradient.dtype is x.dtype
    if not fits or gradient.size != (() if reduction else target.size):
        return None
    return in_kernel_order("nll_loss2d_backward", [_look_like(x)], gradient, x)


# --- norms -----------------------------------------------------------------------------------------------------------


@rule("native_layer_norm_backward")
def _layer_norm(
    gradient: Meta,
    x: Meta,
    shape: Sequence[int],
    mean: Meta,
    deviation: Meta,
    weight: Meta | None,
    bias: Meta | None,
    mask: Sequence[bool],
) -> RuleResult:
    parts = [t for t in (weight, bias) if t is not None]
    shape = tuple(shape)
    # Of half precision, statistics and weights may be of another dtype, and a gradient has that of its own.
    fits = _are_alike(gradient, x) and plain(mean, deviation, *parts) and gradient.size == x.size
    fits = fits and all(t.dtype is x.dtype or x.dtype not in FULL_PRECISION for t in (mean, deviation, *parts))
    rank = len(x.size) - len(shape)
    if not fits or rank < 0 or x.size[rank:] != shape or any(t.size != shape for t in parts):
        return None
    return _mask_looks(mask, [_look_like(x), *(None if t is None else _look_like(t) for t in (weight, bias))])


@rule("native_group_norm_backward")
def _group_norm(
    gradient: Meta,
    x: Meta,
    mean: Meta,
    deviation: Meta,
    weight: Meta | None,
    n: int,
    c: int,
    area: object,
    groups: int,
    mask: Sequence[bool],
) -> RuleResult:
    parts = [] if weight is None else [weight]
    fits = _are_alike(gradient, x) and _are_alike(mean, deviation) and plain(*parts) and gradient.size == x.size
    dtype = statistics_dtype(x, parts) if fits else None
    fits = dtype is not None and (dtype is mean.dtype or (not parts and mean.dtype is torch.float32))
    if not _TAKES_ANY_ORDER:
        fits = fits and are_row_major(gradient, x) and not suggests_channels_last(x.size, x.stride)
        fits = fits and not suggests_channels_last(gradient.size, gradient.stride)
    if not fits or len(x.size) < 2 or x.size[:2] != (n, c) or groups < 1 or c % groups:
        return None
    if mean.size != (n, groups) or deviation.size != (n, groups) or any(t.size != (c,) for t in parts):
        return None
    sums = None if weight is None else plain_meta((c,), weight.dtype)
    looks = in_kernel_order("native_group_norm_backward", [_look_like(x)], gradient, x)
    return _mask_looks(mask, [looks[0][0], sums, sums])


@rule("native_batch_norm_backward")
def _batch_norm(
    gradient: Meta,
    x: Meta,
    weight: Meta | None,
    running_mean: Meta | None,
    running_variance: Meta | None,
    mean: Meta | None,
    deviation: Meta | None,
    training: object,
    eps: object,
    mask: Sequence[bool],
) -> RuleResult:
    running = [t for t in (running_mean, running_variance) if t is not None]
    saved = [t for t in (mean, deviation) if t is not None]
    needed = saved if training else running
    parts = [t for t in (weight, *running) if t is not None]
    fits = _are_alike(gradient, x) and plain(*parts, *needed) and gradient.size == x.size
    dtype = statistics_dtype(x, parts) if fits else None
    fits = dtype is not None and all(t.dtype is dtype for t in needed)
    if (
        not fits
        or dtype is None
        or len(x.size) < 2
        or len(needed) != 2
        or any(t.size != x.size[1:2] for t in (*parts, *needed))
    ):
        return None
    sums = plain_meta(x.size[1:2], dtype)
    looks = in_kernel_order("native_batch_norm_backward", [_look_like(x)], gradient, x)
    return _mask_looks(mask, [looks[0][0], sums, sums])


# --- windows ---------------------------------------------------------------------------------------------------------


@rule("convolution_backward")
def _convolution(
    gradient: Meta,
    x: Meta,
    weight: Meta,
    biases: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> RuleResult:
    """The order of memory is chosen by what was convolved, and the gradient is brought into it."""
    if not _are_alike(gradient, x, weight):
        return None
    if mask[2] and not mask[1]:  # oneDNN gives the gradient of weights all the same
        return None
    options = stride, padding, dilation, transposed, extra, groups
    result = convolved(x, weight, *options)
    if result is None or gradient.size != result.size:
        return None
    looks = [_look_like(x), _look_like(weight)]
    if not (suggests_row_major(x) and suggests_row_major(weight)):
        looks = [plain_meta(t.size, t.dtype, channels_last_stride(t.size)) for t in (x, weight)]
        corrected = in_kernel_order("convolution_backward", looks, gradient, x, weight, biases, *options)
        looks = [look for look, _ in corrected] or looks
    return _mask_looks(mask, [*looks, plain_meta(result.size[1:2], x.dtype)])


def _are_images(*tensors: Meta) -> bool:
    return _are_alike(*tensors) and all(len(t.size) == 4 for t in tensors)


def _look_in_format_of(x: Meta, size: tuple[int, ...], dtype: torch.dtype) -> Look:
    stride = channels_last_stride(size) if suggests_channels_last(x.size, x.stride) else None
    return plain_meta(size, dtype, stride), None


@rule("max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward")
def _pooling(gradient: Meta, x: Meta, *rest: object) -> RuleResult:
    fits = _are_alike(gradient, x) and len(x.size) in (3, 4) and gradient.size[:-2] == x.size[:-2]
    return [_look_in_format_of(x, x.size, x.dtype)] if fits and len(gradient.size) == len(x.size) else None


@rule("adaptive_max_pool2d_backward")
def _adaptive_pooling(gradient: Meta, x: Meta, indices: Meta) -> RuleResult:
    return _pooling(gradient, x) if plain(indices) and indices.size == gradient.size else None


@rule("adaptive_max_pool2d")
def _adaptive_maximum(x: Meta, area: Sequence[int]) -> RuleResult:
    if not _are_images(x) or len(area) != 2 or not all(type(n) is int and n > 0 for n in area):
        return None
    size = (*x.size[:2], *area)
    return [_look_in_format_of(x, size, x.dtype), _look_in_format_of(x, size, torch.int64)]


@rule(
    "upsample_nearest2d_backward upsample_bilinear2d_backward _upsample_nearest_exact2d_backward "
    "_upsample_bilinear2d_aa_backward"
)
def _resampling(gradient: Meta, area: Sequence[int], size: Sequence[int], *rest: object) -> RuleResult:
    found = _plain_resampling(gradient, area, size)
    return None if found is None else [_look_in_format_of(gradient, tuple(size), gradient.dtype)]


@rule("upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward")
def _resampling_of_lines(gradient: Meta, area: Sequence[int], size: Sequence[int], *rest: object) -> RuleResult:
    fits = _are_alike(gradient) and len(gradient.size) == len(size) == 3 and len(area) == 1
    fits = fits and all(type(n) is int and n > 0 for n in (*size, *area)) and gradient.size == (*size[:2], *area)
    return [fresh(tuple(size), gradient.dtype)] if fits else None


@rule("upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward")
def _plain_resampling(gradient: Meta, area: Sequence[int], size: Sequence[int], *rest: object) -> RuleResult:
    fits = _are_images(gradient) and len(size) == 4 and all(type(n) is int and n > 0 for n in (*size, *area))
    fits = fits and gradient.size == (*size[:2], *area)
    return [fresh(tuple(size), gradient.dtype)] if fits else None


@rule("upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward")
def _resampling_of_volumes(gradient: Meta, area: Sequence[int], size: Sequence[int], *rest: object) -> RuleResult:
    fits = _are_alike(gradient) and suggests_row_major(gradient) and len(size) == 5
    fits = fits and all(type(n) is int and n > 0 for n in (*size, *area)) and gradient.size == (*size[:2], *area)
    return [fresh(tuple(size), gradient.dtype)] if fits else None


@rule("max_pool3d_with_indices_backward avg_pool3d_backward _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward")
def _pooling_of_volumes(gradient: Meta, x: Meta, *rest: object) -> RuleResult:
    fits = _are_alike(gradient, x) and are_row_major(x) and suggests_row_major(x) and len(x.size) in (4, 5)
    return [fresh(x.size, x.dtype)] if fits and gradient.size[:-3] == x.size[:-3] else None


def _padding(kind: str, rank: int) -> None:
    """Register a rule for the gradient of padding with the own values of lines, images or volumes."""
    name = f"{kind}_pad{rank}d_backward"

    @rule(name)
    def backward(gradient: Meta, x: Meta, pad: Sequence[int]) -> RuleResult:
        fits = _are_alike(gradient, x) and len(x.size) in (rank + 1, rank + 2) and len(pad) == 2 * rank
        if not fits or not all(type(n) is int and n >= 0 for n in pad):
            return None
        pairs = [pad[2 * at : 2 * at + 2] for at in range(rank - 1, -1, -1)]
        size = (*x.size[:-rank], *(n + sum(pair) for n, pair in zip(x.size[-rank:], pairs, strict=True)))
        if gradient.size != size:
            return None
        if kind == "reflection" and any(max(pair) >= n for n, pair in zip(x.size[-rank:], pairs, strict=True)):
            return None
        return in_kernel_order(name, [_look_like(x)], gradient, x) if rank > 1 else [fresh(x.size, x.dtype)]


for _kind in ("reflection", "replication"):
    for _rank in (1, 2, 3):
        _padding(_kind, _rank)


@rule("pixel_shuffle")
def _pixel_shuffle(x: Meta, factor: int) -> RuleResult:
    if not _are_images(x) or type(factor) is not int or factor < 1 or x.size[1] % (factor * factor):
        return None
    n, c, h, w = x.size
    return [_look_in_format_of(x, (n, c // (factor * factor), h * factor, w * factor), x.dtype)]


@rule("pixel_unshuffle")
def _pixel_unshuffle(x: Meta, factor: int) -> RuleResult:
    empty = type(x) is Meta and x.plain and len(x.size) > 2 and 0 in x.size
    images = empty or _are_images(x)
    if not images or type(factor) is not int or factor < 1 or x.size[-2] % factor or x.size[-1] % factor:
        return None
    if empty:  # which the kernel copies as they are
        return [(plain_meta(x.size, x.dtype, preserved_stride(x.size, x.stride)), None)]
    n, c, h, w = x.size
    return [_look_in_format_of(x, (n, c * factor * factor, h // factor, w // factor), x.dtype)]


@rule("col2im")
def _image_of_columns(
    x: Meta,
    area: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> RuleResult:
    numbers = (area, kernel, dilation, padding, stride)
    fits = _are_alike(x) and len(x.size) == 3 and all(len(a) == 2 and all(type(n) is int for n in a) for a in numbers)
    if not fits or min(*area, *kernel, *dilation, *stride) < 1 or min(padding) < 0:
        return None
    channels, rest = divmod(x.size[1], kernel[0] * kernel[1])
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in zip(*numbers, strict=True)]
    if rest or min(places) < 1 or places[0] * places[1] != x.size[2]:
        return None
    return [fresh((x.size[0], channels, *area), x.dtype)]


@rule("grid_sampler_2d")
def _sampling(x: Meta, grid: Meta, *rest: object) -> RuleResult:
    fits = _are_images(x, grid) and x.size[0] == grid.size[0] and grid.size[3] == 2
    return [fresh((*x.size[:2], *grid.size[1:3]), x.dtype)] if fits else None


@rule("grid_sampler_2d_backward")
def _sampling_backward(
    gradient: Meta, x: Meta, grid: Meta, mode: object, padding: object, aligned: object, mask: Sequence[bool]
) -> RuleResult:
    fits = _are_images(gradient, x, grid) and x.size[0] == grid.size[0] and grid.size[3] == 2
    if not fits or gradient.size != (*x.size[:2], *grid.size[1:3]) or len(mask) != 2:
        return None
    return [fresh(x.size, x.dtype) if mask[0] else _NOTHING, fresh(grid.size, grid.dtype)]


# --- attention and others --------------------------------------------------------------------------------------------


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_attention(
    gradient: Meta, query: Meta, key: Meta, value: Meta, out: Meta, sums: Meta, *rest: object, **named: object
) -> RuleResult:
    """The kernel works on heads beside their places, and gives the gradients back turned."""
    if not _are_images(gradient, query, key, value, out) or gradient.size != out.size:
        return None
    if out.size != (*query.size[:3], value.size[3]) or key.size[:3] != value.size[:3] or query.size[3] != key.size[3]:
        return None
    looks: list[Look] = []
    for x in (query, key, value):
        _, heads, length, width = x.size
        looks.append((plain_meta(x.size, x.dtype, (length * heads * width, width, heads * width, 1)), None))
    return looks


@rule("_safe_softmax")
def _safe_softmax(x: Meta, dim: int, dtype: torch.dtype | None = None) -> RuleResult:
    fits = _are_alike(x) and dtype is None and type(dim) is int and len(x.size) > 0
    return [fresh(x.size, x.dtype)] if fits and -len(x.size) <= dim < len(x.size) else None


@rule("grid_sampler_3d_backward")
def _sampling_of_volumes_backward(
    gradient: Meta, x: Meta, grid: Meta, mode: object, padding: object, aligned: object, mask: Sequence[bool]
) -> RuleResult:
    fits = _are_alike(gradient, x, grid) and are_row_major(x, grid) and len(x.size) == len(grid.size) == 5
    fits = fits and x.size[0] == grid.size[0] and grid.size[4] == 3 and len(mask) == 2
    if not fits or gradient.size != (*x.size[:2], *grid.size[1:4]):
        return None
    return [fresh(x.size, x.dtype) if mask[0] else _NOTHING, fresh(grid.size, grid.dtype)]


@rule("_ctc_loss_backward")
def _ctc(
    gradient: Meta, chances: Meta, targets: Meta, input_lengths: object, target_lengths: object, *rest: object
) -> RuleResult:
    fits = _are_alike(gradient, chances) and len(chances.size) == 3 and gradient.size in ((), chances.size[1:2])
    fits = fits and type(input_lengths) is type(target_lengths) is list and targets.plain
    return [fresh(chances.size, chances.dtype)] if fits and row_major(chances) else None


@rule("masked_scatter_backward")
def _masked_scatter(gradient: Meta, mask: Meta, size: Sequence[int]) -> RuleResult:
    fits = _are_alike(gradient) and mask.plain and mask.dtype is torch.bool and mask.size == gradient.size
    return [fresh(tuple(size), gradient.dtype)] if fits and all(type(n) is int and n > 0 for n in size) else None


@rule("diagonal_backward")
def _diagonal(gradient: Meta, size: Sequence[int], *rest: object) -> RuleResult:
    fits = _are_alike(gradient) and all(type(n) is int and n > 0 for n in size)
    return [fresh(tuple(size), gradient.dtype)] if fits and len(size) == len(gradient.size) + 1 else None


@rule("unfold_backward")
def _unfold(gradient: Meta, size: Sequence[int], *rest: object) -> RuleResult:
    fits = _are_alike(gradient) and all(type(n) is int and n > 0 for n in size)
    return [fresh(tuple(size), gradient.dtype)] if fits and len(size) == len(gradient.size) - 1 else None


@rule("_cdist_backward")
def _distances(gradient: Meta, a: Meta, b: Meta, order: object, distances: Meta) -> RuleResult:
    fits = _are_alike(gradient, a, b, distances) and len(a.size) == len(b.size) >= 2 and a.size[:-2] == b.size[:-2]
    fits = fits and a.size[-1] == b.size[-1] and gradient.size == distances.size == (*a.size[:-1], b.size[-2])
    return [fresh(a.size, a.dtype)] if fits else None


__all__ = ["RULES"]
