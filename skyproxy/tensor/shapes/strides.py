"""Strides of views and of fresh tensors, chosen step by step as ATen does. See also `elementwise`.

Strides of dimensions of size one, and of empty tensors, address nothing. But programs see them, PyTorch reads memory
formats from them, and picks kernels by those: whoever computes them in another way computes other numbers.
"""

from __future__ import annotations

from skyproxy.tensor.shapes.elementwise import channels_last_stride, is_contiguous
from skyproxy.torch_codec import contiguous_stride

Sizes = tuple[int, ...]


def reshaped_stride(size: Sizes, stride: Sizes, new_size: Sizes) -> Sizes | None:
    """The strides of a view of another size, as `computeStride` chooses them; None where no view can be.

    Args:
        size: the size of the tensor that is viewed.
        stride: its strides.
        new_size: as many elements, without -1.
    """
    if not size:
        return (1,) * len(new_size)
    if 0 in size:
        return stride if size == new_size else contiguous_stride(new_size)
    fresh = [0] * len(new_size)
    at = len(new_size) - 1
    base, taken, viewed = stride[-1], 1, 1
    for d in range(len(size) - 1, -1, -1):
        taken *= size[d]
        if d and (size[d - 1] == 1 or stride[d - 1] == taken * base):
            continue  # the same stretch of memory goes on
        while at >= 0 and (viewed < taken or new_size[at] == 1):
            fresh[at] = viewed * base
            viewed *= new_size[at]
            at -= 1
        if viewed != taken:
            return None
        if d:
            base, taken, viewed = stride[d - 1], 1, 1
    return tuple(fresh) if at < 0 else None


def suggested_stride(size: Sizes, stride: Sizes) -> Sizes:
    """The strides of a fresh tensor in the format that `suggest_memory_format` reads from these."""
    return channels_last_stride(size) if suggests_channels_last(size, stride) else contiguous_stride(size)


def suggests_channels_last(size: Sizes, stride: Sizes) -> bool:
    """Return whether `suggest_memory_format` takes a tensor for a channels-last one."""
    if len(size) not in (4, 5) or stride[1] == 0 or stride[-1] < stride[1]:
        return False
    smallest = 0
    for d in (1, *range(len(size) - 1, 1, -1), 0):
        if size[d] == 0 or stride[d] < smallest or (d == 0 and smallest == stride[1]):
            return False
        smallest = stride[d] * max(size[d], 1)
    return True


def batch_norm_stride(size: Sizes, stride: Sizes) -> Sizes:
    """The strides of what the CPU's batch norms give: of an input with gaps, those that it suggests."""
    if len(size) not in (4, 5) or is_contiguous(size, stride):
        return contiguous_stride(size)
    return channels_last_stride(size) if lies_channels_last(size, stride) else suggested_stride(size, stride)


def lies_channels_last(size: Sizes, stride: Sizes) -> bool:
    """Return whether four or five dimensions lie in channels-last order without gaps, whatever idle strides are."""
    expected = 1
    for d in (1, *range(len(size) - 1, 1, -1), 0):
        if size[d] != 1 and stride[d] != expected:
            return False
        expected *= size[d]
    return len(size) in (4, 5)


__all__ = ["batch_norm_stride", "lies_channels_last", "reshaped_stride", "suggested_stride", "suggests_channels_last"]
