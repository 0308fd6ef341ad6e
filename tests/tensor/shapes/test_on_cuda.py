"""Rules of workers with CUDA, on a device that says that it is CUDA's: results are brought into these looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from skyproxy.tensor.core.devices import DEVICES

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    # As an H200 gave them.
    "all dimensions": (lambda x: torch.fft.rfft2(x[0, 0, :8]), (1, 8)),
    "some dimensions": (lambda x: torch.fft.rfft2(x[0]), (144, 9, 1)),
    "one transform": (lambda x: torch.fft.rfft(x), (1152, 144, 9, 1)),
    "back, of one dimension": (
        lambda x: torch.fft.irfft(torch.complex(x, x).transpose(0, 1), 30, 3),
        (960, 480, 30, 1),
    ),
    "right singular vectors": (lambda x: torch.linalg.svd(x[0, 0, :5, :3])[2], (3, 1)),
    "left singular vectors": (lambda x: torch.linalg.svd(x[0, 0, :5, :3])[0], (1, 5)),
    "eigenvectors": (lambda x: torch.linalg.eig(x[0, 0, :5, :5])[1], (5, 1)),
    "groups of images in channels-last": (
        lambda x: F.group_norm(x.contiguous(memory_format=torch.channels_last), 4),
        (2048, 256, 16, 1),
    ),
    "attention in single precision": (lambda x: F.scaled_dot_product_attention(x, x, x), (2048, 16, 128, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_lie_as_on_cuda(name: str, sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES.of(sky).row, "type", "cuda")
    function, stride = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16)
    with torch.no_grad():
        found = function(x.to(sky))
        assert found.stride() == stride
        torch.testing.assert_close(found.abs().cpu(), function(x).abs(), rtol=1e-4, atol=1e-4)


def test_a_known_order_asks_for_nothing(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES.of(sky).row, "type", "cuda")
    x = torch.randn(3, 7, 11, device=sky)
    before = torch.sky.stats()["round_trips"]
    torch.fft.irfft(torch.fft.rfft2(x))
    torch.linalg.svd(x)
    torch.linalg.svdvals(x)
    assert torch.sky.stats()["round_trips"] == before
