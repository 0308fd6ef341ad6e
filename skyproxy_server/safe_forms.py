"""Safe replacements of ops that PyTorch leaves unchecked, or whose results hold what was in memory before.

Many kernels of derivatives trust that their arguments come from the forward op: indices are followed, sizes believed.
Each form here takes the arguments of the op whose place it takes, and gives the same result wherever that one is
defined. Indices are clamped rather than looked at: that needs no wait on any device, and changes none that is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from skyproxy_server.allowed_ops import ALLOWED
from skyproxy_server.foreign_memory import bytes_of, clear, clear_elements, clear_from
from skyproxy_server.forward_checks import FORWARD_CHECKS, READ_ONE_BEHIND_THE_OTHER, spreading
from skyproxy_server.kernel_checks import CHECKS, Check, clamp_indices, require
from skyproxy_server.layouts import needed_bytes
from skyproxy_server.recurrent_checks import RECURRENT_CHECKS, gradients_apart
from skyproxy_server.sparse_indices import check_indices
from skyproxy_server.unwritten_results import UNWRITTEN

Tensor = torch.Tensor
aten = torch.ops.aten
SAFE_FORMS: dict[str, Callable[..., Any]] = {
    # They leave out checks in graphs that are compiled, and are the same ops otherwise.
    "aten::_unsafe_index.Tensor": aten.index.Tensor._op,
    "aten::_unsafe_index_put": aten.index_put.default._op,
    "aten::_unsafe_view": aten.view.default._op,
}
_MOST_STEPS = 1_000_000
"""The largest degree of a polynomial: its kernel takes so many steps for each element."""


def _form(*names: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(function: Callable[..., object]) -> Callable[..., object]:
        for name in names:
            SAFE_FORMS[name] = function
        return function

    return register


def _checks(*packets: str) -> Callable[[Check], Check]:
    """Runs a check before each overload of some ops."""

    def register(check: Check) -> Check:
        for name in ALLOWED:
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if (packet in packets or f"{packet}.{overload}" in packets) and hasattr(aten, packet):
                found = getattr(getattr(aten, packet), overload or "default", None)
                if found is not None:
                    SAFE_FORMS[name] = _checking_form(found, check)
        return check

    return register


def _checking_form(overload: torch._ops.OpOverload, check: Check) -> Callable[..., object]:
    arguments = overload._schema.arguments
    op, names = overload._op, tuple(argument.name for argument in arguments)
    packet = overload._schema.name.removeprefix("aten::")
    if packet in READ_ONE_BEHIND_THE_OTHER:
        written = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        check = spreading(check, written)

    clear = UNWRITTEN.get(packet)

    def call(*args: object, **kwargs: object) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        check(given)
        result = op(*(given[name] for name in names[: len(args)]), **{name: given[name] for name in kwargs})
        if clear is not None:
            clear(given, result)
        return result

    return call


for _packet, _check in (FORWARD_CHECKS | CHECKS | RECURRENT_CHECKS).items():
    _checks(_packet)(_check)
SAFE_FORMS["aten::_cudnn_rnn_backward"] = gradients_apart(SAFE_FORMS["aten::_cudnn_rnn_backward"])


# --- strides and sparse indices --------------------------------------------------------------------------------------


@_form("aten::_reshape_alias")
def _reshape_alias(self: Tensor, size: list[int], stride: list[int]) -> Tensor:
    """`as_strided` holds sizes and strides against the storage; the op itself takes any."""
    given = {"self": self, "size": size, "stride": stride, "storage_offset": self.storage_offset()}
    FORWARD_CHECKS["as_strided"](given)
    return self.as_strided(size, stride, self.storage_offset())


@_form("aten::_sparse_coo_tensor_unsafe")
def _sparse_coo(
    indices: Tensor,
    values: Tensor,
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    is_coalesced: bool | None = None,
) -> Tensor:
    """Kernels follow the indices without a look at the sizes."""
    return torch.sparse_coo_tensor(
        indices, values, size, dtype=dtype, device=device, check_invariants=True, is_coalesced=is_coalesced
    )


def _compressed_form(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A constructor that looks where its indices lead: PyTorch does so only where it is asked, and kernels never."""

    def call(*args: object, **kwargs: object) -> Tensor:
        result = op(*args, **kwargs)
        check_indices(result)
        return result

    return call


