"""Snapshots that are copied between workers' volumes and this machine, beside the session that they are of.

Bytes travel on a session of their own, so what the program does meanwhile neither waits behind them nor has to be
logged with them. Nothing that a worker sends is believed: each piece is held against its hash, here or where it goes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from skyproxy.errors import ProtocolError, RemoteError, SessionLostError, SnapshotError, visible
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked
from skyproxy.protocol.messages import Batch, Failure, Reply, RequestId, Sequence
from skyproxy.session.attempts import attempt
from skyproxy.session.opening import Opener
from skyproxy.session.restoring import NewSession
from skyproxy.snapshots.documents import (
    MAX_DOCUMENT_BYTES,
    Table,
    data,
    entry,
    pack,
    refuse,
    rows,
    table,
    unpack,
    whole_number,
)
from skyproxy.snapshots.folder import MAX_NAMES_BYTES, Opened, SnapshotFolder
from skyproxy.snapshots.hashes import SHA256, PieceHash, piece_check
from skyproxy.snapshots.headers import hash_of
from skyproxy.snapshots.packs import DIGEST_BYTES, PIECE_BYTES, pieces_in, pieces_of

if TYPE_CHECKING:
    from skyproxy.session.session import Session

_Result = TypeVar("_Result")
_ON_THE_WAY = 8
"""Pieces that are asked for, or sent, before the answer of the first has come."""
_ANSWER_SECONDS = 600.0
_WRITERS = 4


class SnapshotCopy(NamedTuple):
    """A snapshot that is being copied.

    Attributes:
        document, contents, names: see `SnapshotFolder`; nothing in them is believed.
        pieces: gives those of some hashes, in order.
        hash_name: the hash that names them.
    """

    document: Table
    contents: list[list[bytes]]
    names: bytes
    pieces: Callable[[list[bytes]], Iterator[bytes]]
    hash_name: str = SHA256

    def digests(self) -> list[bytes]:
        """The hashes of its pieces, each once."""
        return list(dict.fromkeys(digest for content in self.contents for digest in content))


def _copy_of(header: Table, pieces: Callable[[list[bytes]], Iterator[bytes]]) -> SnapshotCopy:
    document = table(entry(header, "document"), "it")
    contents = [
        [data(digest, "a piece's name", DIGEST_BYTES) for digest in rows(content, "a content")]
        for content in rows(entry(header, "contents"), "the contents")
    ]
    sizes = _sizes(document)
    if [len(content) for content in contents] != [pieces_in(size) for size in sizes]:
        raise refuse("its storages have other pieces than they should")
    names = data(header.get("names", b""), "its names", MAX_NAMES_BYTES)
    return SnapshotCopy(document, contents, names, pieces, hash_of(header))


def _sizes(document: Table) -> list[int]:
    return [whole_number(row[0], "a size") for row in rows(entry(document, "storages"), "the storages", 3)]


@contextlib.contextmanager
def copy_in_folder(folder: SnapshotFolder, name: str = "") -> Iterator[SnapshotCopy]:
    """Open a snapshot that lies in a folder, or at an address.

    Raises:
        SnapshotError: there is none, or it is not whole.
    """
    opened = folder.open(name)
    try:
        yield _copy_of(opened.header, lambda digests: _pieces_of(folder, opened, digests))
    finally:
        opened.close()


def _pieces_of(folder: SnapshotFolder, opened: Opened, digests: list[bytes]) -> Iterator[bytes]:
    for digest in digests:
        try:
            yield opened.piece(digest)
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise SnapshotError(
                f"{folder.store} cannot be read: {error.strerror or error}. It was not changed"
            ) from error


def write_to_folder(copy: SnapshotCopy, folder: SnapshotFolder, names: bytes) -> None:
    """Put a snapshot into a folder; what lies there already is not fetched again.

    Args:
        copy: where it comes from.
        folder: where it goes.
        names: what is kept with it in place of its own.

    Raises:
        OSError: the folder cannot be written; what was there is untouched.
        SnapshotError: what came is not the snapshot.
    """
    folder.claim()
    digests = copy.digests()
    with ThreadPoolExecutor(_WRITERS, "skyproxy-copy") as threads:
        draft = folder.begin(len(digests), threads, copy.hash_name)
        try:
            missing = [digest for digest in digests if not draft.knows(digest)]
            # Batch by batch, so that no more is in memory than a few pieces.
            fetched = copy.pieces(missing)
            for start in range(0, len(missing), _ON_THE_WAY):
                part = [next(fetched) for _ in missing[start : start + _ON_THE_WAY]]
                if draft.put(map(memoryview, part)) != missing[start : start + _ON_THE_WAY]:
                    raise refuse("the bytes of a tensor are not those that were written")
            draft.finish(copy.document, copy.contents, sum(_sizes(copy.document)), names)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.abandon()
            raise


class WorkerCopies:
    """The snapshots on a worker's volume, on a session of their own. Use it as a context manager.

    Args:
        opener: opens sessions on the worker.

    Raises:
        ConnectError: the worker lets in no further session.
    """

    def __init__(self, opener: Opener) -> None:
        own = opener.copy()
        own.grace_seconds = 0
        self._opened: NewSession = own.open_session(may_renew=True)
        self._sequence = 0
        self._asked: deque[int] = deque()

    def __enter__(self) -> WorkerCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    # --- asking ------------------------------------------------------------------------------------------------------

    def _send(self, name: str, *arguments: object) -> None:
        self._sequence += 1
        self._asked.append(self._sequence)
        self._opened.operations.send(
            Batch(Sequence(self._sequence), [commands.CALL, self._sequence, name, list(arguments)])
        )

    def _answer(self) -> Any:
        """The answer to the oldest question.

        Raises:
            SnapshotError: the worker refused.
            SessionLostError: it is gone.
        """
        request = RequestId(self._asked.popleft())
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            try:
                message = self._opened.recv(deadline)
            except TimeoutError as error:
                if raised_by_handler(error):
                    raise
                raise SessionLostError(f"the worker has not answered for {_ANSWER_SECONDS:g} s") from None
            if isinstance(message, Reply) and message.request == request:
                return message.value
            if isinstance(message, Failure) and message.request == request:
                raise SnapshotError(visible(message.error.get("message") or "the worker refused"))

    def _ask(self, name: str, *arguments: object) -> Any:
        self._send(name, *arguments)
        return checked(name, self._answer())

    def _ask_each(self, name: str, arguments: Iterable[object]) -> Iterator[Any]:
        for argument in arguments:
            if len(self._asked) >= _ON_THE_WAY:
                yield self._answer()
            self._send(name, argument)
        while self._asked:
            yield self._answer()

    # --- what is there -----------------------------------------------------------------------------------------------

    def open(self, name: str, number: str = "") -> SnapshotCopy:
        """Open a snapshot on the worker's volume.

        Raises:
            SnapshotError: there is none, or it is not whole.
            SessionLostError: the worker is gone.
        """
        content = bytearray()
        while True:
            answer = self._ask("read_snapshot", name, number, len(content))
            try:
                total, part = whole_number(answer["total_bytes"], "its size", MAX_DOCUMENT_BYTES), answer["part"]
                content += data(part, "a part", PIECE_BYTES)
            except (KeyError, TypeError) as error:
                raise ProtocolError(f"the worker sent no part of a snapshot: {error!r:.100}") from error
            if len(content) >= total or not part:
                break
        header = unpack(bytes(content))
        digest_of = piece_check(hash_of(header))
        return _copy_of(header, lambda digests: self._pieces(digests, digest_of))

    def _pieces(self, digests: list[bytes], digest_of: PieceHash | None) -> Iterator[bytes]:
        for digest, piece in zip(digests, self._ask_each("read_snapshot_piece", digests), strict=True):
            is_piece = type(piece) is bytes and len(piece) <= PIECE_BYTES
            if not is_piece or (digest_of is not None and digest_of(piece) != digest):
                raise refuse("the bytes of a tensor are not those that were written")
            yield piece

    def write(self, copy: SnapshotCopy, name: str) -> None:
        """Copy a snapshot to the worker's volume.

        Raises:
            SnapshotError: it cannot be written there, or is damaged; those that are there are untouched.
            SessionLostError: the worker is gone.
        """
        digests = copy.digests()
        self._ask("begin_snapshot", name, len(digests), copy.hash_name)
        for digest, seen in zip(digests, self._ask_each("write_snapshot_piece", copy.pieces(digests)), strict=True):
            if seen != digest:
                raise refuse("the bytes of a tensor are not those that were written")
        header = pack({"document": copy.document, "contents": copy.contents, "names": copy.names})
        for start, end in pieces_of(len(header)):
            self._ask("write_snapshot", header[start:end], end == len(header))

    def sequences(self, name: str) -> set[int]:
        """The batches of the snapshots of a name that lie there."""
        rows = self._ask("list_snapshots", name)
        return {row["sequence"] for row in rows if type(row) is dict and type(row.get("sequence")) is int}

    def leave_name(self, name: str, session: str, where: str) -> None:
        """Have the worker forget a named session, which goes on at another address.

        Raises:
            SnapshotError: the worker refused.
            SessionLostError: it is gone.
        """
        self._ask("leave_named", name, session, where)

    def delete(self, name: str) -> None:
        """Delete all snapshots of a name, unless the worker refuses.

        Raises:
            SessionLostError: it is gone.
        """
        self._asked.clear()
        with contextlib.suppress(RemoteError):
            self._ask("delete_snapshot", name)


def copy_beside(session: Session, opener: Opener, act: Callable[[WorkerCopies], _Result]) -> _Result:
    """Return what `act` gives with the snapshots of a session's worker.

    Where their connection breaks and the session would outlive that, `act` is called anew on another one.

    Raises:
        ConnectError: the worker lets in no further session, or cannot be reached for longer than a session tries.
        SessionLostError: the session is over, or ends with its connections.
    """

    def on_one_connection() -> _Result:
        with WorkerCopies(opener) as worker:
            return act(worker)

    return attempt(session, on_one_connection)
