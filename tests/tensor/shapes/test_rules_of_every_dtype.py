"""Rules whose answer depends on the dtypes of the operands: sizes, strides and dtypes are local PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.tensor.rule_checking import mismatch

DTYPES = (torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16)
DTYPES += (torch.float32, torch.float64, torch.complex64, torch.complex128)
SIZES = (((3, 4), (3, 4)), ((), (3, 4)), ((3, 4), ()), ((4,), (3, 4)), ((1, 4), (3, 1)), ((2, 1, 3, 3), (2, 1, 3, 3)))


def _orders(size: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    x = torch.ones(size, dtype=dtype)
    yield x
    yield torch.ones(size[::-1], dtype=dtype).permute(list(range(len(size)))[::-1])
    yield torch.ones((), dtype=dtype).expand(size)
    if size:
        yield torch.ones((*size[:-1], 2 * size[-1]), dtype=dtype)[..., ::2]
        yield x.as_strided(size, [4096 if n == 1 else s for n, s in zip(size, x.stride())])


@pytest.mark.filterwarnings("ignore:.*omplex.* support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ldexp_of_any_two_dtypes(dtype: torch.dtype) -> None:
    compared = 0
    for other, (size, other_size) in itertools.product(DTYPES, SIZES):
        for x, exponent in itertools.product(_orders(size, dtype), _orders(other_size, other)):
            try:
                torch.ldexp(x, exponent)
            except (NotImplementedError, RuntimeError):
                continue  # no kernel for these
            assert mismatch("ldexp.Tensor", (x, exponent), {}) is None
            compared += 1
    assert compared


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 4), (1, 20), (20, 1), (2, 1, 4), (2, 3, 1, 5), (1, 1, 1), (), (0, 3)], ids=str)
def test_isinf_of_any_dtype(size: tuple[int, ...], dtype: torch.dtype) -> None:
    for x in _orders(size, dtype):
        assert mismatch("isinf", (x,), {}) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["exp", "reciprocal", "sqrt", "sigmoid", "log1p", "lgamma"])
def test_integers_are_fractions_in_an_order_without_gaps_before_a_function_of_fractions(
    name: str, dtype: torch.dtype
) -> None:
    memory = torch.ones(200, dtype=dtype)
    for idle in (1, 2, 3, 5, 9, 27, 100):
        for size, stride in (((1, 1, 3, 3, 2), (27, idle, 9, 3, 1)), ((2, 1, 3), (20, idle, 2)), ((1, 4), (idle, 3))):
            assert mismatch(name, (memory.as_strided(size, stride),), {}) is None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int32, torch.bool])
def test_complex_numbers_go_with_integers_that_nothing_else_is_promoted_with(dtype: torch.dtype, sky1: str) -> None:
    x = torch.ones(2, dtype=dtype)
    for number in (1j, torch.tensor(1j)):
        for compute in (torch.add, torch.mul, torch.ne, torch.pow):
            found, expected = compute(x.to(sky1), number), compute(x, number)
            assert found.dtype is expected.dtype
            assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss"])
def test_losses_of_floats_take_targets_of_another_dtype(
    name: str, reduction: str, dtype: torch.dtype, sky1: str
) -> None:
    """Labels that come from NumPy are float64, and predictions are not; the gradient is of the predictions' dtype.

    Which of these gradients a version has no kernel for, it refuses in the line of `backward`, and so does the device.
    """
    target = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=dtype)
    results, refusals = [], []
    for device in ("cpu", sky1):
        x = torch.linspace(-1, 1, 6).view(3, 2).to(device).t().requires_grad_()
        loss = getattr(torch.nn.functional, name)(x, target.to(device), reduction=reduction)
        try:
            loss.sum().backward()
        except RuntimeError as error:
            refusals.append(str(error).partition("\n")[0])
        results.append((loss.detach().cpu(), None if x.grad is None else x.grad.cpu()))
    assert len(set(refusals)) == len(refusals) // 2
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.dtype is expected.dtype
            assert found.stride() == expected.stride()
            assert torch.equal(found, expected)
