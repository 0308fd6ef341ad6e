"""Vision models of transformers at batch one and two, in both memory formats: the local CPU's results and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1], "num_labels": 4}
ATTENDING: dict[str, Any] = {**SMALL, "num_attention_heads": [1, 2, 2, 2]}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Cvt": (
        "ForImageClassification",
        64,
        {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "num_labels": 4},
    ),
    "ConvNext": ("ForImageClassification", 32, SMALL),
    "Segformer": ("ForSemanticSegmentation", 64, {**ATTENDING, "decoder_hidden_size": 16}),
    "Swin": (
        "ForImageClassification",
        32,
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4},
    ),
    "FocalNet": (
        "ForImageClassification",
        32,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "num_labels": 4,
        },
    ),
    "Pvt": ("ForImageClassification", 64, {**ATTENDING, "image_size": 64}),
    "ViT": (
        "ForImageClassification",
        32,
        {
            "image_size": 32,
            "patch_size": 4,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 37,
        },
    ),
    "MobileNetV2": ("ForImageClassification", 32, {"depth_multiplier": 0.25, "num_labels": 4}),
    "PoolFormer": ("ForImageClassification", 64, SMALL),
    "RegNet": ("ForImageClassification", 32, {**SMALL, "embedding_size": 8, "groups_width": 4}),
}
SLOW = {"FocalNet", "MobileNetV2", "PoolFormer", "Pvt", "RegNet", "Swin"}
FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS])
def test_batches_of_one_and_two_in_turn_give_the_bits_of_the_cpu(name: str, sky1: str) -> None:
    head, size, config = MODELS[name]
    torch.manual_seed(0)
    local = getattr(transformers, name + head)(getattr(transformers, name + "Config")(**config)).train()
    for module in local.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()  # one image of one pixel has no variance
    remote = copy.deepcopy(local).to(sky1)
    generator = torch.Generator().manual_seed(1)
    for memory_format in FORMATS:
        local.to(memory_format=memory_format)
        remote.to(memory_format=memory_format)
        for count in (1, 2, 1):
            images = torch.randn(count, 3, size, size, generator=generator).to(memory_format=memory_format)
            expected = _step(local, images.clone())
            found = _step(remote, images.to(sky1))
            assert [x.stride() for x in found[:2]] == [x.stride() for x in expected[:2]]
            for ours, theirs in zip(found, expected, strict=True):
                if theirs is not None:
                    assert torch.equal(ours.cpu(), theirs), (memory_format, count)


def _step(model: Any, images: torch.Tensor) -> list[Any]:
    """The result, and the gradients of the images and of all parameters."""
    torch.manual_seed(3)
    model.zero_grad()
    result = model(images.requires_grad_()).logits
    result.square().mean().backward()
    return [result.detach(), images.grad, *(parameter.grad for parameter in model.parameters())]
