"""Views beyond the memory of their tensor are refused at their line; refused operations hold no memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch


def test_a_view_beyond_the_memory_is_refused_at_its_line(sky: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        torch.zeros(3).as_strided((2, 2), (2, 2))
    whole = torch.arange(9.0, device=sky)
    for _ in range(2):
        assert whole[:3].as_strided((2, 2), (2, 2)).tolist() == [[0, 2], [2, 4]]
        with pytest.raises(RuntimeError) as found:
            torch.zeros(3, device=sky).as_strided((2, 2), (2, 2))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    torch.sky.synchronize()


def test_a_view_of_a_memory_that_has_grown_asks_for_nothing_twice(sky: str) -> None:
    x = torch.zeros(3, device=sky)
    x.resize_(9).fill_(2)
    x.resize_(3)
    x.as_strided((2, 2), (4, 4))
    torch.sky.synchronize()
    trips = torch.sky.stats()["round_trips"]
    view = x.as_strided((2, 2), (4, 4))
    assert torch.sky.stats()["round_trips"] == trips
    assert view.tolist() == [[2, 2], [2, 2]]


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "an operation": lambda x: x + torch.ones(3, device=x.device),
    "a product": lambda x: x @ torch.ones(3, device=x.device),
    "a view": lambda x: x.view(7),
    "in place": lambda x: x.add_(torch.ones(3, device=x.device)),
    "a list": lambda x: torch._foreach_add_([x], [torch.ones(3, device=x.device)]),
    "another device": lambda x: x + torch.ones(3),
    "late": lambda x: torch.linalg.cholesky(-x[:2, :2]).cpu(),
    "no kernel": lambda x: x.bitwise_and(x),
    "under a transform": lambda x: torch.vmap(lambda row: row @ torch.ones(3, device=x.device))(x),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_a_refused_operation_had_dies_with_its_error(refused: Callable[[torch.Tensor], object], sky1: str) -> None:
    """A program that goes on with a smaller batch needs the memory now, not when the collector comes round."""

    def fail() -> None:
        with pytest.raises(RuntimeError):
            refused(torch.ones(100, 100, device=sky1))

    gc.collect()
    before = torch.sky.memory_allocated(sky1)
    gc.disable()
    try:
        fail()
        assert torch.sky.memory_allocated(sky1) == before
    finally:
        gc.enable()
