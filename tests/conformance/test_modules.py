"""Every entry of PyTorch's module database on the device, held against the local device."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing._internal.common_modules import module_db

from tests.conformance import exceptions
from tests.conformance.conftest import Judge
from tests.conformance.module_checks import check_module


@pytest.mark.parametrize("device", ["sky:0", "sky:1"])
@pytest.mark.parametrize("info", [pytest.param(info, id=info.name) for info in module_db])
@pytest.mark.usefixtures("sky_devices")
def test_a_module_trains_as_it_does_locally(info: Any, device: str, judge: Judge) -> None:
    judge(f"modules, {device}", lambda: check_module(info, device), exceptions.MODULES.get(info.name))
