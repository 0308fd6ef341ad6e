"""Group norm of channels-last inputs: gradients by the kernel that the worker's own PyTorch would choose.

PyTorch's derivative formula keeps the memory format of the input only where `device.is_cpu()`, and makes everything
row-major elsewhere, for which the CPU has another kernel with other roundings. On a CPU worker the format is kept here.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DispatchKey, function_transform_level, is_forward_ad_active
from skyproxy.tensor.shapes.strides import suggests_channels_last

_op = torch.ops.aten.native_group_norm.default
_backward = torch.ops.aten.native_group_norm_backward.default
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _stock(*args: Any) -> Tensors:
    """PyTorch's own autograd kernel, in whose place ours is registered."""
    result: Tensors = _op._op_dk(DispatchKey.Autograd, *args)
    return result


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, *numbers: Any) -> Any:
        result, mean, deviation = _op(x, weight, bias, *numbers)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(mean, deviation)
        return result, mean, deviation

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:
        if torch.is_grad_enabled():  # for gradients of gradients
            return (*_differentiable(ctx, gradient), *[None] * len(ctx.numbers))
        return _once(ctx, gradient)


def _once(ctx: Any, gradient: torch.Tensor) -> Any:
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


def _differentiable(ctx: Any, gradient: torch.Tensor) -> list[Any]:
    inputs = ctx.saved_tensors[:3]
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(_stock(*inputs, *ctx.numbers)[0], wanted, gradient, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


def group_norm(x: torch.Tensor, weight: Any, bias: Any, *numbers: Any) -> Tensors:
    """`aten::native_group_norm` where gradients may be wanted; see there."""
    plain = type(x) is RemoteTensor and torch.is_grad_enabled() and function_transform_level() is None
    if not plain or x._sky.device.place[0] != "cpu" or not suggests_channels_last(tuple(x.shape), x.stride()):
        return _stock(x, weight, bias, *numbers)
    if is_forward_ad_active():
        return _stock(x, weight, bias, *numbers)
    result: Tensors = _ChannelsLast.apply(x, weight, bias, *numbers)
    return result


def install(library: torch.library.Library) -> None:
    """Put our choice in the place of PyTorch's."""
    library.impl("native_group_norm", group_norm, "AutogradPrivateUse1")
