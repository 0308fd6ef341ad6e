"""Strides of fresh results as the CPU's kernels choose them, for ops whose fake kernels choose others.

Fake tensors tell sizes and dtypes; most of them tell strides as well. Where they do not, this corrects what they say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from skyproxy import torch_versions
from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.core.torch_private import is_plain_convolution
from skyproxy.tensor.shapes.elementwise import (
    broadcast_sizes,
    channels_last_stride,
    elementwise,
    is_channels_last,
    is_contiguous,
    preserved_stride,
    result_dtype,
)
from skyproxy.tensor.shapes.strides import (
    batch_norm_stride,
    lies_channels_last,
    reshaped_stride,
    suggested_stride,
    suggests_channels_last,
)
from skyproxy.torch_codec import contiguous_stride

if TYPE_CHECKING:
    from skyproxy.tensor.core.torch_private import OpOverload

Strides = tuple[int, ...] | None
_OfSize = Callable[[tuple[int, ...]], tuple[int, ...]]
Correction = Callable[..., list[Strides]] | Callable[..., list[_OfSize]]
_F = TypeVar("_F", bound=Correction)
_CORRECTIONS: dict[str, Correction] = {}
_ROW_MAJOR: Strides = ()
"""Stands for the strides of a fresh row-major tensor, whatever its size."""
_GROUP_NORMS_KEEP_IDLE_STRIDES = torch_versions.minor(torch.__version__) >= (2, 14)
_POSITIONS = frozenset({torch.int64, torch.int32})
_REVERSED = frozenset({"aten::rsub.Tensor", "aten::threshold_backward"})
"""Ops whose kernels iterate over their operands in the other order."""
_TAKE_NUMBERS_AS_TENSORS = frozenset({"add", "sub", "mul", "div"})
_ELEMENTWISE_ON_LISTS = _TAKE_NUMBERS_AS_TENSORS | frozenset(
    {"maximum", "minimum", "clamp_min", "clamp_max", "pow", "ceil", "exp", "floor", "neg"}
    | {"reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "trunc"}
)
"""Ops on lists, `_foreach_` of these, whose results are laid out as those of the same op on each place."""
_TAKES_NUMBER_AS_TENSOR = frozenset(
    {"Scalar", "Scalar_mode", "Scalar_Other", "Scalar_Self", "Scalar_Tensor"}
    | {"self_scalar", "other_scalar", "x_scalar", "n_scalar"}
)


def _corrects(names: str) -> Callable[[_F], _F]:
    """Registers a function for ops: it takes what the op takes, with a `Meta` for each tensor, and gives the strides of
    each result, None (or nothing more) where the fake kernel's are right.
    """

    def register(function: _F) -> _F:
        for name in names.split():
            _CORRECTIONS["aten::" + name] = function
        return function

    return register


def corrected(
    op: OpOverload,
    args: Sequence[object],
    kwargs: dict[str, object],
    operands: Sequence[object],
    results: list[Meta | None],
) -> list[Meta | None]:
    """Return what fresh results look like, given what fake tensors say of them.

    Args:
        op: the overload.
        args, kwargs: of the call, with a `Meta` for each tensor.
        operands: those of them that are tensors, or that the op takes in a tensor's place.
        results: what each result looks like; None for what is no fresh strided tensor.
    """
    correct = _CORRECTIONS.get(op.name())
    try:
        if correct is not None:
            strides: Sequence[Strides | _OfSize] = correct(*args, **kwargs)
        elif torch.Tag.pointwise in op.tags and results and results[0] is not None:
            strides = [_elementwise(op, operands, results[0])] * len(results)
        else:
            return results
    except (TypeError, ValueError) as error:  # a form that the correction does not know
        if raised_by_handler(error):
            raise
        return results
    return [
        meta if meta is None or stride is None or not meta.plain else _with_stride(meta, stride)
        for meta, stride in itertools.zip_longest(results, strides[: len(results)])
    ]


def in_kernel_order(name: str, results: Sequence[Meta], *args: object) -> list[tuple[Meta, None]]:
    """Return the looks of fresh results, given their sizes and dtypes, in the orders of memory that a kernel writes.

    Args:
        name: of the op, without its namespace; one of those that are corrected here, or elementwise in its first two
            arguments.
        results: one for each, row-major.
        args: of the call, with a `Meta` for each tensor.
    """
    correct = _CORRECTIONS.get("aten::" + name, _iteration_strides)
    strides = correct(*args)
    return [(_with_stride(meta, stride), None) for meta, stride in zip(results, strides, strict=False)]


def corrected_lists(op: OpOverload, args: Sequence[object], items: list[Meta]) -> list[Meta]:
    """The same for an elementwise op on lists, of which each place is an op of its own.

    Args:
        args: of the call, with a `Meta` for each tensor.
        items: what fake tensors say of the results.
    """
    packet = op._schema.name.removeprefix("aten::_foreach_")
    lists = [a for a in args if isinstance(a, list) and a and isinstance(a[0], Meta)]
    known = packet in _ELEMENTWISE_ON_LISTS or (packet == "abs" and not any(a.dtype.is_complex for a in lists[0]))
    if not known or any(len(a) != len(items) for a in lists):
        return items
    number = [0] if packet in _TAKE_NUMBERS_AS_TENSORS and len(lists) < len(args) else []
    found = []
    for place, meta in zip(zip(*lists), items):
        look = elementwise([*place, *number], _common_dtype(list(place), meta)) if meta.plain else None
        found.append(_with_stride(meta, look[1]) if look is not None and look[0] == meta.size else meta)
    return found


def _with_stride(meta: Meta, stride: Strides | _OfSize) -> Meta:
    if callable(stride):
        stride = stride(meta.size)
    if stride is None:
        return meta
    if len(stride) not in (0, len(meta.size)):
        return meta
    return plain_meta(meta.size, meta.dtype, stride or None, meta.offset)


def _elementwise(op: OpOverload, operands: Sequence[object], result: Meta) -> Strides:
    """The strides of a result of an op that PyTorch calls pointwise; None where they cannot be told."""
    if any(isinstance(a, list | tuple) for a in operands):
        return None
    name, operands = op.name(), list(operands)
    if name in _REVERSED:
        operands.reverse()
    tensors = [a for a in operands if isinstance(a, Meta)]
    if not tensors:
        return None
    if op._overloadname in _TAKES_NUMBER_AS_TENSOR and name != "aten::lerp.Scalar":
        operands.append(0)
    common = None if name.startswith("aten::where") else _common_dtype(tensors, result)
    found = elementwise([a if isinstance(a, Meta) else 0 for a in operands], common)
    return found[1] if found is not None and found[0] == result.size else None


def _common_dtype(tensors: list[Meta], result: Meta) -> torch.dtype:
    """The dtype that the kernel converts its inputs to before it looks at their strides."""
    common = result_dtype(tensors)
    floats = result.dtype.is_floating_point or result.dtype.is_complex
    return result.dtype if floats and not (common.is_floating_point or common.is_complex) else common


@_corrects(
    "clone _to_copy empty_like zeros_like ones_like full_like rand_like randn_like randint_like randint_like.low_dtype"
)
def _copy(a: Meta, *args: object, memory_format: torch.memory_format | None = None, **kwargs: object) -> list[Strides]:
    if memory_format is torch.contiguous_format:
        return [contiguous_stride(a.size)]
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        return [channels_last_stride(a.size)]
    return [preserved_stride(a.size, a.stride)]


@_corrects(
    "sum.dim_IntList mean.dim prod.dim_int amax amin any.dim all.dim argmax argmin nansum logsumexp max.dim min.dim "
    "linalg_vector_norm var.correction std.correction var_mean.correction std_mean.correction norm.ScalarOpt_dim "
    "mvlgamma log_sigmoid_forward "
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _unsafe_masked_index "
    "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor pow.Scalar index_add index_copy huber_loss_backward "
    "isin.Tensor_Tensor isin.Tensor_Scalar grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d "
    "grid_sampler_3d_backward "
    "smooth_l1_loss_backward mse_loss_backward native_layer_norm native_layer_norm_backward col2im renorm tril triu "
    "softmax.int log_softmax.int nll_loss2d_forward diag_embed poisson _standard_gamma rrelu_with_noise max_pool1d "
    "layer_norm _transformer_encoder_layer_fwd cross_entropy_loss"
)
def _row_major(*args: object, **kwargs: object) -> list[Strides]:
    return [_ROW_MAJOR] * 3


@_corrects(
    "flip _conj_physical nan_to_num hardtanh frexp.Tensor sort sort.stable _prelu_kernel "
    "_unsafe_masked_index_put_accumulate rad2deg deg2rad fill.Scalar fill.Tensor index_put _unsafe_index_put "
    "log_sigmoid_backward index_fill.int_Scalar index_fill.int_Tensor"
)
def _preserved_strides(a: Meta, *args: object, **kwargs: object) -> list[Strides]:
    return [preserved_stride(a.size, a.stride)] * 2


@_corrects("abs")
def _abs(a: Meta) -> list[Strides]:
    """Of real numbers, an elementwise result; of complex ones, `empty_like` of another dtype."""
    return [preserved_stride(a.size, a.stride) if a.dtype.is_complex else _stride_of(elementwise([a]))]


@_corrects("angle")
def _angle(a: Meta) -> list[Strides]:
    return [_ROW_MAJOR if a.dtype.is_complex else _stride_of(elementwise([a]))]


@_corrects("native_dropout_backward")
def _dropout_backward(gradient: Meta, mask: Meta, scale: float) -> list[Strides]:
    product = elementwise([gradient, mask], gradient.dtype)
    if product is None:
        return [None]
    return [_stride_of(elementwise([plain_meta(product[0], gradient.dtype, product[1]), scale]))]


@_corrects("rms_norm")
def _rms_norm(a: Meta, shape: Sequence[int], weight: Meta | None = None, eps: object = None) -> list[Strides]:
    rank = len(a.size) - len(shape)
    as_it_is = is_contiguous(a.size, a.stride) or suggests_channels_last(a.size, a.stride)
    rows = plain_meta(a.size, a.dtype, a.stride if as_it_is else None)
    stride = _stride_of(elementwise([rows, plain_meta((*a.size[:rank], *[1] * len(shape)), a.dtype)]))
    return [stride] if weight is None else _iteration_strides(plain_meta(a.size, a.dtype, stride), weight)


@_corrects("soft_margin_loss_backward")
def _soft_margin_loss_backward(gradient: Meta, a: Meta, target: Meta, *args: object) -> list[Strides]:
    """Step by step as the kernel: `target * exp(-target * a)`."""
    negated = plain_meta(target.size, target.dtype, preserved_stride(target.size, target.stride))
    product = elementwise([negated, a])
    exponential = product and elementwise([plain_meta(product[0], a.dtype, product[1])])
    return [exponential and _stride_of(elementwise([target, plain_meta(exponential[0], a.dtype, exponential[1])]))]


@_corrects("_cdist_backward")
def _cdist_backward(gradient: Meta, a: Meta, b: Meta, *args: object) -> list[Strides]:
    return [preserved_stride(a.size, a.stride) if 0 in (*a.size, *b.size) else _ROW_MAJOR]


@_corrects("index.Tensor _unsafe_index.Tensor")
def _index(a: Meta, indices: Sequence[Meta | None]) -> list[Strides]:
    return [indexed_stride(a, indices)]


def indexed_stride(a: Meta, indices: Sequence[Meta | None]) -> Strides:
    """Compute the strides of `a[indices]` as `AdvancedIndex` does: elementwise over the tensor, each indexed stretch of
    dimensions replaced by that of the indices, and the indices, which do not move along the other dimensions.
    """
    if not a.plain or not all(index is None or (index.plain and index.dtype in _POSITIONS) for index in indices):
        return None
    given = [index for index in indices if index is not None]
    shape = broadcast_sizes([index.size for index in given]) if given else None
    if shape is None:
        return None
    dims = list(range(len(a.size)))
    places = [at for at, index in enumerate(indices) if index is not None]
    first = places[0]
    if places[-1] - first >= len(places):  # they are not next to each other, and come to the front
        dims, first = places + [d for d in dims if d not in places], 0
    before, after = dims[:first], dims[first + len(places) :]
    if 0 in [a.size[d] for d in places] and 0 not in shape:
        return None
    size = (*(a.size[d] for d in before), *shape, *(a.size[d] for d in after))
    source = (*(a.stride[d] for d in before), *[0] * len(shape), *(a.stride[d] for d in after))
    operands = [plain_meta(size, a.dtype, source)]
    for index in given:
        stride = _expanded_stride(index, shape)
        ones = (*[1] * len(before), *shape, *[1] * len(after))
        viewed = reshaped_stride(shape, stride, ones)
        operands.append(plain_meta(ones, index.dtype, viewed))
    return _stride_of(elementwise(operands))


def _expanded_stride(a: Meta, size: tuple[int, ...]) -> tuple[int, ...]:
    extra = len(size) - len(a.size)
    own = [0 if n == 1 and size[extra + i] != 1 else a.stride[i] for i, n in enumerate(a.size)]
    return (*[0] * extra, *own)


@_corrects("leaky_relu_backward")
def _leaky_relu_backward(gradient: Meta, a: Meta, *args: object) -> list[Strides]:
    return _iteration_strides(a, gradient)


@_corrects("elu_backward")
def _elu_backward(
    gradient: Meta, alpha: object, scale: object, input_scale: object, is_result: bool, a: Meta
) -> list[Strides]:
    return _iteration_strides(gradient, a)


@_corrects("floor_divide hardsigmoid_backward hardswish_backward hardtanh_backward softplus_backward complex polar")
def _iteration_strides(a: Meta, b: Meta, *args: object) -> list[Strides]:
    return [_stride_of(elementwise([a, b]))]


def _stride_of(found: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Strides:
    return None if found is None else found[1]


@_corrects("addr")
def _outer_sum(a: Meta, column: Meta, row: Meta, **numbers: object) -> list[Strides]:
    """The kernel iterates over the matrix, too, where `beta` is 0 and nothing is read of it."""
    upright = plain_meta((*column.size, 1), column.dtype, (*column.stride, 1))
    flat = plain_meta((1, *row.size), row.dtype, (row.size[0] * row.stride[0], *row.stride))
    return [_stride_of(elementwise([a, upright, flat], result_dtype([a, column, row])))]


@_corrects("mse_loss smooth_l1_loss")
def _elementwise_loss(a: Meta, target: Meta, reduction: int = 1, *args: object) -> list[Strides]:
    return _iteration_strides(a, target) if reduction == 0 else [_ROW_MAJOR]


@_corrects("soft_margin_loss")
def _soft_margin_loss(a: Meta, target: Meta, reduction: int = 1) -> list[Strides]:
    """Negated first, then changed in place."""
    return [_stride_of(elementwise([a])) if reduction == 0 else _ROW_MAJOR]


@_corrects("binary_cross_entropy huber_loss")
def _loss_like_first(a: Meta, target: Meta, *args: object, reduction: int | None = None) -> list[Strides]:
    if reduction is None:
        numbers = [n for n in args if type(n) is int]
        reduction = numbers[0] if numbers else 1
    return [preserved_stride(a.size, a.stride) if reduction == 0 else _ROW_MAJOR]


@_corrects("binary_cross_entropy_with_logits")
def _loss_like_target(
    a: Meta, target: Meta, weight: object = None, factor: object = None, reduction: int = 1
) -> list[Strides]:
    return [preserved_stride(target.size, target.stride) if reduction == 0 else _ROW_MAJOR]


@_corrects("binary_cross_entropy_backward nll_loss2d_backward")
def _like_second(gradient: Meta, a: Meta, *args: object) -> list[Strides]:
    return [preserved_stride(a.size, a.stride)]


@_corrects("rot90")
def _rot90(a: Meta, k: int = 1, dims: Sequence[int] = (0, 1)) -> list[Strides]:
    if k % 4 == 0:
        return [_ROW_MAJOR]
    stride = list(preserved_stride(a.size, a.stride))
    if k % 2:
        stride[dims[0]], stride[dims[1]] = stride[dims[1]], stride[dims[0]]
    return [tuple(stride)]


@_corrects("roll")
def _roll(a: Meta, shifts: Sequence[int], dims: Sequence[int] = ()) -> list[Strides]:
    """Along each dimension in turn, the kernel joins two parts, whose formats `cat` compares; without, it flattens."""
    size, stride = a.size, a.stride
    if not dims and len(size) != 1:
        return [_ROW_MAJOR]
    if 0 in size:
        return [preserved_stride(size, stride)]
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        first = shift % size[dim]
        parts = [(*size[:dim], n, *size[dim % len(size) + 1 :]) for n in (first, size[dim] - first)]
        alike = all(suggests_channels_last(part, stride) for part in parts)
        stride = channels_last_stride(size) if alike else contiguous_stride(size)
    return [stride]


@_corrects("max_pool3d_with_indices")
def _max_pool3d(a: Meta, *args: object, **kwargs: object) -> list[_OfSize]:
    """A single volume is looked at as the last one of a batch."""
    if len(a.size) != 4 or is_contiguous(a.size, a.stride):
        return []
    end = max(n * step for n, step in zip(a.size, a.stride, strict=True))
    if not suggests_channels_last((1, *a.size), (end, *a.stride)):
        return []
    return [lambda size: channels_last_stride((1, *size))[1:]] * 2


@_corrects("group_norm native_group_norm")
def _in_suggested_format(a: Meta, *args: object) -> list[Strides]:
    return [suggested_stride(a.size, a.stride)]


@_corrects(
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
def _resampling(a: Meta, area: Sequence[int], *args: object, **kwargs: object) -> list[Strides]:
    size = (*a.size[:2], *area)
    return [channels_last_stride(size) if suggests_channels_last(a.size, a.stride) else _ROW_MAJOR]


@_corrects("reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d")
def _reflection_padding(a: Meta, padding: Sequence[int]) -> list[Strides]:
    added = [before + after for before, after in zip(padding[::2], padding[1::2], strict=True)][::-1]
    unchanged = len(a.size) - len(added)
    size = (*a.size[:unchanged], *(n + more for n, more in zip(a.size[unchanged:], added, strict=True)))
    return [channels_last_stride(size) if suggests_channels_last(a.size, a.stride) else _ROW_MAJOR]


@_corrects("native_group_norm_backward")
def _group_norm_backward(gradient: Meta, a: Meta, *args: object) -> list[Strides]:
    lies = lies_channels_last if suggests_channels_last(a.size, a.stride) else is_contiguous
    keeps_idle = _GROUP_NORMS_KEEP_IDLE_STRIDES and lies(a.size, a.stride)
    return [a.stride if keeps_idle else suggested_stride(a.size, a.stride)]


@_corrects("reflection_pad2d_backward reflection_pad3d_backward replication_pad2d_backward replication_pad3d_backward")
def _in_suggested_format_of_second(gradient: Meta, a: Meta, *args: object) -> list[Strides]:
    return [suggested_stride(a.size, a.stride)]


@_corrects("convolution_backward")
def _convolution_backward(
    gradient: Meta,
    a: Meta,
    weight: Meta,
    biases: object,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: object,
) -> list[Strides]:
    """Without oneDNN, the gradient of weights is laid out as they suggest, and not as the images do.

    They are copied into the order of the images first where they lie in another one.
    """
    if len(weight.size) != 4 or not suggests_channels_last(a.size, a.stride):
        return []
    images, weights = (torch.empty((), dtype=meta.dtype, device="cpu").expand(meta.size) for meta in (a, weight))
    if not is_plain_convolution(images, weights, None, stride, padding, dilation, *rest[:3], biases):
        return []
    if not is_channels_last(weight.size, weight.stride):
        return [None, channels_last_stride(weight.size)]
    return [None, suggested_stride(weight.size, weight.stride)]


@_corrects(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats _batch_norm_with_update "
    "_native_batch_norm_legit_no_training _batch_norm_no_update"
)
def _batch_norm(a: Meta, *args: object, **kwargs: object) -> list[Strides]:
    if all(is_contiguous(part.size, part.stride) for part in args if isinstance(part, Meta)):
        return [batch_norm_stride(a.size, a.stride)]
    return [suggested_stride(a.size, a.stride)]  # the kernel for weights and statistics that are expanded


@_corrects("native_batch_norm_backward batch_norm_backward")
def _batch_norm_backward(gradient: Meta, a: Meta, *args: object) -> list[Strides]:
    suggested = [suggests_channels_last(meta.size, meta.stride) for meta in (gradient, a)]
    if suggested[0] is suggested[1] and all(_is_in_a_format(meta) for meta in (gradient, a)):
        return [batch_norm_stride(a.size, a.stride)]
    return [suggested_stride(a.size, a.stride)]


def _is_in_a_format(a: Meta) -> bool:
    """Tell whether it is row-major or channels-last without gaps, whatever the strides of idle dimensions."""
    return is_contiguous(a.size, a.stride) or (len(a.size) > 1 and lies_channels_last(a.size, a.stride))


@_corrects("masked_fill.Scalar masked_fill.Tensor")
def _masked_fill(a: Meta, mask: Meta, value: object) -> list[Strides]:
    return [_ROW_MAJOR]


__all__ = ["corrected", "in_kernel_order", "indexed_stride"]
