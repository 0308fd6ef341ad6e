"""Every entry of PyTorch's operator database on the device, held against the local device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance import exceptions
from tests.conformance.conftest import Judge
from tests.conformance.op_checks import check_op, entry_name
from tests.conformance.reference import REFERENCE
from tests.operator_database import op_db as every_op

_FIRST, _SECOND = "sky:0", "sky:1"
_SAMPLES: dict[tuple[torch.dtype, str], int | None] = {
    (torch.float32, _SECOND): None,
    (torch.bfloat16, _SECOND): 12,
    (torch.complex64, _SECOND): 12,
    (torch.int64, _SECOND): 12,
    (torch.bool, _SECOND): 12,
    (torch.float32, _FIRST): 6,
    (torch.bfloat16, _FIRST): 2,
    (torch.complex64, _FIRST): 2,
    (torch.int64, _FIRST): 2,
    (torch.bool, _FIRST): 2,
}
"""How many samples of each entry are taken; None takes all. Paths that only an index other than 0 takes are more."""


_NOT_FOR_WORKERS = tuple(exceptions.OF_CUDA_ONLY) if REFERENCE == "cuda" else ()
op_db = [op for op in every_op if not entry_name(op).startswith(_NOT_FOR_WORKERS)]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cases() -> Iterator[Any]:
    for (dtype, device), limit in _SAMPLES.items():
        for op in op_db:
            if op.supports_dtype(dtype, REFERENCE):
                name = _dtype_name(dtype)
                yield pytest.param(op, dtype, device, limit, id=f"{entry_name(op)}-{name}-{device}")


@pytest.mark.parametrize(("op", "dtype", "device", "limit"), list(_cases()))
@pytest.mark.usefixtures("sky_devices")
def test_an_operator_does_what_it_does_locally(
    op: Any, dtype: torch.dtype, device: str, limit: int | None, judge: Judge
) -> None:
    name = _dtype_name(dtype)
    excuse = exceptions.OPERATORS.get((entry_name(op), name))
    # Whether an exception is still needed can take more than the first samples to see.
    samples = None if excuse is not None else limit
    variants = dtype is torch.float32
    judge(f"operators, {name}, {device}", lambda: check_op(op, dtype, device, limit=samples, variants=variants), excuse)


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=entry_name(op)) for op in op_db if op.supports_dtype(torch.float32, REFERENCE)]
)
@pytest.mark.usefixtures("sky_devices")
def test_an_operator_does_so_in_inference_mode(op: Any, judge: Judge) -> None:
    judge(
        "operators in inference mode, float32, sky:1",
        lambda: check_op(op, torch.float32, _SECOND, limit=6, variants=False, inference=True),
        None,
    )
