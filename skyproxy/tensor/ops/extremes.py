"""Extremes and medians of all elements: gradients by the formula that PyTorch takes for tensors of its own.

PyTorch fills the places of the extreme in a tensor of zeros. Of a tensor class it multiplies a mask, which has the
order of memory of the input, and makes NaN of an infinite gradient everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy.tensor.core.torch_private import OpOverload, name_gradients
from skyproxy.tensor.ops.products import call_stock, takes_stock

_OPS: dict[str, tuple[OpOverload, str]] = {
    "max": (torch.ops.aten.max.default, "MaxBackward1"),
    "min": (torch.ops.aten.min.default, "MinBackward1"),
    "median": (torch.ops.aten.median.default, "MedianBackward0"),
    "nanmedian": (torch.ops.aten.nanmedian.default, "NanmedianBackward0"),
}


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors that a forward keeps for its backward."""

    saved_tensors: tuple[torch.Tensor, torch.Tensor]


def _extreme(op: OpOverload, node: str) -> Callable[[torch.Tensor], torch.Tensor]:
    class Extreme(torch.autograd.Function):
        @staticmethod
        def forward(ctx: _Context, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = op(x)
            ctx.save_for_backward(x, result)
            return result

        @staticmethod
        def backward(ctx: _Context, gradient: torch.Tensor) -> torch.Tensor:
            x, result = ctx.saved_tensors
            with torch.no_grad():
                places = (x == result).logical_or_(x.isnan().logical_and_(result.isnan()))
            zeros = torch.zeros(x.shape, dtype=gradient.dtype, device=x.device)
            return zeros.masked_fill_(places, gradient / places.sum())

    name_gradients(Extreme, node)

    def extreme(x: torch.Tensor) -> torch.Tensor:
        if takes_stock(x):
            return call_stock(op, x)
        result: torch.Tensor = Extreme.apply(x)  # type: ignore[no-untyped-call]
        return result

    return extreme


def install(library: torch.library.Library) -> None:
    """Put our gradients in the place of PyTorch's."""
    for name, (op, node) in _OPS.items():
        library.impl(name, _extreme(op, node), "AutogradPrivateUse1")


__all__ = ["install"]
