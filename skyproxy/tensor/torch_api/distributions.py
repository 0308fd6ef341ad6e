"""Checked parameters of `torch.distributions`: one answer for all of a distribution, where PyTorch asks for each.

`Normal(mean, deviation)` reads whether its mean is a number and whether its deviation is positive, which are two round
trips to a worker. Densities check their value by themselves, and still wait once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributions import Distribution, constraints
from torch.distributions.utils import lazy_property

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.remote_tensor import RemoteTensor

_NO_SIZES = torch.Size()


def _all_are_valid(distribution: Distribution, batch_shape: torch.Size, event_shape: torch.Size) -> bool:
    """Ask once whether all parameters are as their constraints demand; False where PyTorch has to ask for each."""
    distribution._batch_shape, distribution._event_shape = batch_shape, event_shape  # parameters may be made of these
    checks: list[torch.Tensor] = []
    for name, constraint in distribution.arg_constraints.items():
        if constraints.is_dependent(constraint):
            continue
        if name not in vars(distribution) and isinstance(getattr(type(distribution), name), lazy_property):
            continue
        value = getattr(distribution, name)
        if type(value) is not RemoteTensor:
            return False
        checks.append(torch._is_all_true(constraint.check(value)))
    if len(checks) < 2 or len({check.device for check in checks}) > 1:
        return False
    return bool(torch.stack(checks).all())


def _asking_once(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def __init__(
        self: Distribution,
        batch_shape: torch.Size = _NO_SIZES,
        event_shape: torch.Size = _NO_SIZES,
        validate_args: bool | None = None,
    ) -> None:
        checks = self._validate_args if validate_args is None else validate_args
        if not checks or torch.compiler.is_compiling() or not _all_are_valid(self, batch_shape, event_shape):
            plain(self, batch_shape, event_shape, validate_args=validate_args)
            return
        flag = vars(self).get("_validate_args") if validate_args is None else validate_args
        plain(self, batch_shape, event_shape, validate_args=False)
        if flag is None:
            del self._validate_args  # the class has it, and may change it
        else:
            self._validate_args = flag

    return __init__


def install() -> None:
    """Have distributions ask once before the first device is made.

    Raises:
        ConfigurationError: this torch's distributions check otherwise.
    """
    patching.require(torch, "_is_all_true")
    DEVICES.before_new[_install_for_devices] = None


def _install_for_devices() -> None:
    if not patching.is_replaced(Distribution, "__init__"):
        patching.wrap(
            Distribution,
            "__init__",
            _asking_once,
            why="PyTorch reads for each parameter whether it is valid, a round trip each; here one answers for all",
            test="tests/tensor/torch_api/test_distributions.py::test_all_parameters_are_checked_with_one_answer",
            when=patching.When.FIRST_DEVICE,
        )


__all__ = ["install"]
