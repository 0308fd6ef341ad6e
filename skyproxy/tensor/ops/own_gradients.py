"""Gradients of our own in the place of PyTorch's, whose formulas for tensor classes round otherwise than those it takes
for tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    DispatchKey,
    OpOverload,
    function_transform_level,
    is_forward_ad_active,
    name_gradients,
)


def wants_stock_formula() -> bool:
    """Return whether PyTorch's own formula is wanted: transforms and tangents know no other."""
    return function_transform_level() is not None or is_forward_ad_active()


def takes_stock_gradient(gradient: torch.Tensor) -> bool:
    """Return whether nothing may be written in place with a gradient: it is a batch of them, or of another class."""
    return type(gradient) is not RemoteTensor or function_transform_level() is not None


def call_stock(op: OpOverload, *args: object, **options: object) -> object:
    """Run PyTorch's own autograd kernel, in whose place ours is registered."""
    return op._op_dk(DispatchKey.Autograd, *args, **options)


def put_gradient(
    library: torch.library.Library,
    op: OpOverload,
    function: type[torch.autograd.Function],
    node: str,
    *,
    tensors: int = 1,
    of: int = 0,
    masked: bool = False,
    unless: Callable[[torch.Tensor], bool] | None = None,
) -> None:
    """Have an op differentiated by a function of ours, where one tensor is remote and requires gradients.

    Args:
        library: where kernels are registered.
        op: the op.
        function: what runs and differentiates it; `forward` takes all of the op's arguments by position.
        node: PyTorch's own name of the node in graphs.
        tensors: how many of the op's first arguments are tensors; PyTorch's own formula is for any that is not remote.
        of: the position of the tensor.
        masked: the second argument is a mask, to which PyTorch's node has no edge; `forward` takes it in a tuple.
        unless: asks the first argument whether PyTorch's own formula is wanted nevertheless.
    """
    name_gradients(function, node)
    arguments: Sequence[torch.Argument] = op._schema.arguments

    def differentiated(*args: torch.Tensor, **options: object) -> object:
        if (
            type(args[0]) is not RemoteTensor
            or not (torch.is_grad_enabled() and args[of].requires_grad)
            or (tensors > 1 and any(type(a) is not RemoteTensor for a in args[1:tensors]))
            or wants_stock_formula()
            or (unless is not None and unless(args[0]))
        ):
            return call_stock(op, *args, **options)
        rest = (options.get(a.name, a.default_value) for a in arguments[len(args) :])
        return function.apply(args[0], (args[1],), *args[2:]) if masked else function.apply(*args, *rest)

    library.impl(op, differentiated, "AutogradPrivateUse1")


__all__ = ["call_stock", "put_gradient", "takes_stock_gradient", "wants_stock_formula"]
