"""Memory that a session's process shares with the supervisor: what the process has said on each of its connections."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading

SLOTS = 64
"""Connections that one session may have at a time; for each, the session's process has a slot of the shared memory:
whether it has said its last word there, and where the frame that it writes begins and ends."""
SLOT_BYTES = 32
SLOT_BOUNDS = slice(8, 24)
OVER = 1


def new_memory() -> int:
    """Make memory for all slots of a session; the descriptor belongs to the caller.

    Nobody can make it shorter: the kernel kills whoever reads what is gone, and the supervisor reads it.
    """
    memory = os.memfd_create("skyproxy-marks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, SLOTS * SLOT_BYTES)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def mapped(descriptor: int) -> mmap.mmap:
    """Return that memory, as the process at either side sees it."""
    return mmap.mmap(descriptor, SLOTS * SLOT_BYTES)


class ConnectionSlots:
    """The supervisor's view of it. Nothing in it is trusted: the process may write what it likes.

    Args:
        marks: the shared memory; closed with this object.
    """

    def __init__(self, marks: mmap.mmap) -> None:
        self._marks = marks
        self._free = set(range(SLOTS))
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Return a slot for a new connection, empty; None where the session has too many."""
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is not None:
            self._marks[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        return slot

    def give(self, slot: int) -> None:
        """Take a slot back."""
        with self._lock:
            self._free.add(slot)

    def is_over(self, slot: int) -> bool:
        """Return whether the process has said its last word on a connection."""
        return self._marks[slot * SLOT_BYTES] == OVER

    def is_between_frames(self, slot: int, written: int) -> bool:
        """Return whether no frame is cut after the first `written` bytes of what the process has sent there."""
        start = slot * SLOT_BYTES
        return written in struct.unpack("QQ", self._marks[start + SLOT_BOUNDS.start : start + SLOT_BOUNDS.stop])

    def close(self) -> None:
        """Let go of the memory."""
        self._marks.close()
