"""Every entry of PyTorch's optimizer database on the device, held against the local device."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing._internal.common_optimizers import optim_db

from tests.conformance import exceptions
from tests.conformance.conftest import Judge
from tests.conformance.optimizer_checks import check_optimizer


@pytest.mark.parametrize("device", ["sky:0", "sky:1"])
@pytest.mark.parametrize("info", [pytest.param(info, id=info.optim_cls.__name__) for info in optim_db])
@pytest.mark.usefixtures("sky_devices")
def test_an_optimizer_steps_as_it_does_locally(info: Any, device: str, judge: Judge) -> None:
    name = info.optim_cls.__name__
    judge(f"optimizers, {device}", lambda: check_optimizer(info, device), exceptions.OPTIMIZERS.get(name))
