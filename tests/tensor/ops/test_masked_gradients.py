"""Gradients by masks are those of the CPU, with its order of memory."""

from __future__ import annotations

import pytest
import torch

INPUTS = {
    "turned": lambda: torch.randn(4, 3).t(),
    "batch of one": lambda: torch.randn(8, 4).as_strided((2, 1, 4), (4, 1, 1)),
    "equal elements": lambda: torch.tensor([[1.0, 3.0, 3.0], [1.0, 1.0, 2.0]]),
    "not a number": lambda: torch.tensor([1.0, float("nan"), float("nan"), 2.0]),
    "infinities": lambda: torch.tensor([float("inf"), -float("inf"), float("inf"), 1.0]),
    "a number": lambda: torch.randn(()),
    "half": lambda: torch.randn(6, dtype=torch.bfloat16),
}
NODES = {"max": "MaxBackward1", "min": "MinBackward1", "median": "MedianBackward0", "nanmedian": "NanmedianBackward0"}


@pytest.mark.parametrize("given", [1.5, float("inf"), float("nan"), -0.0], ids=str)
@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("which", INPUTS)
def test_gradients_are_those_of_the_cpu(which: str, name: str, given: float, sky1: str) -> None:
    torch.manual_seed(0)
    x = INPUTS[which]()
    found = []
    for device in ("cpu", sky1):
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x).requires_grad_()
        result = getattr(there, name)()
        gradient = torch.full((), given, dtype=x.dtype, device=device, requires_grad=True)
        (first,) = torch.autograd.grad(result, there, gradient, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), gradient)
        found.append([(t.detach().cpu(), t.stride(), t.dtype) for t in (result, first, second)])
    for (a, *look), (b, *other) in zip(*found, strict=True):
        assert look == other
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


@pytest.mark.parametrize("of_mask", [(3, 4), (4,), (2, 1, 1), (1, 4), ()], ids=str)
def test_gradients_of_masked_elements_are_those_of_the_cpu(of_mask: tuple[int, ...], sky1: str) -> None:
    torch.manual_seed(0)
    bits = torch.rand(of_mask) > 0.3
    for x in (
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(1, 4),
        torch.randn(3, 1).as_strided((3, 1), (1, 7)),
    ):
        found = []
        for device in ("cpu", sky1):
            there = torch.empty_strided(x.shape, x.stride(), device=device).copy_(x).requires_grad_()
            result = there.masked_select(bits.to(device))
            gradient = torch.arange(1.0, result.numel() + 1, device=device).requires_grad_()
            (first,) = torch.autograd.grad(result, there, gradient, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), gradient)
            found.append([(t.detach().cpu(), t.stride()) for t in (result, first, second)])
        for (a, look), (b, other) in zip(*found, strict=True):
            assert look == other
            assert torch.equal(a, b)


@pytest.mark.parametrize("learns", [False, True], ids=["", "input learns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_the_gradient_of_a_number_that_fills_a_mask_is_the_cpus(dtype: torch.dtype, learns: bool, sky1: str) -> None:
    torch.manual_seed(0)
    x, given = torch.randn(40, 90).to(dtype), torch.randn(40, 90).to(dtype)
    for bits in (torch.rand(40, 90) > 0.4, torch.rand(90) > 0.4, torch.zeros((), dtype=torch.bool)):
        found = []
        for device in ("cpu", sky1):
            there = x.to(device).requires_grad_(learns)
            value = torch.tensor(0.5, dtype=dtype).to(device).requires_grad_()
            gradient = given.to(device).requires_grad_()
            result = there.masked_fill(bits.to(device), value)
            wanted = (there, value) if learns else (value,)
            first = torch.autograd.grad(result, wanted, gradient, create_graph=True)
            second = torch.autograd.grad(sum(t.abs().square().sum() for t in first), gradient)
            found.append([t.detach().cpu() for t in (result, *first, *second)])
            assert type(result.grad_fn).__name__ == "MaskedFillBackward1"
        for a, b in zip(*found, strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)


def test_backward_waits_for_nothing(sky1: str) -> None:
    x = torch.randn(3, 4).to(sky1).requires_grad_()
    (x.max() + x.median()).backward()
    torch.sky.synchronize()
    before = torch.sky.stats()["round_trips"]
    (x.max() + x.median()).backward()
    assert torch.sky.stats()["round_trips"] == before


def test_under_transforms_it_is_pytorchs_own(sky1: str) -> None:
    x = torch.arange(1.0, 5.0).to(sky1)
    assert torch.func.grad(torch.max)(x).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert torch.func.jacfwd(torch.min)(x).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_its_nodes_have_pytorchs_names(sky1: str) -> None:
    for device in ("cpu", sky1):
        x = torch.ones(2, 3, device=device, requires_grad=True)
        results = {name: getattr(x, name)() for name in NODES}
        assert {name: type(result.grad_fn).__name__ for name, result in results.items()} == NODES
        chosen = x[x > 0], x.masked_select(x > 0)
        assert [type(t.grad_fn).__name__ for t in chosen] == ["IndexBackward0", "MaskedSelectBackward0"]


BATCHED = {
    **{name: lambda x, name=name: getattr(x, name)() for name in NODES},
    "masked_select": lambda x: x.masked_select(x.detach() > 1.5),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 1.5, x.mean()),
}


@pytest.mark.parametrize("name", BATCHED)
def test_gradients_of_several_gradients_at_once_are_those_of_the_cpu(name: str, sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        x = torch.tensor([[1.0, 3.0, 3.0], [1.0, 1.0, 2.0]], device=device).t().requires_grad_()
        result = BATCHED[name](x)
        gradients = torch.arange(1.0, 3 * result.numel() + 1).reshape(3, *result.shape).to(device)
        (of_x,) = torch.autograd.grad(result, x, gradients, is_grads_batched=True)
        found.append((of_x.cpu(), of_x.stride()))
    (a, look), (b, other) = found
    assert look == other
    assert torch.equal(a, b)


def test_nodes_have_the_edges_of_pytorchs_own(sky1: str) -> None:
    found = []
    for device in ("cpu", sky1):
        x, value = torch.ones(3, device=device, requires_grad=True), torch.zeros((), device=device, requires_grad=True)
        mask = torch.tensor([True, False, True], device=device)
        results = x.masked_select(mask), x.masked_fill(mask, value), x.max(), x.prod(), x.cumprod(0)
        found.append([[edge and type(edge).__name__ for edge, _ in r.grad_fn.next_functions] for r in results])
        mask.logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[0].sum().backward()
    assert found[0] == found[1]
