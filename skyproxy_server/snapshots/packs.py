"""The bytes of storages in files: pieces under the hash of their content, in files of the safetensors format.

No torch here: it moves bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from skyproxy_server.snapshots.documents import refuse

PIECE_BYTES = 4 << 20
"""Storages are hashed, and compared with what is there already, in pieces of this size."""
DIGEST_BYTES = 32
_ENTRY_BYTES = 160
"""More than the header of a pack has for one piece."""
_MAX_HEADER_BYTES = 100 << 20
"""The bound that the safetensors format itself has."""


def piece_digest(piece: memoryview | bytes) -> bytes:
    """Return the SHA-256 of a piece. Faster than others where the processor has instructions for it, as most have."""
    return hashlib.sha256(piece).digest()


class PackWriter:
    """A new pack. Several threads may put pieces into it.

    Args:
        path: where it will lie; until then it has another name.
        count: how many pieces there are at most.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.name = path.name
        self.written_bytes = 0
        self._path = path
        self._draft = path.with_name(f".{path.name}.draft")
        self._header_bytes = 1024 + -(-count * _ENTRY_BYTES // 512) * 512
        self._pieces: dict[bytes, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._file = os.open(self._draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o600)

    def put(self, digest: bytes, piece: memoryview) -> None:
        """Write a piece, unless it is in this pack already.

        Raises:
            OSError: there is no space, or no such folder any more.
        """
        with self._lock:
            if digest in self._pieces:
                return
            offset = self.written_bytes
            self.written_bytes += len(piece)
            self._pieces[digest] = (offset, self.written_bytes)
        at = 8 + self._header_bytes + offset
        while piece:
            count = os.pwrite(self._file, piece, at)
            piece, at = piece[count:], at + count

    def finish(self) -> bool:
        """Give the pack its header and its name, for good; return False if it holds nothing, and is gone.

        Raises:
            OSError: as `put`.
        """
        if not self._pieces:
            self.abandon()
            return False
        header = {
            digest.hex(): {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
            for digest, (start, end) in self._pieces.items()
        }
        text = json.dumps(header, separators=(",", ":")).encode("ascii").ljust(self._header_bytes)
        assert len(text) == self._header_bytes, "room was left for more than these"
        os.pwrite(self._file, len(text).to_bytes(8, "little") + text, 0)
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        os.replace(self._draft, self._path)
        return True

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._draft.unlink(missing_ok=True)


class PackReader:
    """A pack that is there; nothing in it is believed.

    Raises:
        OSError: it is not there.
        SnapshotError: it is no pack.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0))
        try:
            self.size = os.fstat(self._file).st_size
            self._start, self.pieces = self._header()
        except BaseException:
            os.close(self._file)
            raise

    def _header(self) -> tuple[int, dict[bytes, tuple[int, int]]]:
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, self.size - 8):
            raise refuse("one of its files is cut short, or none of ours")
        try:
            header = json.loads(_read(self._file, length, 8))
            pieces = {
                bytes.fromhex(name): (int(row["data_offsets"][0]), int(row["data_offsets"][1]))
                for name, row in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise refuse(f"one of its files has a malformed header ({error!s:.100})") from error
        room = self.size - 8 - length
        if any(not 0 <= start < end <= room or end - start > PIECE_BYTES for start, end in pieces.values()):
            raise refuse("one of its files is cut short")
        return 8 + length, pieces

    def read_into(self, digest: bytes, target: memoryview) -> None:
        """Read a piece to where it belongs.

        Raises:
            OSError: it cannot be read.
            SnapshotError: there is none like that, or it is not what it should be.
        """
        start, end = self.pieces.get(digest, (0, 0))
        if end - start != len(target):
            raise refuse("a piece of a tensor is missing")
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], self._start + start + done)
            if not count:
                raise refuse("one of its files is cut short")
            done += count
        if piece_digest(target) != digest:
            raise refuse("the bytes of a tensor are not those that were written")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def _read(file: int, count: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.pread(file, count, offset)
        if not part:
            raise refuse("one of its files is cut short")
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def pieces_of(byte_count: int) -> Sequence[tuple[int, int]]:
    """The offsets at which the pieces of so many bytes begin and end."""
    return [(start, min(start + PIECE_BYTES, byte_count)) for start in range(0, byte_count, PIECE_BYTES)]
