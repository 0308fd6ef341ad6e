"""Files that are read in parts, or whole where they are no larger than they may be. No torch here: it moves bytes."""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import Protocol

NO_LINK = getattr(os, "O_NOFOLLOW", 0)
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | NO_LINK | getattr(os, "O_NONBLOCK", 0)
MAX_READ_BYTES = (1 << 30) + (1 << 20)
"""The most that is read of a file at once; larger ones are read in parts. A file may claim any number of bytes."""
SMALL_BYTES = 1 << 16
"""The most that a file has which says who does what."""


class Source(Protocol):
    """A file that is read in parts.

    Attributes:
        size: its bytes.
    """

    size: int

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill the start of `target` with what lies at `offset`; return how much that was, 0 at the end."""

    def close(self) -> None:
        """Let go of it."""


class PlainFile:
    """A file of this machine, which may be neither a link nor a pipe.

    Args:
        path: the file.
        folder: the open folder that it lies in; None where the system opens none.

    Raises:
        OSError: it is not there, or is no file.
    """

    def __init__(self, path: str, folder: int | None) -> None:
        # Without waiting: a pipe that somebody has put there would hold us up for ever, and is no file.
        self._file = os.open(path, OPEN_FLAGS, dir_fd=folder)
        try:
            status = os.fstat(self._file)
            self.size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file", path)
        except BaseException:
            os.close(self._file)
            raise

    def read_into(self, target: memoryview, offset: int) -> int:
        return read_at(self._file, target, offset)

    def close(self) -> None:
        os.close(self._file)


_seeking = threading.Lock()


def read_at(file: int, target: memoryview, offset: int) -> int:
    """Fill the start of `target` with what lies at an offset of an open file; return how much that was."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [target], offset)
    with _seeking:  # the file has one position for all threads
        os.lseek(file, offset, os.SEEK_SET)
        content = os.read(file, len(target))
    target[: len(content)] = content
    return len(content)


def write_at(file: int, content: memoryview | bytes, offset: int) -> None:
    """Write all of it at an offset of an open file."""
    rest = memoryview(content)
    while rest:
        if hasattr(os, "pwrite"):
            count = os.pwrite(file, rest, offset)
        else:
            with _seeking:
                os.lseek(file, offset, os.SEEK_SET)
                count = os.write(file, rest)
        rest, offset = rest[count:], offset + count


def refuse_more(content: bytes, byte_count: int, most_bytes: int) -> bytes:
    """Return the content of a file that has no more bytes than it may have.

    Raises:
        OSError: it has more.
    """
    if byte_count > most_bytes:
        raise OSError(errno.EFBIG, f"the file has {byte_count:,} bytes or more, and {most_bytes:,} are allowed")
    return content


def read_whole(source: Source, most_bytes: int = MAX_READ_BYTES) -> bytes:
    """The content of a file that is read in parts.

    Raises:
        OSError: it has more bytes than it may have.
    """
    refuse_more(b"", source.size, most_bytes)
    content = memoryview(bytearray(source.size))
    done = 0
    while done < len(content):
        count = source.read_into(content[done:], done)
        if not count:
            break
        done += count
    return bytes(content[:done])
