"""Group norm of channels-last inputs: gradients by the kernel that the worker's own PyTorch would choose.

PyTorch's derivative formula keeps the memory format of the input only where `device.is_cpu()`, and makes everything
row-major elsewhere, for which the CPU has another kernel with other roundings. On a CPU worker the format is kept here.
"""

from __future__ import annotations

import torch

from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    count_dispatch_modes,
    function_transform_level,
    is_forward_ad_active,
    name_gradients,
)
from skyproxy.tensor.dispatch.hot_path import dispatch_remote
from skyproxy.tensor.ops.own_gradients import call_stock
from skyproxy.tensor.shapes.strides import suggests_channels_last

_op = torch.ops.aten.native_group_norm.default
_backward = torch.ops.aten.native_group_norm_backward.default
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Context(torch.autograd.function.FunctionCtx):
    """Tensors and numbers that a forward keeps for its backward."""

    numbers: tuple[int, int, int, int, float]
    saved_tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]
    needs_input_grad: tuple[bool, ...]


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, weight: object, bias: object, *numbers: object) -> Tensors:
        result, mean, deviation = _op(x, weight, bias, *numbers)
        ctx.save_for_backward(x, weight, bias, mean, deviation)  # type: ignore[arg-type]  # None is kept, too
        ctx.numbers = numbers  # type: ignore[assignment]
        ctx.set_materialize_grads(False)
        return result, mean, deviation

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradient, of_mean, of_deviation = gradients
        if gradient is None or of_mean is not None or of_deviation is not None or torch.is_grad_enabled():
            found = _differentiable_gradients(ctx, *gradients)
        else:
            found = _gradients(ctx, gradient)
        return (*found, *[None] * len(ctx.numbers))


name_gradients(_ChannelsLast, "NativeGroupNormBackward0")


def _gradients(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, _, mean, deviation = ctx.saved_tensors
    kept = _FORMATS[x.dim()]
    batch, channels, area, groups, _ = ctx.numbers
    gradients: tuple[torch.Tensor | None, ...] = _backward(
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
    return gradients


def _differentiable_gradients(
    ctx: _Context, gradient: torch.Tensor | None, of_mean: torch.Tensor | None, of_deviation: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that can be differentiated, also of the statistics: PyTorch's formula, operation by operation.

    What is saved are the op's own results, so that a second backward comes to its node once, with all three gradients.
    Right operands come first, as the compiler of PyTorch's binaries has it: the engine sums in the order of nodes.
    """
    x, weight, _, mean, deviation = ctx.saved_tensors
    batch, channels, area, groups, _ = ctx.numbers
    width = channels // groups
    values = x.reshape(batch, groups, width, area)
    mean, deviation = (t.reshape(batch, groups, 1, 1) for t in (mean, deviation))
    products = sums = scale = of_x = of_weight = of_bias = None
    if gradient is not None:
        gradient = gradient.reshape(batch, groups, width, area)
        products = (gradient * values).sum(3).unsqueeze_(-1)
        sums = gradient.sum(3).unsqueeze_(-1)
    if ctx.needs_input_grad[0]:
        if weight is not None:
            scale = weight.reshape(1, groups, width, 1)
        cube = deviation * deviation * deviation
        if gradient is not None and products is not None and sums is not None:
            factor = deviation if scale is None else deviation * scale
            slope = (products if scale is None else products * scale).sum(2).unsqueeze_(-2)
            level = (sums if scale is None else sums * scale).sum(2).unsqueeze_(-2)
            slope = (level * mean - slope) * cube * (1.0 / (width * area))
            scaled = level * deviation * (1.0 / (width * area))
            level = -slope * mean - scaled
            scaled = slope * values
            of_x = factor * gradient + scaled + level
        if of_mean is not None and of_deviation is not None:
            of_variance = -0.5 * cube * of_deviation.view(batch, groups, 1, 1)
            distance = values - values.mean((2, 3), True)
            more = 2.0 / (width * area) * of_variance * distance
            more = more + of_mean.view(batch, groups, 1, 1).expand(values.shape) / (width * area)
            of_x = more if of_x is None else of_x.add_(more)
        of_x = None if of_x is None else of_x.reshape_as(x)
    if products is not None and sums is not None:
        if ctx.needs_input_grad[1]:
            of_weight = ((products - sums * mean) * deviation).sum(0).reshape(channels)
        if ctx.needs_input_grad[2]:
            of_bias = sums.sum(0).reshape(channels)
    return of_x, of_weight, of_bias


def _is_differentiated(*tensors: object) -> bool:
    """Return whether PyTorch's autograd, or a mode, has to hear of an operation on these, some of which may be None."""
    if count_dispatch_modes() or is_forward_ad_active():
        return True
    wants = torch.is_grad_enabled()
    return any(t is not None and (type(t) is not RemoteTensor or (wants and t.requires_grad)) for t in tensors)


def group_norm(x: torch.Tensor, weight: object, bias: object, *numbers: object) -> Tensors:
    """`aten::native_group_norm` where gradients may be wanted; see there."""
    args = x, weight, bias, *numbers
    found: object
    if type(x) is not RemoteTensor or function_transform_level() is not None:
        found = call_stock(_op, *args)
    elif not _is_differentiated(x, weight, bias):
        found = dispatch_remote(None, _op, (), args)
    elif torch.is_grad_enabled() and not is_forward_ad_active() and _is_channels_last_on_cpu(x):
        found = _ChannelsLast.apply(*args)  # type: ignore[no-untyped-call]
    else:
        found = call_stock(_op, *args)
    return found  # type: ignore[return-value]  # what that op gives


def _is_channels_last_on_cpu(x: RemoteTensor) -> bool:
    meta = x._sky.meta
    return x._sky.device.place[0] == "cpu" and suggests_channels_last(meta.size, meta.stride)


def install(library: torch.library.Library) -> None:
    """Put our choice in the place of PyTorch's."""
    library.impl("native_group_norm", group_norm, "AutogradPrivateUse1")
