"""The log of a job: bounded, found by offset, and of one writer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

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


def test_strange_files_are_no_segments(tmp_path: Path) -> None:
    (tmp_path / "log-").write_text("x")
    (tmp_path / "log-abc").write_text("x")
    assert JobLog(tmp_path, 10).end == 0
