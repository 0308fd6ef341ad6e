"""Numbers that a dtype lacks are refused at their line, also right after others that it has."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from skyproxy.tensor.dispatch.number_classes import class_of, is_huge, key_of

HALF, BYTE, INTEGER, SINGLE = torch.float16, torch.uint8, torch.int32, torch.float32
COMPLEX = torch.complex64
NUMBERS: dict[str, tuple[torch.dtype, Callable[[torch.Tensor, float], object], float]] = {
    "a mask of halves": (HALF, lambda x, n: x.masked_fill(x > 0, n), -1e9),
    "a mask of halves, in place": (HALF, lambda x, n: x.masked_fill_(x > 0, n), -1e9),
    "a mask of halves, by a tensor": (HALF, lambda x, n: x.masked_fill(x > 0, torch.tensor(n)), -1e9),
    "halves filled": (HALF, lambda x, n: x.fill_(n), 65505.0),
    "halves like others": (HALF, lambda x, n: torch.full_like(x, n), 1e5),
    "halves between bounds": (HALF, lambda x, n: x.clamp(max=n), 1e5),
    "halves between bounds, in place": (HALF, lambda x, n: x.clamp_(-n, n), 1e5),
    "a multiple of halves": (HALF, lambda x, n: x.add(x, alpha=n), 1e5),
    "lists of halves": (HALF, lambda x, n: torch._foreach_clamp_max([x], n), 1e5),
    "lists of halves and of bounds": (HALF, lambda x, n: torch._foreach_clamp_max([x, x], [1.0, n]), 1e5),
    "lists of bytes and of powers": (BYTE, lambda x, n: torch._foreach_pow([x], [n]), 300),
    "complex numbers filled": (COMPLEX, lambda x, n: x.fill_(n * 1j), 1e300),
    "complex numbers like others": (COMPLEX, lambda x, n: torch.full_like(x, n * 1j), 1e300),
    "a mask of complex numbers": (COMPLEX, lambda x, n: x.masked_fill(x == 0, n * 1j), 1e300),
    "a multiple of complex numbers": (COMPLEX, lambda x, n: x.add(x, alpha=n * 1j), 1e300),
    "bytes filled": (BYTE, lambda x, n: x.fill_(n), 300),
    "bytes scattered": (BYTE, lambda x, n: x.scatter_(0, torch.zeros_like(x, dtype=torch.int64), n), 256),
    "rows of bytes": (BYTE, lambda x, n: x.index_fill_(0, torch.zeros_like(x[0], dtype=torch.int64)[:1], n), 256),
    "bytes between bounds": (BYTE, lambda x, n: x.clamp(min=n), 256),
    "integers that are not a number": (INTEGER, lambda x, n: x.fill_(n), float("nan")),
    "integers divided by zero": (INTEGER, lambda x, n: x // n, 0),
    "a remainder of zero": (INTEGER, lambda x, n: x % n, 0),
    "a power below zero": (INTEGER, lambda x, n: x**n, -1),
    "single precision filled": (SINGLE, lambda x, n: x.fill_(n), 1e300),
    "single precision between bounds": (SINGLE, lambda x, n: x.clamp(max=n), sys.float_info.max),
    "unsigned numbers compared in place": (torch.uint16, lambda x, n: x.le_(n), 1),
}


@pytest.mark.parametrize("side", [3, 80])
@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_a_dtype_lacks_is_refused_at_its_line(case: str, side: int, sky: str) -> None:
    dtype, operation, number = NUMBERS[case]
    with pytest.raises(RuntimeError) as expected:
        operation(torch.ones(side, side, dtype=dtype), number)
    there = torch.ones(side, side, dtype=torch.int32, device=sky).to(dtype)
    for _ in range(2):
        operation(there, type(number)(2) if dtype is not torch.uint16 else 2.5)
        with pytest.raises(RuntimeError) as found:
            operation(there, number)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    torch.sky.synchronize()
    assert torch.equal(there.cpu(), there.cpu())


def test_numbers_that_differ_in_size_only_ask_for_nothing(sky: str) -> None:
    there = torch.ones(3, 5, dtype=HALF, device=sky)
    for number in (2.0, 1e3, -6e4, float("inf")):
        there.masked_fill(there > 0, number)
    torch.sky.synchronize()
    trips = torch.sky.stats()["round_trips"]
    for number in (3.0, 2e3, -5e4, float("inf"), -float("inf")):
        there.masked_fill(there > 0, number)
    assert torch.sky.stats()["round_trips"] == trips


@pytest.mark.parametrize("number", [1.0, -128.0, 0.5, 1, 127, True, None, "sum"])
def test_small_numbers_count_by_their_type(number: object) -> None:
    assert key_of(number) is type(number)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (65504.0, 65504.5),
        (127, 128),
        (-128, -129),
        (255, 256),
        (0, 1),
        (0, -1),
        (300, 300.0),
        (float("nan"), float("inf")),
        (float("inf"), -float("inf")),
        (1e38, 1e39),
        (2**63 - 1, 2**63),
    ],
)
def test_numbers_that_some_dtype_tells_apart_are_of_different_classes(first: float, second: float) -> None:
    assert key_of(first) != key_of(second)


def test_numbers_between_the_same_bounds_are_of_one_class() -> None:
    assert class_of(1e5) == class_of(2e9)
    assert class_of(-300) == class_of(-400)


def test_only_what_single_precision_lacks_is_huge() -> None:
    held = torch.finfo(torch.float32).max
    assert not is_huge(held)
    assert not is_huge(-held)
    assert all(map(is_huge, (2 * held, -2 * held, float("inf"), float("nan"), 1 << 200)))
