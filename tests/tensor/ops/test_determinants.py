"""Gradients of determinants are those of the CPU, to the last bit, however often they are differentiated."""

from __future__ import annotations

import pytest
import torch

SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
MATRICES = {
    "one": lambda: torch.randn(4, 4),
    "batch": lambda: torch.randn(3, 2, 3, 3),
    "turned": lambda: torch.randn(3, 3).t(),
    "of columns": lambda: torch.randn(2, 3, 3).mT.contiguous().mT,
    "one element": lambda: torch.randn(1, 1),
    "singular": lambda: SINGULAR.clone(),
    "zero": lambda: torch.zeros(3, 3),
    "some singular": lambda: torch.stack([torch.eye(2), SINGULAR, torch.randn(2, 2)]),
    "complex": lambda: torch.randn(2, 3, 3, dtype=torch.complex64),
    "double": lambda: torch.randn(5, 5, dtype=torch.double),
    "none": lambda: torch.randn(0, 3, 3),
    "of no rows": lambda: torch.randn(2, 0, 0),
}


def gradients(x: torch.Tensor, device: str, times: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x).requires_grad_()
    y = torch.linalg.det(there)
    found = [y]
    for again in reversed(range(times)):
        real = torch.view_as_real(y) if y.is_complex() else y
        weights = torch.arange(1.0, real.numel() + 1, device=device).reshape(real.shape).cos().to(real.dtype)
        (y,) = torch.autograd.grad((real * weights).sum(), there, create_graph=again > 0, materialize_grads=True)
        found.append(y)
        if not y.requires_grad:
            break
    return [(t.detach().cpu(), t.stride()) for t in found]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("name", MATRICES)
def test_gradients_are_those_of_the_cpu(name: str, times: int, sky1: str) -> None:
    torch.manual_seed(0)
    x = MATRICES[name]()
    for (a, look), (b, other) in zip(gradients(x, "cpu", times), gradients(x, sky1, times), strict=True):
        assert look == other
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_backward_waits_for_nothing(sky1: str) -> None:
    x = torch.randn(3, 3).to(sky1).requires_grad_()
    torch.linalg.det(x).backward()
    torch.sky.synchronize()
    before = torch.sky.stats()["round_trips"]
    torch.linalg.det(x).backward()
    assert torch.sky.stats()["round_trips"] == before


def test_its_node_has_pytorchs_name(sky1: str) -> None:
    for device in ("cpu", sky1):
        x = torch.eye(2, device=device, requires_grad=True)
        result = torch.linalg.det(x)
        assert type(result.grad_fn).__name__ == "LinalgDetBackward0"


def test_under_transforms_it_is_pytorchs_own(sky1: str) -> None:
    x = torch.eye(2).to(sky1)
    assert torch.func.grad(torch.linalg.det)(x).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert torch.func.jacfwd(torch.linalg.det)(x).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_gradients_of_several_gradients_at_once_are_those_of_the_cpu(sky1: str) -> None:
    matrices = torch.tensor([[[1.0, 2.0], [3.0, 5.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.5, 1.0], [7.0, -2.0]]])
    gradients = torch.arange(1.0, 7.0).reshape(2, 3)
    found = []
    for device in ("cpu", sky1):
        x = matrices.to(device).requires_grad_()
        options = {"is_grads_batched": True, "create_graph": True}
        (of_x,) = torch.autograd.grad(torch.linalg.det(x), x, gradients.to(device), **options)
        found.append(of_x.detach().cpu())
    torch.testing.assert_close(*found)
