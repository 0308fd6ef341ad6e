"""Memory that two processes share by a file without a name: payloads that pass between them, storages of tensors."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.protocol.messages import Buffer

_LARGEST_STEP_BYTES = 1 << 30
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def make_memory_file(size: int) -> int:
    """Return a file of so many bytes, which nobody can make shorter: whoever has it mapped would be killed.

    Raises:
        OSError: there is no memory for it, or no descriptor.
    """
    descriptor = os.memfd_create("skyproxy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)  # else whoever writes is killed where memory ends
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def bytes_of(piece: Any) -> memoryview:
    """The bytes of a piece of a payload, however it was received."""
    return torch_codec.byte_view(piece) if isinstance(piece, torch.Tensor) else memoryview(piece).cast("B")


def write_pieces(pieces: Sequence[Buffer | torch.Tensor]) -> int:
    """Return a file with these bytes one after another.

    Raises:
        OSError: there is no memory for it, or no descriptor.
    """
    views = [bytes_of(piece) for piece in pieces]
    descriptor = make_memory_file(sum(view.nbytes for view in views))
    try:
        offset = 0
        for view in views:
            done = 0
            while done < view.nbytes:
                done += os.pwrite(descriptor, view[done : done + _LARGEST_STEP_BYTES], offset + done)
            offset += view.nbytes
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_into(descriptor: int, offset: int, view: memoryview) -> None:
    """Fill `view` from a file. It is read and not mapped: whoever made it may make it shorter.

    Raises:
        ProtocolError: it has fewer bytes.
    """
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done : done + _LARGEST_STEP_BYTES]], offset + done)
        if not count:
            raise ProtocolError(f"a file of a function's process ends {view.nbytes - done:,} bytes early")
        done += count


def shared_storage(size: int) -> torch.UntypedStorage:
    """Return memory of a file of its own, as a storage, which keeps the file open: `descriptor_of` tells it.

    Raises:
        OSError, RuntimeError: there is no memory for it, or no descriptor.
    """
    descriptor = make_memory_file(size)
    try:
        return mapped_storage(descriptor, size)
    finally:
        os.close(descriptor)


def mapped_storage(descriptor: int, size: int) -> torch.UntypedStorage:
    """The memory of a file as a storage, which opens the file once more for itself."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]
    return storage


def descriptor_of(storage: torch.UntypedStorage) -> int | None:
    """The file that a storage's memory is; None for memory of its own. It belongs to the storage."""
    return int(storage._share_fd_cpu_()[0]) if storage.device.type == "cpu" and storage.is_shared() else None
