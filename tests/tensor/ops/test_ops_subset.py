"""The operators that programs use most, from PyTorch's database, held against the local CPU.

`make conformance` runs all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.op_checks import check_op, entry_name
from tests.operator_database import op_db

_NAMES = """
    add addmm amax any arange argmax baddbmm bmm bool cat chunk clamp clone contiguous copysign cos cumsum diff
    div.no_rounding_mode einsum empty_like eq exp expand fill flatten full gather gt index_add index_put index_select
    linalg.norm linalg.solve linspace log log_softmax logsumexp masked_fill masked_select matmul
    max.reduction_with_dim mean mm mul
    nn.functional.batch_norm nn.functional.conv2d nn.functional.cross_entropy nn.functional.dropout
    nn.functional.embedding nn.functional.gelu nn.functional.interpolate.bilinear nn.functional.layer_norm
    nn.functional.linear nn.functional.max_pool2d nn.functional.mse_loss nn.functional.pad.constant
    nn.functional.relu nn.functional.scaled_dot_product_attention nn.functional.silu
    nonzero permute pow randn repeat reshape rsqrt scatter sigmoid softmax sort split sqrt squeeze stack std sub sum
    tanh tensor_split topk transpose tril unbind unique unsqueeze var view where zeros __getitem__
"""
HOT = frozenset(_NAMES.split())
_ENTRIES = [op for op in op_db if entry_name(op) in HOT]


def test_every_name_is_an_entry() -> None:
    assert {entry_name(op) for op in _ENTRIES} == HOT


@pytest.mark.parametrize("op", [pytest.param(op, id=entry_name(op)) for op in _ENTRIES])
def test_a_hot_operator_does_what_it_does_on_the_cpu(op: Any, sky1: str) -> None:
    assert check_op(op, torch.float32, sky1, limit=4).problems == []


@pytest.mark.parametrize("op", [pytest.param(op, id=entry_name(op)) for op in _ENTRIES])
def test_a_hot_operator_does_so_in_inference_mode(op: Any, sky1: str) -> None:
    assert check_op(op, torch.float32, sky1, limit=3, variants=False, inference=True).problems == []


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_degrees_of_polynomials_may_be_unsigned(dtype: torch.dtype, sky1: str) -> None:
    expected = torch.special.chebyshev_polynomial_t(torch.tensor([2.0, 3.0]), torch.tensor([2, 3], dtype=dtype))
    found = torch.special.chebyshev_polynomial_t(
        torch.tensor([2.0, 3.0], device=sky1), torch.tensor([2, 3], dtype=dtype, device=sky1)
    )
    assert torch.equal(found.cpu(), expected)
