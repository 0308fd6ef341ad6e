"""A large payload for many workers of this machine: written to memory once, where each of them reads it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from skyproxy.functions.payload import LARGE_BYTES, Payload
from skyproxy.payloads.pieces import FILE_NAME, flat_size
from skyproxy.protocol.messages import Buffer


class Beginning(Protocol):
    """A call that was sent."""

    def add_started_callback(self, callback: Callable[[], object]) -> None:
        """Have a function called when it has begun, or never will."""


class PassedPayload(NamedTuple):
    """A payload that came to a worker another way than by its call; see `skyproxy.relays`.

    Attributes:
        name: by which the worker knows it.
        sizes: of the pieces.
    """

    name: str
    sizes: list[int]

    @property
    def mark(self) -> tuple[str, str]:
        """The entry of a task that names it."""
        return "passed", self.name


class PayloadFile:
    """The pieces of a payload, one behind the other, in a file that has no name and no place on a disk.

    Workers open it through this process, which takes the same user on the same machine; whoever may open it could
    read this process's memory anyway. It ends with the last of us that has it open.

    Attributes:
        path: where workers find it.
        sizes: of the pieces.
    """

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        """Write the pieces to a new file.

        Raises:
            OSError: there is no memory for it.
        """
        self.sizes = [flat_size(piece) for piece in pieces]
        self._descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._lock = threading.Lock()
        self._waiting = 0
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B") if flat_size(piece) else memoryview(b"")
                while view:
                    view = view[os.write(self._descriptor, view) :]
        except BaseException:
            self.close()
            raise

    @property
    def mark(self) -> tuple[str, str]:
        """The entry of a task that names it."""
        return "file", self.path

    @classmethod
    def of(cls, payload: Payload) -> PayloadFile | None:
        """Return the file of a payload; None where it is small, or the system has no such files, or no memory."""
        pieces = payload.pieces(with_code=True)
        if sum(map(flat_size, pieces)) < LARGE_BYTES or not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(pieces)
        except OSError:
            return None

    def close_after(self, calls: Iterable[Beginning]) -> None:
        """Close it when all of these calls have begun, or never will: from then on they have what they need."""
        waiting = list(calls)
        with self._lock:
            self._waiting = len(waiting)
        for call in waiting:
            call.add_started_callback(self._has_begun)
        if not waiting:
            self.close()

    def _has_begun(self) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting:
                return
        self.close()

    def close(self) -> None:
        """Let go of it; idempotent. A worker that has not opened it by then is sent the bytes."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
