"""Operators of libraries: the worker imports what defines them, if its owner or functions have opened them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import UnsupportedOpError
from skyproxy_server import allowed_ops

BROKEN_OR_NOT = """
import torch
if {fails}:
    raise RuntimeError("made for another torch")
library = torch.library.Library("{name}", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: 2 * x, "CPU")
"""


def test_the_first_operator_of_an_open_library_imports_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("skyproxy_test_lib", "skyproxy_test_broken", "skyproxy_test_closed"):
        (tmp_path / f"{name}.py").write_text(BROKEN_OR_NOT.format(name=name, fails=name.endswith("broken")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(allowed_ops, "_opened", set())
    allowed_ops.open_ops(["skyproxy_test_lib", "skyproxy_test_broken::twice", "skyproxy_test_absent"])
    assert allowed_ops.find_overload("skyproxy_test_lib::twice")(torch.ones(1)).item() == 2
    for name, words in {
        "skyproxy_test_lib::thrice": "Use the same version of skyproxy_test_lib on both sides",
        "skyproxy_test_broken::twice": r"cannot import skyproxy_test_broken \(RuntimeError: made for another torch\)",
        "skyproxy_test_absent::twice": "has no package skyproxy_test_absent.*pip install",
        "skyproxy_test_closed::twice": "not on the worker's list",
    }.items():
        with pytest.raises(UnsupportedOpError, match=words):
            allowed_ops.find_overload(name)
    assert "skyproxy_test_closed" not in sys.modules
    allowed_ops.open_ops(allowed_ops.WITH_FUNCTIONS)
    assert allowed_ops.find_overload("skyproxy_test_closed::twice")(torch.ones(1)).item() == 2
    assert not any(map(allowed_ops.is_allowed, ("aten::from_file", "prims::device_put", "inductor::_alloc_from_pool")))


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