for _kind in ("compressed", "csr", "csc", "bsr", "bsc"):
    for _overload in (_packet := getattr(aten, f"sparse_{_kind}_tensor")).overloads():
        SAFE_FORMS[f"aten::sparse_{_kind}_tensor.{_overload}"] = _compressed_form(getattr(_packet, _overload)._op)


def _triangle(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel believes that the matrices of `out` lie one behind the other."""

    def call(self: Tensor, diagonal: int = 0, *, out: Tensor) -> Tensor:
        if out is self or out.is_contiguous():
            return op(self, diagonal, out=out)
        fresh = op(self, diagonal, out=torch.empty_like(out, memory_format=torch.contiguous_format))
        if out.shape != fresh.shape:
            out.resize_(fresh.shape)
        return out.copy_(fresh)

    return call


for _name in ("triu", "tril"):
    SAFE_FORMS[f"aten::{_name}.out"] = _triangle(getattr(aten, _name).out._op)


# --- normalization ---------------------------------------------------------------------------------------------------

_CHANNEL_VECTORS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


@_checks(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional"),
    *("_batch_norm_no_update", "native_batch_norm_backward", "batch_norm_backward", "batch_norm_update_stats"),
)
def _batch_norm(given: dict[str, Any]) -> None:
    tensor: Tensor = given["input"]
    require(tensor.dim() >= 2, f"batch_norm takes at least 2 dimensions, got {tensor.dim()}")
    channels = tensor.shape[1]
    training = given.get("train", given.get("training", given.get("update")))
    for name in _CHANNEL_VECTORS:
        vector = given.get(name)
        if vector is not None and name.startswith("save_") and "grad_out" not in given:
            if training in (None, True) and vector.shape != (channels,):
                vector.resize_(channels).zero_()  # what `out=` is to fill: of any size before
            continue
        # In evaluation mode nothing is saved.
        unused = (
            name.startswith("save_") and vector is not None and vector.numel() == 0 and not given.get("train", True)
        )
        if vector is not None and not unused:
            require(tuple(vector.shape) == (channels,), f"{name} has {list(vector.shape)} elements for {channels}")
    if training is not None:
        backward = "grad_out" in given
        needed = ("save_mean", "save_invstd", "save_var") if training else ("running_mean", "running_var")
        for name in needed if backward or not training else ():
            # Forward ops without these arguments can only train; backward ones have what they save under other names.
            is_there = given.get(name) is not None or (backward and name not in given)
            require(is_there, f"batch_norm needs {name} here")
    grad = given.get("grad_out")
    require(grad is None or grad.shape == tensor.shape, "the gradient does not match the input")


@_checks("_batch_norm_no_update")
def _batch_norm_as_learned(given: dict[str, object]) -> None:
    for name in ("running_mean", "running_var"):
        require(given.get(name) is not None, f"batch_norm needs {name} here")
    _batch_norm(given)


# --- pooling ---------------------------------------------------------------------------------------------------------


def _pool(dimensions: int) -> Check:
    def check(given: dict[str, Any]) -> None:
        grad, tensor, indices = given["grad_output"], given["self"], given.get("indices")
        require(tensor.dim() in (dimensions + 1, dimensions + 2), f"pooling does not support {tensor.dim()} dimensions")
        require(
            grad.dim() == tensor.dim() and grad.shape[:-dimensions] == tensor.shape[:-dimensions],
            f"the gradient {list(grad.shape)} does not belong to the input {list(tensor.shape)}",
        )
        size = given.get("output_size")
        require(size is None or list(size) == list(grad.shape[-dimensions:]), "the gradient has another output_size")
        require(tensor.numel() > 0 or not grad.numel(), "there is nothing that the gradient could be of")
        if indices is not None:
            require(indices.shape == grad.shape, "the indices do not match the gradient")
            given["indices"] = clamp_indices(indices, math.prod(tensor.shape[-dimensions:]))

    return check


for _dimensions in (2, 3):
    _checks(
        *(f"{name}{_dimensions}d_backward" for name in ("_adaptive_avg_pool", "avg_pool", "adaptive_max_pool")),
        *(f"{name}{_dimensions}d_backward" for name in ("fractional_max_pool", "adaptive_avg_pool")),
        f"max_pool{_dimensions}d_with_indices_backward",
    )(_pool(_dimensions))


# --- bags and segments -----------------------------------------------------------------------------------------------


@_checks(
    *("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward", "_embedding_bag_dense_backward"),
    *("_embedding_bag_sparse_backward", "_embedding_bag_per_sample_weights_backward", "embedding_bag"),
)
def _embedding_bag(given: dict[str, Any]) -> None:
    indices, offsets, bags = given["indices"], given.get("offsets"), given.get("offset2bag")
    count = indices.numel()
    weights = given.get("per_sample_weights")
    require(weights is None or weights.shape == indices.shape, "per_sample_weights and indices have other sizes")
    if offsets is not None:
        require(offsets.dim() == 1 and offsets.numel() > 0, "offsets is a list of at least one place")
        if "grad" not in given and offsets.device.type == "cpu":  # CUDA's kernel does not look, either
            last = int(offsets[-1])
            message = f"offsets[-1] can not be greater than input's length {count} but got offsets[-1] of {last}"
            require(last <= count, message)
            grow = bool((offsets[1:] >= offsets[:-1]).all())
            require(grow, "Expected i < index_size to be true, but got false: offsets of bags decrease")
        given["offsets"] = offsets.clamp(0, count).cummax(0).values  # where they decrease, the kernel writes nothing
    rows = given["weight"].shape[0] if "weight" in given else given.get("num_weights", 0)
    if "grad" not in given:
        return
    grad = given["grad"]
    require(grad.dim() == 2 and indices.dim() == 1, "the gradient of bags is a matrix, and their indices a list")
    if bags is not None and bags.numel():
        require(bags.shape == indices.shape, "offset2bag and indices have other sizes")
        given["offset2bag"] = clamp_indices(bags, grad.shape[0])
    elif bags is not None and offsets is not None and count:
        # The kernel takes the bags from the offsets, of which one may be the end of the last bag.
        offsets = given["offsets"] = given["offsets"][: grad.shape[0]].sort().values
        places = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
        bags = clamp_indices(torch.bucketize(places, offsets, right=True) - 1, grad.shape[0])
        given["offset2bag"] = bags.to(torch.promote_types(indices.dtype, offsets.dtype))  # as the kernel makes them
    require(int(rows) > 0 or count == 0, "there are no rows")
    require(grad.shape[0] > 0 or count == 0, "there are no bags")
    given["indices"] = clamp_indices(indices, int(rows))
    if "weight" in given:
        require(given["weight"].dim() == 2 and given["weight"].shape[1] == grad.shape[1], "weight and gradient differ")
    for name in ("bag_size", "maximum_indices"):
        known = given.get(name)
        if known is None or known.numel() == 0:
            continue
        require(known.shape[0] == grad.shape[0], f"{name} and the gradient have other sizes")
        if name == "maximum_indices" and known.dim() == 2:
            require(known.shape == grad.shape, f"{name} and the gradient have other sizes")
            given[name] = known.clamp(-1, int(rows) - 1)


@_form("aten::_pdist_backward")
def _pdist_backward(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    """The kernel reads a distance although fewer than two rows have none."""
    CHECKS["_pdist_backward"](given := {"grad": grad, "self": self, "p": p, "pdist": pdist})
    if self.shape[0] < 2 or not self.shape[1]:
        return torch.zeros_like(self, memory_format=torch.contiguous_format)
    return aten._pdist_backward.default._op(*given.values())  # type: ignore[no-any-return]


@_checks("segment_reduce", "_segment_reduce_backward")
def _segments(given: dict[str, Any]) -> None:
    data, axis = given["data"], int(given.get("axis", 0))
    rank = max(data.dim(), 1)
    require(-rank <= axis < rank, f"the data have no dimension {axis}")
    axis %= rank
    count = data.shape[axis] if data.dim() else 1
    lengths, offsets = given.get("lengths"), given.get("offsets")
    for name, places in (("lengths", lengths), ("offsets", offsets)):
        if places is not None:
            require(
                places.dim() == axis + 1 and places.shape[:axis] == data.shape[:axis] and places.numel() > 0,
                f"the {name} of segments have other sizes than the data",
            )
    if offsets is not None:
        given["offsets"] = offsets.clamp(0, count)
    if lengths is not None:
        within = bool(((lengths >= 0) & (lengths <= count)).all())  # or their sum overflows
        require(within and bool((lengths.sum(-1) <= count).all()), "segments end behind the data")
    if "output" in given:
        output, places = given["output"], lengths if lengths is not None else offsets
        if places is None:
            raise RuntimeError("segments need lengths or offsets")
        segments = places.shape[-1] - (lengths is None)
        expected = (*data.shape[:axis], segments, *data.shape[axis + 1 :])
        require(tuple(output.shape) == expected == tuple(given["grad"].shape), "the results have other sizes")


# --- numbers that kernels believe ------------------------------------------------------------------------------------


@_checks("_fft_c2r", "_fft_r2c", "_fft_c2c")
def _fft(given: dict[str, Any]) -> None:
    tensor, dims = given["self"], given["dim"]
    copies = not dims and "forward" in given  # complex numbers to complex numbers, over no dimension
    require(copies or len(set(dims)) == len(dims) > 0, "an FFT names each of its dimensions once")
    require(all(0 <= d < tensor.dim() for d in dims), f"an FFT over {dims} of {tensor.dim()} dimensions")
    if "last_dim_size" in given:
        size, given_size = given["last_dim_size"], tensor.shape[dims[-1]]
        require(size >= 1 and given_size >= size // 2 + 1, f"{size} numbers cannot come from so few")
        # The kernel takes the larger one for the size of the signal, and writes so many numbers.
        fits = given_size in (size, size // 2 + 1) or tensor.device.type != "cpu"
        require(fits, f"{size} numbers come from {size // 2 + 1}, not from {given_size}")


@_checks(
    *(f"special_{name}_polynomial_{kind}" for name in ("chebyshev", "shifted_chebyshev") for kind in "tuvw"),
    *("special_hermite_polynomial_h", "special_hermite_polynomial_he"),
    *("special_laguerre_polynomial_l", "special_legendre_polynomial_p"),
)
def _polynomial(given: dict[str, Any]) -> None:
    degree = given["n"]
    if isinstance(degree, Tensor):
        if degree.device.type != "cpu" or not degree.numel():
            return
        degree = degree.to(torch.float64).max().item()  # unsigned integers have no largest one
    require(not degree > _MOST_STEPS, f"a polynomial of the degree {degree}; up to {_MOST_STEPS} are computed")


@_checks(*(f"_upsample_{kind}2d_aa{end}" for kind in ("bilinear", "bicubic", "lanczos") for end in ("", "_backward")))
def _check_antialiasing(given: dict[str, Any]) -> None:
    sizes = given["input_size"][-2:] if "input_size" in given else given["self"].shape[-2:]
    factors = given.get("scale_factors") or (given.get("scales_h"), given.get("scales_w"))
    results = given.get("output_size") or (None, None)
    for size, factor, result in zip(sizes, factors, results, strict=False):
        require(factor is None or factor * (size + 1) >= 0.5, f"{size} pixels cannot be scaled by {factor}")
        # The last pixel lies within the image.
        fits = factor is None or result is None or result - 0.5 < size * factor
        require(fits, f"{size} pixels scaled by {factor} are not {result}")


@_checks("smooth_l1_loss_backward", "huber_loss_backward")
def _loss(given: dict[str, Any]) -> None:
    require(given["self"].is_floating_point(), "a loss that has a gradient is a floating point number")


@_checks("multi_margin_loss_backward")
def _margins(given: dict[str, Any]) -> None:
    tensor, target, weight, grad = given["self"], given["target"], given.get("weight"), given["grad_output"]
    require(tensor.dim() <= 2, "margins are of a list of classes, or of a batch of lists")
    rows, classes = (1, 1, *tensor.shape)[-2:]
    require(target.dim() <= 1 and target.numel() == rows, f"{target.numel()} targets for {rows} rows")
    require(weight is None or tuple(weight.shape) == (classes,), f"the weights are not of {classes} classes")
    require(
        grad.numel() == 1 or (given["reduction"] == 0 and grad.numel() == rows), "the gradient does not match the rows"
    )
    given["target"] = clamp_indices(target, classes)


@_checks("lu_unpack", "lu_solve", "linalg_lu_solve", "linalg_ldl_solve")
def _pivots(given: dict[str, Any]) -> None:
    """Rows are exchanged as the pivots say. Those of LDL are negative for blocks of two."""
    name = "LU_pivots" if "LU_pivots" in given else "pivots"
    matrix: Tensor = next(given[key] for key in ("LU_data", "LU", "LD", "self") if isinstance(given.get(key), Tensor))
    pivots: Tensor = given[name]
    if matrix.dim() < 2:
        return  # every one of these kernels refuses that before it reads a pivot, in its own words
    rows, columns = matrix.shape[-2:]
    if pivots.dtype is not torch.int32 and "LD" not in given and given.get("unpack_pivots", True):
        words = (
            "torch.lu_unpack: LU_pivots is expected to be a contiguous tensor of torch.int32 dtype"
            if "LU_data" in given and "self" not in given
            else "linalg.lu_solve: pivots should be a Tensor of scalar type torch.int32"
        )
        require(False, words)
    require(
        pivots.dtype is torch.int32 and pivots.shape == (*matrix.shape[:-2], min(rows, columns)),
        f"the pivots {list(pivots.shape)} do not belong to the factors {list(matrix.shape)}",
    )
    if "LD" in given:
        for row in pivots.reshape(-1, rows).tolist() if pivots.numel() else ():
            require(_are_block_pivots(row), "the pivots of LDL do not come in blocks")
        return
    if pivots.numel() and pivots.device.type == "cpu":  # CUDA's kernels do not look, either
        least, most = (int(bound) for bound in pivots.aminmax())
        if "LU_data" in given and "self" not in given:
            right, what = "between 1 and LU.size(-2) inclusive.", "pivots passed to lu_unpack must be"
            require(not given.get("unpack_pivots", True) or 1 <= least <= most <= rows, f"{what} {right}{_PROPERLY}")
        else:
            what = "Pivots given to lu_solve must all be"
            require(least >= 1, f"{what} greater or equal to 1. {_PROPERLY}")
            require(most <= rows, f"{what} smaller or equal to LU.size(-2). {_PROPERLY}")
    given[name] = pivots.clamp(1, max(rows, 1))


_PROPERLY = "Did you properly pass the result of lu_factor?"


def _are_block_pivots(row: list[int]) -> bool:
    """Return whether each names a row, from 1, or two in a sequence name the same one with a minus."""
    place = 0
    while place < len(row):
        width = 1 if row[place] > 0 else 2
        block = row[place : place + width]
        if len(block) != width or len(set(block)) != 1 or not 1 <= abs(row[place]) <= len(row):
            return False
        place += width
    return True


@_checks("grid_sampler_2d_backward", "grid_sampler_3d_backward", "_grid_sampler_2d_cpu_fallback_backward")
def _grid(given: dict[str, Any]) -> None:
    tensor, grid, grad = given["input"], given["grid"], given["grad_output"]
    require(tensor.dim() == grid.dim() in (4, 5), "images and grid have four or five dimensions")
    require(grid.shape[-1] == grid.dim() - 2 and grid.shape[0] == tensor.shape[0], "the grid does not match the images")
    require(grad.shape == (*tensor.shape[:2], *grid.shape[1:-1]), "the gradient does not match the result")
    require(given["interpolation_mode"] in (0, 1, 2) and given["padding_mode"] in (0, 1, 2), "unknown mode")


# --- memory as it was ------------------------------------------------------------------------------------------------

_MAKES = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_GROWS = ("resize_", "resize_as_", "set_")


def _fresh_form(overload: torch._ops.OpOverload) -> Callable[..., object]:
    op = overload._op
    return lambda *args, **kwargs: clear(op(*args, **kwargs))


def _growing_form(overload: torch._ops.OpOverload) -> Callable[..., object]:
    op, names = overload._op, [argument.name for argument in overload._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> object:
        given = dict(zip(names, args, strict=False)) | kwargs
        changed: Tensor = given["out"] if "out" in given else given["self"]
        # A tensor that takes another one's storage gains what that one gains.
        former = bytes_of(given.get("source", changed))
        try:
            return op(*args, **kwargs)
        finally:  # it may have grown before it failed
            clear_from(changed, former)
            if "out" in given and changed.layout is torch.strided and needed_bytes(changed) <= bytes_of(changed):
                clear_elements(changed)

    return call


def _overload_of(name: str) -> torch._ops.OpOverload | None:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


for _name in ALLOWED:
    _packet = _name.removeprefix("aten::").partition(".")[0]
    _found = _overload_of(_name) if _packet in (*_MAKES, *_GROWS) else None
    if _found is not None:
        _writes = _packet in _GROWS or any(argument.name == "out" for argument in _found._schema.arguments)
        SAFE_FORMS[_name] = _growing_form(_found) if _writes else _fresh_form(_found)
