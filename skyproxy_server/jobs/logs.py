"""The output of a job, on disk: the newest bytes, found by their offset since the job began."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import BinaryIO

from skyproxy_server.jobs.records import open_own

_PREFIX = "log-"
_DIGITS = 20
_SHARE = 2
"""A segment has at most this part of the bound; of two segments, the older one goes when a third begins."""


class JobLog:
    """The log of one job: one writer, any number of readers.

    Args:
        folder: of the job; segments are found again there.
        max_bytes: kept at most.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = max(max_bytes // _SHARE, 1)
        self._changed = threading.Condition()
        self._segments = sorted(_offset(path) for path in folder.glob(f"{_PREFIX}*") if _offset(path) >= 0)
        self._file: BinaryIO | None = None
        self._refusal: OSError | None = None  # of output that was lost, and of which the log does not say so yet
        self._end = 0
        if self._segments:
            self._end = self._segments[-1] + self._path(self._segments[-1]).lstat().st_size

    @property
    def end(self) -> int:
        """The bytes that were ever written."""
        return self._end

    @property
    def start(self) -> int:
        """The offset of the first byte that is kept."""
        return self._segments[0] if self._segments else self._end

    def _path(self, offset: int) -> Path:
        return self._folder / f"{_PREFIX}{offset:0{_DIGITS}d}"

    def write(self, data: bytes) -> None:
        """Append bytes. On a full disk they replace older ones; what it does not even take so is dropped, and said."""
        with self._changed:
            try:
                self._append(data)
            except OSError as error:
                self._refusal = error
            finally:
                self._changed.notify_all()

    def _append(self, data: bytes) -> None:
        """Append bytes, and before them a line where some are lost.

        Raises:
            OSError: there is no room, and nothing older in this log that could give way.
        """
        left = memoryview(data)
        while left:
            lost = b"" if self._refusal is None else _line_of(self._refusal)
            try:
                while lost:
                    lost = lost[self._write(memoryview(lost)[: self._segment_bytes]) :]
                self._refusal = None
                left = left[self._write(left[: self._segment_bytes]) :]
            except OSError as error:
                if not self._make_room(error):
                    raise
                self._refusal = error

    def _write(self, data: memoryview) -> int:
        """Append what fits into a segment, or a part of it; return how much."""
        if not self._segments or self._end - self._segments[-1] + len(data) > self._segment_bytes:
            self._begin_segment()
        elif self._file is None:
            self._file = self._open(self._segments[-1])
        assert self._file is not None
        written = self._file.write(data) or 0
        self._end += written
        return written

    def _make_room(self, error: OSError) -> bool:
        """Drop the oldest output where a disk is full; return False where it is not, or there is nothing to drop."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self.start == self._end:
            return False
        if len(self._segments) == 1:
            self._close_file()
        try:
            self._path(self._segments[0]).unlink()
        except OSError:
            return False
        self._segments.pop(0)
        return True

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_segment(self) -> None:
        self._close_file()
        self._file = self._open(self._end)
        self._segments.append(self._end)
        while len(self._segments) > _SHARE:
            with contextlib.suppress(OSError):
                self._path(self._segments[0]).unlink()
            self._segments.pop(0)

    def _open(self, offset: int) -> BinaryIO:
        # Private from the start; the job could have put something else there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        return open(os.open(self._path(offset), flags, 0o600), "ab", buffering=0)

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        """Return bytes from `offset` on, and the offset of the first of them: a later one where those are gone.

        Args:
            offset: since the beginning; a negative one counts from the end.
            limit: how many at most.
        """
        with self._changed:
            if offset < 0:
                offset += self._end
            offset = min(max(offset, self.start), self._end)
            inside = [begin for begin in self._segments if begin <= offset]
            if not inside:
                return offset, b""
            index = self._segments.index(inside[-1])
            following = self._segments[index + 1 : index + 2]
            most = min(limit, (following[0] if following else self._end) - offset)
            try:
                with open_own(self._path(inside[-1])) as file:
                    file.seek(offset - inside[-1])
                    return offset, file.read(most)
            except OSError:
                return offset, b""

    def wait_beyond(self, offset: int, timeout_seconds: float) -> None:
        """Wait until there is more than `offset` bytes, `wake` is called, or the time is over."""
        with self._changed:
            if self._end <= offset:
                self._changed.wait(timeout_seconds)

    def wake(self) -> None:
        """Have whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of the file; a later write opens it again."""
        with self._changed:
            self._close_file()
            self._changed.notify_all()


def _line_of(refusal: OSError) -> bytes:
    reason = refusal.strerror or str(refusal)
    return f"\n[skyproxy] some of the output before this line is lost: the worker's disk said: {reason}\n".encode()


def _offset(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if len(digits) == _DIGITS and digits.isdigit() else -1
