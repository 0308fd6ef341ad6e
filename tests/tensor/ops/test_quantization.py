"""Observers, fake quantization and training for it: the CPU's numbers, and models that convert afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import skyproxy  # noqa: F401  (registers the device)

pytestmark = pytest.mark.filterwarnings("ignore")
OBSERVERS: dict[str, Callable[[], Any]] = {
    "MinMaxObserver": quantization.MinMaxObserver,
    "MovingAverageMinMaxObserver": quantization.MovingAverageMinMaxObserver,
    "PerChannelMinMaxObserver": quantization.PerChannelMinMaxObserver,
    "MovingAveragePerChannelMinMaxObserver": quantization.MovingAveragePerChannelMinMaxObserver,
    "HistogramObserver": quantization.HistogramObserver,
}
FAKE: dict[str, Callable[[], Any]] = {
    "FakeQuantize": quantization.FakeQuantize,
    "per channel": quantization.default_per_channel_weight_fake_quant,
    "weights": quantization.default_weight_fake_quant,
    "fused": quantization.FusedMovingAvgObsFakeQuantize,
    "fused per channel": quantization.default_fused_per_channel_wt_fake_quant,
}


def values(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.detach().cpu(), b.detach())


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_finds_what_it_finds_on_the_cpu(name: str, sky1: str) -> None:
    def observe(place: str) -> list[Any]:
        observer = OBSERVERS[name]().to(place)
        for seed in range(3):
            observer(values(seed, 4, 8).to(place) * (seed + 1))
        return [*observer.calculate_qparams(), *observer.state_dict().values()]

    assert_same(observe(sky1), observe("cpu"))


@pytest.mark.parametrize("name", FAKE)
def test_fake_quantization_and_its_gradient_are_the_cpus(name: str, sky1: str) -> None:
    def quantize(place: str) -> list[Any]:
        module = FAKE[name]().to(place)
        found: list[Any] = []
        for seed in range(2):
            x = values(seed, 4, 8).to(place).requires_grad_()
            y = module(x)
            found += [y, *torch.autograd.grad(y.square().sum(), x), module.scale, module.zero_point]
        return found

    assert_same(quantize(sky1), quantize("cpu"))


def prepared() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)]
    model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.fuse_modules_qat(model, [["1", "2", "3"]], inplace=True)
    return quantization.prepare_qat(model)  # type: ignore[no-any-return]


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs fbgemm")
def test_training_for_quantization_gives_the_cpus_model(sky1: str) -> None:
    def train(place: str) -> list[Any]:
        model = prepared().to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for seed in range(3):
            loss = model(values(seed, 2, 1, 8, 8).to(place)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        converted = quantization.convert(model.cpu().eval())
        return [*losses, converted(values(9, 2, 1, 8, 8))]

    assert_same(train(sky1), train("cpu"))


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs fbgemm")
def test_calibration_on_a_worker_gives_the_cpus_model(sky1: str) -> None:
    def calibrate(place: str) -> list[Any]:
        torch.manual_seed(0)
        layers = [quantization.QuantStub(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), quantization.DeQuantStub()]
        model = nn.Sequential(*layers).eval()
        model.qconfig = quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
        model = quantization.prepare(model).to(place)
        model(values(0, 16, 4).to(place))
        return [quantization.convert(model.cpu())(torch.ones(1, 4))]

    assert_same(calibrate(sky1), calibrate("cpu"))
