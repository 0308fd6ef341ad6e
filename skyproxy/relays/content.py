"""A payload in memory that was checked against its hash, and that nobody can change any more."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator

from skyproxy.payloads.pieces import FILE_NAME

PART_BYTES = 1 << 20
# By number: Python has their names from 3.12 on some systems only.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALED = 0x1 | 0x2 | 0x4 | 0x8
"""Neither other seals, nor shorter, nor longer, nor other bytes."""
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}", re.ASCII)


class Content:
    """The bytes. They end with the last process that has them open.

    Attributes:
        path: where other processes of this machine find them, if they may.
        size: in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Take a sealed file over."""
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.size = size

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of it inside of the `with` block, whoever closes it meanwhile.

        Raises:
            OSError: it was closed before.
        """
        descriptor = os.dup(self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of it; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Writer:
    """Takes the bytes as they come, and gives them out when they are all there, and right."""

    def __init__(self, size: int, digest: bytes) -> None:
        """Make an empty file in memory, which grows with what comes.

        Args:
            size: that it must have in the end.
            digest: SHA-256 that it must have then.

        Raises:
            OSError: this system has no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory")
        self._size, self._digest = size, digest
        self._hash = hashlib.sha256()
        self._written = 0
        self._descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def write(self, part: bytes | memoryview) -> None:
        """Add what comes next.

        Raises:
            OSError: it is more than was announced, or there is no memory.
        """
        view = memoryview(part).cast("B") if len(memoryview(part)) else memoryview(b"")
        if self._written + len(view) > self._size:
            raise OSError("more came than was announced")
        self._hash.update(view)
        self._written += len(view)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def finish(self) -> Content:
        """Seal it.

        Raises:
            OSError: it is not what was announced.
        """
        if self._written != self._size or not hmac.compare_digest(self._hash.digest(), self._digest):
            raise OSError("what came is not what was announced")
        fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEALED)
        descriptor, self._descriptor = self._descriptor, -1
        return Content(descriptor, self._size)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def open_content(path: str, size: int, digest: bytes) -> Content:
    """Open what another process of this machine has, trusting nothing that it says.

    Raises:
        OSError: it cannot be opened here, could still change, or is not what was announced.
    """
    if _PATH.fullmatch(path) is None:
        raise OSError("this names no open file of a process")
    # Without waiting: it could be a pipe, which nobody writes to.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}").partition(" ")[0]
        if not stat.S_ISREG(status.st_mode) or name != f"/memfd:{FILE_NAME}" or status.st_size != size:
            raise OSError(f"{path} is no payload of this size")
        if fcntl.fcntl(descriptor, _GET_SEALS) & _SEALED != _SEALED:
            raise OSError(f"{path} may still change")
        found = hashlib.sha256()
        for offset in range(0, size, PART_BYTES):
            found.update(os.pread(descriptor, PART_BYTES, offset))
        if not hmac.compare_digest(found.digest(), digest):
            raise OSError(f"{path} is another payload")
    except BaseException:
        os.close(descriptor)
        raise
    return Content(descriptor, size)
