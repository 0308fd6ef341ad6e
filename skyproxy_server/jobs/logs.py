"""The output of a job, on disk: the newest bytes, found by their offset since the job began."""

from __future__ import annotations

import contextlib
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
        return self._segments[0] if self._segments else 0

    def _path(self, offset: int) -> Path:
        return self._folder / f"{_PREFIX}{offset:0{_DIGITS}d}"

    def write(self, data: bytes) -> None:
        """Append bytes; what a full disk does not take is dropped, and the job goes on."""
        for begin in range(0, len(data), self._segment_bytes):
            self._write(data[begin : begin + self._segment_bytes])

    def _write(self, data: bytes) -> None:
        with self._changed:
            try:
                if not self._segments or self._end - self._segments[-1] + len(data) > self._segment_bytes:
                    self._begin_segment()
                elif self._file is None:
                    self._file = self._open(self._segments[-1])
                assert self._file is not None
                written = self._file.write(data)
            except OSError:
                return
            finally:
                self._changed.notify_all()
            self._end += written or 0

    def _begin_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file = self._open(self._end)
        self._segments.append(self._end)
        while len(self._segments) > _SHARE:
            with contextlib.suppress(OSError):
                self._path(self._segments[0]).unlink()
            self._segments.pop(0)

    def _open(self, offset: int) -> BinaryIO:
        # Private from its beginning; the job could have put something else there.
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
            if self._file is not None:
                self._file.close()
                self._file = None
            self._changed.notify_all()


def _offset(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if len(digits) == _DIGITS and digits.isdigit() else -1
