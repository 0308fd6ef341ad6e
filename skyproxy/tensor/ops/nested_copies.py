"""Copies of strided nested tensors to another dtype or device: each component is copied by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def copy_nested(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    **options: object,
) -> object:
    """Another dtype, or another device."""
    device = torch.device(device) if device is not None else x.device
    if device.type == x.device.type == "sky" and device.index in (None, x.device.index):
        return _move(x, lambda t: t.to(dtype, copy=True) if dtype is not None else t.clone(), x.device)
    return _move(x, lambda t: t.to(device, dtype if dtype is not None else t.dtype), device)


def _move(x: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> object:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Moved.apply(x, move, device)  # type: ignore[no-untyped-call]
    return _nest_components([move(t) for t in x.detach().unbind()], device)


def _nest_components(components: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.nested.nested_tensor(components, device=device)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        ctx.before = x.device, x.dtype
        return _nest_components([move(t) for t in x.detach().unbind()], device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[object, None, None]:
        device, dtype = ctx.before
        return _nest_components([t.to(device, dtype) for t in gradient.unbind()], device), None, None


__all__ = ["copy_nested"]
