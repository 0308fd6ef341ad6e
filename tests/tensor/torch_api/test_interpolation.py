"""`interpolate` under deterministic algorithms has the bits of the worker's own kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from skyproxy.tensor.torch_api import interpolation as module_under_test


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("mode", "size"), [("bilinear", (1, 2, 5, 5)), ("trilinear", (1, 2, 3, 4, 5))])
@pytest.mark.parametrize("align_corners", [True, False])
def test_deterministic_interpolation_has_the_bits_of_the_cpu(
    mode: str, size: tuple[int, ...], align_corners: bool, sky1: str
) -> None:
    results = []
    for device in ("cpu", sky1):
        x = torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu").to(device).requires_grad_()
        larger = F.interpolate(x, scale_factor=2.5, mode=mode, align_corners=align_corners)
        (gradient,) = torch.autograd.grad(larger.square().sum(), x)
        results.append((larger.detach().cpu(), gradient.cpu()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


def test_other_devices_are_computed_as_before() -> None:
    x = torch.randn(1, 2, 5, 5, device="cpu")
    calls = []
    interpolate = module_under_test._with_the_workers_kernel(lambda input, *rest: calls.append(rest) or input)
    assert interpolate(x, [7, 7], False, None) is x
    assert calls == [([7, 7], False, None)]
