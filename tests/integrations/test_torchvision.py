"""Transforms of torchvision on remote images, boxes and masks: to the last bit what they are on the local CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.dispatch import inference
from tests.integrations.vision import import_timm

try:
    import_timm()  # which brings torchvision
    from torchvision import tv_tensors
    from torchvision.transforms import v2
except ImportError as error:
    pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)

GEOMETRY: dict[str, Callable[[], Any]] = {
    "nearest": lambda: v2.Resize((9, 11), interpolation=v2.InterpolationMode.NEAREST),
    "crop": lambda: v2.RandomCrop(8),
    "flip": lambda: v2.RandomHorizontalFlip(0.5),
    "rotation": lambda: v2.RandomRotation(30),
    "affine": lambda: v2.RandomAffine(10, (0.1, 0.1), (0.8, 1.2), 5),
    "perspective": lambda: v2.RandomPerspective(p=1.0),
    "padding": lambda: v2.Pad(3),
    "zoom": lambda: v2.RandomZoomOut(p=1.0),
}
COLORS: dict[str, Callable[[], Any]] = {
    "jitter": lambda: v2.ColorJitter(0.3, 0.3, 0.3, 0.1),
    "blur": lambda: v2.GaussianBlur(3),
    "normalized": lambda: v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)]),
    "erased": lambda: v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.RandomErasing(1.0)]),
    "posterized": lambda: v2.RandomPosterize(3, 1.0),
    "equalized": lambda: v2.RandomEqualize(1.0),
    "contrast": lambda: v2.RandomAutocontrast(1.0),
    "sharpness": lambda: v2.RandomAdjustSharpness(2, 1.0),
    "RandAugment": lambda: v2.RandAugment(),
    "five crops": lambda: v2.FiveCrop(8),
}


def inputs(device: str) -> dict[str, Any]:
    values = torch.rand(3, 20, 24, generator=torch.Generator().manual_seed(0)) * 255
    boxes = torch.tensor([[1.0, 2.0, 8.0, 9.0], [4.0, 5.0, 20.0, 18.0]]).to(device)
    return {
        "image": tv_tensors.Image(values.to(torch.uint8).to(device)),
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(20, 24)),
        "mask": tv_tensors.Mask(values[:1].to(device) > 99),
        "label": torch.tensor([1, 2]).to(device),
    }


def assert_same(ours: Any, theirs: Any) -> None:
    found, expected = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, type(b))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("name", GEOMETRY)
def test_boxes_and_masks_go_with_their_image(name: str, sky1: str) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(1)
        return GEOMETRY[name]()(inputs(device))

    assert_same(run(sky1), run("cpu"))


@pytest.mark.parametrize("name", COLORS)
def test_colors_are_those_of_the_cpu(name: str, sky1: str) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(1)
        return COLORS[name]()(inputs(device)["image"])

    assert_same(run(sky1), run("cpu"))


@pytest.mark.parametrize("mix", ["MixUp", "CutMix"])
def test_images_of_a_batch_are_mixed(mix: str, sky1: str) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        return getattr(v2, mix)(num_classes=5)(images.to(device), torch.arange(4).to(device))

    assert_same(run(sky1), run("cpu"))


def test_no_fake_kernel_is_asked_how_many_boxes_remain(sky1: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    boxes, scores = torch.rand(5, 4, device=sky1), torch.rand(5, device=sky1)
    monkeypatch.setattr(inference, "_infer_by_fake", asked.append)
    with contextlib.suppress(UnsupportedOpError, NotImplementedError):  # the worker of a test may lack torchvision
        torch.ops.torchvision.nms(boxes, scores, 0.5)
    assert asked == []
