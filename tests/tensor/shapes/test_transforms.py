"""Rules for Fourier transforms and linear algebra, held against PyTorch for matrices of many sizes and orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.tensor.rule_checking import answer_of, mismatch

Arguments = Callable[[torch.Tensor], tuple[Any, ...]]


def _square(x: torch.Tensor) -> torch.Tensor:
    """Matrices that have an inverse and a root, in the order of memory of those given."""
    side = max(x.shape[-2:])
    whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).new_zeros(*x.shape[:-2], side, side)
    whole = whole + torch.eye(side, dtype=x.dtype)
    return whole if x.is_contiguous() else whole.mT.contiguous().mT


ALGEBRA: dict[str, Arguments] = {
    "linalg_inv_ex": lambda x: (_square(x),),
    "linalg_cholesky_ex": lambda x: (_square(x),),
    "_linalg_solve_ex": lambda x: (_square(x), _square(x)[..., :1]),
    "_linalg_det": lambda x: (_square(x),),
    "_linalg_slogdet": lambda x: (_square(x),),
    "_linalg_eigh": lambda x: (_square(x),),
    "_linalg_eigh without vectors": lambda x: (_square(x), "L", False),
    "linalg_qr": lambda x: (x,),
    "linalg_qr of a square": lambda x: (_square(x),),
    "linalg_matrix_exp": lambda x: (_square(x),),
}
TRANSFORMS: dict[str, Arguments] = {
    "_fft_r2c": lambda x: (x, [x.dim() - 1], 0, True),
    "_fft_r2c whole": lambda x: (x, [x.dim() - 1], 0, False),
    "_fft_c2r": lambda x: (torch.complex(x, x), [x.dim() - 1], 0, 2 * x.shape[-1] - 1),
    "_fft_c2c": lambda x: (torch.complex(x, x), [x.dim() - 1], 0, True),
}


def _matrices(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for size in ((3, 3), (4, 2), (2, 5), (1, 1), (2, 4, 3), (1, 3, 1), (2, 1, 3, 4), (3, 2, 1, 1)):
        x = torch.linspace(1, 2, torch.Size(size).numel(), dtype=dtype).view(size)
        yield x
        yield x.mT.contiguous().mT
        yield x.transpose(0, -1).contiguous().transpose(0, -1)
        yield x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", {**ALGEBRA, **TRANSFORMS})
def test_a_result_looks_as_pytorch_makes_it(case: str, dtype: torch.dtype) -> None:
    arguments, answered = {**ALGEBRA, **TRANSFORMS}[case], 0
    name = case.split(" ")[0]
    for x in _matrices(dtype):
        args = arguments(x)
        assert mismatch(name, args, {}) is None
        answered += answer_of(name, args, {}) is not None
    assert answered >= 12


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_cross_product_looks_as_pytorch_makes_it(dim: int) -> None:
    for x in (torch.ones(3, 3, 3), torch.ones(3, 3, 3).transpose(0, 2), torch.ones(3, 3).expand(3, 3, 3)):
        assert answer_of("linalg_cross", (x, x), {"dim": dim}) is not None
        assert mismatch("linalg_cross", (x, x), {"dim": dim}) is None
