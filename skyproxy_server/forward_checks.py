"""Checks of what kernels of attention, CTC, packed weights, distances and medians take on trust, before they run.

As those of `kernel_checks`: sizes of arguments that belong together, and memory in the order
that a kernel walks through without a look at the strides.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy_server.kernel_checks import Check, registering, require

Tensor = torch.Tensor
FORWARD_CHECKS: dict[str, Check] = {}
"""By the operator's name without its namespace, for each of its overloads."""
_checks = registering(FORWARD_CHECKS)


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a strided tensor share memory: a kernel that walks on by one leaves that."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return False
    return torch_codec.storage_extent(tuple(tensor.shape), tensor.stride(), 0) < tensor.numel()


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if not tensor.dim() or tensor.stride(-1) == 1 else tensor.contiguous()


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@_checks(_FLASH, f"{_FLASH}_backward")
def _flash_attention(given: dict[str, Any]) -> None:
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    require(
        query.dim() == key.dim() == 4 and key.shape == value.shape, "attention is of (N, H, L, E) and two (N, H, S, E)"
    )
    (batch, heads, length, width), (_, shared, steps, _) = query.shape, key.shape
    require(key.shape[0] == batch and key.shape[3] == width, "query and key are of one batch and width")
    require(min(heads, length, shared, steps) > 0, "attention of nothing, or to nothing, has another kernel")
    require(heads % shared == 0, f"{heads} heads cannot share {shared}")
    require(query.dtype is key.dtype is value.dtype, "query, key and value are of one type")
    names = ["query", "key", "value"]
    if mask is not None:
        require(mask.dim() in (2, 4), "a mask has two or four dimensions")
        sizes = (batch, heads, length, steps)[-mask.dim() :]
        fits = all(size in (1, whole) for size, whole in zip(mask.shape, sizes, strict=True))
        require(fits, f"the mask {list(mask.shape)} is not of {list(sizes)}")
        names.append("attn_mask")
    if "grad_out" in given:
        sums = given["logsumexp"]
        require(given["out"].shape == given["grad_out"].shape == query.shape, "the results have another shape")
        require(tuple(sums.shape) == (batch, heads, length), "logsumexp has another shape")
        require(given["out"].dtype is given["grad_out"].dtype is query.dtype, "the results are of another type")
        wanted = query.dtype if query.dtype is torch.float64 else torch.float32
        require(sums.dtype is wanted, f"logsumexp is not of {wanted}")
        names += ["out", "grad_out"]
    for name in names:
        given[name] = _in_rows(given[name])


