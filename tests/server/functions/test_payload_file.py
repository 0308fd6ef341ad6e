"""Payloads that a worker reads from a file of its client's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyproxy.payloads.pieces import FILE_NAME, Assembly, plain_memory
from skyproxy_server.functions.payload_file import is_payload_file, read_payload_file

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files have names on Linux only")


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/proc/12/fd/3", True),
        ("/proc/self/fd/3", False),
        ("/etc/passwd", False),
        ("/proc/12/fd/3/../../environ", False),
        ("/proc/12/fd/3\n", False),
        ("/proc/١/fd/3", False),
        (b"/proc/12/fd/3", False),
        (7, False),
    ],
)
def test_only_open_files_of_processes_are_payloads(path: object, is_one: bool) -> None:
    assert is_payload_file(path) is is_one


def assembly(sizes: list[int]) -> Assembly[object]:
    return Assembly(sizes, (), plain_memory, 1 << 30)


def test_pieces_come_in_order_whatever_their_sizes() -> None:
    pieces = [b"a" * 5, b"", b"b" * (3 << 20), b"c"]
    descriptor = os.memfd_create(FILE_NAME)
    os.write(descriptor, b"".join(pieces))
    sizes = [len(piece) for piece in pieces]
    made = assembly(sizes)
    read_payload_file(f"/proc/{os.getpid()}/fd/{descriptor}", made, "call", sizes)
    os.close(descriptor)
    assert made.complete
    assert [bytes(piece) for piece in made.pieces] == pieces  # type: ignore[call-overload]


def test_what_is_no_such_file_is_refused_at_once() -> None:
    reader, writer = os.pipe()
    short = os.memfd_create(FILE_NAME)
    os.write(short, b"12345")
    gone = os.memfd_create(FILE_NAME)
    os.close(gone)
    for descriptor in (reader, short, gone):
        with pytest.raises(OSError):
            read_payload_file(f"/proc/{os.getpid()}/fd/{descriptor}", assembly([10]), "call", [10])
    for descriptor in (reader, writer, short):
        os.close(descriptor)


def test_another_file_of_the_same_size_is_refused(tmp_path: Path) -> None:
    """A descriptor is used again for whatever the client opens next."""
    ordinary = tmp_path / f"{FILE_NAME} (deleted)"
    ordinary.write_bytes(b"0123456789")
    another = os.memfd_create("another")
    os.write(another, b"0123456789")
    for descriptor in (os.open(ordinary, os.O_RDONLY), another):
        made = assembly([10])
        with pytest.raises(OSError, match="is no payload in memory"):
            read_payload_file(f"/proc/{os.getpid()}/fd/{descriptor}", made, "call", [10])
        assert not made.complete
        os.close(descriptor)
