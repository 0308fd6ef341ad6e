"""The memory of remote tensors: who shares it with whom, at which (invented) address, and how large it is.

The bytes are on the worker; here a memory is an address and a size, kept on the handle of the tensor that first had it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from skyproxy import torch_codec
from skyproxy.tensor.core.addresses import Memory
from skyproxy.tensor.core.metadata import Meta, plain_meta

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skyproxy.tensor.core.devices import Handle


def bytes_needed(meta: Meta) -> int:
    """Return how many bytes a storage needs for a tensor of this form."""
    return torch_codec.storage_extent(meta.size, meta.stride, meta.offset) * meta.dtype.itemsize


def memory_of(handle: Handle) -> Memory:
    """The memory that a handle's tensor lies in.

    Raises:
        NotImplementedError: sparse tensors have none of their own.
    """
    root = handle.root or handle
    try:
        return root.memory
    except AttributeError:
        if root.meta.layout is not torch.strided:
            raise NotImplementedError("Cannot access storage of a sparse tensor") from None
        memory = root.memory = Memory(bytes_needed(root.meta))
        return memory


def note_change(handle: Handle, meta: Meta) -> None:
    """A tensor is about to look like `meta`: its storage grows if it must, and never shrinks, as in PyTorch."""
    if meta.layout is torch.strided and handle.meta is not None and handle.meta.layout is torch.strided:  # type: ignore[redundant-expr]
        memory, needed = memory_of(handle), bytes_needed(meta)
        if needed > memory.byte_count:
            memory.resize(needed)


def is_beyond(handle: Handle, metas: Iterable[Meta]) -> bool:
    """Return whether views of a tensor that look so would reach beyond its memory."""
    return any(bytes_needed(meta) > memory_of(handle).byte_count for meta in metas)


class MemorySlice(Memory):
    """A part of another storage's memory; has a key of its own, as PyTorch's storages of slices do.

    Attributes:
        whole: the other storage.
        start: where in it, in bytes.
    """

    __slots__ = ("start", "whole")

    def __init__(self, whole: Handle, start: int, stop: int) -> None:
        super().__init__(stop - start)
        self.address = memory_of(whole).address + start
        self.whole, self.start = whole, start

    def moved(self, meta: Meta) -> Meta:
        """The look, in the whole storage, of what has a look in this part."""
        if self.start % meta.dtype.itemsize:
            raise RuntimeError(
                f"a part of a storage that begins at byte {self.start} holds no {meta.dtype} tensor on sky"
            )
        if bytes_needed(meta) > self.byte_count:
            raise RuntimeError("Trying to resize storage that is not resizable")
        return plain_meta(meta.size, meta.dtype, meta.stride, meta.offset + self.start // meta.dtype.itemsize)


__all__ = ["Memory", "MemorySlice", "bytes_needed", "is_beyond", "memory_of", "note_change"]
