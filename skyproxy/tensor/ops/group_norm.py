"""Group norm of channels-last inputs: gradients by the kernel that the worker's own PyTorch would choose.

PyTorch's derivative formula keeps the memory format of the input only where `device.is_cpu()`, and makes everything
row-major elsewhere, for which the CPU has another kernel with other roundings. On a CPU worker the format is kept here.
"""

from __future__ import annotations

import threading

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    DispatchKey,
    count_dispatch_modes,
    function_transform_level,
    is_forward_ad_active,
    name_gradients,
)
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.shapes.strides import suggests_channels_last

_op = torch.ops.aten.native_group_norm.default
_backward = torch.ops.aten.native_group_norm_backward.default
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Choice(threading.local):
    """Choice of the kernel that a thread's next calls take."""

    takes_stock = False


_choice = _Choice()


def _stock(*args: object) -> Tensors:
    """PyTorch's own autograd kernel, in whose place ours is registered."""
    result: Tensors = _op._op_dk(DispatchKey.Autograd, *args)
    return result


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors and numbers that a forward keeps for its backward."""

    numbers: tuple[object, ...]
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, weight: object, bias: object, *numbers: object) -> Tensors:
        result, mean, deviation = _op(x, weight, bias, *numbers)
        ctx.save_for_backward(x, weight, bias, mean, deviation)  # type: ignore[arg-type]  # None is kept, too
        ctx.numbers = numbers
        ctx.mark_non_differentiable(mean, deviation)
        return result, mean, deviation

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor, *unused: object) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # for gradients of gradients
            return (*_differentiable_gradients(ctx, gradient), *[None] * len(ctx.numbers))
        return _gradients(ctx, gradient)


name_gradients(_ChannelsLast, "NativeGroupNormBackward0")


def _gradients(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, _, mean, deviation = ctx.saved_tensors
    kept = _FORMATS[x.dim()]
    batch, channels, area, groups, _ = ctx.numbers
    gradients = _backward(
        gradient.contiguous(memory_format=kept),
        x.contiguous(memory_format=kept),
        mean,
        deviation,
        weight,
        batch,
        channels,
        area,
        groups,
        list(ctx.needs_input_grad[:3]),
    )
    return (*gradients, *[None] * len(ctx.numbers))


def _differentiable_gradients(ctx: _Context, gradient: torch.Tensor) -> list[torch.Tensor | None]:
    inputs = ctx.saved_tensors[:3]
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    _choice.takes_stock = True  # through the dispatcher: PyTorch 2.11 refuses kernels that are called in a backward
    try:
        result = _op(*inputs, *ctx.numbers)[0]
    finally:
        _choice.takes_stock = False
    found = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


def _is_differentiated(*tensors: object) -> bool:
    """Return whether PyTorch's autograd, or a mode, has to hear of an operation on these, some of which may be None."""
    if count_dispatch_modes() or is_forward_ad_active():
        return True
    wants = torch.is_grad_enabled()
    return any(t is not None and (type(t) is not RemoteTensor or (wants and t.requires_grad)) for t in tensors)


def group_norm(x: torch.Tensor, weight: object, bias: object, *numbers: object) -> Tensors:
    """`aten::native_group_norm` where gradients may be wanted; see there."""
    if type(x) is not RemoteTensor or function_transform_level() is not None:
        return _stock(x, weight, bias, *numbers)
    if not _is_differentiated(x, weight, bias):
        args = x, weight, bias, *numbers
        found: Tensors = dispatch_remote(None, _op, (), args)  # type: ignore[assignment]  # what that op gives
        return found
    if not torch.is_grad_enabled():
        return _stock(x, weight, bias, *numbers)
    meta = x._sky.meta
    if x._sky.device.place[0] != "cpu" or not suggests_channels_last(meta.size, meta.stride):
        return _stock(x, weight, bias, *numbers)
    if is_forward_ad_active() or _choice.takes_stock:
        return _stock(x, weight, bias, *numbers)
    result: Tensors = _ChannelsLast.apply(x, weight, bias, *numbers)  # type: ignore[no-untyped-call]
    return result


def install(library: torch.library.Library) -> None:
    """Put our choice in the place of PyTorch's."""
    library.impl("native_group_norm", group_norm, "AutogradPrivateUse1")
