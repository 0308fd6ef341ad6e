"""Zeros that C++ knows to be zeros, as PyTorch's tangents are where there are none, are zeros as on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

INFINITY = float("inf")


def zeros(device: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch._efficientzerotensor(size or (2, 3), dtype=dtype, device=device)


def ones(device: str, *size: int) -> torch.Tensor:
    return torch.ones(size or (2, 3), device=device)


OPERATIONS: dict[str, Callable[[str], torch.Tensor]] = {
    "zeros themselves": zeros,
    "a product": lambda d: zeros(d) * (ones(d) * INFINITY),
    "a product with a number": lambda d: zeros(d) * INFINITY,
    "a number on the CPU times zeros": lambda d: torch.tensor(INFINITY) * zeros(d),
    "a sum": lambda d: zeros(d) + ones(d),
    "a sum with a number": lambda d: zeros(d) + 1,
    "a difference": lambda d: ones(d) - zeros(d),
    "a quotient": lambda d: zeros(d) / ones(d),
    "an inner product": lambda d: torch.dot(zeros(d, 3), ones(d, 3) * INFINITY),
    "a cross product": lambda d: torch.linalg.cross(zeros(d), ones(d) * INFINITY),
    "a matrix product": lambda d: zeros(d) @ ones(d, 3, 2),
    "negative zeros": lambda d: -zeros(d),
    "a reduction": lambda d: zeros(d).sum(0),
    "a list": lambda d: torch.cat([zeros(d), ones(d)]),
    "a copy": lambda d: zeros(d).clone(),
    "a copy of another dtype": lambda d: zeros(d).double() * INFINITY,
    "copied into another": lambda d: ones(d).copy_(zeros(d)),
    "zeros like zeros": lambda d: torch.zeros_like(zeros(d)),
    "ones like zeros": lambda d: torch.full_like(zeros(d), 1),
    "detached": lambda d: zeros(d).detach(),
    "transposed": lambda d: zeros(d).t(),
    "of another shape": lambda d: zeros(d).view(3, 2),
    "flattened": lambda d: zeros(d).reshape(-1) * INFINITY,
    "copied to another shape": lambda d: zeros(d).t().reshape(6),
    "of other strides": lambda d: zeros(d).as_strided((2,), (2,)) * INFINITY,
    "a row": lambda d: zeros(d)[1] * INFINITY,
    "a part": lambda d: zeros(d)[:, 1:],
    "one of several views": lambda d: zeros(d).unbind()[1] * INFINITY,
    "expanded": lambda d: zeros(d).expand(4, 2, 3) * INFINITY,
    "a view of a view": lambda d: zeros(d).unsqueeze(0).movedim(0, 2).squeeze().diagonal() * INFINITY,
    "windows": lambda d: zeros(d).unfold(1, 2, 1),
    "other bits": lambda d: zeros(d).view(torch.int32),
    "conjugate numbers": lambda d: zeros(d, 2, dtype=torch.complex64).conj() * 2,
    "imaginary parts": lambda d: zeros(d, 2, dtype=torch.complex64).imag * INFINITY,
    "turned in place": lambda d: zeros(d).transpose_(0, 1) * INFINITY,
    "a parameter": lambda d: torch.nn.Parameter(zeros(d)) * INFINITY,
    "a view under vmap": lambda d: torch.func.vmap(lambda x: x * zeros(d).view(6)[:3])(ones(d) * INFINITY),
    "a loop's variable": lambda d: torch.func.vmap(lambda x: x * INFINITY)(zeros(d)),
    "in inference mode": torch.inference_mode()(lambda d: zeros(d).view(6) * INFINITY),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_the_cpu(name: str, sky1: str) -> None:
    local, remote = OPERATIONS[name]("cpu"), OPERATIONS[name](sky1)
    assert remote._is_zerotensor() == local._is_zerotensor()
    assert (remote.stride(), remote.dtype, remote.device) == (local.stride(), local.dtype, torch.device(sky1))
    # Clones are asked for by the fallback of C++: what comes here is no ZeroTensor.
    values, expected = remote.detach().cpu(), local.detach().clone()
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())
    if not values.is_complex():
        assert torch.equal(values.signbit() & ~values.isnan(), expected.signbit() & ~expected.isnan())


CHANGES: dict[str, Callable[[str], object]] = {
    "a sum in place": lambda d: zeros(d).add_(1),
    "in place in a view": lambda d: zeros(d)[0].fill_(1),
    "a copy": lambda d: zeros(d).copy_(ones(d)),
    "an item": lambda d: zeros(d).__setitem__(0, 1.0),
    "a list": lambda d: torch._foreach_add_([zeros(d)], 1),
    "out=": lambda d: torch.add(ones(d), 1, out=zeros(d)),
    "another storage": lambda d: zeros(d).set_(ones(d)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_zeros_are_immutable_in_pytorchs_words(name: str, sky1: str) -> None:
    for device in ("cpu", sky1):
        with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
            CHANGES[name](device)


def test_zeros_are_read_printed_and_copied_like_any_tensor(sky1: str) -> None:
    x = zeros(sky1)
    assert x.tolist() == [[0.0] * 3] * 2
    assert x[0, 0].item() == 0.0
    assert repr(x) == repr(torch.zeros(2, 3, device=sky1))
    assert torch.equal(copy.deepcopy(x).cpu(), torch.zeros(2, 3))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded.add_(1).cpu(), torch.ones(2, 3))


def at_infinity(device: str) -> torch.Tensor:
    return torch.tensor([0.0, INFINITY, float("nan"), 1.0], device=device)


DERIVATIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "second derivatives of an entropy at zero": lambda x: torch.func.hessian(lambda y: torch.special.entr(y).sum())(x),
    "second derivatives by forward mode alone": lambda x: torch.func.jacfwd(torch.func.jacfwd(torch.special.entr))(x),
    "a product of which one has no tangent": lambda x: torch.func.jvp(lambda y: y * x, (x,), (x,))[1],
    "a tangent that is missing": lambda x: torch.func.jvp(lambda y: torch.addcmul(y, x, x), (x,), (x,))[1],
    "a tangent of a gradient": lambda x: torch.func.jvp(torch.func.grad(lambda y: torch.xlogy(y, x).sum()), (x,), (x,)),
    "normalized": lambda x: torch.func.jacfwd(torch.func.jacfwd(lambda y: torch.layer_norm(y, (4,), x, x)))(x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_is_the_cpus_where_a_tangent_is_missing(name: str, sky1: str) -> None:
    found = torch.utils._pytree.tree_leaves(DERIVATIVES[name](at_infinity(sky1)))
    expected = torch.utils._pytree.tree_leaves(DERIVATIVES[name](at_infinity("cpu")))
    for remote, local in zip(found, expected, strict=True):
        values = remote.cpu()
        assert torch.equal(values.isnan(), local.isnan())
        assert torch.equal(values.nan_to_num(), local.nan_to_num())
        assert torch.equal(values.signbit() & ~values.isnan(), local.signbit() & ~local.isnan())


def test_a_missing_tangent_stays_zero_in_a_captured_program(sky1: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda y: torch.addcmul(y, x, x), (x,), (x,))[1]

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    found = compiled(at_infinity(sky1)).cpu()
    assert torch.equal(found.nan_to_num(), program(at_infinity("cpu")).nan_to_num())


def test_gradients_that_are_zeros_are_those_of_the_cpu(sky1: str) -> None:
    for device in ("cpu", sky1):
        x = torch.linspace(-1, 1, 4, device=device).requires_grad_()
        x.sgn().sum().backward()
        assert x.grad is not None
        assert x.grad._is_zerotensor()
        with pytest.raises(RuntimeError, match="immutable"):
            x.grad += 1
        assert x.grad.clone().tolist() == [0.0] * 4
        assert (x.grad + 1).tolist() == [1.0] * 4
        x.grad = x.grad.clone()
        x.grad += 1
        assert x.grad.tolist() == [1.0] * 4
