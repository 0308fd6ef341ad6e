"""Ops that the worker computes its own way on the CPU, against the kernels they stand in for."""

from __future__ import annotations

import pytest
import torch

from skyproxy_server.op_overrides import CPU_OVERRIDES

histogram = CPU_OVERRIDES["aten::histc"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_counted_in_their_own_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 3, 3, 1, 7, 9], dtype=dtype)
    counts = histogram(values, bins=8, min=0, max=7)
    assert counts.dtype is dtype
    assert counts.tolist() == [1, 1, 0, 2, 0, 0, 0, 1]


def test_integers_without_bounds_span_what_is_there() -> None:
    assert histogram(torch.tensor([2, 4, 6, 6]), bins=2).tolist() == [1, 3]


def test_floats_go_to_the_kernel_itself() -> None:
    values = torch.tensor([0.1, 0.6, 0.9, 1.0])
    assert torch.equal(histogram(values, 2, 0, 1), torch.histc(values, 2, 0, 1))
