"""Checks of cuDNN's networks: what PyTorch sends passes, and nothing has the library read or write elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyproxy_server.recurrent_checks import RECURRENT_CHECKS, gradients_apart

aten = torch.ops.aten


def network(*, backward: bool, packed: bool = False, batch_first: bool = False, mode: int = 2) -> dict[str, Any]:
    """The arguments of two bidirectional layers over five steps of at most two sequences, by name."""
    gates = {0: 1, 1: 1, 2: 4, 3: 3}[mode] * 4
    shapes = [(gates, 3), (gates, 4), (gates,), (gates,)] * 2 + [(gates, 8), (gates, 4), (gates,), (gates,)] * 2
    weights = [torch.zeros(shape) for shape in shapes]
    size = (8,) if packed else (2, 5) if batch_first else (5, 2)
    given: dict[str, Any] = {
        "input": torch.zeros(*size, 3),
        "weight": weights,
        "weight_stride0": 4,
        "weight_buf": torch.zeros(sum(w.numel() for w in weights)) if backward else None,
        "hx": torch.zeros(4, 2, 4),
        "cx": torch.zeros(4, 2, 4) if mode == 2 else None,
    }
    if backward:
        given |= {"output": torch.zeros(*size, 8), "grad_output": torch.zeros(*size, 8), "grad_hy": None}
        given |= {"grad_cy": torch.zeros(4, 2, 4) if mode == 2 else None}
    given |= {"mode": mode, "hidden_size": 4, "proj_size": 0, "num_layers": 2, "batch_first": batch_first}
    given |= {"dropout": 0.0, "train": True, "bidirectional": True, "batch_sizes": [2, 2, 2, 1, 1] if packed else []}
    given |= {"dropout_state": None}
    return given | ({"reserve": torch.zeros(99, dtype=torch.uint8)} if backward else {})


def check(given: dict[str, Any]) -> None:
    name = "_cudnn_rnn_backward" if "reserve" in given else "_cudnn_rnn"
    assert set(given) <= {argument.name for argument in getattr(aten, name).default._schema.arguments}
    RECURRENT_CHECKS[name](given)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mode", range(4))
def test_what_pytorch_sends_passes(backward: bool, mode: int) -> None:
    for packed, batch_first in ((False, False), (False, True), (True, False), (True, True)):
        check(network(backward=backward, packed=packed, batch_first=batch_first, mode=mode))


WRONG: dict[str, Any] = {
    "another kind": {"mode": 4},
    "no layers": {"num_layers": 0},
    "weights of other sizes": {"hidden_size": 5},
    "more layers than weights": {"num_layers": 3},
    "one direction": {"bidirectional": False},
    "another stride of weights": {"weight_stride0": 2},
    "states of another size": {"hx": torch.zeros(4, 1, 4)},
    "states of another type": {"hx": torch.zeros(4, 2, 4, dtype=torch.float16)},
    "no cells": {"cx": None},
    "cells of another size": {"cx": torch.zeros(3, 2, 4)},
    "a projection of none": {"proj_size": 2},
    "an input of another type": {"input": torch.zeros(5, 2, 3, dtype=torch.float16)},
    "an input without a batch": {"input": torch.zeros(5, 3)},
    "sequences without lengths": {"input": torch.zeros(8, 3), "batch_sizes": [2, 2, 2, 1]},
    "sequences that grow": {"input": torch.zeros(8, 3), "batch_sizes": [2, 1, 4, 1]},
    "a buffer that is too small": {"weight_buf": torch.zeros(7)},
    "a buffer with gaps": {"weight_buf": torch.zeros(1, 1).expand(4096, 1).squeeze(1)},
    "dropout without a state": {"dropout": 0.5},
    "a state of numbers": {"dropout": 0.5, "dropout_state": torch.zeros(4096)},
}
WRONG_BACKWARD: dict[str, Any] = {
    "a reserve of numbers": {"reserve": torch.zeros(99)},
    "a reserve with gaps": {"reserve": torch.zeros(1, dtype=torch.uint8).expand(99)},
    "another output": {"output": torch.zeros(5, 1, 8)},
    "another gradient": {"grad_output": torch.zeros(5, 2, 4)},
    "another gradient of states": {"grad_hy": torch.zeros(4, 2, 5)},
    "another gradient of cells": {"grad_cy": torch.zeros(1)},
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backward", [False, True])
def test_what_cudnn_would_believe_is_refused(name: str, backward: bool) -> None:
    with pytest.raises(RuntimeError):
        check(network(backward=backward) | WRONG[name])


@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_what_its_backward_would_believe_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError):
        check(network(backward=True) | WRONG_BACKWARD[name])


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_output_with_gaps_is_laid_out_as_it_is_read(batch_first: bool) -> None:
    given = network(backward=True, batch_first=batch_first)
    given["output"] = torch.zeros(1).expand(given["output"].shape)
    check(given)
    in_time = given["output"].transpose(0, 1) if batch_first else given["output"]
    assert in_time.is_contiguous()


def test_a_state_of_dropout_is_bytes() -> None:
    for wrong in ({"dtype": torch.float32}, {"dropout": 2.0}, {"layout": torch.sparse_coo}):
        with pytest.raises(RuntimeError):
            RECURRENT_CHECKS["_cudnn_init_dropout_state"]({"dropout": 0.5, "dtype": torch.uint8} | wrong)


def test_gradients_of_weights_have_memory_of_their_own() -> None:
    joined = torch.arange(6.0)
    found: Any = gradients_apart(lambda: (joined, None, None, [joined[:2], joined[2:], None]))()
    assert [x if x is None else x.tolist() for x in found[3]] == [[0, 1], [2, 3, 4, 5], None]
    assert {x.storage_offset() for x in found[3][:2]} == {0}
