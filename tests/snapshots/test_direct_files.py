"""Files that are written in whole blocks: they hold what was put into them, whatever their file system can do."""

from __future__ import annotations

import errno
import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyproxy.snapshots import direct_files
from skyproxy.snapshots.direct_files import ALIGNMENT, BLOCK_BYTES, DirectFile

HEAD = b"head".ljust(ALIGNMENT)
linux = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no writes past its cache")


def written(path: Path) -> bytes:
    """Fill a file from four threads, out of order and in odd sizes; return what it should hold."""
    dice = random.Random(7)
    content = dice.randbytes(2 * BLOCK_BYTES + 12_345)
    bounds = [0, *sorted(dice.sample(range(1, len(content)), 40)), len(content)]
    spans = list(itertools.pairwise(bounds))
    dice.shuffle(spans)
    file = DirectFile(path, ALIGNMENT)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda span: file.fill(memoryview(content)[slice(*span)], ALIGNMENT + span[0]), spans))
    file.finish(HEAD)
    return HEAD + content


def test_it_holds_what_threads_have_put_into_it(tmp_path: Path) -> None:
    expected = written(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == expected


def test_one_without_a_whole_block(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "file", ALIGNMENT)
    file.fill(b"abc", ALIGNMENT)
    file.finish(HEAD)
    assert (tmp_path / "file").read_bytes() == HEAD + b"abc"


@linux
def test_a_file_system_that_opens_it_and_cannot_write_it_gets_it_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    write_at = direct_files.write_at

    def refuse(file: int, content: memoryview | bytes, offset: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        write_at(file, content, offset)

    monkeypatch.setattr(direct_files, "write_at", refuse)
    expected = written(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == expected


@linux
def test_a_file_system_that_does_not_open_it_gets_it_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(opens(path, flags & ~os.O_DIRECT, mode))  # as Linux does
            raise OSError(errno.EINVAL, "Invalid argument")
        return opens(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    expected = written(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == expected


def test_one_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file", ALIGNMENT)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_full_disk_is_said_and_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = DirectFile(tmp_path / "file", ALIGNMENT)
    monkeypatch.setattr(direct_files, "write_at", full)
    with pytest.raises(OSError, match="No space left"):
        file.fill(bytes(BLOCK_BYTES), ALIGNMENT)
    file.close()
    file.close()
