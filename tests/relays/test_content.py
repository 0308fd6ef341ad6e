"""Payloads in memory: checked, sealed, and opened by others only if they are what was announced."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.payloads.pieces import FILE_NAME
from skyproxy.relays.content import Content, Writer, open_content

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without a name are there on Linux only")
BYTES = bytes(range(256)) * 100
DIGEST = hashlib.sha256(BYTES).digest()


def written(data: bytes, size: int = len(BYTES), digest: bytes = DIGEST) -> Content:
    with Writer(size, digest) as writer:
        writer.write(data[:1000])
        writer.write(memoryview(data)[1000:])
        return writer.finish()


@pytest.fixture
def content() -> Iterator[Content]:
    content = written(BYTES)
    yield content
    content.close()


def test_what_was_announced_is_kept_and_nobody_can_change_it(content: Content) -> None:
    assert Path(content.path).read_bytes() == BYTES
    with content.opened() as descriptor:
        for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 1)):
            with pytest.raises(PermissionError):
                change()


@pytest.mark.parametrize(
    "data", [BYTES[:-1], BYTES + b"x", BYTES[:-1] + b"x", b""], ids=["shorter", "longer", "other", "nothing"]
)
def test_what_was_not_announced_is_refused(data: bytes) -> None:
    with pytest.raises(OSError, match="announced"):
        written(data)


def test_another_process_opens_it_by_its_path(content: Content) -> None:
    opened = open_content(content.path, len(BYTES), DIGEST)
    content.close()
    with opened.opened() as descriptor:
        assert os.pread(descriptor, len(BYTES), 0) == BYTES
    opened.close()
    with pytest.raises(OSError):
        open_content(opened.path, len(BYTES), DIGEST)


def test_what_is_no_such_payload_is_not_opened(content: Content, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    pipe = os.pipe()
    unsealed = os.memfd_create(FILE_NAME, os.MFD_ALLOW_SEALING)
    os.write(unsealed, BYTES)
    try:
        for descriptor in (file, *pipe, unsealed):
            with pytest.raises(OSError):
                open_content(f"/proc/{os.getpid()}/fd/{descriptor}", len(BYTES), DIGEST)
        for path in (str(tmp_path / "file"), "/proc/self/fd/3", content.path + "/../3", ""):
            with pytest.raises(OSError, match="names no open file"):
                open_content(path, len(BYTES), DIGEST)
    finally:
        for descriptor in (file, *pipe, unsealed):
            os.close(descriptor)
    with pytest.raises(OSError, match="size"):
        open_content(content.path, len(BYTES) - 1, DIGEST)
    with pytest.raises(OSError, match="another payload"):
        open_content(content.path, len(BYTES), hashlib.sha256(b"").digest())
