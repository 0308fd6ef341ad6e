"""Ops that the worker computes its own way on the CPU, against the kernels they stand in for."""

from __future__ import annotations

import re

import pytest
import torch

from skyproxy_server.op_functions import function_of
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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_what_the_kernel_refuses_is_not_counted(dtype: torch.dtype) -> None:
    with pytest.raises((NotImplementedError, TypeError)) as theirs:  # 2.15 has a TypeError for complex numbers
        torch.histc(torch.ones(3, dtype=dtype), bins=2)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        histogram(torch.ones(3, dtype=dtype), bins=2)


def test_floats_go_to_the_kernel_itself() -> None:
    values = torch.tensor([0.1, 0.6, 0.9, 1.0])
    assert torch.equal(histogram(values, 2, 0, 1), torch.histc(values, 2, 0, 1))


_ELEMENTWISE: list[tuple[str, tuple[object, ...]]] = [
    ("add.out", (torch.ones(3),)),
    ("addcmul.out", (torch.ones(3), torch.ones(3))),
    ("atan2.out", (torch.ones(3),)),
    ("clamp.Tensor_out", (torch.ones(3),)),
    ("lerp.Scalar_out", (torch.ones(3), 0.5)),
    ("maximum.out", (torch.ones(2, 1),)),
    ("pow.Tensor_Tensor_out", (torch.ones(3),)),
    ("where.self_out", (torch.ones(3),)),
]


@pytest.mark.parametrize(("name", "others"), _ELEMENTWISE)
def test_a_tensor_that_an_elementwise_op_reads_is_not_resized_by_it(name: str, others: tuple[object, ...]) -> None:
    packet, _, overload = name.partition(".")
    function = function_of("aten::" + name, getattr(getattr(torch.ops.aten, packet), overload), on_cpu=True)
    small = torch.ones(1)
    operands = (torch.ones(3, dtype=torch.bool), small, *others) if packet == "where" else (small, *others)
    with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't match the broadcast shape"):
        function(*operands, out=small)
    assert small.tolist() == [1.0]
    assert function(*operands, out=torch.empty(0)).numel() > 1
    several = torch.ones(2, 3)
    operands = tuple(several if a is small else a for a in operands)
    assert function(*operands, out=several) is several
