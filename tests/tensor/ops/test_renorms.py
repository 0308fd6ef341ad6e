"""Gradients of `renorm` on a device that says that it is CUDA's."""

from __future__ import annotations

import pytest
import torch

from skyproxy.tensor.core.devices import DEVICES


@pytest.mark.parametrize("p", [1, 2, 3.5, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_are_those_of_single_precision(
    sky: str, monkeypatch: pytest.MonkeyPatch, p: float, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(DEVICES.of(sky).row, "type", "cuda")
    torch.manual_seed(0)
    values, weights = torch.randn(4, 3, 5, dtype=dtype), torch.randn(4, 3, 5, dtype=dtype)
    results = []
    # In double precision the CPU computes as CUDA does; in single precision, by norms of double precision.
    for device, precision in ((sky, dtype), ("cpu", torch.complex128 if dtype.is_complex else torch.float64)):
        x = values.to(device, precision).requires_grad_()
        result = torch.renorm(x, p, 1, 0.5)
        assert type(result.grad_fn).__name__ == "RenormBackward0"
        (first,) = torch.autograd.grad((result * weights.to(device)).abs().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.abs().square().sum(), x)
        results.append([each.detach().cpu().to(dtype) for each in (result, first, second)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_cpu_worker_has_the_cpus_formula(sky: str) -> None:
    values, gradients = torch.randn(4, 3, 5), []
    for device in (sky, "cpu"):
        x = values.to(device).requires_grad_()
        torch.renorm(x, 2, 1, 0.5).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)
