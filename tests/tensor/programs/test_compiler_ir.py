"""What a graph of the compiler becomes before it travels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def clamped(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.clamp(max=limit) / limit - x * limit


def in_half_precision(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.half() * limit + limit


@pytest.mark.parametrize("function", [clamped, in_half_precision])
def test_graphs_with_numbers_that_vary_travel(
    sky: str, caplog: pytest.LogCaptureFixture, function: Callable[[torch.Tensor, float], torch.Tensor]
) -> None:
    # From its second value on, a number is a tensor of the graph, whose dtype comes from an op of the compiler's own.
    step = torch.compile(function, backend="sky", options={"worker": "eager"})
    theirs = torch.linspace(-1, 3, 7, requires_grad=True)
    ours = theirs.detach().to(sky).requires_grad_()
    with caplog.at_level(logging.WARNING, "skyproxy"):
        for limit in (1.5, 2.5, 0.3):
            want, got = function(theirs, limit), step(ours, limit)
            assert torch.equal(got.cpu(), want)
            assert torch.equal(
                torch.autograd.grad(got.sum(), ours)[0].cpu(), torch.autograd.grad(want.sum(), theirs)[0]
            )
    assert not caplog.records
