"""Gradients of products are those of the CPU, to the last bit."""

from __future__ import annotations

import pytest
import torch

INPUTS = {
    "no zero": lambda: torch.randn(3, 4),
    "one zero": lambda: torch.randn(3, 4).index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(0.0)),
    "zeros": lambda: torch.randn(3, 4) * torch.eye(3, 4),
    "a zero and an infinity": lambda: torch.tensor([[1.0, 0.0, 2.0], [3.0, float("inf"), 0.5]]),
    "turned": lambda: torch.randn(4, 3).t(),
    "one element": lambda: torch.randn(1),
    "a number": lambda: torch.randn(()),
    "none": lambda: torch.randn(0, 3),
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
    "half": lambda: torch.randn(6, dtype=torch.bfloat16),
}


def gradients(x: torch.Tensor, device: str, dim: int | None, keepdim: bool, again: bool) -> list[torch.Tensor]:
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x).requires_grad_()
    result = there.prod() if dim is None else there.prod(dim, keepdim)
    torch.manual_seed(1)
    given = torch.randn(result.shape, dtype=x.dtype).to(device).requires_grad_(again)
    (first,) = torch.autograd.grad(result, there, given, create_graph=again)
    second = (
        torch.autograd.grad(first.abs().sum(), (there, given), materialize_grads=True)
        if again and first.requires_grad
        else ()
    )
    return [t.detach().cpu() for t in (result, first, *second)]


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", INPUTS)
def test_gradients_are_those_of_the_cpu(name: str, again: bool, sky1: str) -> None:
    torch.manual_seed(0)
    x = INPUTS[name]()
    for dim in (None, 0, -1):
        for keepdim in (False, True) if dim is not None else (False,):
            theirs = gradients(x, "cpu", dim, keepdim, again)
            ours = gradients(x, sky1, dim, keepdim, again)
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs):
                assert a.dtype is b.dtype
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("stride", [(1, 3, 3), (12, 1, 3), (4, 7, 1)], ids=str)
def test_gradients_of_products_without_zeros_have_the_order_of_memory_of_the_cpus(
    stride: tuple[int, int, int], again: bool, sky1: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(40).as_strided((3, 1, 4), stride)
    for dim in (None, 0, -1):
        found = []
        for device in ("cpu", sky1):
            there = torch.empty_strided(x.shape, x.stride(), device=device).copy_(x).requires_grad_()
            result = there.prod() if dim is None else there.prod(dim)
            (first,) = torch.autograd.grad(result, there, torch.ones_like(result), create_graph=again)
            found.append((first.detach().cpu(), first.stride()))
        assert found[0][1] == found[1][1]
        assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", [*INPUTS, "two zeros", "zero first", "complex zeros"])
def test_gradients_of_cumulative_products_are_those_of_the_cpu(name: str, again: bool, sky1: str) -> None:
    torch.manual_seed(0)
    two = torch.randn(3, 7)
    two[0, 2] = two[0, 5] = two[2, 6] = 0
    two[1, 0] = -0.0
    zeros = torch.randn(5, 7, dtype=torch.complex64)
    zeros[1, 2] = zeros[3, 1] = zeros[3, 4] = 0
    if again:  # second derivatives of complex ones with zeros differ in the last bits
        zeros = zeros.real
    x = {"two zeros": two, "zero first": torch.tensor([0.0, 2.0, 3.0]), "complex zeros": zeros}.get(name)
    x = INPUTS[name]() if x is None else x
    for dim in (0, -1):
        found = []
        for device in ("cpu", sky1):
            there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x).requires_grad_()
            result = there.cumprod(dim)
            torch.manual_seed(1)
            given = torch.randn(x.shape, dtype=x.dtype).to(device).requires_grad_(again)
            (first,) = torch.autograd.grad(result, there, given, create_graph=again)
            second = torch.autograd.grad(first.abs().sum(), (there, given), materialize_grads=True) if again else ()
            found.append([t.detach().cpu() for t in (result, first, *second)])
        for a, b in zip(*found, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(
                torch.signbit(torch.view_as_real(a) if a.is_complex() else a),
                torch.signbit(torch.view_as_real(b) if b.is_complex() else b),
            )


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_a_vector_times_the_jacobian_of_a_cumulative_product_is_that_of_the_cpu(zeros: int, sky1: str) -> None:
    torch.manual_seed(0)
    x, given = torch.randn(6, 9), torch.randn(6, 9)
    x.view(-1)[7 : 7 + 8 * zeros : 8] = 0
    for dim in (0, -1):
        found = []
        for device in ("cpu", sky1):
            _, multiply = torch.func.vjp(lambda t, dim=dim: t.cumprod(dim), x.to(device))
            found.append(multiply(given.to(device))[0].cpu())
        assert torch.equal(*found)


def test_a_product_of_another_dtype_has_gradients_of_its_own(sky1: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, dtype=torch.bfloat16)
    found = []
    for device in ("cpu", sky1):
        there = x.to(device).requires_grad_()
        (gradient,) = torch.autograd.grad(there.prod(dtype=torch.float32), there)
        found.append(gradient.cpu())
    assert torch.equal(*found)


def test_backward_waits_for_nothing(sky1: str) -> None:
    x = torch.randn(3, 4).to(sky1).requires_grad_()
    (x.prod() + x.prod(1).sum()).backward()
    torch.sky.synchronize()
    before = torch.sky.stats()["round_trips"]
    (x.prod() + x.prod(1).sum()).backward()
    assert torch.sky.stats()["round_trips"] == before


def test_under_transforms_it_is_pytorchs_own(sky1: str) -> None:
    x = torch.arange(1.0, 5.0).to(sky1)
    assert torch.func.grad(torch.prod)(x).tolist() == [24.0, 12.0, 8.0, 6.0]
    assert torch.func.jacfwd(torch.prod)(x).tolist() == [24.0, 12.0, 8.0, 6.0]


def test_its_nodes_have_pytorchs_names(sky1: str) -> None:
    for device in ("cpu", sky1):
        x = torch.ones(2, 3, device=device, requires_grad=True)
        results = x.prod(), x.prod(1)  # before torch 2.13, nodes of Python end with what they are the history of
        nodes = [result.grad_fn for result in results]
        assert [type(node).__name__ for node in nodes] == ["ProdBackward0", "ProdBackward1"]
        assert [node.name() for node in nodes if node is not None] == ["ProdBackward0", "ProdBackward1"]
