"""`skyproxy.sky`: what type checkers know of `torch.sky`, and `torch.sky` itself."""

from __future__ import annotations

import sys
import types

import torch

import skyproxy
from skyproxy.tensor.torch_api import sky as typed


def public(module: types.ModuleType) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }


def test_it_is_the_module_that_pytorch_knows() -> None:
    assert skyproxy.sky is torch.sky  # type: ignore[attr-defined, comparison-overlap]


def test_type_checkers_know_every_name_and_no_other() -> None:
    known, real = public(typed), public(torch.sky)  # type: ignore[attr-defined]
    assert {name: real.get(name) for name in known} == known
    written = {
        name: value  # and not made from a table, as those that refuse what only `torch.cuda` has
        for name, value in real.items()
        if (home := getattr(value, "__module__", "")).startswith("skyproxy.")
        and getattr(sys.modules[home], name, None) is value
    }
    assert written.keys() - known.keys() == set()


def test_it_shows_nothing_that_it_is_made_of() -> None:
    assert {"os", "sys", "torch", "Any", "DEVICES", "Session", "shielded"}.isdisjoint(dir(torch.sky))  # type: ignore[attr-defined]
