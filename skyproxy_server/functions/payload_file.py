"""Reads a payload that a client of this machine has written to memory, in place of sending it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from skyproxy.payloads.pieces import FILE_NAME, Assembly
from skyproxy.protocol.call_messages import CallData
from skyproxy.relays.relays import RELAYS

_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}", re.ASCII)
_PART_BYTES = 1 << 20


def is_payload_file(path: object) -> bool:
    """Return whether this names an open file of a process, as a client names its payload."""
    return type(path) is str and _PATH.fullmatch(path) is not None


def read_payload_file(path: str, assembly: Assembly[object], call: str, sizes: Sequence[int]) -> None:
    """Take all pieces of a payload from a file.

    A client that may send functions can read whatever this process can; so the path is no secret to be kept from it.
    What is in the file is trusted no more than what would have been sent. A client's descriptors are used again, and
    workers of other machines have other files under the same path: so its name and its size must be right.

    Raises:
        OSError: it cannot be opened here, or is no payload of this size.
    """
    # Without waiting: it could be a pipe, which nobody writes to.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if not stat.S_ISREG(status.st_mode) or name.partition(" ")[0] != f"/memfd:{FILE_NAME}":
            raise OSError(f"{path} is no payload in memory")
        if status.st_size != sum(sizes):
            raise OSError(f"{path} has {status.st_size} bytes, and not {sum(sizes)}")
        _read_pieces(descriptor, assembly, call, sizes)
    finally:
        os.close(descriptor)


def read_passed_payload(session: str, name: str, assembly: Assembly[object], call: str, sizes: Sequence[int]) -> None:
    """Take all pieces of a payload that the client, or another worker, has brought to this process before.

    Raises:
        OSError: it is not here, or has another size.
    """
    with RELAYS.claimed(session, name) as descriptor:
        if os.fstat(descriptor).st_size != sum(sizes):
            raise OSError("the payload that was passed on has another size")
        _read_pieces(descriptor, assembly, call, sizes)


def _read_pieces(descriptor: int, assembly: Assembly[object], call: str, sizes: Sequence[int]) -> None:
    at = 0
    for index, size in enumerate(sizes):
        for offset in range(0, size, _PART_BYTES):
            part = os.pread(descriptor, min(_PART_BYTES, size - offset), at)
            if len(part) != min(_PART_BYTES, size - offset):
                raise OSError("a payload in memory has become shorter")
            at += len(part)
            assembly.add(CallData(call, 0, index, offset, (part,)))
