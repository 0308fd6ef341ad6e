"""Gradients of `renorm` on CUDA workers: PyTorch's formula computes in double precision for devices other than CUDA.

There the norm is that of single precision, which also is the one to find the largest of single-precision numbers by.
"""

from __future__ import annotations

import torch

from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.ops.own_gradients import put_gradient

_op = torch.ops.aten.renorm.default


class _Context(torch.autograd.function.FunctionCtx):
    """Tensor and numbers that a forward keeps for its backward."""

    saved_tensors: tuple[torch.Tensor]
    options: tuple[float, int, float]


class _Renorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, p: float, dim: int, most: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.options = (p, dim, most)
        result: torch.Tensor = _op(x, p, dim, most)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), (p, dim, most) = ctx.saved_tensors, ctx.options
        again = torch.is_grad_enabled()
        source = x if again else x.detach().requires_grad_()
        others = [d for d in range(x.dim()) if d != dim % x.dim()]
        with torch.enable_grad():
            norm = torch.linalg.vector_norm(source, p, others, keepdim=True)
        weight = source.conj() * gradient if again else x.conj() * gradient
        weight = (weight.real if x.is_complex() else weight).sum(others, keepdim=True)
        (of_norm,) = torch.autograd.grad(norm, source, weight, create_graph=again)
        norm = norm if again else norm.detach()
        inverse = (norm + 1e-7).reciprocal()
        scaled = most * inverse * (gradient - inverse * of_norm)
        return torch.where(norm > most, scaled.to(gradient.dtype), gradient), None, None, None


def _is_alike_everywhere(x: torch.Tensor) -> bool:
    return x.dtype not in (torch.float32, torch.complex64) or DEVICES.of(x.device).row["type"] != "cuda"


def install(library: torch.library.Library) -> None:
    """Put our formula in the place of PyTorch's, for CUDA workers."""
    put_gradient(library, _op, _Renorm, "RenormBackward0", unless=_is_alike_everywhere)


__all__ = ["install"]
