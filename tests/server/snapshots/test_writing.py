"""Snapshots on a volume that hangs: a session never waits for it without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.errors import SnapshotError
from skyproxy.session.failures import remote_error
from skyproxy.snapshots import direct_files
from skyproxy.snapshots.stores import LocalStore
from skyproxy_server.snapshots.threads import DiskThreads
from skyproxy_server.snapshots.volume import VolumeHangsError
from skyproxy_server.snapshots.writing import CopyBuffers
from tests.integration.programs import wait_for
from tests.server.snapshots.sessions import CALL, Session

STALL_SECONDS = 0.2
WAIT_SECONDS = 60.0


class Volume:
    """A volume that takes nothing until it is let go.

    Attributes:
        goes_on: lets it go.
        waits: set while somebody waits for it.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.waits = threading.Event()

    def hang(self) -> None:
        self.waits.set()
        assert self.goes_on.wait(WAIT_SECONDS)


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    made = Volume()
    write_at = direct_files.write_at

    def hang(*arguments: Any) -> None:
        made.hang()
        write_at(*arguments)

    monkeypatch.setattr(direct_files, "write_at", hang)
    yield made
    made.goes_on.set()


def save(session: Session) -> list[Any]:
    """Ask for a snapshot; the answers that have come."""
    session.run(CALL, 77, "save_snapshot", ["s"])
    return session.sent


def answered(session: Session, count: int) -> Any:
    wait_for(lambda: len(session.sent) >= count, f"{count} answers")
    return session.sent[count - 1]


def let_go(volume: Volume, session: Session) -> None:
    """The volume takes everything, however slow this machine is at the moment."""
    snapshots = session.snapshots
    snapshots._stall_seconds = snapshots._buffers._stall_seconds = WAIT_SECONDS
    volume.goes_on.set()
    assert all(job.wait(WAIT_SECONDS) for job in snapshots._jobs)


def test_a_session_goes_on_and_is_told(volume: Volume, tmp_path: Path) -> None:
    with Session(tmp_path, snapshot_stall_seconds=STALL_SECONDS) as session:
        session.put(s1=torch.rand(10))
        before = len(session.sent)
        save(session)
        assert volume.waits.wait(WAIT_SECONDS)
        assert "taken nothing" in answered(session, before + 1).error["message"]
        save(session)  # at once, for it is known
        assert "taken nothing" in session.sent[-1].error["message"]
        let_go(volume, session)
        assert session.call("save_snapshot", "s")["sequence"] == session.sequence
        assert len(session.sent) == before + 3  # the first was not answered twice


def test_a_session_larger_than_its_copies_may_be_does_not_wait_for_ever(volume: Volume, tmp_path: Path) -> None:
    bounds = {"snapshot_stall_seconds": STALL_SECONDS, "max_snapshot_copy_bytes": 1 << 20}
    with Session(tmp_path, **bounds) as session:
        session.put(s1=torch.rand(1 << 20), s2=torch.rand(1 << 20))
        save(session)
        assert "taken nothing" in session.sent[-1].error["message"]
        assert "taken nothing" in session.call_now("delete_snapshot", "s")["message"]
        let_go(volume, session)
        assert "snapshot" in session.call("save_snapshot", "s")


def test_a_session_ends_although_its_volume_hangs(volume: Volume, tmp_path: Path) -> None:
    session = Session(tmp_path, snapshot_stall_seconds=STALL_SECONDS)
    session.put(s1=torch.rand(10))
    save(session)
    assert volume.waits.wait(WAIT_SECONDS)
    session.executor.end()  # comes to an end


def test_the_last_step_may_hang_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, write = Volume(), LocalStore.write

    def hang(self: LocalStore, name: str, content: bytes) -> None:
        if name.startswith("snapshot"):
            volume.hang()
        write(self, name, content)

    monkeypatch.setattr(LocalStore, "write", hang)
    with Session(tmp_path, snapshot_stall_seconds=STALL_SECONDS) as session:
        session.put(s1=torch.rand(10))
        before = len(session.sent)
        save(session)
        assert "taken nothing" in answered(session, before + 1).error["message"]
        let_go(volume, session)
        assert [row["snapshot"] for row in session.call("list_snapshots", "s")] == ["1"]  # it became one after all


