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

Tensor = torch.Tensor
Check = Callable[[dict[str, object]], None]
CHECKS: dict[str, Check] = {}
"""By the operator's name without its namespace, for each of its overloads."""


def _checks(*packets: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(packets, check))
        return check

    return register


def require(right: bool, message: str) -> None:
    """Refuse arguments that do not belong together.

    Raises:
        RuntimeError: they do not.
    """
    if not right:
        raise RuntimeError(message)


def within(indices: Tensor, count: int) -> Tensor:
    """Indices of a run of `count` elements."""
    return indices.clamp(0, max(count - 1, 0))


@_checks("multilabel_margin_loss_backward")
def _many_margins(given: dict[str, Any]) -> None:
    tensor, target, grad = given["self"], given["target"], given["grad_output"]
    require(tensor.dim() <= 2, "margins are of a list of classes, or of a batch of lists")
    require(target.shape == tensor.shape == given["is_target"].shape, "the targets look otherwise than the input")
    rows = tensor.shape[0] if tensor.dim() == 2 else 1
    require(grad.numel() == 1 or (given["reduction"] == 0 and grad.numel() == rows), "the gradient is of other rows")
    classes = tensor.shape[-1] if tensor.dim() else 1
    given["target"] = target.clamp(-1, max(classes - 1, -1))


@_checks("nll_loss_backward", "nll_loss2d_backward")
def _likelihoods(given: dict[str, Any]) -> None:
    tensor, target, grad, weight = given["self"], given["target"], given["grad_output"], given.get("weight")
    require(tensor.dim() in (1, 2, 4), f"likelihoods have no {tensor.dim()} dimensions")
    classes = tensor.shape[0 if tensor.dim() == 1 else 1]
    rows = tensor.numel() // classes if classes else 0
    require(target.numel() == rows, f"{target.numel()} targets for {rows} rows")
    require(weight is None or tuple(weight.shape) == (classes,), f"the weights are not of {classes} classes")
    require(given["total_weight"].numel() == 1, "the total weight is one number")
    require(grad.numel() == (rows if given["reduction"] == 0 else 1), "the gradient is of other rows")
    # What is to be ignored stays what it is.
    ignored = target == given["ignore_index"]
    given["target"] = torch.where(ignored, target, within(target, classes))


@_checks("native_layer_norm_backward")
def _layer_norm(given: dict[str, Any]) -> None:
    tensor, inner = given["input"], tuple(given["normalized_shape"])
    require(0 < len(inner) <= tensor.dim(), f"a layer of the shape {list(inner)} of {tensor.dim()} dimensions")
    outer = tuple(tensor.shape[: tensor.dim() - len(inner)])
    require(tuple(tensor.shape[len(outer) :]) == inner, f"the input does not end with {list(inner)}")
    require(given["grad_out"].shape == tensor.shape, "the gradient looks otherwise than the input")
    for name in ("mean", "rstd"):
        require(given[name].numel() == math.prod(outer), f"{name} is not of {math.prod(outer)} rows")
    for name in ("weight", "bias"):
        vector = given.get(name)
        require(vector is None or tuple(vector.shape) == inner, f"{name} does not have the shape {list(inner)}")


@_checks("_pdist_backward")
def _distances(given: dict[str, Any]) -> None:
    tensor = given["self"]
    require(tensor.dim() == 2, "distances are between the rows of a matrix")
    count = tensor.shape[0] * (tensor.shape[0] - 1) // 2
    for name in ("grad", "pdist"):
        require(given[name].shape == (count,), f"{name} is not of {count} pairs")
        require(given[name].dtype is tensor.dtype, f"{name} has another dtype than the rows")


def _padding(dimensions: int, *, reflects: bool) -> Check:
    def check(given: dict[str, Any]) -> None:
        tensor, padding = given["self"], list(given["padding"])
        require(len(padding) == 2 * dimensions, f"{len(padding)} paddings for {dimensions} dimensions")
        require(tensor.dim() in (dimensions + 1, dimensions + 2), f"padding takes no {tensor.dim()} dimensions")
        sizes = list(tensor.shape)
        for place, pad in enumerate(padding):
            size = tensor.shape[-1 - place // 2]
            require(not reflects or -size <= pad < size, f"a padding of {pad} reflects more than there is of {size}")
            sizes[-1 - place // 2] += pad
        require(list(given["grad_output"].shape) == sizes, "the gradient looks otherwise than the result")

    return check


for _dimensions in (1, 2, 3):
    _checks(f"reflection_pad{_dimensions}d_backward")(_padding(_dimensions, reflects=True))
    _checks(f"replication_pad{_dimensions}d_backward")(_padding(_dimensions, reflects=False))


_SOBOL_BITS, _MOST_SOBOL_DIMENSIONS = 30, 21201


@_checks("_sobol_engine_scramble_", "_sobol_engine_initialize_state_", "_sobol_engine_ff_", "_sobol_engine_draw")
def _sobol(given: dict[str, Any]) -> None:
    dimension, first = given["dimension"], given.get("num_generated", 0)
    require(1 <= dimension <= _MOST_SOBOL_DIMENSIONS, f"a sequence of {dimension} dimensions")
    # The kernel takes the number of a point's lowest bit that is 0 for the number of a column.
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
    require(qkv.dim() == 3 and bias.dim() == 1 and qkv.shape[2] == bias.shape[0], "qkv is (N, T, 3 D), its bias 3 D")
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
