"""The table of exceptions names only what exists, says why, and stays within what is allowed."""

from __future__ import annotations

from collections import Counter

import torch
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

from tests.conformance import exceptions
from tests.conformance.op_checks import entry_name
from tests.operator_database import op_db

_DTYPES = {"float32": 0.0, "int64": 0.005, "bool": 0.005, "bfloat16": 0.005, "complex64": 0.005}
"""The share of entries that may be excepted."""


def test_every_row_names_an_entry_that_runs_on_the_cpu() -> None:
    entries = {
        (entry_name(op), name) for op in op_db for name in _DTYPES if op.supports_dtype(getattr(torch, name), "cpu")
    }
    assert set(exceptions.OPERATORS) <= entries
    assert set(exceptions.MODULES) <= {info.name for info in module_db}
    assert set(exceptions.OPTIMIZERS) <= {info.optim_cls.__name__ for info in optim_db}


def test_what_is_not_for_workers_is_in_the_database() -> None:
    for name in exceptions.OF_CUDA_ONLY:
        assert any(entry_name(op).startswith(name) for op in op_db)


def test_every_row_has_a_reason() -> None:
    for table in (exceptions.OPERATORS, exceptions.MODULES, exceptions.OPTIMIZERS, exceptions.OF_CUDA_ONLY):
        assert all(len(reason) > 20 for reason in table.values())


def test_there_are_no_more_exceptions_than_allowed() -> None:
    excepted = Counter(dtype for _, dtype in exceptions.OPERATORS)
    for name, share in _DTYPES.items():
        entries = sum(op.supports_dtype(getattr(torch, name), "cpu") for op in op_db)
        assert excepted[name] <= share * entries