def test_what_was_written_after_all_takes_nothing_from_the_ones_that_are_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, write = Volume(), LocalStore.write

    def hang(self: LocalStore, name: str, content: bytes) -> None:
        if name.startswith("snapshot"):
            volume.hang()
        write(self, name, content)

    with Session(tmp_path, snapshot_stall_seconds=STALL_SECONDS) as session:
        session.put(s1=torch.rand(10))
        assert session.call("save_snapshot", "s")["snapshot"] == "1"
        for _ in range(2):
            volume.goes_on.clear()
            with monkeypatch.context() as patch:
                patch.setattr(LocalStore, "write", hang)
                before = len(session.sent)
                save(session)
                assert "taken nothing" in answered(session, before + 1).error["message"]
                volume.goes_on.set()
                assert all(job.wait(WAIT_SECONDS) for job in session.snapshots._jobs)
        assert [row["snapshot"] for row in session.call("list_snapshots", "s")] == ["3", "2", "1"]
        session.snapshots._stall_seconds = WAIT_SECONDS
        assert session.call("save_snapshot", "s")["snapshot"] == "4"
        assert [row["snapshot"] for row in session.call("list_snapshots", "s")] == ["4", "3"]


def test_copies_wait_for_a_volume_that_takes_something() -> None:
    buffers = CopyBuffers(100, 5 * WAIT_SECONDS)
    first = buffers.take(80)
    taken = threading.Event()

    def take() -> None:
        buffers.take(50)
        taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    buffers.give_back(first)
    assert taken.wait(WAIT_SECONDS)
    thread.join()
    full = CopyBuffers(10, 0.01)
    full.take(80)  # a single one always may
    with pytest.raises(VolumeHangsError, match=r"SKYPROXY_SNAPSHOT_STALL_SECONDS"):
        full.take(50)


def test_memory_of_copies_that_were_written_is_used_again() -> None:
    buffers = CopyBuffers(1 << 30, WAIT_SECONDS)
    first = buffers.take(buffers.buffer_bytes)
    place = first.data_ptr()
    buffers.give_back(first)
    again = buffers.take(10)
    assert (again.data_ptr(), again.numel()) == (place, buffers.buffer_bytes)
    buffers.give_back(again)
    buffers.let_go()
    assert buffers.take(10).numel() == 10


def test_a_buffer_that_was_not_filled_to_the_last_byte_is_used_again() -> None:
    buffers = CopyBuffers(1 << 30, WAIT_SECONDS)
    first = buffers.take(buffers.buffer_bytes - 5)
    place = first.data_ptr()
    buffers.give_back(first)
    again = buffers.take(buffers.buffer_bytes - 9)
    assert (again.data_ptr(), again.numel()) == (place, buffers.buffer_bytes)


def test_storages_of_all_sizes_share_buffers(tmp_path: Path) -> None:
    sizes = [0, 1, 3_000_000, 5 << 20, 7, 33 << 20, 100, 4 << 20]
    tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    with Session(tmp_path, max_snapshot_copy_bytes=20 << 20) as session:
        session.put(**{f"s{slot}": tensor for slot, tensor in enumerate(tensors, 1)})
        session.call("save_snapshot", "s")
        found = session.snapshots._folder("s").read("", session.snapshots._threads, lambda: None)
    assert [storage.numel() for storage in found.storages] == sizes
    assert all(map(torch.equal, found.storages, tensors))


def test_threads_of_the_disk_do_all_in_order_and_end() -> None:
    threads, done = DiskThreads(1, "skyproxy-snapshot"), []
    futures = [threads.submit(done.append, number) for number in range(5)]
    failed = threads.submit(int, "x")
    assert list(threads.map(str, [1, 2])) == ["1", "2"]
    threads.shutdown()
    assert threads.join(time.monotonic() + WAIT_SECONDS)
    assert (done, [future.result() for future in futures]) == (list(range(5)), [None] * 5)
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(int)


def test_a_program_is_told_of_it_by_an_error_about_snapshots() -> None:
    assert isinstance(remote_error({"type": VolumeHangsError.__name__, "message": "it hangs"}, ""), SnapshotError)
