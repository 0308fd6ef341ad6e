"""The output of a script's processes, from the files that they write to the agent's own.

No torch here. PyTorch's launcher reads them in its own way, which takes room for all that was ever printed, and cuts a
line in two where it was written in pieces, as `print` with several arguments does.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

_READ_BYTES = 1 << 18
_FREE_BYTES = 4 << 20
"""Bytes that were read, after which their room on the disk is given back."""
_MAX_LINE_LENGTH = 1 << 20
_PATIENCE_ROUNDS = 10
"""Rounds in which nothing comes, after which a line without an end is shown as it is."""
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE of <linux/falloc.h>


class LineOutput(Protocol):
    """The place for lines."""

    def write(self, text: str, /) -> object:
        """Take text."""


def pass_on_file(
    header: str,
    file: str,
    dst: LineOutput,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Write the lines of a growing file elsewhere until its end; stands in for PyTorch's `tail_logfile`.

    Args:
        header: goes before each line.
        file: which another process writes; it need not be there yet.
        dst: for the lines. Each is written whole.
        finished: set when nothing more will be written.
        interval_sec: how long to wait for more.
        log_line_filter: says which lines to write.
    """
    while not os.path.exists(file):
        if finished.wait(interval_sec) and not os.path.exists(file):
            return
    with open(file, "rb", buffering=0) as source:
        _Lines(header, dst, log_line_filter).pass_on(source, Path(file), finished, interval_sec)


class _Lines:
    """The lines of one file."""

    def __init__(self, header: str, dst: LineOutput, is_wanted: Callable[[str], bool] | None) -> None:
        self._header = header
        self._dst = dst
        self._is_wanted = is_wanted
        # As in a text file: whatever ends a line, a progress bar's "\r" too, becomes "\n".
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._rest = ""

    def pass_on(self, source: BinaryIO, path: Path, finished: threading.Event, interval_seconds: float) -> None:
        freed = rounds = 0
        while True:
            is_last = finished.is_set()  # before it is read, so that nothing of its end is missed
            data = source.read(_READ_BYTES)
            if data:
                rounds = 0
                self._take(self._decoder.decode(data))
                if source.tell() - freed >= _FREE_BYTES:
                    freed = source.tell()
                    _free(path, freed)
            elif is_last:
                break
            else:
                rounds += 1
                if rounds == _PATIENCE_ROUNDS:
                    self._show_rest()
                finished.wait(interval_seconds)
        self._take(self._decoder.decode(b"", final=True))
        self._show_rest()
        _free(path, source.tell())

    def _take(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        self._write(lines)
        if len(self._rest) > _MAX_LINE_LENGTH:
            self._show_rest()

    def _show_rest(self) -> None:
        rest, self._rest = self._rest, ""
        self._write([rest] if rest else [])

    def _write(self, lines: list[str]) -> None:
        wanted = [line for line in lines if self._is_wanted is None or self._is_wanted(f"{line}\n")]
        if wanted:
            self._dst.write("".join(f"{self._header}{line}\n" for line in wanted))


def _free(path: Path, end: int) -> None:
    """Give back the room of a file's beginning, where the system can: what is read there from now on is zeros."""
    if sys.platform != "linux" or not end:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return
    try:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        fallocate(descriptor, _PUNCH_HOLE, 0, end)
    finally:
        os.close(descriptor)