@_checks("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
def _fused_layer(given: dict[str, Any]) -> None:
    heads, width = given.get("num_head", given.get("num_heads", 0)), given["embed_dim"]
    require(0 < heads <= width and width % heads == 0, f"{heads} heads cannot share {width} numbers")
    sizes = {"qkv_weight": (3 * width, width), "qkv_bias": (3 * width,), "proj_weight": (width, width)}
    for name, size in {**sizes, "proj_bias": (width,)}.items():
        require(tuple(given[name].shape) == size, f"{name} does not have the shape {list(size)}")
        require(given[name].dtype is given["qkv_weight"].dtype, f"{name} is of another type")
    tensor = given.get("query", given.get("src"))
    require(tensor is not None and tensor.dim() == 3, "a layer is of (N, L, E)")


@_checks("_ctc_loss", "_ctc_loss_backward", "ctc_loss")
def _alignments(given: dict[str, Any]) -> None:
    logs, targets = given["log_probs"], given["targets"]
    require(logs.dim() in (2, 3) and logs.shape[-1] > 0, "probabilities are of (T, N, classes)")
    require(targets.dim() in (0, 1, 2) and targets.dtype in (torch.int32, torch.int64), "targets are integers")
    # What is behind a target's length may be anything, and is not looked at.
    given["targets"] = targets.clamp(0, logs.shape[-1] - 1)
    if "grad" not in given:
        return
    require(logs.dim() == 3, "probabilities are of (T, N, classes)")
    steps, batch, classes = logs.shape
    require(0 <= given["blank"] < classes, "the blank is one of the classes")
    inputs, lengths = (
        n.tolist() if isinstance(n, Tensor) else n for n in (given["input_lengths"], given["target_lengths"])
    )
    for numbers in (inputs, lengths):
        require(isinstance(numbers, list | tuple) and len(numbers) == batch, f"there are lengths of {batch} sequences")
    require(all(0 <= n <= steps for n in inputs), f"sequences are of up to {steps} steps")
    longest = max(lengths, default=0)
    require(all(n >= 0 for n in lengths), "targets have lengths")
    if targets.dim() == 2:
        require(targets.shape[0] == batch and longest <= targets.shape[1], "targets are longer than they are")
    else:
        require(sum(lengths) <= targets.numel(), "targets are longer than they are")
    alpha, loss, grad = given["log_alpha"], given["neg_log_likelihood"], given["grad"]
    fits = alpha.dim() == 3 and alpha.shape[:2] == (batch, steps) and alpha.shape[2] >= 2 * longest + 1
    require(fits, f"log_alpha {list(alpha.shape)} is of other sequences")
    require(loss.numel() == batch and grad.numel() == batch, f"there are losses of {batch} sequences")
    given["neg_log_likelihood"], given["grad"] = loss.reshape(batch), grad.reshape(batch)


@_checks("_cdist_backward")
def _distances_of_two(given: dict[str, Any]) -> None:
    gradient = "grad_output" if "grad_output" in given else "grad"  # the former from torch 2.14 on
    left, right, grad, distances = (given[name] for name in ("x1", "x2", gradient, "cdist"))
    require(left.dim() >= 2 and right.dim() >= 2 and left.shape[-1] == right.shape[-1], "points have one dimension")
    batch = torch._C._infer_size(left.shape[:-2], right.shape[:-2])
    size = (*batch, left.shape[-2], right.shape[-2])
    # Of one sample, `vmap` leaves the batch's dimension in front.
    more = grad.dim() - len(size)
    fits = more >= 0 and tuple(grad.shape) == (1,) * more + size and tuple(distances.shape) == size
    require(fits, f"the distances are not of {list(size)}")
    require(left.dtype is right.dtype is grad.dtype is distances.dtype, "points and distances are of one type")
    given[gradient], given["cdist"] = grad.reshape(size).contiguous(), distances.contiguous()


@_checks("_cummax_helper", "_cummin_helper")
def _running_extremes(given: dict[str, Any]) -> None:
    tensor, values, places = given["self"], given["values"], given["indices"]
    require(values.shape == tensor.shape == places.shape, "the results have the sizes of the input")
    require(0 <= given["dim"] < max(tensor.dim(), 1), f"there is no dimension {given['dim']}")
    require(values.dtype is tensor.dtype and places.dtype is torch.int64, "the results are of other types")


READ_ONE_BEHIND_THE_OTHER = frozenset(
    {"median", "nanmedian", "native_group_norm", "native_group_norm_backward", "mkldnn_rnn_layer"}
    | {"mkldnn_rnn_layer_backward", "_embedding_bag", "_embedding_bag_forward_only", "_slow_conv2d_backward"}
    | {"_rowwise_prune", "_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"}
    | {"rrelu_with_noise", "rrelu_with_noise_"}
)
"""Operators whose kernels read tensors as if their elements lay one behind the other; those of expanded ones do not."""


def spreading(check: Check, written: frozenset[str]) -> Check:
    """Return a check that gives tensors whose elements share memory some for each of them, before another check.

    Args:
        check: the other one.
        written: the arguments that the operator writes to, which must have it already.
    """

    def spread(given: dict[str, Any]) -> None:
        for name, value in given.items():
            if isinstance(value, Tensor) and overlaps(value):
                require(name not in written, f"elements of {name} share memory: it cannot be written to")
                given[name] = value.contiguous()
        check(given)

    return spread


@_checks(*READ_ONE_BEHIND_THE_OTHER)
def _spread_elements(given: dict[str, Any]) -> None:
    """Being spread is enough for these, where nothing below, in `kernel_checks` or in `safe_forms` has more."""


@_checks("copy")
def _copies(given: dict[str, Any]) -> None:
    require(isinstance(given["self"], Tensor) and isinstance(given["src"], Tensor), "a copy is of a tensor")


@_checks("_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm")
def _packed_weights(given: dict[str, Any]) -> None:
    for name in ("self", "mat2", "qScaleAndZeros", "scales"):
        if name in given:
            given[name] = given[name].contiguous()
    tensor, weight = given["self"], given["mat2"]
    require(tensor.dim() == weight.dim() == 2, "packed weights are a matrix, as what they are multiplied with")
    if "scales" in given:
        require(weight.shape[1] == tensor.shape[1], "the weights are of other columns")
        scales = given["scales"]
        require(scales.shape == weight.shape[:1] and scales.dtype is tensor.dtype, "there is a scale for each row")
        return
    group, scales = given["qGroupSize"], given["qScaleAndZeros"]
    require(group in (32, 64, 128, 256) and tensor.shape[1] % group == 0, f"groups of {group} columns")
    require(weight.dtype is torch.uint8 and 2 * weight.shape[1] == tensor.shape[1], "the weights are of other columns")
    size = (tensor.shape[1] // group, weight.shape[0], 2)
    require(tuple(scales.shape) == size and scales.dtype is tensor.dtype, f"scales are not of {list(size)}")


@_checks(
    *(f"slow_conv{kind}d" for kind in ("_dilated2", "_dilated3", "_transpose2", "_transpose3", "3")),
    "slow_conv3d_forward",
)
def _slow_kernels(given: dict[str, Any]) -> None:
    weight, sizes = given["weight"], list(given["kernel_size"])
    require(weight.dim() == len(sizes) + 2, f"the weight has {weight.dim()} dimensions")
    require(list(weight.shape[2:]) == sizes and min(sizes, default=0) > 0, f"kernels of {sizes} have other weights")
    for name in ("kernel_size", "stride", "padding", "output_padding", "dilation"):
        require(all(0 <= n < _MOST_PIXELS for n in given.get(name, ())), f"no image has a {name} of {given.get(name)}")


_MOST_ELEMENTS = 1 << 58
"""More than memory has; twice a number of bytes below it does not overflow, as sums in a kernel do."""
_MOST_PIXELS = 1 << 31


@_checks("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "empty_strided", "new_empty_strided")
def _places(given: dict[str, Any]) -> None:
    # PyTorch multiplies and adds them in 64 bits before it compares them with the storage.
    size, stride, offset = given["size"], given["stride"], given.get("storage_offset")
    if offset is None:
        offset = int(given["self"].storage_offset()) if "self" in given else 0
    reach = offset + sum(n * step for n, step in zip(size, stride, strict=False) if step > 0)
    fits = max(offset, reach) < _MOST_ELEMENTS
    require(fits, f"no memory has the sizes {list(size)}, the strides {list(stride)} and the offset {offset}")


@_checks("_masked_softmax")
def _masks(given: dict[str, Any]) -> None:
    tensor, mask, kind = given["self"], given["mask"], given.get("mask_type")
    sizes = tuple(tensor.shape)
    if kind in (0, 1) and len(sizes) == 4 and mask.dim() == 2:  # else, the kernel takes it for one of all elements
        sizes = sizes[2:] if kind == 0 else (sizes[0], sizes[3])
    require(tuple(mask.shape) == sizes, f"the mask is not of {list(sizes)}")


@_checks("_linalg_eigvals", "linalg_eigvals")
def _eigenvalues(given: dict[str, Any]) -> None:
    if given["self"].device.type == "cpu":
        finite = bool(given["self"].isfinite().all())
        require(finite, "torch.linalg.eigvals: input tensor should not contain infs or NaNs.")


@_checks("_sparse_broadcast_to")
def _sparse_repetitions(given: dict[str, Any]) -> None:
    size, own = list(given["size"]), list(given["self"].shape)
    own = [1] * (len(size) - len(own)) + own
    repeated = [n for n, there in zip(size, own, strict=False) if n != there]
    require(min(repeated, default=1) > 0, "a sparse tensor is not repeated zero times")


@_checks("_spdiags")
def _diagonals(given: dict[str, Any]) -> None:
    shape = given["shape"]
    require(len(shape) == 2 and min(shape) >= 0, f"no matrix has the shape {list(shape)}")


@_checks("binomial")
def _numbers_of_trials(given: dict[str, Any]) -> None:
    # The kernel draws for ever where the number is none.
    given["count"] = torch.where(given["count"].isnan(), 0, given["count"])


@_checks("binary_cross_entropy", "binary_cross_entropy_backward")
def _targets_of_each(given: dict[str, Any]) -> None:
    for name in ("target", "weight", "grad_output"):
        other = given.get(name)
        require(other is None or other.numel() > 0 or not given["self"].numel(), f"{name} is of no elements")


@_checks("_convolution_double_backward")
def _second_derivatives(given: dict[str, Any]) -> None:
    tensor, grad, weight = given["self"], given["gO"], given["weight"]
    require(tensor.dim() == grad.dim() == weight.dim() >= 3, "input, weight and gradient have as many dimensions")
    require(grad.shape[0] == tensor.shape[0], "the gradient is of another batch")


@_checks("_grouped_mm")
def _groups(given: dict[str, Any]) -> None:
    left, right, ends = given["self"], given["mat2"], given.get("offs")
    require(left.dim() in (2, 3) and right.dim() in (2, 3), "groups are of matrices")
    if ends is None:
        return
    require(ends.dim() == 1 and ends.dtype is torch.int32 and ends.numel() > 0, "offs is a list of 32-bit places")
    count = left.shape[1 if right.dim() == 2 else 0] if left.dim() == 2 else right.shape[1]
    given["offs"] = ends.clamp(0, count).cummax(0).values.to(torch.int32)


@_checks("max_pool1d")
def _pool_of_a_line(given: dict[str, Any]) -> None:
    tensor, padding = given["self"], given.get("padding") or [0]
    for name in ("kernel_size", "stride", "padding", "dilation"):
        require(all(0 <= n < _MOST_PIXELS for n in given.get(name) or ()), f"no line has such a {name}")
    length = tensor.shape[-1] + 2 * padding[0] if tensor.dim() else 0
    require(all(n <= length for n in given["kernel_size"]), f"a pool of {given['kernel_size']} of {length} numbers")


@_checks("repeat_interleave")
def _repetitions(given: dict[str, Any]) -> None:
    repeats = given.get("repeats")
    if isinstance(repeats, Tensor) and repeats.device.type == "cpu" and repeats.numel():
        few = bool((repeats >= 0).all()) and float(repeats.double().sum()) < _MOST_ELEMENTS
        require(few, "repeats can not be negative, nor more than memory has room for")


@_checks("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")
def _slopes(given: dict[str, Any]) -> None:
    tensor, out = given["self"], given.get("out")
    require(given["noise"].shape == tensor.shape, "there is a slope for each number")
    if out is not None and out.shape != tensor.shape:
        out.resize_(tensor.shape)  # the kernel does not


@_checks("gcd", "lcm")
def _divisors(given: dict[str, Any]) -> None:
    for name in ("self", "other"):
        given[name] = _with_absolute_values(given[name])


@_checks("gcd_", "lcm_")
def _divisors_in_place(given: dict[str, Any]) -> None:
    given["self"].copy_(_with_absolute_values(given["self"]))
    given["other"] = _with_absolute_values(given["other"])


def _with_absolute_values(tensor: Tensor) -> Tensor:
    """The least integer has none, and divided by -1 it ends the process."""
    if tensor.dtype not in (torch.int32, torch.int64):
        return tensor
    return tensor.clamp(min=torch.iinfo(tensor.dtype).min + 1)


_MODES = [f"{name}.{form}" for name in ("div", "divide") for form in ("Tensor_mode", "Scalar_mode", "out_mode")]
_MODES += [f"{name}.Scalar_mode_out" for name in ("div", "divide")]


@_checks(*_MODES)
def _quotients(given: dict[str, Any]) -> None:
    found = _without_minus_one(given)
    if found is not None:
        given["self"], given["other"] = found


@_checks(*(f"{name}_.{form}" for name in ("div", "divide") for form in ("Tensor_mode", "Scalar_mode")))
def _quotients_in_place(given: dict[str, Any]) -> None:
    found = _without_minus_one(given)
    if found is not None and found[0].shape == given["self"].shape:
        given["self"].copy_(found[0])
        given["other"] = found[1]


def _without_minus_one(given: dict[str, Any]) -> tuple[Tensor, Any] | None:
    """Return a dividend and a divisor with the same quotient: the least integer divided by -1 ends the process."""
    dividend, other = given["self"], given["other"]  # either may be a number, not both
    kind = torch.result_type(dividend, other)
    if given.get("rounding_mode") != "trunc" or kind not in (torch.int32, torch.int64):
        return None
    if any(isinstance(operand, Tensor) and operand.device.type != "cpu" for operand in (dividend, other)):
        return None
    negative = other == -1
    dividend = (dividend if isinstance(dividend, Tensor) else torch.tensor(dividend)).to(kind)
    if not isinstance(other, Tensor):
        return (-dividend, 1) if negative else None
    # A product has the order of memory of a quotient; a choice would have that of the divisor.
    return dividend * torch.where(negative, -1, 1).to(kind), torch.where(negative, 1, other)
