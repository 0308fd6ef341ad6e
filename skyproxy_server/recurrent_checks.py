"""Checks of recurrent networks' kernels, oneDNN's and cuDNN's: both libraries believe sizes and types.

See `kernel_checks`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from skyproxy_server.kernel_checks import Check, registering, require

Tensor = torch.Tensor
aten = torch.ops.aten
RECURRENT_CHECKS: dict[str, Check] = {}
"""By the operator's name without its namespace."""
_checks = registering(RECURRENT_CHECKS)


# --- oneDNN ----------------------------------------------------------------------------------------------------------

_OPTIONS = ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first")


@_checks("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
def _recurrent_layer(given: dict[str, Any]) -> None:
    """Check the sizes, which oneDNN believes; and the workspace of its forward op, whose content only that op knows."""
    backward = "workspace" in given
    tensor, hidden = given["input"], given["hidden_size"]
    require(tensor.dim() == 3 and 0 < hidden < 1 << 24 and given["mode"] == 2, "the layer is an LSTM over (T, N, F)")
    require(not given["batch_sizes"], "the sequences have one length")
    biases = ("weight3", "weight4") if backward else ("weight2", "weight3")
    weights = ("weight1", "weight2") if backward else ("weight0", "weight1")
    sizes: dict[str, tuple[int, ...] | None] = {
        weights[0]: (4 * hidden, tensor.shape[2]),
        weights[1]: (4 * hidden, hidden),
    }
    sizes.update(dict.fromkeys(biases, (4 * hidden,) if given["has_biases"] else None))
    batch = (1, tensor.shape[1], hidden)
    states = ("hx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy") if backward else ("hx_", "cx_")
    for name in states:
        sizes[name] = batch
    if backward:
        sizes.update(dict.fromkeys(("output", "grad_output"), (*tensor.shape[:2], hidden)))
    for name, size in sizes.items():
        found = given[name]
        if size is None or found is None:
            continue
        flat = found.shape == size or (name in states and math.prod(found.shape) == math.prod(size))
        require(flat and found.dtype is tensor.dtype, f"{name} has {list(found.shape)} elements, not {list(size)}")
    if backward:
        require(given["workspace"].numel() == _workspace_bytes(given, weights, biases), "another layer's workspace")


def _workspace_bytes(given: dict[str, Any], weights: tuple[str, ...], biases: tuple[str, ...]) -> int:
    tensor = given["input"]
    key = (tuple(tensor.shape), tensor.dtype, *(str(given[name]) for name in _OPTIONS))
    known = _workspaces.get(key)
    if known is None:
        arguments = [given[name] for name in (*weights, *biases, "hx_", "cx_tmp")]
        result = aten.mkldnn_rnn_layer.default(tensor, *arguments, *(given[name] for name in _OPTIONS), True)
        known = _workspaces[key] = result[3].numel()
        while len(_workspaces) > _MOST_WORKSPACES:
            _workspaces.pop(next(iter(_workspaces)), None)
    return known


_MOST_WORKSPACES = 256
_workspaces: dict[object, int] = {}


# --- cuDNN -----------------------------------------------------------------------------------------------------------

_RELU, _TANH, _LSTM, _GRU = range(4)
_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}
"""By cuDNN's number for the kind of network, how many products a cell has."""


