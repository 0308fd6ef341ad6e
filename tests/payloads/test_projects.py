"""Which modules are the user's own."""

from __future__ import annotations

import json
import sys
import types

import cloudpickle
import pytest
import torch

import skyproxy
from skyproxy.payloads.projects import is_project_module, project_by_value


@pytest.mark.parametrize("module", [json, types, torch, torch.nn, pytest, cloudpickle, skyproxy, skyproxy.errors, sys])
def test_installed_modules_are_none(module: types.ModuleType) -> None:
    assert not is_project_module(module)


def test_this_module_is_one() -> None:
    assert is_project_module(sys.modules[__name__])


def test_what_is_no_module_is_none() -> None:
    assert not is_project_module(torch.ops)
    assert not is_project_module(object())
    assert not is_project_module(types.ModuleType("made_up"))


def test_cloudpickle_is_left_as_it_was() -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    with project_by_value():
        assert __name__ in cloudpickle.list_registry_pickle_by_value()
        with project_by_value():
            assert __name__ in cloudpickle.list_registry_pickle_by_value()
        assert __name__ in cloudpickle.list_registry_pickle_by_value()
    assert cloudpickle.list_registry_pickle_by_value() == before
