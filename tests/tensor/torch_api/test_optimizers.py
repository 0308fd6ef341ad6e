"""Every optimizer of PyTorch trains on a worker as it trains here, by the plain, the foreach and the fused way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import skyproxy  # noqa: F401  (registers the device)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "LBFGS": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def trained(device: str, name: str, options: dict[str, Any], steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if name == "SparseAdam":
        module: nn.Module = nn.Embedding(10, 3, sparse=True)
        x = torch.tensor([1, 2, 5, 2])
    else:
        # Muon takes matrices only.
        module = nn.Sequential(nn.Linear(4, 8, bias=name != "Muon"), nn.Tanh(), nn.Linear(8, 3, bias=name != "Muon"))
        x = torch.randn(6, 4)
    module.to(device)
    x = x.to(device)
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.01, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(x).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.detach().cpu() for p in module.parameters()]


def test_the_list_of_optimizers_is_complete() -> None:
    known = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert known - set(OPTIMIZERS) == set()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_it_trains_here(name: str, sky1: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    options = OPTIMIZERS[name]
    for remote, local in zip(trained(sky1, name, options), trained("cpu", name, options), strict=True):
        assert torch.allclose(remote, local, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_trains_as_it_trains_here(name: str, sky1: str) -> None:
    options = {**OPTIMIZERS[name], "fused": True}
    for remote, local in zip(trained(sky1, name, options), trained("cpu", name, options), strict=True):
        assert torch.allclose(remote, local, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "NAdam"])
def test_the_foreach_way_is_the_default_and_equals_the_plain_one(name: str, sky1: str) -> None:
    options = OPTIMIZERS[name]
    plain, foreach, default = (
        trained(sky1, name, {**options, **extra}) for extra in ({"foreach": False}, {"foreach": True}, {})
    )
    for a, b, c in zip(plain, foreach, default, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        assert torch.equal(b, c)


def test_an_optimizer_step_costs_few_operations(sky1: str) -> None:
    counts = {}
    for way in ({"foreach": False}, {}, {"fused": True}):
        module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).to(sky1)
        optimizer = torch.optim.AdamW(module.parameters(), **way)
        for _ in range(2):
            module(torch.ones(1, 4, device=sky1)).sum().backward()
            before = torch.sky.stats()["ops"]  # type: ignore[attr-defined]
            optimizer.step()
            counts[str(way)] = torch.sky.stats()["ops"] - before  # type: ignore[attr-defined]
    plain, foreach, fused = counts.values()
    assert fused <= 2
    assert foreach <= 16
    assert plain >= 8 * 4


def test_a_learning_rate_can_be_a_tensor_and_steps_capturable(sky1: str) -> None:
    module = nn.Linear(4, 4).to(sky1)
    rate = torch.tensor(0.1, device=sky1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, capturable=True)
    before = module.weight.detach().clone()
    for _ in range(2):
        module(torch.ones(1, 4, device=sky1)).sum().backward()
        optimizer.step()
    assert optimizer.state[module.weight]["step"].device == torch.device(sky1)
    assert torch.allclose((before - module.weight.detach()).cpu(), torch.full((4, 4), 0.2), atol=1e-2)


def test_schedulers_and_gradient_accumulation_work(sky1: str) -> None:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        x = torch.randn(8, 4).to(device)
        for _ in range(3):
            for part in x.chunk(2):
                module(part).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return module.weight.detach().cpu()

    assert torch.allclose(run(sky1), run("cpu"), atol=1e-6)


def test_a_step_with_sparse_gradients_asks_only_how_many_rows_there_are(sky: str) -> None:
    """Once, of what the gradient is coalesced to; each operation asked before, 18 in all."""
    module = nn.Embedding(10, 3, sparse=True, device=sky)
    x = torch.tensor([1, 2, 5, 2], device=sky)
    optimizer = torch.optim.SparseAdam(list(module.parameters()))
    for _ in range(3):
        before = torch.sky.stats()["round_trips"]
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()
    assert torch.sky.stats()["round_trips"] - before <= 1
