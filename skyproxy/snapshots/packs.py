"""The bytes of storages in files: pieces under the hash of their content, in files of the safetensors format.

No torch here: it moves bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from skyproxy.snapshots.direct_files import ALIGNMENT, DirectFile
from skyproxy.snapshots.documents import refuse
from skyproxy.snapshots.hashes import SHA256, PieceHash, piece_hash
from skyproxy.snapshots.sources import Source
from skyproxy.snapshots.stores import FileStore

PIECE_BYTES = 4 << 20
"""Storages are hashed, and compared with what is there already, in pieces of this size."""
DIGEST_BYTES = 32
_ENTRY_BYTES = 160
"""More than the header of a pack has for one piece."""
_MAX_HEADER_BYTES = 100 << 20
"""The bound that the safetensors format itself has."""


class PackWriter:
    """A new pack. Several threads may put pieces into it.

    Args:
        store: where it will lie.
        name: its name there; until it is whole, it has another one.
        count: how many pieces there are at most.
    """

    def __init__(self, store: FileStore, name: str, count: int) -> None:
        self.name = name
        self.written_bytes = 0
        self._store = store
        self._draft = store.draft(name)
        self._start = -(-(8 + 1024 + count * _ENTRY_BYTES) // ALIGNMENT) * ALIGNMENT
        self._pieces: dict[bytes, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._file = DirectFile(self._draft, self._start)

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
        self._file.fill(piece, self._start + offset)

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
        text = json.dumps(header, separators=(",", ":")).encode("ascii").ljust(self._start - 8)
        assert len(text) == self._start - 8, "room was left for more than these"
        self._file.finish(len(text).to_bytes(8, "little") + text)
        self._store.publish(self._draft, self.name)
        return True

    def abandon(self) -> None:
        """Leave nothing behind; no thread may be putting a piece."""
        self._file.close()
        self._draft.unlink(missing_ok=True)


class PackReader:
    """A pack that is there; nothing in it is believed.

    Args:
        store: where it lies.
        name: its name there.
        digest_of: the hash that names its pieces; SHA-256 by default.

    Raises:
        OSError: it is not there.
        SnapshotError: it is not a pack.
    """

    def __init__(self, store: FileStore, name: str, digest_of: PieceHash | None = None) -> None:
        self._digest_of = digest_of or piece_hash(SHA256)
        self._file = store.open(name)
        try:
            self.size = self._file.size
            self._start, self.pieces = self._header()
        except BaseException:
            self._file.close()
            raise

    def _header(self) -> tuple[int, dict[bytes, tuple[int, int]]]:
        length = int.from_bytes(_read(self._file, min(8, self.size), 0), "little")
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
        _fill(self._file, target, self._start + start)
        if self._digest_of(target) != digest:
            raise refuse("the bytes of a tensor are not those that were written")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _read(file: Source, count: int, offset: int) -> bytes:
    content = bytearray(count)
    _fill(file, memoryview(content), offset)
    return bytes(content)


def _fill(file: Source, target: memoryview, offset: int) -> None:
    done = 0
    while done < len(target):
        count = file.read_into(target[done:], offset + done)
        if not count:
            raise refuse("one of its files is cut short")
        done += count


def pieces_in(byte_count: int) -> int:
    """The number of the pieces of so many bytes; takes no memory, whatever a document says."""
    return -(-byte_count // PIECE_BYTES)


def pieces_of(byte_count: int) -> Sequence[tuple[int, int]]:
    """The offsets at which the pieces of so many bytes begin and end."""
    return [(start, min(start + PIECE_BYTES, byte_count)) for start in range(0, byte_count, PIECE_BYTES)]
