"""`torch.sky`'s names for captured graphs; optimizers refuse to be captured where a graph would freeze them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from skyproxy import patching
from skyproxy.errors import CaptureError
from skyproxy.tensor.dispatch.capture import is_capturing
from skyproxy.tensor.programs.graphed_callables import make_graphed_callables
from skyproxy.tensor.programs.graphs import (
    SkyGraph,
    graph,
    graph_pool_handle,
    graph_report,
    is_current_stream_capturing,
)
from skyproxy.tensor.torch_api import sky_module

_HEALTH_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")


def _check_optimizer(original: Callable[..., object]) -> Callable[..., object]:
    def check(self: Optimizer) -> object:
        if is_capturing() and not torch.compiler.is_compiling():
            if not all(group.get("capturable", True) for group in self.param_groups):
                raise CaptureError(
                    f"step() of {type(self).__name__} computes numbers in Python, which a capture would freeze. Make "
                    "the optimizer with capturable=True, before its first step."
                )
        return original(self)

    return check


def install() -> None:
    """Puts the names above into `torch.sky`, and keeps optimizers from being captured that cannot be.

    Raises:
        ConfigurationError: this torch's optimizers have no check to hook into.
    """
    sky_module.MODULE.__dict__.update(
        SkyGraph=SkyGraph,
        Graph=SkyGraph,
        CUDAGraph=SkyGraph,
        graph=graph,
        graph_pool_handle=graph_pool_handle,
        graph_report=graph_report,
        is_current_stream_capturing=is_current_stream_capturing,
        make_graphed_callables=make_graphed_callables,
    )
    # A hook before each step (`register_optimizer_step_pre_hook`) would be traced into every compiled step.
    name = next((name for name in _HEALTH_CHECKS if hasattr(Optimizer, name)), _HEALTH_CHECKS[0])
    patching.wrap(
        Optimizer,
        name,
        _check_optimizer,
        why="an optimizer that cannot be captured in a graph says so, as it does for CUDA",
        test="tests/tensor/programs/test_graphs.py::test_an_optimizer_that_would_be_frozen_is_refused",
    )
