"""The client's share in remote memory: invented addresses, each given once, and the bytes of some small storages."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

_ALIGNMENT_BYTES = 512
_FIRST_ADDRESS = 1 << 40
_next_address = _FIRST_ADDRESS
_lock = threading.Lock()


class Memory:
    """Address and size of one storage.

    Attributes:
        key: unique for the life of the process; what PyTorch calls `_cdata`.
        address: where it would lie, aligned as CUDA aligns; moves when the storage grows. Never given twice.
        byte_count: its size.
        face: a weak reference to the storage object that stands for it, or None.
    """

    __slots__ = ("address", "byte_count", "face", "key")

    def __init__(self, byte_count: int) -> None:
        self.face: weakref.ref[torch.UntypedStorage] | None = None
        self.resize(byte_count)
        self.key = self.address

    def resize(self, byte_count: int) -> None:
        global _next_address
        with _lock:
            self.address = _next_address
            _next_address += (byte_count // _ALIGNMENT_BYTES + 1) * _ALIGNMENT_BYTES
        self.byte_count = byte_count


def is_invented(address: int) -> bool:
    """Return whether an address or a key is one of remote memory: nothing of this process may be read there."""
    return _FIRST_ADDRESS <= address < _next_address


class LaterBytes(Protocol):
    """A source of the bytes of a storage, or of none, for when somebody asks.

    Attributes:
        waits: whether it may have to ask the worker. It holds other tensors then, for as long as this one lives.
    """

    waits: bool

    def __call__(self) -> bytes: ...


class HostCopy:
    """Knowledge of a storage until something writes to it: its bytes if it is small, and what follows from them.

    Attributes:
        values: its bytes, none where they are not known; None once something may have changed them.
        bounds: the least and the largest of the numbers in them, and their dtype, once they were asked for.
        reads: where numbers of it were read one after another, and what was read ahead; None before.
        sized: what results look like whose sizes depend on the values, by the operation and its arguments.
        epoch: `recorder.hidden_writes` when they were right.
        asked: whether a number of it was asked for.
        final: whether it is never known: something else than this program may write to it at any time.
        later: gives the bytes where `values` has none, or none either; nobody has asked for them yet.
    """

    __slots__ = ("asked", "bounds", "epoch", "final", "later", "reads", "sized", "values")

    def __init__(self, values: bytes | None, epoch: int) -> None:
        self.values = values
        self.epoch = epoch
        self.asked = self.final = False
        self.sized: dict[object, object] | None = None
        self.reads: Reads | None = None
        self.later: LaterBytes | None = None
        self.bounds: tuple[int, int, torch.dtype] | None = None


class Reads:
    """Numbers of a large storage that were read one after another, and bytes of it that were read ahead.

    Attributes:
        last: where the last one was, in bytes.
        step: how far behind the one before.
        start: where the bytes begin that were read ahead.
        values: these bytes.
    """

    __slots__ = ("last", "start", "step", "values")

    def __init__(self) -> None:
        self.last = self.start = -1
        self.step = 0
        self.values = b""


__all__ = ["HostCopy", "Memory", "Reads", "is_invented"]
