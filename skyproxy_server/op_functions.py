"""The function that runs an operator for a client: PyTorch's own, or the checked form that stands in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch

from skyproxy_server.forward_checks import overlaps
from skyproxy_server.op_overrides import CPU_OVERRIDES
from skyproxy_server.safe_forms import SAFE_FORMS

Function = Callable[..., object]


def function_of(name: str, overload: torch._ops.OpOverload, *, on_cpu: bool) -> Function:
    """Return what runs an op on whatever a client sends; `overload._op` where the op itself checks its arguments.

    Args:
        name: the op's, with its overload.
        overload: the op.
        on_cpu: whether it runs on the CPU.
    """
    function: Function = SAFE_FORMS.get(name, overload._op)
    if on_cpu and name in CPU_OVERRIDES:
        function = CPU_OVERRIDES[name]
    outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
    return _with_results_apart(function, outs, broadcasts=_is_elementwise(overload)) if outs else function


def is_checked(name: str, overload: torch._ops.OpOverload) -> bool:
    """Return if `function_of` looks at an op's arguments, in place of PyTorch or beside it."""
    return name in SAFE_FORMS or any(argument.is_out for argument in overload._schema.arguments)


def _is_elementwise(overload: torch._ops.OpOverload) -> bool:
    """Return whether the op gives a result for each element of its broadcast tensors; PyTorch tags some overloads."""
    packet = overload._overloadpacket
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def _with_results_apart(function: Function, outs: list[str], *, broadcasts: bool) -> Function:
    """Let no `out=` tensor be an argument of its own op, nor stand for two results, nor lie in less memory than it has
    elements.

    Kernels resize what they write to, and then rely on sizes that they have read before. What is resized is the tensor,
    so another one on the same memory keeps its sizes.

    Args:
        function: runs the op.
        outs: the names of the tensors that it fills.
        broadcasts: whether it is elementwise: it cannot read the elements of a tensor that it resizes.
    """

    def call(*args: object, **kwargs: object) -> Any:
        written = [tensor for name in outs for tensor in _tensors(kwargs.get(name))]
        known = {id(tensor) for tensor in written}
        if any(overlaps(tensor) for tensor in written):
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory "
                "location. Please clone() the tensor before performing the operation."
            )
        if len(known) < len(written):
            raise RuntimeError("out= names one tensor for two results. Give each result a tensor of its own")

        def detach_known(value: object) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach() if id(value) in known else value
            return [detach_known(item) for item in value] if isinstance(value, list) else value

        if broadcasts:
            _keep_sizes(written, [*args, *(value for name, value in kwargs.items() if name not in outs)])
        others = {name: value if name in outs else detach_known(value) for name, value in kwargs.items()}
        return function(*(detach_known(value) for value in args), **others)

    return call


def _keep_sizes(written: list[torch.Tensor], read: list[object]) -> None:
    """Refuse, as PyTorch does, to resize a tensor that is read by the elementwise op that fills it.

    Raises:
        RuntimeError: one of `written` is among `read`, and has not the size of the result.
    """
    operands = [tensor for value in read for tensor in _tensors(value)]
    known = {id(tensor) for tensor in operands}
    for tensor in written:
        if id(tensor) in known and any(other.shape != tensor.shape for other in operands):
            shape = reduce(torch._C._infer_size, (other.shape for other in operands))
            if shape != tensor.shape:
                raise RuntimeError(
                    f"output with shape {list(tensor.shape)} doesn't match the broadcast shape {list(shape)}"
                )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, torch.Tensor))
