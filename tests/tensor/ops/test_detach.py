"""Detached tensors hold the very value that they were detached from, and yet keep a look of their own."""

from __future__ import annotations

import pytest
import torch


def test_detach_sends_nothing(sky: str) -> None:
    x = torch.arange(6.0, device=sky, requires_grad=True)
    before = torch.sky.stats()["ops"]
    y = x.detach()
    assert torch.sky.stats()["ops"] == before
    assert not y.requires_grad
    y.add_(1)
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    assert x._version == y._version == 1
    assert x.data_ptr() == y.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.resize_(3, 4),
        lambda t: t.squeeze_().unsqueeze_(0),
        lambda t: t.transpose_(0, 1).add_(1),
        lambda t: t.as_strided_((2,), (1,), 1),
        lambda t: torch.cat([torch.ones(2, 3, device=t.device)] * 2, out=t),
    ],
    ids=["t_", "resize_", "unsqueeze_", "transpose_", "as_strided_", "out"],
)
@pytest.mark.parametrize("which", ["original", "detached"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_change_of_look_is_not_seen_by_the_other(sky1: str, change: object, which: str) -> None:
    pairs = []
    for device in (sky1, "cpu"):
        x = torch.arange(6.0).view(2, 3).to(device)
        y = x.detach()
        change(x if which == "original" else y)  # type: ignore[operator]
        x.mul_(2)
        pairs.append((x, y))
    for got, want in zip(*pairs, strict=True):
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        # PyTorch leaves memory that resize_ adds as it is.
        assert torch.equal(got.flatten()[:6].cpu(), want.flatten()[:6])


def test_the_value_lives_as_long_as_one_of_them(sky: str) -> None:
    x = torch.ones(3, device=sky)
    y = x.detach()
    del x
    filler = [torch.zeros(3, device=sky) for _ in range(20)]
    assert y.tolist() == [1, 1, 1]
    assert len(filler) == 20
