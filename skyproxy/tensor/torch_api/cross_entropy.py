"""`linear_cross_entropy` with options: chunks and precision as PyTorch chooses them for the worker's device.

PyTorch chooses them in Python, from a table by `device.type`, and for a device that it does not know it takes what
suits neither CPU nor CUDA. Here they are chosen for the device behind `sky:k`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES

_LEAST_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""From which compute capability on PyTorch accumulates products of these in float32."""
_plain_adjust: Callable[..., object]


def _adjust(
    self: Any,
    num_batches: int,
    in_features: int,
    num_classes: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *further: object,
    **named: object,
) -> object:
    options = self
    if device is not None and device.type == "sky":
        behind = DEVICES.of(device)
        device = behind.worker_device
        if device.type == "cuda" and self.acc_dtype is None and self.acc_policy == "auto":
            # PyTorch would ask this machine's CUDA for its capability.
            capability = tuple(behind.row.get("compute_capability") or (0, 0))
            mixed = dtype in _LEAST_CAPABILITY and capability >= _LEAST_CAPABILITY[dtype]
            options = dataclasses.replace(self, acc_dtype=torch.float32 if mixed else dtype)
    return _plain_adjust(options, num_batches, in_features, num_classes, dtype, device, *further, **named)


def install() -> None:
    """Replace `LinearCrossEntropyOptions._adjust`, which torch has from 2.13 on.

    Raises:
        ConfigurationError: if the class is there without that method.
    """
    global _plain_adjust
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None:
        _plain_adjust = patching.wrap(
            options,
            "_adjust",
            lambda plain: _adjust,
            why="chunks and precision are chosen by the type of the device: it must be that of the one behind `sky:k`",
            test="tests/tensor/torch_api/test_cross_entropy.py::test_a_worker_with_cuda_is_asked_for_its_own_capability",
        )
