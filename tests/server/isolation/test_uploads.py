"""Uploads that sessions in processes of their own have the supervisor keep: nobody can change them."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.protocol.digests import content_digest
from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

from skyproxy_server.auth import OWNER, Identity
from skyproxy_server.blobs import BlobStore
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.isolation.uploads import SealedFolderBackend, SealedMemoryBackend, SharedUploads, UploadDesk

SIZE = 10_000


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    backend = SealedMemoryBackend() if request.param == "memory" else SealedFolderBackend(tmp_path / "blobs")
    made = BlobStore(4 * SIZE, backend)
    yield made
    made.close()


class Session:
    """A session's side and its desk, which answers on a thread of its own."""

    def __init__(self, store: BlobStore, name: str = "session", client: Identity = OWNER) -> None:
        self.ours, theirs = ControlChannel.pair()
        self.desk = UploadDesk(store, name, client)
        self.uploads = SharedUploads(ControlChannel(theirs), store.max_bytes)
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        try:
            while True:
                try:
                    self.desk.answer(self.ours)
                except TimeoutError:
                    self.ours._readable.wait(10)
        except ChannelClosedError:
            self.desk.close()

    def end(self) -> None:
        self.uploads._channel.close()  # type: ignore[union-attr]
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def session(store: BlobStore) -> Iterator[Session]:
    made = Session(store)
    yield made
    made.end()


def settled(store: BlobStore) -> None:
    store._finished.put(None)
    store._hasher.join(30)
    store._hasher = threading.Thread(target=store._hash, daemon=True)
    store._hasher.start()


def keep(session: Session, data: bytes) -> None:
    writing = session.uploads.start(len(data), "")
    assert writing is not None
    writing.write(0, memoryview(data[: len(data) // 2]))
    writing.write(len(data) // 2, memoryview(data[len(data) // 2 :]))
    writing.finish()


def test_what_one_session_uploaded_another_one_finds(store: BlobStore, session: Session) -> None:
    data = os.urandom(SIZE)
    keep(session, data)
    settled(store)
    other, target = Session(store, "other"), bytearray(SIZE)
    assert other.uploads.copy_into(content_digest(memoryview(data)), memoryview(target), "")
    assert target == data
    assert len(other.uploads) == 1
    assert other.uploads.stats()["bytes"] == SIZE
    other.end()


@pytest.mark.parametrize("shared", [False, True])
def test_what_came_with_one_token_is_not_given_to_another(shared: bool) -> None:
    store = BlobStore(4 * SIZE, SealedMemoryBackend(), shared=shared)
    data, target = os.urandom(SIZE), memoryview(bytearray(SIZE))
    first, second = Session(store, "a", Identity("first")), Session(store, "b", Identity("second"))
    keep(first, data)
    settled(store)
    name = content_digest(memoryview(data))
    assert not second.uploads.copy_into(name, target, "", "first")  # whatever it says that it is
    keep(second, data)
    settled(store)
    assert second.uploads.copy_into(name, target, "")
    assert store.stats()["blobs"] == (1 if shared else 2)
    first.end()
    second.end()
    store.close()


def test_what_is_not_there_is_not_found(store: BlobStore, session: Session) -> None:
    assert not session.uploads.copy_into(bytes(32), memoryview(bytearray(SIZE)), "")


def test_an_upload_that_is_given_up_leaves_nothing(store: BlobStore, session: Session) -> None:
    writing = session.uploads.start(SIZE, "")
    assert writing is not None
    writing.write(0, memoryview(b"early"))
    writing.discard()
    writing.write(0, memoryview(b"late"))
    assert session.uploads.stats()["bytes"] == 0


def test_a_session_that_ends_leaves_no_draft(store: BlobStore) -> None:
    session = Session(store)
    writing = session.uploads.start(SIZE, "")
    assert writing is not None
    assert store.stats()["bytes"] == 0  # an offer takes no room
    writing.write(0, memoryview(b"first"))
    assert store.stats()["bytes"] == SIZE
    session.end()
    assert store.stats()["bytes"] == 0


def test_there_is_no_room_for_more_than_the_bound(store: BlobStore, session: Session) -> None:
    writing = session.uploads.start(5 * SIZE, "")
    assert writing is not None
    writing.write(0, memoryview(b"first"))
    writing.finish()
    assert session.uploads.stats()["bytes"] == 0


def test_nobody_changes_what_is_kept(store: BlobStore, session: Session) -> None:
    """Not by a descriptor that stayed open, and not by memory that stayed mapped: that is not kept."""
    data = bytes(SIZE)
    writing = session.uploads.start(SIZE, "")
    assert writing is not None
    writing.write(0, memoryview(data))
    stayed = os.dup(writing._descriptor)
    writing.finish()
    with pytest.raises(PermissionError):
        os.pwrite(stayed, b"x", 0)
    os.close(stayed)
    settled(store)
    assert store.stats()["blobs"] == 1

    mapped = session.uploads.start(SIZE, "")
    assert mapped is not None
    mapped.write(0, memoryview(b"y"))
    with mmap.mmap(mapped._descriptor, SIZE):
        mapped.finish()
        settled(store)
    assert store.stats()["blobs"] == 1
    assert store.stats()["bytes"] == SIZE


def test_what_is_found_cannot_be_written(store: BlobStore, session: Session) -> None:
    data = os.urandom(SIZE)
    keep(session, data)
    settled(store)
    words, (descriptor,) = session.uploads.ask({"do": "find", "digest": content_digest(memoryview(data)), "size": SIZE})
    assert words["found"]
    with pytest.raises(OSError, match=r"not permitted|Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)


@pytest.mark.parametrize(
    "question", [{}, {"do": "start"}, {"do": "start", "size": "x"}, {"do": "find", "digest": 5, "size": None}]
)
def test_a_malformed_question_is_an_error_of_the_asker(question: dict[str, object]) -> None:
    store = BlobStore(SIZE, SealedMemoryBackend())
    ours, theirs = ControlChannel.pair()
    try:
        ControlChannel(theirs).send(question)
        with pytest.raises((KeyError, TypeError, ValueError)):
            UploadDesk(store, "x").answer(ours)
    finally:
        ours.close()
        store.close()


def test_a_changed_file_is_not_given_out(tmp_path: Path) -> None:
    store = BlobStore(4 * SIZE, SealedFolderBackend(tmp_path))
    session = Session(store)
    data = os.urandom(SIZE)
    keep(session, data)
    settled(store)
    (file,) = tmp_path.glob("*.blob")
    file.write_bytes(bytes(SIZE))
    assert not session.uploads.copy_into(content_digest(memoryview(data)), memoryview(bytearray(SIZE)), "")
    assert not file.exists()
    session.end()
    store.close()


def test_a_supervisor_that_is_silent_costs_uploads_and_nothing_else() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    uploads = SharedUploads(ControlChannel(theirs), SIZE)
    writing = uploads.start(SIZE, "")
    assert writing is not None
    writing.write(0, memoryview(b"x"))
    writing.finish()
    assert not uploads.copy_into(bytes(32), memoryview(bytearray(8)), "")
    assert len(uploads) == 0
    theirs.close()
