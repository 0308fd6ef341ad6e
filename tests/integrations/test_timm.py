"""Vision models of timm: forward passes and training steps as on the local CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.integrations.vision import import_timm

try:
    import_timm()
except ImportError as error:
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

import timm
import timm.optim
import timm.utils

MODELS: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "resnet18": {},
    "vit_tiny_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "mobilenetv3_small_050": {},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 1, 1)},
}


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def make(name: str) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **MODELS[name])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_forward_pass_equals_the_local_one(name: str, sky1: str) -> None:
    local = make(name).eval()
    remote = copy.deepcopy(local).to(sky1)
    with torch.no_grad():
        expected, found = local(images()), remote(images().to(sky1))
        features, theirs = remote.forward_features(images().to(sky1)), local.forward_features(images())
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(features.cpu(), theirs)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_steps_equal_the_local_ones(name: str, sky1: str) -> None:
    results = []
    for device in ("cpu", sky1):
        model = make(name).to(device).train()
        optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            loss = F.cross_entropy(model(images(4).to(device)), torch.tensor([0, 1, 2, 3], device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, {key: value.cpu() for key, value in model.state_dict().items()}))
    assert results[0][0] == results[1][0]
    for key, expected in results[0][1].items():
        assert torch.equal(results[1][1][key], expected), key


def test_the_average_of_a_model_follows_it(sky1: str) -> None:
    """timm's exponential moving average of weights, on the worker."""
    averages = []
    for device in ("cpu", sky1):
        model = make("resnet10t").to(device)
        average = timm.utils.ModelEmaV3(model, decay=0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        average.update(model)
        averages.append([p.cpu() for p in average.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*averages, strict=True))


def test_channels_last_and_bfloat16_run(sky1: str) -> None:
    model = make("resnet10t").eval().to(sky1, memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("sky", dtype=torch.bfloat16):
        found = model(images().to(sky1, memory_format=torch.channels_last))
    with torch.no_grad():
        expected = make("resnet10t").eval()(images())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0.1, atol=0.05)
