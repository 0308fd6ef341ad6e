"""Copies of strided nested tensors to another dtype or device: each component is copied by itself."""

from __future__ import annotations

from typing import Any

import torch


def convert_nested(
    x: torch.Tensor,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    **options: object,
) -> torch.Tensor:
    """Return the same tensor, or a copy of another dtype or on another device: what PyTorch does not divide further."""
    asked = torch.device(device) if device is not None else x.device
    stays = asked.type == x.device.type and asked.index in (None, x.device.index)
    if stays and dtype in (None, x.dtype) and not copy:
        return x
    if stays and torch.is_grad_enabled() and x.requires_grad:
        copied: torch.Tensor = _Converted.apply(x, dtype or x.dtype)  # type: ignore[no-untyped-call]
        return copied
    return copy_nested(x, dtype=dtype, device=asked)


def copy_nested(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    **options: object,
) -> torch.Tensor:
    """Return a copy of another dtype or on another device, from a worker or to one, without a history of its own."""
    device = torch.device(device) if device is not None else x.device
    stays = device.type == x.device.type and device.index in (None, x.device.index)
    place = x.device if stays else device
    moved = [t.to(place, dtype or t.dtype, copy=stays) for t in x.detach().unbind()]
    return torch.nested.nested_tensor(moved, device=place)


class _Converted(torch.autograd.Function):
    """A copy on the same worker."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = x.dtype
        return copy_nested(x, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[object, None]:
        return copy_nested(gradient, dtype=ctx.dtype), None


__all__ = ["convert_nested", "copy_nested"]
