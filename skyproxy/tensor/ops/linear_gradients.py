"""`aten::linear` as one operation and one node of the graph where its input and its weight are differentiated.

PyTorch divides it into views, a transpose and a product, each with a node of its own, except on devices with a kernel
for it, such as `mps`: there the node is `LinearBackward0`, whose gradients are `aten::linear_backward`. So it is here.
Forward the worker runs its own kernel; the gradients are the operations that PyTorch's nodes of the parts would record,
to the last bit, noted once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from skyproxy import torch_versions
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.torch_private import DispatchKey, engine_task, node_that_runs, will_run
from skyproxy.tensor.dispatch.memoized_calls import MemoizedCall

aten = torch.ops.aten
_calls = MemoizedCall(follows_caller=True)
_Mask = tuple[bool, bool, bool]
_Junctions = dict[str, "_Junction"]
_Make = Callable[[torch.Tensor], torch.Tensor]
_Left = dict[int, torch.Tensor]  # a gradient of the view, by the task of the engine
_divided = aten.linear.default._op_dk
_records_graphs = torch.is_grad_enabled
_JUNCTIONS = "skyproxy: junctions"  # where a node's metadata has them
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


def _rows(x: torch.Tensor) -> torch.Tensor:
    size = x.shape
    return x.reshape(size.numel() // size[-1], size[-1]) if len(size) > 2 else x


def _gradients(
    x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: _Mask, junctions: _Junctions | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input (..., in), weight (out, in) and bias (out), as far as they are wanted.

    The formulas are those of PyTorch's nodes for views, transposes, products and sums.

    Args:
        junctions: those of the layer's node, by the operand; None: gradients meet nowhere.
    """
    size = x.shape
    found: list[torch.Tensor | None] = []
    if len(size) > 2:
        gradient = _rows(gradient)
        x = _view(x, _rows, "x", junctions)
    transposed = _view(weight, torch.t, "weight", junctions)
    if mask[0]:
        if _is_column_major(x):
            product = transposed.mm(gradient.t()).t()
        else:
            product = gradient.mm(transposed.t())
        if _is_left_to_meet(product, "x", junctions):
            found.append(None)
        else:
            found.append(product.reshape(size) if len(size) > 2 else product)
    if mask[1]:
        if _is_column_major(transposed):
            product = gradient.t().mm(x).t()
        else:
            product = x.t().mm(gradient)
        found.append(None if _is_left_to_meet(product, "weight", junctions) else product.t())
    if mask[2]:
        found.append(gradient.sum([0], keepdim=True).view(gradient.shape[1:]))
    return tuple(found)


class _Meeting(torch.autograd.Function):
    """A view of an operand whose node adds what a layer left for it."""

    @staticmethod
    def forward(ctx: Any, operand: torch.Tensor, make: _Make, left: _Left) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.left, ctx.transposes, ctx.size = left, make is torch.t, operand.shape
        return make(operand)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        found = ctx.left.pop(engine_task(), None)
        if found is not None:
            gradient = found if gradient is None else gradient + found
        if gradient is not None:
            gradient = gradient.t() if ctx.transposes else gradient.reshape(ctx.size)
        return gradient, None, None


class _Junction:
    """Meeting place of the gradients of one operand of a layer: that of the layer, and those of the layer's backward.

    In PyTorch's parts that is the node of the operand's view. Of a weight that several layers use, each layer's
    gradients are summed there, and then the layers'; in another order the last bits differ.

    Attributes:
        view: what the layer's backward takes in place of the operand.
    """

    __slots__ = ("_left", "view")

    def __init__(self, operand: torch.Tensor, make: _Make) -> None:
        self._left: _Left = {}
        self.view: torch.Tensor = _Meeting.apply(operand, make, self._left)  # type: ignore[no-untyped-call]
        layer = node_that_runs()
        # The engine takes the latest first: right after the layer, and after all that adds to the view's gradient.
        self._node()._set_sequence_nr(layer._sequence_nr() - 1)  # type: ignore[union-attr]

    def _node(self) -> torch.autograd.graph.Node | None:
        return self.view.grad_fn

    def leave(self, gradient: torch.Tensor) -> bool:
        """Leave the gradient of the view to its node, if that is going to run."""
        if not will_run(self._node()):
            return False
        self._left[engine_task()] = gradient
        return True


def _view(operand: torch.Tensor, make: _Make, name: str, junctions: _Junctions | None) -> torch.Tensor:
    """Return a view of an operand; where backward is differentiated, each time the same one for a layer."""
    if junctions is None or not (_records_graphs() and operand.requires_grad):
        return make(operand)
    junction = junctions.get(name)
    if junction is None:
        junctions[name] = junction = _Junction(operand, make)
    return junction.view


def _is_left_to_meet(gradient: torch.Tensor, name: str, junctions: _Junctions | None) -> bool:
    junction = None if junctions is None else junctions.get(name)
    return junction is not None and junction.leave(gradient)


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
    """`aten::linear_backward` in operations that transforms see."""
    wanted = (mask[0], mask[1], mask[2])
    return _fill_in(_gradients(x, gradient, weight, wanted, None), wanted)


def _noted_gradients(
    x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    wanted = (mask[0], mask[1], mask[2])
    node = node_that_runs()
    junctions: _Junctions | None = None if node is None else node.metadata.get(_JUNCTIONS)
    if _records_graphs():
        if junctions is None and node is not None and node.name() == "LinearBackward0":
            junctions = node.metadata[_JUNCTIONS] = {}
    elif junctions is None:
        return _fill_in(
            _calls.call(lambda: _gradients(x, gradient, weight, wanted, None), (x, gradient, weight), wanted), wanted
        )
    return _fill_in(_gradients(x, gradient, weight, wanted, junctions), wanted)


def install(library: torch.library.Library) -> None:
    """Put our gradients where PyTorch has none for this device."""
    library.impl(aten.linear_backward.default, _noted_gradients, "AutogradPrivateUse1")


__all__ = ["divided_gradients", "install", "one_node"]
