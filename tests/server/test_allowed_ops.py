"""Operators of libraries: the worker imports what defines them, if its owner or functions have opened them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from skyproxy.errors import UnsupportedOpError
from skyproxy_server import allowed_ops

LIBRARY = """
import torch
if {fails}:
    raise RuntimeError("made for another torch")
if {exits}:
    raise SystemExit(1)
library = torch.library.Library("{name}", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: 2 * x, "CPU")
"""


def test_the_first_operator_of_an_open_library_imports_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("skyproxy_test_lib", "skyproxy_test_broken", "skyproxy_test_script", "skyproxy_test_closed"):
        text = LIBRARY.format(name=name, fails=name.endswith("broken"), exits=name.endswith("script"))
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(allowed_ops, "_opened", set())
    opened = ["skyproxy_test_lib", "skyproxy_test_broken::twice", "skyproxy_test_script", "skyproxy_test_absent"]
    allowed_ops.open_ops([*opened, "__main__"])
    assert allowed_ops.find_overload("skyproxy_test_lib::twice")(torch.ones(1)).item() == 2
    for name, words in {
        "skyproxy_test_lib::thrice": "Use the same version of skyproxy_test_lib on both sides",
        "skyproxy_test_broken::twice": r"cannot import skyproxy_test_broken \(RuntimeError: made for another torch\)",
        "skyproxy_test_script::twice": r"cannot import skyproxy_test_script \(SystemExit: 1\)",
        "__main__::twice": "has no package __main__",
        "skyproxy_test_absent::twice": "has no package skyproxy_test_absent.*pip install",
        "skyproxy_test_closed::twice": "not on the worker's list",
    }.items():
        with pytest.raises(UnsupportedOpError, match=words):
            allowed_ops.find_overload(name)
    assert "skyproxy_test_closed" not in sys.modules
    allowed_ops.open_ops(allowed_ops.WITH_FUNCTIONS)
    assert allowed_ops.find_overload("skyproxy_test_closed::twice")(torch.ones(1)).item() == 2
    assert not any(map(allowed_ops.is_allowed, ("aten::from_file", "prims::device_put", "inductor::_alloc_from_pool")))
