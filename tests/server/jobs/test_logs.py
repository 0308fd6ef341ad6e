"""The log of a job: bounded, found by offset, and of one writer."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from skyproxy_server.jobs.logs import JobLog


def everything(log: JobLog, offset: int = 0) -> bytes:
    found = b""
    while offset < log.end:
        begin, data = log.read(offset, 7)
        found += data
        offset = begin + len(data)
    return found


def test_what_is_written_is_read_by_offset(tmp_path: Path) -> None:
    log = JobLog(tmp_path, 1000)
    log.write(b"hello ")
    log.write(b"world")
    assert everything(log) == b"hello world"
    assert log.read(6, 100) == (6, b"world")
    assert log.read(-5, 3) == (6, b"wor")
    assert log.read(500, 10) == (11, b"")


def test_only_the_newest_bytes_are_kept(tmp_path: Path) -> None:
    log = JobLog(tmp_path, 100)
    text = b"".join(b"line %4d\n" % number for number in range(200))
    for start in range(0, len(text), 13):
        log.write(text[start : start + 13])
    kept = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert log.end == len(text)
    assert 50 <= kept <= 100
    assert everything(log, log.start) == text[log.start :]
    assert log.read(0, 5) == (log.start, text[log.start : log.start + 5])


def test_a_piece_larger_than_all_is_cut(tmp_path: Path) -> None:
    log = JobLog(tmp_path, 10)
    log.write(b"0123456789" * 5)
    assert everything(log, log.start) == b"0123456789"


def test_a_later_worker_goes_on_where_the_log_ended(tmp_path: Path) -> None:
    first = JobLog(tmp_path, 1000)
    first.write(b"one ")
    first.close()
    second = JobLog(tmp_path, 1000)
    second.write(b"two")
    assert everything(second) == b"one two"


def test_whoever_waits_is_woken_by_a_write(tmp_path: Path) -> None:
    log = JobLog(tmp_path, 1000)
    seen: list[int] = []

    def wait() -> None:
        while not log.end:
            log.wait_beyond(0, 60)
        seen.append(log.end)

    thread = threading.Thread(target=wait)
    thread.start()
    log.write(b"x")
    thread.join(60)
    assert seen == [1]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/passwd", path)], ids=["pipe", "link"])
def test_a_job_cannot_have_the_worker_write_elsewhere(make: object, tmp_path: Path) -> None:
    log = JobLog(tmp_path, 1000)
    make(tmp_path / f"log-{0:020d}")  # type: ignore[operator]
    log.write(b"x")
    assert log.end == 0
    assert log.read(0, 10) == (0, b"")


class Disk:
    """A disk with so much room, for the files that are opened through it."""

    def __init__(self, folder: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room = folder, room
        monkeypatch.setattr(JobLog, "_open", lambda log, offset: _OnDisk(self, str(log._path(offset))))

    def free(self) -> int:
        return self.room - sum(path.stat().st_size for path in self.folder.iterdir())


class _OnDisk(io.FileIO):
    def __init__(self, disk: Disk, name: str) -> None:
        super().__init__(name, "ab")
        self._disk = disk

    def write(self, data: Any) -> int:
        fits = min(len(data), self._disk.free())  # as the kernel: what fits is written, and the next write is refused
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:fits])


LINES = [b"line %04d\n" % number for number in range(200)]
LOST = b"some of the output before this line is lost: the worker's disk said: No space left on device"


@pytest.mark.parametrize("room", [150, 437, 1000, 1500])
def test_a_full_disk_keeps_the_newest_output_and_a_line_on_what_is_lost(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(tmp_path, room, monkeypatch)
    log = JobLog(tmp_path, 4000)
    for line in LINES:
        log.write(line)
    kept = everything(log, log.start)
    assert LOST in kept
    after = kept.rpartition(b"on device\n")[2]
    assert b"".join(LINES).endswith(after)
    assert after.endswith(b"0199\n")
    again = JobLog(tmp_path, 4000)
    assert everything(again, again.start) == kept


def test_output_that_others_left_no_room_for_is_told_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, 0, monkeypatch)
    log = JobLog(tmp_path, 4000)
    log.write(b"lost")
    assert (log.start, log.end, everything(log)) == (0, 0, b"")
    disk.room = 1000
    log.write(b"kept\n")
    log.write(b"more\n")
    assert everything(log).count(LOST) == 1
    assert everything(log).endswith(b"\nkept\nmore\n")


def test_strange_files_are_no_segments(tmp_path: Path) -> None:
    (tmp_path / "log-").write_text("x")
    (tmp_path / "log-abc").write_text("x")
    assert JobLog(tmp_path, 10).end == 0
