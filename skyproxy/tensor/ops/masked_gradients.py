"""Gradients by masks, by the formulas that PyTorch takes for tensors of its own.

For tensor classes it takes others, which write nothing in place and ask for no values. Of an extreme or a median of all
elements that multiplies a mask, which has the order of memory of the input, and makes NaN of an infinite gradient
everywhere else; of the elements of a mask it makes a row-major copy; of a number that fills a mask it sums zeros, too,
in another order. To sum what the mask has alone waits, as on every device.
"""

from __future__ import annotations

import torch

from skyproxy.tensor.core.torch_private import OpOverload, broadcast_two
from skyproxy.tensor.ops.own_gradients import put_gradient, takes_stock_gradient

_EXTREMES: dict[OpOverload, str] = {
    torch.ops.aten.max.default: "MaxBackward1",
    torch.ops.aten.min.default: "MinBackward1",
    torch.ops.aten.median.default: "MedianBackward0",
    torch.ops.aten.nanmedian.default: "NanmedianBackward0",
}
_selected = torch.ops.aten.masked_select.default
_filled = torch.ops.aten.masked_fill.Tensor


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors that a forward keeps for its backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]


def _extreme(op: OpOverload) -> type[torch.autograd.Function]:
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
            if takes_stock_gradient(gradient):
                return (gradient / places.sum()) * places
            zeros = torch.zeros(x.shape, dtype=gradient.dtype, device=x.device)
            return zeros.masked_fill_(places, gradient / places.sum())

    return Extreme


class _Selection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, mask: tuple[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = _selected(x, *mask)
        ctx.save_for_backward(x, *mask)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, mask = ctx.saved_tensors
        spread = x.detach().expand(broadcast_two(x.shape, mask.shape))
        zeros = torch.zeros_like(spread)
        write = zeros.masked_scatter if takes_stock_gradient(gradient) else zeros.masked_scatter_
        return write(mask, gradient).sum_to_size(x.shape), None


class _Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, mask: tuple[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _filled(x, *mask, value)
        ctx.save_for_backward(*mask)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor]:
        (mask,) = ctx.saved_tensors
        of_x = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return of_x, None, gradient.masked_select(mask).sum()


def install(library: torch.library.Library) -> None:
    """Put our gradients in the place of PyTorch's."""
    for op, node in _EXTREMES.items():
        put_gradient(library, op, _extreme(op), node)
    put_gradient(library, _filled, _Filling, "MaskedFillBackward1", tensors=3, of=2, masked=True)
    put_gradient(library, _selected, _Selection, "MaskedSelectBackward0", tensors=2, masked=True)


__all__ = ["install"]