@_checks("_cudnn_rnn", "_cudnn_rnn_backward")
def _whole_network(given: dict[str, Any]) -> None:
    """Check all sizes and types, and have what cuDNN takes by its address lie as it reads it."""
    tensor, batch_sizes = given["input"], given["batch_sizes"]
    hidden, projected, mode, layers = (given[name] for name in ("hidden_size", "proj_size", "mode", "num_layers"))
    sound = 0 < hidden < 1 << 24 and 0 <= projected <= hidden and 0 < layers < 1 << 16
    require(sound and mode in _GATES and (mode == _LSTM or not projected), "there is no such network")
    require(tensor.dim() == (2 if batch_sizes else 3) and tensor.numel() > 0, "the sequences have no elements")
    if batch_sizes:
        falls = all(count >= following for count, following in itertools.pairwise(batch_sizes))
        require(falls and batch_sizes[-1] > 0 and sum(batch_sizes) == len(tensor), "the rows are of other sequences")
    time_first = bool(batch_sizes) or not given["batch_first"]
    batch = batch_sizes[0] if batch_sizes else tensor.shape[1 if time_first else 0]
    ways, width = 2 if given["bidirectional"] else 1, projected or hidden
    count = _check_weights(given, tensor, ways, width)
    sizes: dict[str, tuple[int, ...]] = {"hx": (layers * ways, batch, width)}
    require((given["cx"] is not None) == (mode == _LSTM), "an LSTM has cells, and no other network")
    if mode == _LSTM:
        sizes["cx"] = (layers * ways, batch, hidden)
    buffers = {"weight_buf": tensor.dtype, "dropout_state": torch.uint8}
    if "reserve" in given:
        sizes["output"] = sizes["grad_output"] = (*tensor.shape[:-1], width * ways)
        sizes["grad_hy"], sizes["grad_cy"] = sizes["hx"], sizes.get("cx", ())
        buffers["reserve"] = torch.uint8
        output = given["output"]
        given["output"] = output.contiguous() if time_first else output.transpose(0, 1).contiguous().transpose(0, 1)
    for name, size in sizes.items():
        value = given[name]
        fits = value is None or (tuple(value.shape) == size and value.dtype is tensor.dtype)
        require(fits and (value is None or value.device == tensor.device), f"{name} is not of {list(size)}")
    for name, dtype in buffers.items():
        value = given[name]
        fits = value is None or (value.dim() == 1 and value.dtype is dtype and value.is_contiguous())
        require(fits and (value is None or value.device == tensor.device), f"{name} is no buffer of cuDNN")
    buffer, draws = given["weight_buf"], given["train"] and given["dropout"] > 0
    require(buffer is None or buffer.numel() >= count, "weight_buf is too small for the weights")
    require(0 <= given["dropout"] <= 1 and (not draws or given["dropout_state"] is not None), "nothing draws numbers")


def _check_weights(given: dict[str, Any], tensor: Tensor, ways: int, width: int) -> int:
    """Check the weights of all layers, and return how many numbers they have."""
    weights, each, gates = given["weight"], given["weight_stride0"], _GATES[given["mode"]] * given["hidden_size"]
    has_projection = given["proj_size"] > 0
    has_biases = each == 4 + has_projection
    require(has_biases or each == 2 + has_projection, f"no cell has {each} weights")
    require(len(weights) == given["num_layers"] * ways * each, "there are other weights than the layers need")
    for number, weight in enumerate(weights):
        first, position = number < ways * each, number % each
        shapes: list[tuple[int, ...]] = [(gates, tensor.shape[-1] if first else width * ways), (gates, width)]
        shapes += [(gates,), (gates,)] if has_biases else []
        shapes += [(width, given["hidden_size"])] if has_projection else []
        fits = tuple(weight.shape) == shapes[position] and weight.dtype is tensor.dtype
        require(fits and weight.device == tensor.device, f"weight {number} is not of {list(shapes[position])}")
    return sum(weight.numel() for weight in weights)


@_checks("_cudnn_init_dropout_state")
def _dropout_state(given: dict[str, Any]) -> None:
    require(given.get("dtype") is torch.uint8 and 0 <= given["dropout"] <= 1, "the state of a dropout is of bytes")
    require(given.get("layout") in (None, torch.strided), "the state of a dropout is dense")


def gradients_apart(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form of cuDNN's backward whose gradients of weights have memory of their own.

    The library fills one buffer with all of them, and a client believes of no result that it begins within another.
    """

    def call(*args: object, **kwargs: object) -> tuple[object, ...]:
        *others, weights = backward(*args, **kwargs)
        return *others, [weight if weight is None else weight.clone() for weight in weights]

    return call
