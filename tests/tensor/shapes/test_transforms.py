"""Rules for Fourier transforms and linear algebra, held against PyTorch for matrices of many sizes and orders."""

from __future__ import annotations

import random
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
    "_linalg_solve_ex of vectors": lambda x: (_square(x), _square(x)[..., 0]),
    "linalg_qr complete": lambda x: (x, "complete"),
    "linalg_qr without vectors": lambda x: (x, "r"),
    "_linalg_svd": lambda x: (x,),
    "_linalg_svd whole": lambda x: (x, True),
    "_linalg_svd without vectors": lambda x: (x, False, False),
    "linalg_eig": lambda x: (_square(x),),
    "_linalg_eigvals": lambda x: (_square(x),),
    "linalg_lu": lambda x: (x,),
    "linalg_lu_factor_ex": lambda x: (x,),
    "lu_unpack": lambda x: (x, _pivots(x)),
    "lu_unpack without matrices": lambda x: (x, _pivots(x), False),
    "lu_unpack without pivots": lambda x: (x, _pivots(x), True, False),
    "linalg_lu_solve": lambda x: (_square(x), _pivots(_square(x)), _square(x)[..., :2]),
    "cholesky_solve": lambda x: (_square(x)[..., :1], _square(x)),
    "cholesky_inverse": lambda x: (_square(x),),
    "linalg_householder_product": lambda x: (_square(x), _square(x)[..., 0, :]),
    "geqrf": lambda x: (x,),
}
TRANSFORMS: dict[str, Arguments] = {
    "_fft_r2c": lambda x: (x, [x.dim() - 1], 0, True),
    "_fft_r2c whole": lambda x: (x, [x.dim() - 1], 0, False),
    "_fft_c2r": lambda x: (torch.complex(x, x), [x.dim() - 1], 0, 2 * x.shape[-1] - 1),
    "_fft_c2c": lambda x: (torch.complex(x, x), [x.dim() - 1], 0, True),
}


def _pivots(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(*x.shape[:-2], min(x.shape[-2:]), dtype=torch.int32)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_products_of_groups_look_as_pytorch_makes_them(dtype: torch.dtype) -> None:
    chosen, answered = random.Random(7), 0
    for _ in range(2000):
        length, rows, columns, groups = (chosen.choice(sizes) for sizes in ((16, 8, 5), (8, 1, 5), (8, 10, 16), (3, 1)))

        def operand(*size: int, groups: int = groups) -> torch.Tensor:
            x = torch.ones(*[groups][: chosen.randint(0, 1)], *size, dtype=dtype)
            x = x.mT.contiguous().mT if chosen.random() < 0.4 else x
            return x if chosen.random() < 0.8 else torch.ones(x.numel() + 4, dtype=dtype)[4:].view(x.shape)

        offsets = [None, torch.ones(chosen.choice((groups, groups, 2)), dtype=torch.int32)][chosen.random() < 0.7]
        args = (operand(rows, length), operand(chosen.choice((length, length, 4)), columns), offsets)
        options = chosen.choice(({}, {}, {"out_dtype": torch.float32}, {"bias": torch.ones(columns, dtype=dtype)}))
        assert mismatch("_grouped_mm", args, options) is None
        answered += answer_of("_grouped_mm", args, options) is not None
    assert (answered >= 100) is (dtype is not torch.float64)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_cross_product_looks_as_pytorch_makes_it(dim: int) -> None:
    for x in (torch.ones(3, 3, 3), torch.ones(3, 3, 3).transpose(0, 2), torch.ones(3, 3).expand(3, 3, 3)):
        assert answer_of("linalg_cross", (x, x), {"dim": dim}) is not None
        assert mismatch("linalg_cross", (x, x), {"dim": dim}) is None


@pytest.mark.parametrize("left", [True, False])
def test_solutions_lie_as_pytorch_makes_them_on_both_sides(left: bool) -> None:
    for x in _matrices(torch.float32):
        square = _square(x)
        for other in (square[..., :1], square[..., :2], square.mT):
            b = other if left else other.mT
            assert mismatch("_linalg_solve_ex", (square, b), {"left": left}) is None
            assert mismatch("linalg_lu_solve", (square, _pivots(square), b), {"left": left}) is None
            options = {"upper": True, "left": left}
            assert answer_of("linalg_solve_triangular", (square, b), options) is not None
            assert mismatch("linalg_solve_triangular", (square, b), options) is None


def _any_order(size: list[int], dtype: torch.dtype, draw: random.Random) -> torch.Tensor:
    """A tensor in a drawn order of memory, perhaps with gaps, idle strides, or one dimension that is expanded."""
    order = draw.sample(range(len(size)), len(size))
    x = torch.ones([size[d] for d in order], dtype=dtype).permute([order.index(d) for d in range(len(size))])
    kind = draw.randrange(4)
    if kind == 1:
        return x.repeat_interleave(2, -1)[..., ::2]
    if kind == 2:
        return x.as_strided(size, [draw.choice((1, 3, 100)) if n == 1 else s for n, s in zip(size, x.stride())])
    return x.narrow(draw.randrange(len(size)), 0, 1).expand(size) if kind == 3 else x


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other libraries leave results in other orders")
@pytest.mark.parametrize("seed", range(3))
def test_transforms_along_any_dimensions_lie_as_pytorch_makes_them(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        size = [draw.choice((1, 1, 2, 3, 4)) for _ in range(draw.randint(1, 5))]
        dims = draw.sample(range(len(size)), draw.randint(1, min(3, len(size))))
        real, whole = _any_order(size, torch.float32, draw), _any_order(size, torch.complex64, draw)
        calls: dict[str, tuple[Any, ...]] = {
            "_fft_r2c": (real, dims, 0, draw.random() < 0.8),
            "_fft_c2c": (whole, dims, 0, True),
            "_fft_c2r": (whole, dims, 0, 2 * size[dims[-1]] - 1),
        }
        for name, args in calls.items():
            assert answer_of(name, args, {}) is not None
            assert mismatch(name, args, {}) is None


@pytest.mark.parametrize("size", [(1, 5), (5, 1), (3, 3), (2, 4, 4)], ids=str)
def test_pseudoinverses_of_hermitian_matrices_are_of_square_ones(size: tuple[int, ...]) -> None:
    x = torch.ones(size)
    assert mismatch("linalg_pinv.atol_rtol_tensor", (x,), {"hermitian": True}) is None
    assert mismatch("linalg_pinv.atol_rtol_tensor", (x,), {}) is None


@pytest.mark.parametrize("tolerance", [(), (1,), (4,), (3, 1)], ids=str)
def test_tolerances_of_pseudoinverses_are_broadcast_with_the_matrices(tolerance: tuple[int, ...], sky1: str) -> None:
    x, rtol = torch.arange(24.0).view(2, 3, 4)[:1], torch.full(tolerance, 1e-3)
    assert mismatch("linalg_pinv.atol_rtol_tensor", (x,), {"rtol": rtol}) is None
    assert torch.equal(torch.linalg.pinv(x.to(sky1), rtol=rtol.to(sky1)).cpu(), torch.linalg.pinv(x, rtol=rtol))
