"""Functions and modules whose forward and backward are one replay each."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)) for _ in range(count)
    ]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def test_a_graphed_module_trains_as_locally(sky: str) -> None:
    remote, local = small_network().to(sky), small_network()
    data = batches(4)
    graphed = torch.sky.make_graphed_callables(remote, (data[0][0].to(sky),))
    assert graphed is remote
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (graphed, local)]
    for x, y in data:
        losses = [
            one_step(m, o, x.to(d), y.to(d)) for m, o, d in zip((graphed, local), optimizers, (sky, "cpu"), strict=True)
        ]
        assert torch.equal(losses[0].detach().cpu(), losses[1].detach())
    for got, want in zip(remote.parameters(), local.parameters(), strict=True):
        assert torch.equal(got.detach().cpu(), want.detach())


def test_a_graphed_step_sends_few_commands(sky: str) -> None:
    model = small_network().to(sky)
    x = batches(1)[0][0].to(sky)
    torch.sky.make_graphed_callables(model, (x,))

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    step()
    before = torch.sky.stats()["ops"]
    step()
    # detach of the output, sum and its backward, a copy of the gradient, and a detach for each parameter's gradient
    assert torch.sky.stats()["ops"] - before <= 14


def test_graphed_functions_in_a_tuple(sky: str) -> None:
    def first(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a * b, a + b

    def second(a: torch.Tensor) -> torch.Tensor:
        return a.sin()

    sample = torch.ones(3, device=sky, requires_grad=True)
    factor = torch.ones(3, device=sky)
    one, two = torch.sky.make_graphed_callables((first, second), ((sample, factor), (sample,)))
    for value in (2.0, 3.0):
        x = torch.full((3,), value, device=sky, requires_grad=True)
        product, total = one(x, torch.full((3,), 5.0, device=sky))
        two(product).sum().backward()
        local = torch.full((3,), value, requires_grad=True)
        (local * 5).sin().sum().backward()
        assert x.grad is not None
        assert local.grad is not None
        assert torch.equal(x.grad.cpu(), local.grad)
        assert total.tolist() == [value + 5] * 3


def test_a_graphed_module_in_another_mode_runs_as_it_was(sky: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(sky)
    x = torch.ones(2, 4, device=sky)
    torch.sky.make_graphed_callables(model, (x,))
    model.eval()
    assert torch.equal(model(torch.ones(7, 4, device=sky)).cpu(), model[0](torch.ones(7, 4, device=sky)).cpu())


def test_what_cannot_be_graphed_is_refused(sky: str) -> None:
    model = nn.Linear(2, 2).to(sky)
    with pytest.raises(ValueError, match="tensors"):
        torch.sky.make_graphed_callables(model, (3,))
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="hooks"):
        torch.sky.make_graphed_callables(model, (torch.ones(2, 2, device=sky),))
