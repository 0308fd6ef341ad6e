"""Large new files, written in whole blocks past the system's cache where the file system can do that.

What goes through the cache costs a copy, and a page for every 4 KiB; a snapshot is read once, if ever, so nothing is
won by having it there. No torch here: it moves bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from skyproxy.snapshots.sources import write_at

ALIGNMENT = 4096
"""The number of which addresses and offsets are multiples where a file system writes without its cache."""
BLOCK_BYTES = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_FLAGS = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)


def new_pages(byte_count: int) -> mmap.mmap:
    """Return memory that begins with a page, as a write past the cache needs it; of large pages where the system gives
    them to whoever asks: the first touch of each page costs about the same, and a large one holds 512 small ones.
    """
    pages = mmap.mmap(-1, byte_count)
    with contextlib.suppress(AttributeError, OSError):  # not every system has them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class _Block:
    """A part of the file that is not full yet."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.bytes = np.frombuffer(buffer, np.uint8)
        self.filled = 0


class DirectFile:
    """A new file that threads fill from an offset on, without gaps, each byte once; at last comes what is before it.

    Args:
        path: where it will be.
        start: the offset from which on it is filled; a multiple of ALIGNMENT.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, start: int) -> None:
        assert start % ALIGNMENT == 0, "no block begins there"
        self._start = start
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}
        self._free: list[mmap.mmap] = []
        self._file, self._was_direct = _open(path)

    def fill(self, content: memoryview | bytes, offset: int) -> None:
        """Put something at an offset; on the disk it is after `finish` only. For any thread.

        Raises:
            OSError: there is no space, or no such folder any more.
        """
        source = np.frombuffer(content, np.uint8)
        done = 0
        while done < len(source):
            number, begin = divmod(offset - self._start + done, BLOCK_BYTES)
            count = min(BLOCK_BYTES - begin, len(source) - done)
            with self._lock:
                block = self._blocks.get(number) or self._new_block(number)
            block.bytes[begin : begin + count] = source[done : done + count]  # other threads run meanwhile
            done += count
            with self._lock:
                block.filled += count
                is_full = block.filled == BLOCK_BYTES
                if is_full:
                    del self._blocks[number]
            if is_full:
                self._write(block.buffer, self._start + number * BLOCK_BYTES)
                with self._lock:
                    self._free.append(block.buffer)

    def _new_block(self, number: int) -> _Block:
        block = self._blocks[number] = _Block(self._free.pop() if self._free else new_pages(BLOCK_BYTES))
        return block

    def _write(self, content: mmap.mmap, offset: int) -> None:
        try:
            write_at(self._file, memoryview(content), offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._was_direct:
                raise
            self._use_cache()  # this file system lets such a file be opened, and not be written
            write_at(self._file, memoryview(content), offset)

    def _use_cache(self) -> None:
        if self._was_direct:
            import fcntl

            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT)

    def finish(self, head: bytes) -> None:
        """Write the rest, and what comes before all; close the file when all of it outlives a crash.

        Raises:
            OSError: as `fill`.
        """
        self._use_cache()  # for what is no whole block
        for number, block in sorted(self._blocks.items()):
            write_at(self._file, memoryview(block.buffer)[: block.filled], self._start + number * BLOCK_BYTES)
        write_at(self._file, head, 0)
        os.fsync(self._file)
        self.close()

    def close(self) -> None:
        """Let go of the file as it is; no thread may be filling it."""
        file, self._file = self._file, -1
        self._blocks.clear()
        self._free.clear()
        if file >= 0:
            os.close(file)


def _open(path: Path) -> tuple[int, bool]:
    """Open a new file; return also whether writing to it passes by the cache."""
    if _DIRECT:
        try:
            return os.open(path, _FLAGS | _DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        path.unlink(missing_ok=True)  # Linux makes the file before it finds that the file system cannot
    return os.open(path, _FLAGS, 0o600), False
