"""Custom ops: with a kernel for the device, of a library that the worker has, and of nobody that it knows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import UnsupportedOpError

LIBRARY = """
import torch
library = torch.library.Library("skyproxy_tests_library", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x.mul(2), "CPU")
library.define("rare(Tensor x) -> Tensor")
library.define("above(Tensor x, float least) -> (Tensor, Tensor)")
library.impl("above", lambda x, least: (x[x > least], (x > least).sum()), "CPU")
library.define("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
library.impl("add_", lambda x, y: x.copy_(x + y), "CPU")
torch.library.register_autograd(
    "skyproxy_tests_library::twice", lambda ctx, gradient: torch.ops.skyproxy_tests_library.twice(gradient)
)
"""


def test_an_op_that_workers_refuse_leaves_the_session_usable(sky1: str) -> None:
    x = torch.ones(2, device=sky1)
    with pytest.raises(UnsupportedOpError, match="Move the tensor first"):
        torch.from_file("/etc/hostname", size=1, dtype=torch.uint8, device=sky1)
    library = torch.library.Library("skyproxy_tests_foreign", "FRAGMENT")
    library.define("only_on_cuda(Tensor x) -> Tensor")
    with pytest.raises(UnsupportedOpError, match="custom op"):
        torch.ops.skyproxy_tests_foreign.only_on_cuda(x)
    assert (x + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("for_all", [False, True])
def test_a_custom_op_runs_the_kernel_that_was_registered_for_the_device(sky1: str, for_all: bool) -> None:
    name = f"skyproxy_tests_foreign::doubled_{for_all}"

    @torch.library.custom_op(name, mutates_args=(), device_types=None if for_all else "cpu")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @doubled.register_kernel("sky")
    def _(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    doubled.register_autograd(lambda ctx, gradient: gradient * 3)
    x = torch.ones(3, device=sky1, requires_grad=True)
    result = doubled(x)
    result.sum().backward()
    assert (result.tolist(), result.device.type) == ([3.0] * 3, "sky")
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    assert doubled(torch.ones(3)).tolist() == [2.0] * 3


def test_an_operator_of_a_library_runs_on_a_worker_that_has_the_library(
    sky1: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "skyproxy_tests_library"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    ops = torch.ops.skyproxy_tests_library
    with pytest.raises(UnsupportedOpError, match=f"the worker has no package {name}.*pip install"):
        ops.rare(torch.arange(4.0, device=sky1))
    node = skyproxy.list_nodes()[int(sky1.removeprefix("sky:"))]
    node.run(sys.path.append, str(tmp_path))
    try:
        x = torch.arange(4.0, device=sky1, requires_grad=True)
        y = ops.twice(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert (y.tolist(), gradient.tolist()) == ([0.0, 2.0, 4.0, 6.0], [2.0] * 4)
        assert [part.tolist() for part in ops.above(x.detach(), 1.5)] == [[2.0, 3.0], 2]
        z = x.detach().clone()
        assert ops.add_(z, z) is z
        assert z.tolist() == [0.0, 2.0, 4.0, 6.0]
    finally:
        node.run(sys.path.remove, str(tmp_path))
