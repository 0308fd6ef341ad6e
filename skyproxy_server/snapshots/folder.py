"""The snapshots of one session name, in a folder: which there are, how one is written, read, and cleared away.

A snapshot is a header, which names packs and their pieces, see `packs`. It is written last and renamed into place: one
that is there is whole. Two are kept; what none of them needs goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path

import torch

from skyproxy.errors import SnapshotError
from skyproxy.torch_codec import byte_view
from skyproxy_server.snapshots.documents import (
    Row,
    Table,
    data,
    entry,
    pack,
    real,
    refuse,
    rows,
    table,
    text,
    unpack,
    whole,
)
from skyproxy_server.snapshots.packs import DIGEST_BYTES, PIECE_BYTES, PackReader, PackWriter, piece_digest, pieces_of

MAGIC = b"skyproxy snapshot 1\n"
KEPT_SNAPSHOTS = 2
_HEADER_NAME = re.compile(r"snapshot-(\d{8})\.msgpack")
_PACK_NAME = re.compile(r"pack-[0-9a-f]{16}\.safetensors")
_SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LIVE_PART = 0.5
"""A pack of which the latest snapshot uses less is left behind: what is still needed of it is written again."""


def check_name(name: object) -> str:
    """Return a name that can be that of a folder.

    Raises:
        SnapshotError: it cannot.
    """
    if type(name) is not str or not _SESSION_NAME.fullmatch(name):
        raise SnapshotError(
            f"snapshots cannot have the name {name!r:.80}: up to 64 letters, digits, '.', '_' and '-', with a "
            "letter or a digit first"
        )
    return name


class Draft:
    """A snapshot that is being written."""

    def __init__(self, folder: SnapshotFolder, piece_count: int, hashing: Executor) -> None:
        self._folder = folder
        self._hashing = hashing
        self._known = folder.known_pieces()
        self._pack = PackWriter(folder.path / f"pack-{secrets.token_hex(8)}.safetensors", piece_count)
        self._used: dict[bytes, str] = {}

    @property
    def written_bytes(self) -> int:
        """The bytes that were not there before."""
        return self._pack.written_bytes

    def put(self, pieces: Iterable[memoryview]) -> list[bytes]:
        """Write what is not there yet; return the digests."""
        return list(self._hashing.map(self.put_piece, pieces))

    def put_piece(self, piece: memoryview) -> bytes:
        """Write one piece, if it is not there yet. For any thread."""
        digest = piece_digest(piece)
        known = self._known.get(digest)
        if known is None:
            self._pack.put(digest, piece)
        self._used[digest] = known or self._pack.name
        return digest

    def finish(self, document: Table, contents: list[list[bytes]], total_bytes: int) -> str:
        """Make the snapshot; return its name.

        Raises:
            OSError: there is no space.
            SnapshotError: another session writes under this name now.
        """
        self._pack.finish()
        packs = sorted(set(self._used.values()))
        number = {name: index for index, name in enumerate(packs)}
        header = {
            "document": document,
            "contents": contents,
            "packs": packs,
            "pieces": [[digest, number[name]] for digest, name in self._used.items()],
            "bytes": total_bytes,
            "made_at": time.time(),
        }
        return self._folder.add(pack(header))

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._pack.abandon()


class SnapshotFolder:
    """The snapshots of one name.

    Args:
        path: the folder; made when the first is written.
        writer: who writes: the last one that began owns the name.
    """

    def __init__(self, path: Path, writer: str = "") -> None:
        self.path = path
        self._writer = writer

    def numbers(self) -> list[int]:
        """The numbers of its snapshots, the newest first."""
        with contextlib.suppress(OSError):
            found = (_HEADER_NAME.fullmatch(item) for item in os.listdir(self.path))
            return sorted((int(match[1]) for match in found if match), reverse=True)
        return []

    # --- writing -----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make this name ours: who wrote under it before writes no more.

        Raises:
            OSError: the folder cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write("writer", self._writer.encode("ascii"))

    def _check_claim(self) -> None:
        if (self.path / "writer").read_bytes() != self._writer.encode("ascii"):
            raise SnapshotError(
                "another session writes snapshots under this name now, so this one does not any more. What it wrote is "
                "kept. Use another name"
            )

    def begin(self, piece_count: int, hashing: Executor) -> Draft:
        """Begin a snapshot of up to so many pieces.

        Raises:
            OSError: the folder cannot be written.
            SnapshotError: another session writes under this name.
        """
        self._check_claim()
        return Draft(self, piece_count, hashing)

    def known_pieces(self) -> dict[bytes, str]:
        """The pieces that need not be written again, each with its pack."""
        numbers = self.numbers()
        if not numbers:
            return {}
        try:
            header = self._header(numbers[0])
            used: dict[str, list[bytes]] = {}
            for digest, name in _places(header).items():
                used.setdefault(name, []).append(digest)
            known = {}
            for name, digests in used.items():
                reader = PackReader(self.path / name)
                try:
                    there = [digest for digest in digests if digest in reader.pieces]
                    live = sum(end - start for start, end in (reader.pieces[digest] for digest in there))
                    if live >= _LIVE_PART * reader.size:
                        known.update(dict.fromkeys(there, name))
                finally:
                    reader.close()
            return known
        except (OSError, SnapshotError):
            return {}  # it is not what we wrote; all is written anew

    def add(self, body: bytes) -> str:
        """Make a snapshot of a header, as the newest; return its name."""
        self._sync()
        self._check_claim()
        number = (self.numbers() or [0])[0] + 1
        self._write(f"snapshot-{number:08d}.msgpack", MAGIC + hashlib.sha256(body).digest() + body)
        self.clear_away()
        return str(number)

    def _write(self, name: str, content: bytes) -> None:
        draft = self.path / f".{name}.{secrets.token_hex(4)}.draft"
        try:
            file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o600)
            with os.fdopen(file, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, self.path / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._sync()

    def _sync(self) -> None:
        """Have the names in the folder outlive a crash of the machine."""
        if os.name == "posix":
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def clear_away(self) -> None:
        """Delete what no kept snapshot needs."""
        numbers = self.numbers()
        for number in numbers[KEPT_SNAPSHOTS:]:
            self._path_of(number).unlink(missing_ok=True)
        needed: set[str] = set()
        try:
            for number in numbers[:KEPT_SNAPSHOTS]:
                needed |= set(_places(self._header(number)).values())
        except (OSError, SnapshotError):
            return  # what it needs is not known
        for name in os.listdir(self.path):
            if (_PACK_NAME.fullmatch(name) and name not in needed) or name.endswith(".draft"):
                with contextlib.suppress(OSError):
                    os.unlink(self.path / name)

    def delete(self, name: str) -> bool:
        """Delete a snapshot, or all of them, and the folder; return whether there was one."""
        numbers = self.numbers()
        if not name:
            for item in self._files():
                with contextlib.suppress(OSError):
                    os.unlink(self.path / item)
            with contextlib.suppress(OSError):
                self.path.rmdir()
            return bool(numbers)
        number = self._number(name)
        if number not in numbers:
            return False
        self._path_of(number).unlink(missing_ok=True)
        self.clear_away()
        return True

    def _files(self) -> list[str]:
        with contextlib.suppress(OSError):
            return os.listdir(self.path)
        return []

    # --- reading -----------------------------------------------------------------------------------------------------

    def row(self, number: int) -> dict[str, object]:
        """Return the row for people about a snapshot."""
        header = self._header(number)
        document = table(entry(header, "document"), "the document")
        return {
            "name": self.path.name,
            "snapshot": str(number),
            "sequence": whole(entry(document, "sequence"), "its batch"),
            "bytes": whole(entry(header, "bytes"), "its size"),
            "seconds": max(time.time() - real(entry(header, "made_at"), "when it was made"), 0.0),
        }

    def read(self, name: str, hashing: Executor, room_bytes: Callable[[], int | None]) -> Loaded:
        """Read a snapshot.

        Args:
            name: which; empty for the newest.
            hashing: what reads and hashes.
            room_bytes: how much there may be of it; None says nothing.

        Raises:
            SnapshotError: there is none, or it is not whole.
        """
        numbers = self.numbers()
        number = self._number(name) if name else (numbers or [0])[0]
        if number not in numbers:
            there = ", ".join(map(str, reversed(numbers)))
            raise SnapshotError(
                f"there is no snapshot {name or 'at all'} of {self.path.name!r} here"
                + (f"; there are {there}" if there else "")
                + ". Nothing was changed"
            )
        try:
            header = self._header(number)
            return Loaded(
                str(number), table(entry(header, "document"), "it"), self._storages(header, hashing, room_bytes())
            )
        except OSError as error:
            raise SnapshotError(
                f"snapshot {number} of {self.path.name!r} cannot be read: {error.strerror}. Nothing was changed; "
                "load an older one (list_snapshots names them)"
            ) from error

    def _number(self, name: object) -> int:
        if type(name) is not str or not re.fullmatch(r"[0-9]{1,8}", name):
            raise SnapshotError(f"a snapshot is named by its number, not by {name!r:.40}")
        return int(name)

    def _path_of(self, number: int) -> Path:
        return self.path / f"snapshot-{number:08d}.msgpack"

    def _header(self, number: int) -> Table:
        content = self._path_of(number).read_bytes()
        start = len(MAGIC) + DIGEST_BYTES
        if not content.startswith(MAGIC) or len(content) < start:
            raise refuse("its header is cut short, or none of ours")
        body = content[start:]
        if hashlib.sha256(body).digest() != content[len(MAGIC) : start]:
            raise refuse("its header is not what was written")
        return unpack(body)

    def _storages(self, header: Table, hashing: Executor, room: int | None) -> list[torch.Tensor]:
        described = rows(entry(table(entry(header, "document"), "it"), "storages"), "the storages", 3)
        contents = rows(entry(header, "contents"), "the contents")
        if len(described) != len(contents):
            raise refuse(f"it has {len(described)} storages, and contents of {len(contents)}")
        sizes = [whole(row[0], "the size of a storage") for row in described]
        if room is not None and sum(sizes) > room:
            raise SnapshotError(
                f"this snapshot holds {sum(sizes):,} bytes, and this worker has {room:,} left. It is untouched; "
                "load it on a worker with more memory"
            )
        places = _places(header)
        readers: dict[str, PackReader] = {}
        try:
            for name in set(places.values()):
                readers[name] = PackReader(self.path / name)
            return [
                _filled(size, rows(content, "a content"), places, readers, hashing)
                for size, content in zip(sizes, contents, strict=True)
            ]
        finally:
            for reader in readers.values():
                reader.close()


class Loaded:
    """A snapshot that was read.

    Attributes:
        name: its number.
        document: not believed yet.
        storages: its bytes.
    """

    def __init__(self, name: str, document: Table, storages: list[torch.Tensor]) -> None:
        self.name = name
        self.document = document
        self.storages = storages


def _filled(
    size: int, content: Row, places: dict[bytes, str], readers: dict[str, PackReader], hashing: Executor
) -> torch.Tensor:
    spans = pieces_of(size)
    if len(spans) != len(content):
        raise refuse(f"a storage of {size} bytes has {len(content)} pieces")
    tensor = torch.empty(size, dtype=torch.uint8)
    view = byte_view(tensor)

    def fill(span: tuple[int, int], digest: object) -> None:
        key = data(digest, "a piece's name", DIGEST_BYTES)
        if key not in places:
            raise refuse("a piece of a tensor is missing")
        readers[places[key]].read_into(key, view[span[0] : span[1]])

    for _ in hashing.map(fill, spans, content):
        pass
    return tensor


def _places(header: Table) -> dict[bytes, str]:
    """The pack of each piece."""
    packs = [text(name, "a pack", 64) for name in rows(entry(header, "packs"), "the packs")]
    if not all(_PACK_NAME.fullmatch(name) for name in packs):
        raise refuse("it names a file that is none of ours")
    return {
        data(digest, "a piece's name", DIGEST_BYTES): packs[whole(number, "a pack", len(packs) - 1)]
        for digest, number in rows(entry(header, "pieces"), "the pieces", 2)
    }


def piece_count(storages: Iterable[torch.Tensor]) -> int:
    """The number of pieces of these storages."""
    return sum(-(-storage.numel() // PIECE_BYTES) for storage in storages)
