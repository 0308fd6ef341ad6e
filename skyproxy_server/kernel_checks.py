"""Checks of what kernels of losses, norms, padding and sequences take on trust, made before they run.

PyTorch's own forward ops hand these arguments on, so their kernels follow indices and believe sizes. A check looks at
the arguments of a call by name, raises RuntimeError, or puts others in their place: indices are clamped, which changes
none that is right and waits for no device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from skyproxy import torch_codec

Tensor = torch.Tensor
Check = Callable[[dict[str, object]], None]
CHECKS: dict[str, Check] = {}
"""By the operator's name without its namespace, for each of its overloads."""


def registering(table: dict[str, Check]) -> Callable[..., Callable[[Check], Check]]:
    """Return a decorator that puts a check into a table, by the names of operators."""

    def checks(*packets: str) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            table.update(dict.fromkeys(packets, check))
            return check

        return register

    return checks


_checks = registering(CHECKS)


def require(right: bool, message: str) -> None:
    """Refuse arguments that do not belong together.

    Raises:
        RuntimeError: they do not.
    """
    if not right:
        raise RuntimeError(message)


def clamp_indices(indices: Tensor, count: int) -> Tensor:
    """Indices of a run of `count` elements."""
    return indices.clamp(0, max(count - 1, 0))


@_checks("multilabel_margin_loss_backward")
def _multilabel_margins(given: dict[str, Any]) -> None:
    tensor, target, grad = given["self"], given["target"], given["grad_output"]
    require(tensor.dim() <= 2, "margins are of a list of classes, or of a batch of lists")
    one_row = tensor.dim() < 2 and target.dim() < 2 and target.numel() == tensor.numel()
    fits = given["is_target"].shape == target.shape and (one_row or target.shape == tensor.shape)
    require(fits, "the targets do not match the input")
    rows = tensor.shape[0] if tensor.dim() == 2 else 1
    require(
        grad.numel() == 1 or (given["reduction"] == 0 and grad.numel() == rows), "the gradient does not match the rows"
    )
    classes = tensor.shape[-1] if tensor.dim() else 1
    given["target"] = target.clamp(-1, max(classes - 1, -1))


@_checks("nll_loss_backward", "nll_loss2d_backward")
def _likelihoods(given: dict[str, Any]) -> None:
    tensor, target, grad, weight = given["self"], given["target"], given["grad_output"], given.get("weight")
    require(tensor.dim() in (1, 2, 4), f"likelihoods cannot have {tensor.dim()} dimensions")
    classes = tensor.shape[0 if tensor.dim() == 1 else 1]
    rows = tensor.numel() // classes if classes else 0
    require(target.numel() == rows, f"{target.numel()} targets for {rows} rows")
    require(weight is None or tuple(weight.shape) == (classes,), f"the weights are not of {classes} classes")
    require(given["total_weight"].numel() == 1, "the total weight is one number")
    require(grad.numel() == (rows if given["reduction"] == 0 else 1), "the gradient does not match the rows")
    # What is to be ignored stays as it is.
    ignored = target == given["ignore_index"]
    given["target"] = torch.where(ignored, target, clamp_indices(target, classes))


@_checks("native_layer_norm_backward")
def _layer_norm(given: dict[str, Any]) -> None:
    tensor, inner = given["input"], tuple(given["normalized_shape"])
    require(0 < len(inner) <= tensor.dim(), f"a layer of the shape {list(inner)} of {tensor.dim()} dimensions")
    outer = tuple(tensor.shape[: tensor.dim() - len(inner)])
    require(tuple(tensor.shape[len(outer) :]) == inner, f"the input does not end with {list(inner)}")
    require(given["grad_out"].shape == tensor.shape, "the gradient does not match the input")
    for name in ("mean", "rstd"):
        require(given[name].numel() == math.prod(outer), f"{name} does not have {math.prod(outer)} rows")
        given[name] = given[name].contiguous()  # the kernel walks through it without a look at its strides
    for name in ("weight", "bias"):
        vector = given.get(name)
        require(vector is None or tuple(vector.shape) == inner, f"{name} does not have the shape {list(inner)}")


