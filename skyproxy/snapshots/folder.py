"""The snapshots of one session name, in a folder: which there are, how one is written, read, and cleared away.

A snapshot is a header, which names packs and their pieces, see `packs`. It is written last and renamed into place: one
that is there is whole. Two are kept; what none of them needs goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path

import torch

from skyproxy.errors import SnapshotError
from skyproxy.interrupts import raised_by_handler
from skyproxy.snapshots.documents import (
    Row,
    Table,
    data,
    entry,
    pack,
    real,
    refuse,
    rows,
    table,
    unpack,
    whole_number,
)
from skyproxy.snapshots.hashes import SHA256, piece_hash
from skyproxy.snapshots.headers import PACK_NAME, hash_of, places_of, session_of
from skyproxy.snapshots.packs import DIGEST_BYTES, PIECE_BYTES, PackReader, PackWriter, pieces_in, pieces_of
from skyproxy.snapshots.sources import SMALL_BYTES
from skyproxy.snapshots.stores import FileStore, LocalStore
from skyproxy.torch_codec import byte_view

MAGIC = b"skyproxy snapshot 1\n"
_MAGIC_2 = b"skyproxy snapshot 2\n"
"""Of those whose pieces have names by another hash than SHA-256."""
_ANY_MAGIC = re.compile(rb"skyproxy snapshot \d{1,9}\n")
KEPT_SNAPSHOTS = 2
_WRITER = "writer"
_HEADER_NAME = re.compile(r"snapshot-(\d{8})\.msgpack")
_SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_NAMES_BYTES = 1 << 28
_LIVE_PART = 0.5
"""A pack of which the latest snapshot uses less is left behind: what is still needed of it is written again."""


def check_name(name: object) -> str:
    """Return a name that can be that of a folder.

    Raises:
        SnapshotError: it cannot.
    """
    if not is_name(name):
        raise SnapshotError(
            f"snapshots cannot have the name {name!r:.80}: up to 64 letters, digits, '.', '_' and '-', with a "
            "letter or a digit first"
        )
    assert isinstance(name, str)
    return name


def is_name(name: object) -> bool:
    """Return whether a folder of snapshots can have this name."""
    return type(name) is str and _SESSION_NAME.fullmatch(name) is not None


class Draft:
    """A snapshot that is being written."""

    def __init__(self, folder: SnapshotFolder, piece_count: int, hashing: Executor, hash_name: str = SHA256) -> None:
        self._folder = folder
        self._hashing = hashing
        self._hash_name, self._digest_of = hash_name, piece_hash(hash_name)
        self._known = folder.known_pieces(hash_name)
        self._pack = PackWriter(folder.store, f"pack-{secrets.token_hex(8)}.safetensors", piece_count)
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
        digest = self._digest_of(piece)
        known = self._known.get(digest)
        if known is None:
            self._pack.put(digest, piece)
        self._used[digest] = known or self._pack.name
        return digest

    def knows(self, digest: bytes) -> bool:
        """Return whether a piece need not be written because it is there; it belongs to this snapshot then."""
        name = self._known.get(digest)
        if name is not None:
            self._used[digest] = name
        return name is not None

    def has(self, digest: bytes) -> bool:
        """Return whether a piece was put into it."""
        return digest in self._used

    def finish(
        self,
        document: Table,
        contents: list[list[bytes]],
        total_bytes: int,
        names: bytes = b"",
        *,
        clears: bool = True,
    ) -> str:
        """Make the snapshot; return its name.

        Args:
            document: the session.
            contents: for each storage, its pieces.
            total_bytes: the size of all storages.
            names: what a client keeps with it: see `saved`.
            clears: whether older ones go, which is for `clear_away` otherwise.

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
            "names": names,
            "hash": self._hash_name,
        }
        made = self._folder.add(pack(header), self._hash_name)
        if clears:
            self._folder.clear_away()
        return made

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._pack.abandon()


