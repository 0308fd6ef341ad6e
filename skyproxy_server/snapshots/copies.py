"""Snapshots that are copied through a client: to its own disk, or to a worker that does not see the same volume.

Both ways piece by piece, each no larger than `PIECE_BYTES`. What comes from a client is believed no more than what a
volume holds: a piece is known by the hash that is made of it here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress

from skyproxy.errors import ProtocolError, SnapshotError
from skyproxy.snapshots.documents import (
    MAX_DOCUMENT_BYTES,
    data,
    entry,
    pack,
    refuse,
    rows,
    table,
    unpack,
    whole_number,
)
from skyproxy.snapshots.folder import MAX_NAMES_BYTES, Draft, Opened, SnapshotFolder
from skyproxy.snapshots.hashes import SHA256, piece_hash
from skyproxy.snapshots.packs import DIGEST_BYTES, PIECE_BYTES, pieces_in
from skyproxy_server.snapshots.volume import VolumeThread

_MOST_PIECES = 500_000
"""2 TiB, and a header of a pack that is still below the bound of its format."""
_COPIED = ("document", "contents", "names", "hash")
"""Entries of a header that a client is given."""
Folder = Callable[[str], SnapshotFolder]


def _unreadable(name: str, error: OSError) -> SnapshotError:
    return SnapshotError(
        f"the snapshot {name!r} cannot be copied: {error.strerror or error}. It is as it was, and nothing else was "
        "changed. Try again"
    )


class CopiesOut:
    """The snapshot that a client is reading.

    Args:
        folder: finds the folder of a name.
        volume: the thread that reads, which alone changes anything here.
    """

    def __init__(self, folder: Folder, volume: VolumeThread) -> None:
        self._folder = folder
        self._volume = volume
        self._opened: Opened | None = None
        self._key = ("", "")
        self._header = b""

    def header(self, name: str, number: str, offset: int) -> dict[str, object]:
        """Open a snapshot, and return a part of its document and contents: "snapshot", "total_bytes", "part".

        Raises:
            SnapshotError: there is none, or it is not whole, or the volume hangs.
        """
        return self._volume.run("reading a snapshot", lambda: self._header_part(name, number, offset))

    def _header_part(self, name: str, number: str, offset: int) -> dict[str, object]:
        if type(offset) is not int or offset < 0:
            raise ProtocolError(f"no part begins at {offset!r:.40}")
        if offset == 0 or self._key != (name, number):
            self.end()
            self._opened = self._folder(name).open(number)
            self._key = name, number
            header = self._opened.header
            self._header = pack({key: header[key] for key in _COPIED if key in header})
        assert self._opened is not None
        part = self._header[offset : offset + PIECE_BYTES]
        return {"snapshot": self._opened.name, "total_bytes": len(self._header), "part": part}

    def piece(self, digest: bytes) -> bytes:
        """Return a piece of the snapshot that was opened.

        Raises:
            SnapshotError: it is not there, or not what it should be, or the volume hangs.
        """
        return self._volume.run("reading a snapshot", lambda: self._piece(digest))

    def _piece(self, digest: bytes) -> bytes:
        if self._opened is None:
            raise ProtocolError("a piece is read of a snapshot whose header was read before")
        try:
            return self._opened.piece(data(digest, "a piece's name", DIGEST_BYTES))
        except OSError as error:
            raise _unreadable(self._key[0], error) from error

    def end(self) -> None:
        """Close the files. On the thread that reads."""
        opened, self._opened, self._header = self._opened, None, b""
        if opened is not None:
            opened.close()


class CopiesIn:
    """The snapshot that a client is writing.

    Args:
        folder: finds the folder of a name.
        claimed: the names that are this session's.
        hashing: hashes and writes.
        volume: the thread that writes, which alone changes anything here.
        most_bytes: what the snapshots of this token may have here for another one to be brought.
        used_bytes: gives what they have, but for those of one name.
    """

    def __init__(
        self,
        folder: Folder,
        claimed: set[str],
        hashing: Executor,
        volume: VolumeThread,
        most_bytes: int,
        used_bytes: Callable[[str], int],
    ) -> None:
        self._most_bytes = most_bytes
        self._used_bytes = used_bytes
        self._room = 0
        self._folder = folder
        self._volume = volume
        self._claimed = claimed
        self._hashing = hashing
        self._draft: Draft | None = None
        self._name = ""
        self._header = bytearray()

    def begin(self, name: str, pieces_in: int, hash_name: str = SHA256) -> None:
        """Begin one, of up to so many pieces, which have their names by a hash; an unfinished one is dropped.

        Raises:
            SnapshotError: it cannot be written, or the hash is not here, or the volume hangs.
        """
        self._volume.run("writing a copy of a snapshot", lambda: self._begin(name, pieces_in, hash_name))

    def _begin(self, name: str, pieces_in: int, hash_name: str) -> None:
        whole_number(pieces_in, "the number of pieces", _MOST_PIECES)
        piece_hash(hash_name)  # before anything is written
        self.end()
        folder = self._folder(name)
        self._room = self._most_bytes - self._used_bytes(name)
        try:
            folder.claim()
            self._claimed.add(name)
            self._draft, self._name = folder.begin(pieces_in, self._hashing, hash_name), name
        except OSError as error:
            raise _unwritable(name, error) from error

    def piece(self, content: bytes) -> bytes:
        """Take a piece; return its hash.

        Raises:
            SnapshotError: it cannot be written; the snapshot is dropped. Or the volume hangs.
        """
        return self._volume.run("writing a copy of a snapshot", lambda: self._take_piece(content))

    def _take_piece(self, content: bytes) -> bytes:
        if self._draft is None:
            raise ProtocolError("a piece is written behind the beginning of a snapshot")
        if not len(data(content, "a piece", PIECE_BYTES)) > 0:
            raise ProtocolError("a piece has at least one byte")
        self._room -= len(content)
        if self._room < 0:
            name = self._name
            self.end()
            raise SnapshotError(
                f"the snapshot {name!r} was not brought here: the snapshots of this token would have more than "
                f"{self._most_bytes:,} bytes on this volume (SKYPROXY_MAX_BROUGHT_SNAPSHOT_BYTES, or `snapshots` in "
                "the token's file). Nothing of it is kept, and those before it are untouched. Delete what is not "
                "needed, or have the bound raised"
            )
        try:
            return self._draft.put_piece(memoryview(content))
        except (OSError, SnapshotError) as error:
            name = self._name
            self.end()
            raise _unwritable(name, error) from error

    def header(self, part: bytes, is_last: bool) -> str:
        """Take a part of the document, contents and names; with the last one, make the snapshot, and return its name.

        Raises:
            SnapshotError: it is not a header, or cannot be written; the snapshot is dropped. Or the volume hangs.
        """
        return self._volume.run("writing a copy of a snapshot", lambda: self._take_header(part, is_last))

    def _take_header(self, part: bytes, is_last: bool) -> str:
        if self._draft is None:
            raise ProtocolError("a header is written behind the beginning of a snapshot")
        self._header += data(part, "a part of a header", PIECE_BYTES)
        if len(self._header) > MAX_DOCUMENT_BYTES:
            self.end()
            raise refuse(f"its document has more than {MAX_DOCUMENT_BYTES:,} bytes")
        if not is_last:
            return ""
        draft, name, header = self._draft, self._name, bytes(self._header)
        try:
            made = _finish(draft, header)
        except OSError as error:
            self.end()
            raise _unwritable(name, error) from error
        except BaseException:
            self.end()
            raise
        self._draft, self._header = None, bytearray()
        return made

    def end(self) -> None:
        """Give up what is not finished. On the thread that writes."""
        draft, self._draft = self._draft, None
        self._header = bytearray()
        if draft is not None:
            with suppress(OSError):
                draft.abandon()


def _finish(draft: Draft, content: bytes) -> str:
    header = unpack(content)
    document = table(entry(header, "document"), "it")
    sizes = [whole_number(row[0], "a size") for row in rows(entry(document, "storages"), "the storages", 3)]
    contents = [
        [data(digest, "a piece's name", DIGEST_BYTES) for digest in rows(content, "a content")]
        for content in rows(entry(header, "contents"), "the contents")
    ]
    if [len(content) for content in contents] != [pieces_in(size) for size in sizes]:
        raise refuse("its storages have other pieces than they should")
    if not all(draft.has(digest) for content in contents for digest in content):
        raise refuse("a piece of a tensor is missing")
    names = data(header.get("names", b""), "its names", MAX_NAMES_BYTES)
    return draft.finish(document, contents, sum(sizes), names)


def _unwritable(name: str, error: Exception) -> SnapshotError:
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return SnapshotError(
        f"the snapshot {name!r} could not be written here: {why}. Nothing of it is kept, and those before it are "
        "untouched. Make room on the worker's volume; try again"
    )
