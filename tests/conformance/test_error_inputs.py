"""Mistakes of PyTorch's module and optimizer databases: the CPU's type of error and words, at the same line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db
from torch.utils import _pytree as pytree

LATE = {"nn.Embedding": "only the worker knows the values of indices, as only the GPU does"}
"""Modules whose mistake comes where the program waits next."""
MODULES = [info for info in module_db if info.module_error_inputs_func is not None and info.name not in LATE]


def _mover(device: str) -> Callable[[Any], Any]:
    """Return what makes copies on a device, of a tensor that comes twice one copy."""
    made: dict[int, torch.Tensor] = {}

    def move(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        if id(a) not in made:
            made[id(a)] = a.detach().clone().to(device).requires_grad_(a.requires_grad)
            if isinstance(a, torch.nn.Parameter):
                made[id(a)] = torch.nn.Parameter(made[id(a)], a.requires_grad)
        return made[id(a)]

    return move


def _error(call: Callable[[str], object], device: str) -> Exception | None:
    try:
        call(device)
    except Exception as error:
        return error
    return None


def _check(call: Callable[[str], object], device: str) -> None:
    expected, found = _error(call, "cpu"), _error(call, device)
    torch.sky.synchronize()
    if expected is None:
        assert found is None
        return
    assert isinstance(found, type(expected))
    words = str(expected).partition("\n")[0]
    assert words in str(found).replace(device, "cpu").replace("torch.sky.", "torch.")


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_mistakes_with_modules_are_those_of_the_cpu(info: ModuleInfo, training: bool, sky: str) -> None:
    inputs = info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    )
    for mistake in inputs:
        made, given = mistake.module_error_input.constructor_input, mistake.module_error_input.forward_input

        def call(device: str, made: Any = made, given: Any = given) -> None:
            move = _mover(device)
            options = {name: a for name, a in made.kwargs.items() if name != "device"}
            module = info.module_cls(*made.args, **options).to(device).train(training)
            if given is not None:
                args, kwargs = pytree.tree_map(move, (given.args, given.kwargs))
                module(*args, **kwargs)

        _check(call, sky)


@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.optim_cls.__name__)
def test_mistakes_with_optimizers_are_those_of_the_cpu(info: OptimizerInfo, sky: str) -> None:
    for mistake in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = mistake.optimizer_error_input

        def call(device: str, given: Any = given) -> None:
            move = _mover(device)
            params = given.params if isinstance(given.params, torch.Tensor) else pytree.tree_map(move, given.params)
            info.optim_cls(move(params), **pytree.tree_map(move, given.kwargs)).step()

        _check(call, sky)