class SnapshotFolder:
    """The snapshots of one name.

    Args:
        place: where they lie; made when the first is written.
        writer: who writes: the last one that began owns the name.

    Attributes:
        store: where they lie.
        name: the name that they have in common.
    """

    def __init__(self, place: FileStore | Path, writer: str = "") -> None:
        self.store: FileStore = LocalStore(place) if isinstance(place, Path) else place
        self.name = self.store.name
        self._writer = writer

    def numbers(self) -> list[int]:
        """The numbers of its snapshots, the newest first."""
        found = (_HEADER_NAME.fullmatch(item) for item in self._files())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    # --- writing -----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make this name ours: who wrote under it before writes no more.

        Raises:
            OSError: the folder cannot be made.
        """
        self.store.prepare()
        self.store.write(_WRITER, self._writer.encode("ascii"))

    def _check_claim(self) -> None:
        if self.store.read(_WRITER, SMALL_BYTES) != self._writer.encode("ascii"):
            raise SnapshotError(
                "another session writes snapshots under this name now, so this one does not any more. What it wrote is "
                "kept. Use another name"
            )

    def begin(self, piece_count: int, hashing: Executor, hash_name: str = SHA256) -> Draft:
        """Begin a snapshot of up to so many pieces, which get their names by a hash.

        Raises:
            OSError: the folder cannot be written.
            SnapshotError: another session writes under this name, or the hash is not here.
        """
        self._check_claim()
        return Draft(self, piece_count, hashing, hash_name)

    def known_pieces(self, hash_name: str = SHA256) -> dict[bytes, str]:
        """The pieces that need not be written again, each with its pack."""
        numbers = self.numbers()
        if not numbers:
            return {}
        try:
            header = self._header(numbers[0])
            if hash_of(header) != hash_name:
                return {}
            used: dict[str, list[bytes]] = {}
            for digest, name in places_of(header).items():
                used.setdefault(name, []).append(digest)
            known = {}
            for name, digests in used.items():
                reader = PackReader(self.store, name)
                try:
                    there = [digest for digest in digests if digest in reader.pieces]
                    live = sum(end - start for start, end in (reader.pieces[digest] for digest in there))
                    if live >= _LIVE_PART * reader.size:
                        known.update(dict.fromkeys(there, name))
                finally:
                    reader.close()
            return known
        except (OSError, SnapshotError) as error:
            if raised_by_handler(error):
                raise
            return {}  # it is not what we wrote; everything is written again

    def add(self, body: bytes, hash_name: str = SHA256) -> str:
        """Make a snapshot of a header, as the newest; return its name."""
        magic = MAGIC if hash_name == SHA256 else _MAGIC_2
        self.store.settle()
        self._check_claim()
        number = (self.numbers() or [0])[0] + 1
        self.store.write(_header_name(number), magic + hashlib.sha256(body).digest() + body)
        return str(number)

    def clear_away(self) -> None:
        """Delete what no kept snapshot needs."""
        numbers = self.numbers()
        for number in numbers[KEPT_SNAPSHOTS:]:
            self.store.remove(_header_name(number))
        needed: set[str] = set()
        try:
            for number in numbers[:KEPT_SNAPSHOTS]:
                needed |= set(places_of(self._header(number)).values())
        except (OSError, SnapshotError):
            return  # what it needs is not known
        for name in self._files():
            if (PACK_NAME.fullmatch(name) and name not in needed) or name.endswith(".draft"):
                with contextlib.suppress(OSError):
                    self.store.remove(name)

    def delete(self, name: str) -> bool:
        """Delete a snapshot, or all of them, and the folder; return whether there was one."""
        numbers = self.numbers()
        if not name:
            for item in self._files():
                with contextlib.suppress(OSError):
                    self.store.remove(item)
            self.store.remove_place()
            return bool(numbers)
        number = self._number(name)
        if number not in numbers:
            return False
        self.store.remove(_header_name(number))
        self.clear_away()
        return True

    def _files(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.store.files()
        return []

    # --- reading -----------------------------------------------------------------------------------------------------

    def row(self, number: int) -> dict[str, object]:
        """Return the row for people about a snapshot."""
        header = self._header(number)
        document = table(entry(header, "document"), "the document")
        return {
            "name": self.name,
            "snapshot": str(number),
            "sequence": whole_number(entry(document, "sequence"), "its batch"),
            "bytes": whole_number(entry(header, "bytes"), "its size"),
            "seconds": max(time.time() - real(entry(header, "made_at"), "when it was made"), 0.0),
            **session_of(document),
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
        number = self.find(name)
        try:
            header = self._header(number)
            return Loaded(
                str(number),
                table(entry(header, "document"), "it"),
                self._storages(header, hashing, room_bytes()),
                data(header.get("names", b""), "its names", MAX_NAMES_BYTES),
            )
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise self._unreadable(number, error) from error

    def find(self, name: str) -> int:
        """The number of a snapshot; without a name, of the newest.

        Raises:
            SnapshotError: there is none.
        """
        numbers = self.numbers()
        number = self._number(name) if name else (numbers or [0])[0]
        if number not in numbers:
            there = ", ".join(map(str, reversed(numbers)))
            raise SnapshotError(
                f"there is no snapshot {name or 'at all'} of {self.name!r} here"
                + (f"; there are {there}" if there else "")
                + ". Nothing was changed"
            )
        return number

    def open(self, name: str) -> Opened:
        """Open a snapshot to be copied, piece by piece; close it afterwards.

        Raises:
            SnapshotError: there is none, or it is not whole.
        """
        number = self.find(name)
        try:
            header = self._header(number)
            places, digest_of = places_of(header), piece_hash(hash_of(header))
            readers: dict[str, PackReader] = {}
            try:
                for pack_name in set(places.values()):
                    readers[pack_name] = PackReader(self.store, pack_name, digest_of)
            except BaseException:
                for reader in readers.values():
                    reader.close()
                raise
            return Opened(str(number), header, places, readers)
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise self._unreadable(number, error) from error

    def _unreadable(self, number: int, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"snapshot {number} of {self.name!r} cannot be read: {error.strerror or error}. Nothing was changed; "
            "load an older one (list_snapshots names them)"
        )

    def _number(self, name: object) -> int:
        if type(name) is not str or not re.fullmatch(r"[0-9]{1,8}", name):
            raise SnapshotError(f"a snapshot is named by its number, not by {name!r:.40}")
        return int(name)

    def _header(self, number: int) -> Table:
        content = self.store.read(_header_name(number))
        start = len(MAGIC) + DIGEST_BYTES
        if not content.startswith((MAGIC, _MAGIC_2)) and _ANY_MAGIC.match(content):
            raise SnapshotError(
                "this snapshot is of a newer format than is known here. Nothing was changed; a newer skyproxy reads it"
            )
        if not content.startswith((MAGIC, _MAGIC_2)) or len(content) < start:
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
        sizes = [whole_number(row[0], "the size of a storage") for row in described]
        if room is not None and sum(sizes) > room:
            raise SnapshotError(
                f"this snapshot holds {sum(sizes):,} bytes, and this worker has {room:,} left. It is untouched; "
                "load it on a worker with more memory"
            )
        places, digest_of = places_of(header), piece_hash(hash_of(header))
        readers: dict[str, PackReader] = {}
        try:
            for name in set(places.values()):
                readers[name] = PackReader(self.store, name, digest_of)
            return [
                _load_tensor(size, rows(content, "a content"), places, readers, hashing)
                for size, content in zip(sizes, contents, strict=True)
            ]
        finally:
            for reader in readers.values():
                reader.close()


def _header_name(number: int) -> str:
    return f"snapshot-{number:08d}.msgpack"


class Loaded:
    """A snapshot that was read.

    Attributes:
        name: its number.
        document: not believed yet.
        storages: its bytes.
        names: what a client keeps with it.
    """

    def __init__(self, name: str, document: Table, storages: list[torch.Tensor], names: bytes = b"") -> None:
        self.name = name
        self.document = document
        self.storages = storages
        self.names = names


class Opened:
    """A snapshot that is being copied. Nothing in it is believed.

    Attributes:
        name: its number.
        header: all but the bytes.
    """

    def __init__(self, name: str, header: Table, places: dict[bytes, str], readers: dict[str, PackReader]) -> None:
        self.name = name
        self.header = header
        self._places = places
        self._readers = readers

    def piece(self, digest: bytes) -> bytes:
        """The bytes of a piece.

        Raises:
            OSError: it cannot be read.
            SnapshotError: there is none like that, or it is not what it should be.
        """
        reader = self._readers.get(self._places.get(digest, ""))
        start, end = reader.pieces.get(digest, (0, 0)) if reader is not None else (0, 0)
        if reader is None or end <= start:
            raise refuse("a piece of a tensor is missing")
        content = bytearray(end - start)
        reader.read_into(digest, memoryview(content))
        return bytes(content)

    def close(self) -> None:
        """Let go of its files."""
        for reader in self._readers.values():
            reader.close()


def _load_tensor(
    size: int, content: Row, places: dict[bytes, str], readers: dict[str, PackReader], hashing: Executor
) -> torch.Tensor:
    if pieces_in(size) != len(content):
        raise refuse(f"a storage of {size} bytes has {len(content)} pieces")
    spans = pieces_of(size)
    tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
    view = byte_view(tensor)

    def fill(span: tuple[int, int], digest: object) -> None:
        key = data(digest, "a piece's name", DIGEST_BYTES)
        if key not in places:
            raise refuse("a piece of a tensor is missing")
        readers[places[key]].read_into(key, view[span[0] : span[1]])

    for _ in hashing.map(fill, spans, content):
        pass
    return tensor


def piece_count(storages: Iterable[torch.Tensor]) -> int:
    """The number of pieces of these storages."""
    return sum(-(-storage.numel() // PIECE_BYTES) for storage in storages)
