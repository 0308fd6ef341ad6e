"""Determinants: gradients that are differentiated again, by the formula that PyTorch takes for tensors of its own.

It solves for the gradient where a matrix has an inverse, and decomposes singular values where it has none. Of a tensor
class it does not ask which, and decomposes, which rounds otherwise. Here it is asked, and waits, as on every device;
gradients that nobody differentiates wait for nothing.
"""

from __future__ import annotations

import torch

from skyproxy.tensor.ops.own_gradients import put_gradient, takes_stock_gradient
from skyproxy.tensor.ops.products import multiply_others

_op = torch.ops.aten._linalg_det.default
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors that a forward keeps for its backward."""

    saved_tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class _Determinant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, matrix: torch.Tensor) -> Tensors:
        result, factors, pivots = _op(matrix)
        ctx.save_for_backward(matrix, result, factors, pivots)
        ctx.mark_non_differentiable(factors, pivots)
        ctx.set_materialize_grads(False)
        return result, factors, pivots

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor | None, *unused: object) -> torch.Tensor | None:
        matrix, result, factors, pivots = ctx.saved_tensors
        if gradient is None:
            return None
        scaled = gradient * result.conj()
        diagonal = torch.diag_embed(scaled.unsqueeze(-1).expand_as(pivots)).mT
        epsilon = torch.finfo(factors.dtype).eps
        if torch.is_grad_enabled():
            return _differentiable_gradient(matrix, diagonal, gradient, result.abs() < 100.0 * epsilon)
        # What is singular is moved a little: a determinant is smooth.
        moved = factors + torch.diag_embed(torch.where(factors.diagonal(0, -2, -1) == 0.0, epsilon, 0.0))
        adjoint = matrix.is_complex() or not matrix.is_contiguous()
        found: torch.Tensor = torch.linalg.lu_solve(moved, pivots, diagonal, left=True, adjoint=adjoint)
        return found


def _differentiable_gradient(
    matrix: torch.Tensor, diagonal: torch.Tensor, gradient: torch.Tensor, is_singular: torch.Tensor
) -> torch.Tensor:
    count = int(is_singular.sum().item())
    if count == 0:
        return _solve(matrix, diagonal)
    if count == is_singular.numel():
        return _decompose(matrix, gradient)
    others = ~is_singular
    found = torch.empty_like(matrix)
    parts = (
        (is_singular, _decompose(matrix[is_singular], gradient[is_singular])),
        (others, _solve(matrix[others], diagonal[others])),
    )
    for where, part in parts:
        found = found.index_put((where,), part) if takes_stock_gradient(gradient) else found.index_put_((where,), part)
    return found


def _solve(matrix: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.solve(matrix.mH, diagonal)
    return found


def _decompose(matrix: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient by the adjugate of a matrix, https://nhigham.com/2020/06/16/what-is-the-adjugate-of-a-matrix/."""
    left, values, right = torch.linalg.svd(matrix)
    of_right = torch.linalg.det(right)  # right operands first, as the compiler of PyTorch's binaries has it
    scale = (torch.linalg.det(left) * of_right).conj() * gradient
    others = multiply_others(scale.unsqueeze(-1), values, values.dim() - 1)
    found: torch.Tensor = (left * others.unsqueeze(-2)).matmul(right)
    return found


def _solves_nothing(matrix: torch.Tensor) -> bool:
    return matrix.numel() == 0 or matrix.size(-1) == 1


def install(library: torch.library.Library) -> None:
    """Put our gradient in the place of PyTorch's."""
    put_gradient(library, _op, _Determinant, "LinalgDetBackward0", unless=_solves_nothing)


__all__ = ["install"]
