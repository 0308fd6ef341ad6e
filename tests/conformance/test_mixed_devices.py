"""Every entry of PyTorch's operator database with tensors on several devices: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.conftest import Judge
from tests.conformance.mixed_checks import check_mixed
from tests.conformance.op_checks import entry_name
from tests.operator_database import op_db


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=entry_name(op)) for op in op_db if op.supports_dtype(torch.float32, "cpu")]
)
@pytest.mark.usefixtures("sky_devices")
def test_an_operator_on_several_devices_is_right_or_refused(op: Any, judge: Judge) -> None:
    judge("operators on several devices, float32", lambda: check_mixed(op, "sky:1", "sky:0"), None)
