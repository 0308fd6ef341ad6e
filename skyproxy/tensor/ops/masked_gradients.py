"""Gradients by masks, by the formulas that PyTorch takes for tensors of its own.

For tensor classes it takes others, which write nothing in place and ask for no values. Of an extreme or a median of all
elements that multiplies a mask, which has the order of memory of the input, and makes NaN of an infinite gradient
everywhere else; of the elements of a mask it makes a row-major copy; of a number that fills a mask it sums zeros, too,
in another order. To sum what the mask has alone waits, as on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload, name_gradients
from skyproxy.tensor.ops.products import call_stock, takes_stock, takes_stock_gradient

_EXTREMES: dict[str, tuple[OpOverload, str]] = {
    "max": (torch.ops.aten.max.default, "MaxBackward1"),
    "min": (torch.ops.aten.min.default, "MinBackward1"),
    "median": (torch.ops.aten.median.default, "MedianBackward0"),
    "nanmedian": (torch.ops.aten.nanmedian.default, "NanmedianBackward0"),
}
_selected = torch.ops.aten.masked_select.default
_filled = torch.ops.aten.masked_fill.Tensor


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors that a forward keeps for its backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[torch.Tensor, ...]


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
            if takes_stock_gradient(gradient):
                return (gradient / places.sum()) * places
            zeros = torch.zeros(x.shape, dtype=gradient.dtype, device=x.device)
            return zeros.masked_fill_(places, gradient / places.sum())

    name_gradients(Extreme, node)

    def extreme(x: torch.Tensor) -> torch.Tensor:
        if takes_stock(x):
            return call_stock(op, x)
        result: torch.Tensor = Extreme.apply(x)  # type: ignore[no-untyped-call]
        return result

    return extreme


class _Selection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _selected(x, mask)
        ctx.save_for_backward(x, mask)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, mask = ctx.saved_tensors
        spread = x.detach().expand(torch._C._infer_size(x.shape, mask.shape))
        zeros = torch.zeros_like(spread)
        write = zeros.masked_scatter if takes_stock_gradient(gradient) else zeros.masked_scatter_
        return write(mask, gradient).sum_to_size(x.shape), None


name_gradients(_Selection, "MaskedSelectBackward0")


def selected(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`aten::masked_select` where gradients may be wanted; see there."""
    if takes_stock(x) or type(mask) is not RemoteTensor:
        return call_stock(_selected, x, mask)
    result: torch.Tensor = _Selection.apply(x, mask)  # type: ignore[no-untyped-call]
    return result


class _Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _filled(x, mask, value)
        ctx.save_for_backward(mask)
        return result

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor]:
        (mask,) = ctx.saved_tensors
        of_x = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return of_x, None, gradient.masked_select(mask).sum()


name_gradients(_Filling, "MaskedFillBackward1")


def filled(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`aten::masked_fill.Tensor` where gradients may be wanted; see there."""
    if takes_stock(value) or type(x) is not RemoteTensor or type(mask) is not RemoteTensor:
        return call_stock(_filled, x, mask, value)
    result: torch.Tensor = _Filling.apply(x, mask, value)  # type: ignore[no-untyped-call]
    return result


def install(library: torch.library.Library) -> None:
    """Put our gradients in the place of PyTorch's."""
    for name, (op, node) in _EXTREMES.items():
        library.impl(name, _extreme(op, node), "AutogradPrivateUse1")
    library.impl("masked_fill.Tensor", filled, "AutogradPrivateUse1")
    library.impl("masked_select", selected, "AutogradPrivateUse1")


__all__ = ["install"]
