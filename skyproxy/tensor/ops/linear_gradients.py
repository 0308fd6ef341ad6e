"""`aten::linear` as one operation and one node of the graph where its input and its weight are differentiated.

PyTorch divides it into views, a transpose and a product, each with a node of its own, except on devices with a kernel
for it, such as `mps`: there the node is `LinearBackward0`, whose gradients are `aten::linear_backward`. So it is here.
Forward the worker runs its own kernel; the gradients are the operations that PyTorch's nodes of the parts would record,
to the last bit, noted once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from skyproxy import torch_versions
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.torch_private import DispatchKey
from skyproxy.tensor.dispatch.memoized_calls import MemoizedCall

aten = torch.ops.aten
_calls = MemoizedCall(follows_caller=True)
_Mask = tuple[bool, bool, bool]
_divided = aten.linear.default._op_dk
_records_graphs = torch.is_grad_enabled
# The last of the parts of a layer with a bias is `aten::view`, and from 2.15 on `aten::_unsafe_view`.
_ENDS_IN_VIEW = torch_versions.minor(torch.__version__) < (2, 15)


def one_node(args: tuple[Any, ...]) -> object:
    """`aten::linear` with one node in the graph; None: it is to be divided.

    Where only one of input and weight requires gradients, the parts keep less for backward. And of what has gaps they
    keep the copy without. Where the last of the parts is a view, so is what is returned.

    Args:
        args: remote tensors, nothing of which has tangents, modes or transforms; a bias may be left out, or None.
    """
    x, weight = args[0], args[1]
    bias = args[2] if len(args) > 2 else None
    if not (x.requires_grad and weight.requires_grad and _records_graphs()):
        return None
    if not _is_usual(x._sky.meta, weight._sky.meta, None if bias is None else bias._sky.meta):
        return None
    result: torch.Tensor = _divided(DispatchKey.Autograd, *args)
    return result[...] if _ENDS_IN_VIEW and bias is not None and result.dim() > 2 else result


@lru_cache(maxsize=4096)
def _is_usual(x: Meta, weight: Meta, bias: Meta | None) -> bool:
    """Return whether PyTorch would take one product of all rows, without a copy."""
    rank = len(x.size)
    if rank < 2 or (rank > 3 and bias is not None) or len(weight.size) != 2 or 0 in x.size or 0 in weight.size:
        return False
    if not (x.plain and weight.plain and x.dtype is weight.dtype and x.size[-1] == weight.size[1]):
        return False
    if bias is not None and not (bias.plain and bias.dtype is x.dtype and bias.size == weight.size[:1]):
        return False
    expected = 1
    for size, stride in zip(reversed(x.size), reversed(x.stride), strict=True):
        if rank > 2 and stride != expected:
            return False
        expected *= size
    return True


def _gradients(x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: _Mask) -> tuple[torch.Tensor, ...]:
    """Return the gradients of input (..., in), weight (out, in) and bias (out), as far as they are wanted.

    The formulas are those of PyTorch's nodes for views, transposes, products and sums.
    """
    size, found = x.shape, []
    if len(size) > 2:
        rows = size.numel() // size[-1]
        gradient = gradient.reshape(rows, weight.shape[0])
        x = x.reshape(rows, size[-1])
    transposed = weight.t()
    if mask[0]:
        if _is_column_major(x):
            product = transposed.mm(gradient.t()).t()
        else:
            product = gradient.mm(transposed.t())
        found.append(product.reshape(size) if len(size) > 2 else product)
    if mask[1]:
        if _is_column_major(transposed):
            product = gradient.t().mm(x).t()
        else:
            product = x.t().mm(gradient)
        found.append(product.t())
    if mask[2]:
        found.append(gradient.sum([0], keepdim=True).view(gradient.shape[1:]))
    return tuple(found)


def _is_column_major(x: torch.Tensor) -> bool:
    first, second = x.stride()
    return first == 1 and second == x.shape[0]


def _fill_in(found: Any, mask: _Mask) -> tuple[torch.Tensor | None, ...]:
    if len(found) == 3:
        return found  # type: ignore[no-any-return]
    left = iter(found)
    return tuple([next(left) if is_wanted else None for is_wanted in mask])


def divided_gradients(
    x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    """`aten::linear_backward` in operations that can be differentiated, and that transforms see."""
    wanted = (mask[0], mask[1], mask[2])
    return _fill_in(_gradients(x, gradient, weight, wanted), wanted)


def _noted_gradients(
    x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    if _records_graphs():
        return divided_gradients(x, gradient, weight, mask)
    wanted = (mask[0], mask[1], mask[2])
    return _fill_in(_calls.call(lambda: _gradients(x, gradient, weight, wanted), (x, gradient, weight), wanted), wanted)


def install(library: torch.library.Library) -> None:
    """Put our gradients where PyTorch has none for this device."""
    library.impl(aten.linear_backward.default, _noted_gradients, "AutogradPrivateUse1")


__all__ = ["divided_gradients", "install", "one_node"]
