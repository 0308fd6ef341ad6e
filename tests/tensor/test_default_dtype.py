"""`torch.set_default_dtype` holds for remote tensors too, from the very point of the program where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import skyproxy
from skyproxy.tensor.recipes import function_by_recipe

EXPRESSIONS: dict[str, Callable[[str], torch.Tensor]] = {
    "zeros": lambda device: torch.zeros(3, device=device),
    "full": lambda device: torch.full((2, 2), 0.1, device=device),
    "full of integers": lambda device: torch.full((2,), 3, device=device),
    "arange": lambda device: torch.arange(0, 1, 0.1, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "division of integers": lambda device: torch.arange(1, 7, device=device) / 3,
    "integers times a fraction": lambda device: torch.arange(5, device=device) * 0.1,
    "root of integers": lambda device: torch.arange(5, device=device).sqrt(),
    "mean of booleans": lambda device: torch.tensor([1.1, 2.2], device=device) + 0.3,
    "complex": lambda device: torch.arange(3, device=device) * 1j,
    "layer": lambda device: sum(
        p.sum() * 0 + p.new_ones(()) for p in torch.nn.Linear(2, 3, device=device).parameters()
    ),
}
DTYPES = (torch.float64, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_dtype_gives_what_it_gives_here(name: str, sky: str, sky1: str) -> None:
    for dtype in (*DTYPES, *DTYPES):
        torch.set_default_dtype(dtype)
        for device in (sky, sky1):
            found, expected = EXPRESSIONS[name](device), EXPRESSIONS[name]("cpu")
            assert found.dtype is expected.dtype
            assert torch.equal(found.cpu(), expected)
    torch.sky.synchronize(sky)


def test_what_was_recorded_before_keeps_the_dtype_before(sky: str) -> None:
    numbers = torch.arange(1, 4).to(sky)
    before = numbers / 3
    torch.set_default_dtype(torch.float64)
    after = numbers / 3
    assert (before.dtype, after.dtype) == (torch.float32, torch.float64)
    assert torch.equal(before.cpu(), torch.arange(1, 4).float() / 3)
    assert torch.equal(after.cpu(), torch.arange(1, 4) / 3)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_type_counts_too(sky: str) -> None:
    torch.set_default_tensor_type(torch.DoubleTensor)
    assert torch.ones(2, device=sky).dtype is torch.float64


def test_a_worker_that_comes_later_has_it(sky: str) -> None:
    torch.set_default_dtype(torch.float64)
    node = skyproxy.launch_local("cpu")
    try:
        device = node.devices[0]
        found = torch.arange(1, 4, device=device) / 3
        assert torch.equal(found.cpu(), torch.arange(1, 4) / 3)
    finally:
        node.close()


def test_a_noted_function_has_recipes_for_each(sky: str) -> None:
    function = function_by_recipe(lambda x: x / 3 + 1)
    numbers = torch.arange(4).to(sky)
    with torch.no_grad():
        for dtype in DTYPES:
            torch.set_default_dtype(dtype)
            for _ in range(6):
                found, expected = function(numbers), torch.arange(4) / 3 + 1
                assert found.dtype is expected.dtype
                assert torch.equal(found.cpu(), expected)


def test_a_lost_worker_does_not_keep_the_program_from_setting_it(sky: str) -> None:
    node = skyproxy.launch_local("cpu")
    node.close()
    torch.set_default_dtype(torch.float64)
    assert torch.ones(1, device=sky).dtype is torch.float64
