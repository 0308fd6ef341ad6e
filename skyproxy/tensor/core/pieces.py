"""Copies of large CPU tensors in pieces: PyTorch's own is one call of C++, in which no interrupt is heard."""

from __future__ import annotations

import torch

PIECE_BYTES = 16 << 20
"""Milliseconds of copying, and so few pieces that the calls cost nothing beside it."""


def copied(
    tensor: torch.Tensor,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Return what `tensor.to(dtype, copy=True, memory_format=...)` gives for a tensor on the CPU.

    Conjugate and negative bits of a large one are resolved.
    """
    if not _is_large(tensor):
        return tensor.to(dtype or tensor.dtype, copy=True, memory_format=memory_format)
    return copy_into(torch.empty_like(tensor, dtype=dtype, memory_format=memory_format, requires_grad=False), tensor)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Do what `target.copy_(source)` does. An interrupt leaves the first pieces of a large one written.

    Args:
        target: any tensor.
        source: any tensor that `copy_` takes, in memory of its own.
    """
    if not (_is_large(target) and _is_plain(source)) or any(
        count > 1 and step == 0 for count, step in zip(target.shape, target.stride())
    ):
        return target.copy_(source)
    _copy_in_pieces(target.detach(), source.expand(target.shape))
    return target


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > PIECE_BYTES and _is_plain(tensor)


def _copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy slices along the dimension of the target that goes slowest through memory, and slices of too large ones."""
    dim = max((dim for dim in range(target.dim()) if target.shape[dim] > 1), key=target.stride, default=None)
    byte_count = target.numel() * target.element_size()
    if dim is None or byte_count <= PIECE_BYTES:
        _copy_piece(target, source)
        return
    count = target.shape[dim]
    step = max(1, count * PIECE_BYTES // byte_count)
    for start in range(0, count, step):
        length = min(step, count - start)
        _copy_in_pieces(target.narrow(dim, start, length), source.narrow(dim, start, length))


def _copy_piece(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


__all__ = ["copied", "copy_into"]
