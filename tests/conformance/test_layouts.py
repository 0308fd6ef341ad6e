"""Every entry of PyTorch's operator database on batches of one and in other orders of memory, against the local CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.conftest import Judge
from tests.conformance.layout_checks import check_layouts
from tests.conformance.op_checks import entry_name
from tests.operator_database import op_db

_OPERATORS = [pytest.param(op, id=entry_name(op)) for op in op_db if op.supports_dtype(torch.float32, "cpu")]


@pytest.mark.parametrize("op", _OPERATORS)
@pytest.mark.usefixtures("sky_devices")
def test_an_operator_does_the_same_in_every_layout(op: Any, judge: Judge) -> None:
    judge("operators in other layouts, float32, sky:1", lambda: check_layouts(op, "sky:1"), None)


@pytest.mark.parametrize("op", _OPERATORS)
@pytest.mark.usefixtures("sky_devices")
def test_an_operator_does_the_same_in_every_layout_in_inference_mode(op: Any, judge: Judge) -> None:
    judge(
        "operators in other layouts and inference mode, float32, sky:1",
        lambda: check_layouts(op, "sky:1", inference=True),
        None,
    )
