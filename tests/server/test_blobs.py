"""Kept uploads: bounded, found by content alone, never shared with what may change."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError, ProtocolError
from skyproxy.protocol.digests import content_digest
from skyproxy.protocol.messages import CancelTransfer, Chunk, Offer
from skyproxy.settings import SETTINGS
from skyproxy_server import __main__ as program
from skyproxy_server.__main__ import _blob_bytes
from skyproxy_server.arguments import parser
from skyproxy_server.blob_backends import BlobBackend, FolderBackend, MemoryBackend
from skyproxy_server.blobs import BlobStore, usable_memory_bytes
from skyproxy_server.transfers import Transfers

SIZE = 1000
Make = Callable[[int], BlobStore]


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    stores: list[BlobStore] = []

    def made(max_bytes: int) -> BlobStore:
        backend: BlobBackend = MemoryBackend() if request.param == "memory" else FolderBackend(tmp_path / "blobs")
        stores.append(BlobStore(max_bytes, backend))
        return stores[-1]

    yield made
    for store in stores:
        store.close()


def content(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


def digest(data: bytes) -> bytes:
    return content_digest(memoryview(data))


def settled(store: BlobStore) -> None:
    """Waits until everything that came is hashed: its thread ends behind that, and another one begins."""
    store._finished.put(None)
    store._hasher.join(30)
    assert not store._hasher.is_alive()
    begin_hashing(store)


def begin_hashing(store: BlobStore) -> None:
    store._hasher = threading.Thread(target=store._hash, daemon=True)
    store._hasher.start()


def keep(store: BlobStore, data: bytes, user: str = "a") -> bool:
    incoming = store.start(len(data), user)
    if incoming is None:
        return False
    incoming.write(len(data) // 2, memoryview(data)[len(data) // 2 :])
    incoming.write(0, memoryview(data)[: len(data) // 2])
    incoming.finish()
    return True


def found(store: BlobStore, data: bytes, user: str = "b") -> bool:
    target = bytearray(len(data))
    return store.copy_into(digest(data), memoryview(target), user) and bytes(target) == data


def test_what_was_kept_is_found_by_its_content(make: Make) -> None:
    store = make(10 * SIZE)
    assert keep(store, content(1))
    settled(store)
    assert found(store, content(1))
    assert not found(store, content(2))


def test_a_name_finds_nothing_of_another_size(make: Make) -> None:
    store = make(10 * SIZE)
    keep(store, content(1))
    settled(store)
    assert not store.copy_into(digest(content(1)), memoryview(bytearray(SIZE - 1)), "b")


def test_each_reader_gets_a_copy_of_its_own(make: Make) -> None:
    store = make(10 * SIZE)
    keep(store, content(1))
    settled(store)
    first = bytearray(SIZE)
    assert store.copy_into(digest(content(1)), memoryview(first), "b")
    first[:] = content(9)
    assert found(store, content(1))


def test_the_same_content_is_kept_once(make: Make) -> None:
    store = make(10 * SIZE)
    for _ in range(3):
        assert keep(store, content(1))
    settled(store)
    assert store.stats() == {"blobs": 1, "bytes": SIZE, "max_bytes": 10 * SIZE, "unhashed": 0}


def test_a_full_store_lets_go_of_what_another_session_used_longest_ago(make: Make) -> None:
    store = make(3 * SIZE)
    keep(store, content(1), "a")
    keep(store, content(2), "a")
    settled(store)
    assert found(store, content(1), "a")  # now the second one is the oldest
    assert keep(store, content(3), "b")
    assert keep(store, content(4), "b")
    settled(store)
    assert [found(store, content(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert store.stats()["bytes"] <= store.max_bytes


def test_uploads_of_one_session_do_not_displace_one_another(make: Make) -> None:
    store = make(3 * SIZE)
    assert [keep(store, content(number), "a") for number in range(1, 6)] == [True, True, True, False, False]
    settled(store)
    assert [found(store, content(number)) for number in (1, 2, 3)] == [True] * 3


def test_what_was_given_up_takes_no_room(make: Make) -> None:
    store = make(SIZE)
    for _ in range(3):
        incoming = store.start(SIZE, "a")
        assert incoming is not None
        incoming.write(0, memoryview(content(1)))
        incoming.discard()
        incoming.write(0, memoryview(content(1)))
        incoming.finish()
    assert store.stats() == {"blobs": 0, "bytes": 0, "max_bytes": SIZE, "unhashed": 0}


def arguments(*argv: str) -> argparse.Namespace:
    return parser().parse_args(argv)


def test_what_a_worker_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "usable_memory_bytes", lambda: 40 << 20)
    assert _blob_bytes(arguments()) == 10 << 20
    assert _blob_bytes(arguments("--blob-bytes", "4096")) == 4096
    assert _blob_bytes(arguments("--blob-bytes", "0")) == 0
    assert _blob_bytes(arguments("--embedded")) == 0
    assert _blob_bytes(arguments("--embedded", "--blob-bytes", "4096")) == 4096
    assert _blob_bytes(arguments("--blob-dir", "x")) == SETTINGS.max_blob_bytes
    assert _blob_bytes(arguments("--processes", "5")) == 2 << 20


def test_what_is_too_small_is_not_kept() -> None:
    store = BlobStore(10 * SIZE, least_bytes=100)
    assert store.start(99, "a") is None
    assert store.start(0, "a") is None
    assert store.start(100, "a") is not None
    store.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_uploads_that_wait_to_be_hashed_hold_no_files_open(tmp_path: Path) -> None:
    store = BlobStore(100 * SIZE, FolderBackend(tmp_path))
    store._finished.put(None)
    store._hasher.join(30)  # nothing is hashed now
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        keep(store, content(number))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    begin_hashing(store)
    settled(store)
    assert all(found(store, content(number)) for number in range(20))
    store.close()


def test_a_folder_outlives_the_worker_and_its_bound_is_kept(tmp_path: Path) -> None:
    first = BlobStore(10 * SIZE, FolderBackend(tmp_path / "blobs"))
    for number in (1, 2, 3):
        keep(first, content(number))
    settled(first)
    first.close()
    for number, age in ((1, 30), (2, 10), (3, 20)):
        path = tmp_path / "blobs" / f"{digest(content(number)).hex()}.blob"
        assert path.stat().st_mode & 0o077 == 0
        os.utime(path, (1e9 - age, 1e9 - age))
    second = BlobStore(2 * SIZE, FolderBackend(tmp_path / "blobs"))
    assert [found(second, content(number)) for number in (1, 2, 3)] == [False, True, True]
    second.close()


def test_a_file_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    store = BlobStore(10 * SIZE, FolderBackend(tmp_path))
    keep(store, content(1))
    settled(store)
    (tmp_path / f"{digest(content(1)).hex()}.blob").write_bytes(content(2))
    assert not found(store, content(1))
    assert not list(tmp_path.glob(f"{digest(content(1)).hex()}*"))
    store.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--blob-dir"):
        FolderBackend(tmp_path / "file")


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert usable_memory_bytes(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 999 kB\nMemAvailable:   800 kB\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert usable_memory_bytes(tmp_path) == 800 << 10
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    assert usable_memory_bytes(tmp_path) == 4096


# --- transfers -------------------------------------------------------------------------------------------------------


def receive(transfers: Transfers, number: int, data: bytes, offset: int = 0) -> None:
    """What the bulk connection does with one chunk."""
    chunk = Chunk(number, offset, SIZE)
    target = transfers.sink(chunk)
    assert target is not None
    target[: len(data)] = data
    transfers.on_chunk(Chunk(number, offset, SIZE, (target[: len(data)],)))


def test_an_offered_upload_is_kept_and_the_next_one_need_not_come() -> None:
    store = BlobStore(10 * SIZE)
    transfers = Transfers(SIZE, blobs=store, user="a")
    data = content(5)
    assert transfers.on_offer(Offer(1, SIZE, b"")) is False
    receive(transfers, 1, data[:600])
    receive(transfers, 1, data[600:], 600)
    live = transfers.arrival(1, SIZE).wait()
    live.fill_(0)  # what the program does to its tensor must not reach what is kept
    settled(store)
    assert transfers.on_offer(Offer(2, SIZE, digest(data))) is True
    assert bytes(transfers.arrival(2, SIZE).wait().numpy()) == data
    store.close()


def test_a_lie_about_the_content_harms_nobody() -> None:
    store = BlobStore(10 * SIZE)
    transfers = Transfers(SIZE, blobs=store, user="a")
    assert transfers.on_offer(Offer(1, SIZE, digest(content(5)))) is False
    receive(transfers, 1, content(6))
    settled(store)
    assert not found(store, content(5))
    assert found(store, content(6))
    store.close()


def test_a_piece_that_comes_again_does_not_change_what_is_kept() -> None:
    store = BlobStore(10 * SIZE)
    transfers = Transfers(SIZE, blobs=store, user="a")
    transfers.on_offer(Offer(1, SIZE, b""))
    receive(transfers, 1, content(5))
    receive(transfers, 1, content(6))
    settled(store)
    assert found(store, content(5))
    store.close()


def test_an_upload_that_is_given_up_or_cut_off_is_not_kept() -> None:
    store = BlobStore(10 * SIZE)
    transfers = Transfers(SIZE, blobs=store, user="a")
    for number in (1, 2):
        transfers.on_offer(Offer(number, SIZE, b""))
        receive(transfers, number, content(5)[:500])
    assert store.stats()["bytes"] == 2 * 500  # what came, and not what was announced
    transfers.on_cancel(CancelTransfer(1, "no more"))
    transfers.end()
    assert store.stats()["bytes"] == 0
    store.close()


def test_an_offer_at_the_wrong_time_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        Transfers(SIZE).on_offer(Offer(1, SIZE, b""))
    store = BlobStore(10 * SIZE)
    transfers = Transfers(SIZE, blobs=store, user="a")
    receive(transfers, 1, content(5)[:10])
    with pytest.raises(ProtocolError):
        transfers.on_offer(Offer(1, SIZE, b""))
    store.close()
