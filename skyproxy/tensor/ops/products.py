"""Products of elements: gradients by the formula that PyTorch takes for tensors of its own.

PyTorch asks whether an element is zero and divides the product by each element where none is. Of a tensor class it does
not ask, and multiplies all other elements instead, which rounds otherwise; so it does where products are cumulative.
Here both are computed and the worker chooses, so that nobody waits; gradients of gradients wait, as on every device.
"""

from __future__ import annotations

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DispatchKey
from skyproxy.tensor.ops.own_gradients import put_gradient, takes_stock_gradient

_whole = torch.ops.aten.prod.default
_along = torch.ops.aten.prod.dim_int
_cumulative_backward = torch.ops.aten.cumprod_backward.default


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors and numbers that a forward keeps for its backward."""

    dim: int
    keeps_dim: bool
    saved_tensors: tuple[torch.Tensor, ...]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        result: torch.Tensor = _whole(x, dtype=dtype)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, result = ctx.saved_tensors
        if x.dim() == 0:
            return gradient, None
        x = x.to(gradient.dtype)
        zeros = x == 0
        if torch.is_grad_enabled() and not zeros.any().item():
            return _divide(gradient, x, result), None
        others = multiply_others(gradient, x.contiguous().view(-1), 0).view_as(x)
        if torch.is_grad_enabled():
            return others, None
        count = zeros.sum()
        return _choose(count == 0, _divide(gradient, x, result), others.masked_fill(count > 1, 0)), None


class _ProductAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        result: torch.Tensor = _along(x, dim, keepdim, dtype=dtype)
        ctx.dim, ctx.keeps_dim = dim, keepdim
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x, result), dim = ctx.saved_tensors, ctx.dim
        if x.dim() == 0:
            return gradient, None, None, None
        x = x.to(gradient.dtype)
        if not ctx.keeps_dim:
            gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
        has_zeros = (x == 0).any()
        if not torch.is_grad_enabled():
            found = _choose(~has_zeros, _divide(gradient, x, result), multiply_others(gradient, x, dim))
        elif has_zeros.item():
            found = multiply_others(gradient, x, dim)
        else:
            found = _divide(gradient, x, result)
        return found, None, None, None


def _cumulative_gradient(gradient: torch.Tensor, x: torch.Tensor, dim: int, result: torch.Tensor) -> object:
    """`aten::cumprod_backward`, which is PyTorch's whole formula, also where transforms have recorded it."""
    if type(x) is not RemoteTensor or takes_stock_gradient(gradient):
        return _cumulative_backward._op_dk(DispatchKey.CompositeImplicitAutograd, gradient, x, dim, result)
    if x.numel() == 0 or x.dim() == 0 or x.size(dim) == 1:
        return gradient
    if not torch.is_grad_enabled():
        return _divide_sums(gradient, x, result, dim)
    if not (x == 0).any().item():
        return _sum_backwards(result.conj() * gradient, dim) / x.conj()
    return _sum_products(gradient, x.conj(), dim)


def _divide(gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return gradient * (result / x).conj()


def _choose(is_divided: torch.Tensor, divided: torch.Tensor, multiplied: torch.Tensor) -> torch.Tensor:
    """Return one of two gradients, in the order of memory that one without zeros has locally.

    Of one with zeros that is row-major; which of the two it is, nobody knows before the worker has looked.
    """
    found = torch.where(is_divided, divided, multiplied)
    return found if found.stride() == divided.stride() else divided.copy_(found)


def multiply_others(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the gradient times the product of what comes before and after each element."""
    if x.numel() == 0:
        return gradient.expand_as(x)
    count = x.size(dim)
    if count == 1:
        return gradient
    size = list(x.shape)
    size[dim] = 1
    ones = torch.ones(size, dtype=gradient.dtype, device=gradient.device)
    before = torch.cat([ones, x.narrow(dim, 0, count - 1)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, count - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return gradient * (before * after).conj()


def _divide_sums(gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    """Return gradients of cumulative products: up to the first zero by division, and there by the products after it."""
    zeros, factors = x == 0, x.conj()
    counts = zeros.cumsum(dim)
    before, since = counts == 0, counts == 1
    sums = _sum_backwards((result.conj() * gradient).masked_fill(~before, 0), dim)
    divided = sums / factors
    if x.is_complex():  # ATen divides in place where there are zeros, and kernels round that otherwise
        divided = torch.where(zeros.any(), sums.div_(factors), divided)
    products = factors.masked_fill(zeros | ~since, 1).cumprod(dim) * gradient.masked_fill(~since, 0)
    # One number for each row, as ATen multiplies them: kernels round the complex ones of whole rows otherwise.
    first = since.max(dim, keepdim=True).indices
    previous = result.conj().gather(dim, (first - 1).relu_()).masked_fill_(first == 0, 1)
    at_zero = products.sum(dim, keepdim=True).mul_(previous)
    return torch.where(before, divided, torch.where(zeros & since, at_zero, 0))


def _sum_products(gradient: torch.Tensor, factors: torch.Tensor, dim: int) -> torch.Tensor:
    """Return gradients of cumulative products with zeros that can be differentiated: one sum for each place.

    That is PyTorch's formula for tensors of its own; for others it has another one from 2.14 on.
    """
    count, sums = factors.size(dim), []
    one = factors.new_ones(()).expand_as(factors.narrow(dim, 0, 1))
    for place in range(count):
        before = factors.narrow(dim, 0, place).prod(dim, keepdim=True) if place else one
        products = before
        if place < count - 1:
            after = factors.narrow(dim, place + 1, count - place - 1).cumprod(dim)
            products = torch.cat([before, before.expand_as(after) * after if place else after], dim)
        sums.append((gradient.narrow(dim, place, count - place) * products).sum(dim))
    return torch.stack(sums, dim)


def _sum_backwards(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


def install(library: torch.library.Library) -> None:
    """Put our gradients in the place of PyTorch's."""
    put_gradient(library, _whole, _Product, "ProdBackward0")
    put_gradient(library, _along, _ProductAlong, "ProdBackward1")
    library.impl(_cumulative_backward, _cumulative_gradient, "AutogradPrivateUse1")


__all__ = ["install", "multiply_others"]