@_checks("native_group_norm_backward")
def _group_norm(given: dict[str, Any]) -> None:
    # Of images that lie channels-last, the kernel writes the input's gradient, asked or not: to no memory, up to 2.13.
    # Those of one channel or one element lie in both orders.
    lies_in_rows = given["input"].is_contiguous() and 1 not in given["input"].shape[1:]
    given["output_mask"] = [given["output_mask"][0] or not lies_in_rows, *given["output_mask"][1:]]


@_checks("_softmax_backward_data", "_log_softmax_backward_data", "_masked_softmax_backward")
def _probabilities(given: dict[str, Any]) -> None:
    grad, output = given["grad_output"], given["output"]
    require(grad.shape == output.shape, "the gradient does not match the result")
    require(grad.dtype is output.dtype, "the gradient has another dtype than the result")


@_checks("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
def _grid_modes(given: dict[str, object]) -> None:
    # In another mode, the kernel writes nothing.
    require(given["interpolation_mode"] in (0, 1, 2) and given["padding_mode"] in (0, 1, 2), "unknown mode")


@_checks("_weight_norm_interface", "_weight_norm_interface_backward")
def _norms_of_weights(given: dict[str, Any]) -> None:
    name, vectors = ("v", ("g",)) if "v" in given else ("saved_v", ("saved_g", "saved_norms"))
    weight, dim = given[name], int(given.get("dim", 0))
    require(weight.dim() > 0 and dim in (0, weight.dim() - 1), "norms are of the first or of the last dimension")
    given[name] = weight.contiguous()
    for vector in vectors:
        found = given[vector]
        require(found.numel() == weight.shape[dim], f"{vector} is not of {weight.shape[dim]} norms")
        given[vector] = found.contiguous()
    if "grad_w" in given:
        require(given["grad_w"].shape == weight.shape, "the gradient does not match the weight")
        require(weight.shape[dim] > 0, "there is no norm, and its kernel divides by their number")
        given["grad_w"] = given["grad_w"].contiguous()


@_checks("_weight_norm")
def _fused_norms_of_weights(given: dict[str, Any]) -> None:
    # It calls the kernel of `_weight_norm_interface` where the dimension is the first or the last, and else broadcasts.
    if given["v"].dim() > 0 and given.get("dim", 0) in (0, given["v"].dim() - 1):
        _norms_of_weights(given)


_OF_EACH_PARAMETER = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list")


@_checks(*(f"_fused_{name}{place}" for name in ("adagrad", "adam", "adamw", "sgd") for place in ("", "_")))
def _fused_steps(given: dict[str, Any]) -> None:
    """The kernels walk through the memory of all by the number of the parameter's elements."""
    parameters = given["self"]
    may_be_none = {"max_exp_avg_sqs": not given.get("amsgrad"), "momentum_buffer_list": not given.get("momentum")}
    for name in ("self", *_OF_EACH_PARAMETER):
        values = given.get(name, parameters)
        fits = len(values) == len(parameters) or (not values and may_be_none.get(name, False))
        require(fits, f"{name} has {len(values)} tensors for {len(parameters)} parameters")
        for parameter, value in zip(parameters, values, strict=False):
            require(value.layout is torch.strided and _is_dense(value), f"{name} has a tensor with gaps, or overlaps")
            require(value.shape == parameter.shape and value.dtype is parameter.dtype, f"{name} has other tensors")
    for name in ("state_steps", "out"):
        values = given.get(name, parameters)
        require(len(values) == len(parameters), f"{name} has {len(values)} tensors for {len(parameters)} parameters")
    numbers = [*given.get("state_steps", ()), *(given.get(name) for name in ("lr", "grad_scale", "found_inf"))]
    require(
        all(n is None or not isinstance(n, Tensor) or n.numel() == 1 for n in numbers), "steps have one number each"
    )


def _is_dense(tensor: Tensor) -> bool:
    return torch_codec.storage_extent(tuple(tensor.shape), tensor.stride(), 0) == tensor.numel()


@_checks("_logcumsumexp")
def _cumulated_sums(given: dict[str, Any]) -> None:
    out = given.get("out")
    require(out is None or out.dtype is given["self"].dtype, "the kernel writes elements of the input's dtype")


@_checks("_compute_linear_combination")
def _linear_combination(given: dict[str, Any]) -> None:
    tensor, coefficients = given["input"], given["coefficients"]
    require(coefficients.dim() == 2 and tensor.dim() > 0, "the coefficients are a matrix")
    require(coefficients.shape[1] == tensor.shape[0], f"coefficients for {tensor.shape[0]} tensors have other sizes")
    kinds = [value.dtype for value in (coefficients, given.get("out")) if value is not None]
    fits = coefficients.dtype in (tensor.dtype, tensor.dtype.to_real()) and kinds[-1] in (tensor.dtype, kinds[0])
    require(fits, "the coefficients have another dtype than the tensors")


@_checks("random", "random_")
def _range(given: dict[str, Any]) -> None:
    # The kernel adds one to it, and then halves a negative number until it is 0.
    require(given.get("from") is None or given["from"] < (1 << 63) - 1, "there are no numbers beyond the largest")


@_checks("arange", "range")
def _steps(given: dict[str, Any]) -> None:
    # The kernel computes the number of steps in 64 bits, and the smallest number divided by -1 ends the process.
    numbers = [given.get("start", 0), given["end"], given.get("step", 1)]
    kind = given["out"].dtype if "out" in given else given.get("dtype")
    if kind is None:
        kind = torch.float64 if any(type(number) is float for number in numbers) else torch.int64
    require(kind.is_floating_point or sum(map(abs, numbers)) < (1 << 63) - 1, "a range of numbers beyond the largest")


@_checks("_slow_conv2d_forward", "_slow_conv2d_backward", "thnn_conv2d")
def _slow_convolution(given: dict[str, Any]) -> None:
    tensor, weight, grad = given["self"], given["weight"], given.get("grad_output")
    for name in ("kernel_size", "stride", "padding"):
        numbers = given.get(name, (0, 0))
        require(len(numbers) == 2 and all(0 <= n < 1 << 31 for n in numbers), f"{name} has two numbers")
    require(tensor.dim() == 4 and weight.dim() in (2, 4), "a convolution is of images (N, C, H, W)")
    if grad is not None:
        require(grad.dim() == 4 and grad.shape[:2] == (tensor.shape[0], weight.shape[0]), "the gradient is of images")
    require(all(t is None or t.dtype is tensor.dtype for t in (weight, grad)), "images and weight are of one type")
    sizes = list(given["kernel_size"])
    kernel = list(weight.shape[2:]) if weight.dim() == 4 else sizes
    columns = weight.shape[1] if weight.dim() == 2 else 0
    fits = kernel == sizes and (weight.dim() == 4 or columns == tensor.shape[1] * math.prod(sizes))
    require(fits and min(sizes) > 0, f"kernels of {sizes} have other weights")


@_checks(
    "_fused_moving_avg_obs_fq_helper", "_fused_moving_avg_obs_fq_helper_functional", "fused_moving_avg_obs_fake_quant"
)
def _observers(given: dict[str, Any]) -> None:
    tensor, axis, rows = given["self"], given["ch_axis"], bool(given.get("per_row_fake_quant", False))
    require(not rows or 0 <= axis < tensor.dim(), f"there is no dimension {axis}")
    count = tensor.shape[axis] if rows else 1
    for name in ("observer_on", "fake_quant_on"):
        require(given[name].numel() == 1, f"{name} is one number")
    # Where nothing of the channels is known yet, the kernel resizes all four.
    begins = rows and given["running_min"].numel() == given["running_max"].numel() == 0
    for name in () if begins else ("running_min", "running_max", "scale", "zero_point"):
        require(given[name].numel() == count, f"{name} is not of {count} channels")


@_checks("_nested_compute_contiguous_strides_offsets")
def _nested_sizes(given: dict[str, Any]) -> None:
    sizes = given["nested_size"]
    require(sizes.numel() == 0 or sizes.dim() == 2, "the sizes of components are a matrix")
    require(sizes.dtype is torch.int64, "sizes are 64-bit integers")
    require(sizes.dim() < 2 or sizes.shape[0] > 0, "there are components")
    given["nested_size"] = sizes.contiguous()


@_checks("_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward")
def _check_jagged(given: dict[str, Any]) -> None:
    rows = given["values"].shape[0] if "values" in given and given["values"].dim() else None
    for offsets in given["offsets"]:
        require(offsets.dim() == 1 and offsets.numel() > 0, "offsets are a list of at least one place")
        if offsets.device.type != "cpu":
            continue
        require(offsets.dtype in (torch.int32, torch.int64), "offsets are integers")
        rise = offsets.diff()
        require(int(offsets[0]) == 0 and bool((rise >= 0).all()), "offsets begin with 0 and rise")
        require(rows is None or int(offsets[-1]) <= rows, "offsets end behind the values")


@_checks("embedding_backward", "embedding_dense_backward", "embedding_sparse_backward")
def _embedding(given: dict[str, Any]) -> None:
    indices, rows = given["indices"], given["num_weights"]
    require(rows > 0 or indices.numel() == 0, "there are no rows")
    given["indices"] = clamp_indices(indices, rows)


@_checks("gather_backward", "_gather_sparse_backward")
def _check_gathered(given: dict[str, Any]) -> None:
    tensor, dim, index = given["self"], given["dim"], given["index"]
    if not given.get("sparse_grad", True) or tensor.dim() == 0:
        return
    require(-tensor.dim() <= dim < tensor.dim(), f"there is no dimension {dim}")
    require(index.dim() == tensor.dim() and given["grad"].shape == index.shape, "gradients match their indices")
    sizes = enumerate(zip(index.shape, tensor.shape, strict=True))
    require(all(few <= size for at, (few, size) in sizes if at != dim % tensor.dim()), "indices reach beyond the sizes")
    given["index"] = clamp_indices(index, tensor.shape[dim])


@_checks("_cholesky_solve_helper")
def _solutions(given: dict[str, Any]) -> None:
    tensor, factor = given["self"], given["A"]
    require(tensor.dim() >= 2 and factor.dim() >= 2, "a system has matrices")
    require(factor.shape[-1] == factor.shape[-2] == tensor.shape[-2], "the factor does not match the right side")
    require(factor.shape[:-2] == tensor.shape[:-2], "the factor is of another batch than the right side")
    require(factor.dtype is tensor.dtype, "the factor has another dtype than the right side")


_MOST_ELEMENTS = 1 << 62


@_checks("sparse_coo_tensor", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors")
def _sparse_sizes(given: dict[str, Any]) -> None:
    sizes = given.get("size") or ()
    fits = all(size >= 0 for size in sizes) and math.prod(max(size, 1) for size in sizes) <= _MOST_ELEMENTS
    require(fits, f"no tensor has the sizes {list(sizes)}")
    if "indices" in given and sizes:
        torch._validate_sparse_coo_tensor_args(given["indices"], given["values"], list(sizes))


_MOST_BINS = 1 << 40


@_checks("histogram", "histogramdd", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts")
def _bins(given: dict[str, Any]) -> None:
    bins = given.get("bins", 100)
    numbers = bins if isinstance(bins, list | tuple) else [bins]
    if all(type(number) is int for number in numbers):
        few = all(0 < number < _MOST_BINS for number in numbers) and math.prod(numbers) < _MOST_BINS
        require(few, f"a histogram of {numbers} bins")


@_checks("unfold_backward")
def _windows(given: dict[str, Any]) -> None:
    sizes, size, step = list(given["input_sizes"]), given["size"], given["step"]
    dim = given["dim"] + len(sizes) * (given["dim"] < 0)
    require(step > 0 and size >= 0 and all(n >= 0 for n in sizes), "windows have a size and a step")
    if sizes:
        require(0 <= dim < len(sizes) and size <= sizes[dim], f"no windows of {size} along the dimension {dim}")
        sizes[dim] = (sizes[dim] - size) // step + 1
    shape = list(given["grad_in"].shape)
    # Beside the windows it may be broadcast, as compilers have it of `istft`.
    fits = len(shape) == len(sizes) + 1 and shape[-1] == size and (not sizes or shape[dim] == sizes[dim])
    fits = fits and all(n in (1, wanted) for n, wanted in zip(shape, sizes, strict=False))
    require(fits, "the gradient is of other windows")


@_checks("_pdist_backward")
def _distances(given: dict[str, Any]) -> None:
    tensor = given["self"]
    require(tensor.dim() == 2, "distances are between the rows of a matrix")
    count = tensor.shape[0] * (tensor.shape[0] - 1) // 2
    for name in ("grad", "pdist"):
        require(given[name].shape == (count,), f"{name} does not have {count} pairs")
        require(given[name].dtype is tensor.dtype, f"{name} has another dtype than the rows")


def _padding(dimensions: int, *, reflects: bool) -> Check:
    def check(given: dict[str, Any]) -> None:
        tensor, padding = given["self"], list(given["padding"])
        require(len(padding) == 2 * dimensions, f"{len(padding)} paddings for {dimensions} dimensions")
        require(tensor.dim() in (dimensions + 1, dimensions + 2), f"padding does not support {tensor.dim()} dimensions")
        sizes = list(tensor.shape)
        for place, pad in enumerate(padding):
            size = tensor.shape[-1 - place // 2]
            require(
                not reflects or -size <= pad < size, f"a padding of {pad} reflects more than the size {size} allows"
            )
            sizes[-1 - place // 2] += pad
        require(list(given["grad_output"].shape) == sizes, "the gradient does not match the result")

    return check


for _dimensions in (1, 2, 3):
    _checks(f"reflection_pad{_dimensions}d_backward")(_padding(_dimensions, reflects=True))
    _checks(f"replication_pad{_dimensions}d_backward")(_padding(_dimensions, reflects=False))


_SOBOL_BITS, _MOST_SOBOL_DIMENSIONS = 30, 21201


@_checks("_sobol_engine_scramble_", "_sobol_engine_initialize_state_", "_sobol_engine_ff_", "_sobol_engine_draw")
def _sobol(given: dict[str, Any]) -> None:
    dimension, first = given["dimension"], given.get("num_generated", 0)
    require(1 <= dimension <= _MOST_SOBOL_DIMENSIONS, f"a sequence of {dimension} dimensions")
    # The kernel uses the position of a point's lowest zero bit as the number of a column.
    require(first >= 0 and given.get("n", 0) >= 0 and first + given.get("n", 0) < 1 << _SOBOL_BITS, "too many points")
    wanted: dict[str, tuple[int, ...]] = {"sobolstate": (dimension, _SOBOL_BITS), "quasi": (dimension,)}
    if "ltm" in given:
        wanted["ltm"] = (dimension, _SOBOL_BITS, _SOBOL_BITS)
    wanted["self"] = wanted["quasi" if "sobolstate" in given else "sobolstate"]
    for name, size in wanted.items():
        found = given.get(name)
        fits = found is None or (tuple(found.shape) == size and found.layout is torch.strided)
        require(fits, f"{name} does not have the shape {list(size)}")
        require(found is None or found.dtype is torch.int64, f"{name} holds 64-bit integers")


@_checks("_transform_bias_rescale_qkv")
def _heads(given: dict[str, Any]) -> None:
    qkv, bias, heads = given["qkv"], given["qkv_bias"], given["num_heads"]
    require(
        qkv.numel() > 0 and qkv.dim() == 3 and bias.dim() == 1 and qkv.shape[2] == bias.shape[0],
        "qkv is (N, T, 3 D), its bias 3 D",
    )
    require(heads > 0 and bias.shape[0] % (3 * heads) == 0, f"{bias.shape[0]} values are not of {heads} heads")
    require(qkv.dtype is bias.dtype and qkv.is_floating_point(), "qkv and its bias are of one floating point type")


@_checks("_sparse_mm_reduce_impl_backward")
def _sparse_product(given: dict[str, Any]) -> None:
    matrix, weight, grad, chosen = (given[name] for name in ("self", "weight", "grad_out", "arg_out"))
    require(matrix.layout is torch.sparse_csr and matrix.dim() == 2, "the matrix is sparse, by rows")
    require(weight.dim() == 2 and weight.shape[0] == matrix.shape[1], "the weight has a row for each column")
    size = (matrix.shape[0], weight.shape[1])
    require(tuple(grad.shape) == size, "the gradient has the product's shape")
    require(grad.dtype is weight.dtype is matrix.dtype, "matrix, weight and gradient are of one type")
    require(grad.layout is weight.layout is torch.strided, "weight and gradient are dense")
    if given["reduce"] in ("amax", "amin"):
        require(tuple(chosen.shape) == size and chosen.dtype is torch.int64, "arg_out has the product's shape")
        # The forward op's own mark of a row without values is the number of values.
        given["arg_out"] = chosen.clamp(0, matrix._nnz())


@_checks("_fused_sdp_choice", "_scaled_dot_product_attention_math", "scaled_dot_product_attention")
def _shared_heads(given: dict[str, Any]) -> None:
    if given.get("enable_gqa"):
        # The number of the query's heads is divided by theirs.
        for name in ("key", "value"):
            require(given[name].dim() < 3 or given[name].shape[-3] > 0, f"the {name} has no head to share")
