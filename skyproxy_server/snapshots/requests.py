"""The snapshots of a worker as one session finds them: what its requests do."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SnapshotError
from skyproxy.settings import Settings
from skyproxy.snapshots.folder import MAX_NAMES_BYTES, Loaded, SnapshotFolder, check_name
from skyproxy.snapshots.hashes import SHA256, chosen
from skyproxy.snapshots.stores import open_store
from skyproxy_server.gates import storage_key
from skyproxy_server.named_sessions import NamedSession
from skyproxy_server.reports import Deferred
from skyproxy_server.saved_sessions import SavedSession, saved_sessions
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.capture import capture
from skyproxy_server.snapshots.copies import CopiesIn, CopiesOut
from skyproxy_server.snapshots.listing import list_rows, used_bytes
from skyproxy_server.snapshots.places import place_of
from skyproxy_server.snapshots.restore import Adoptable, restore, restore_named, restore_values
from skyproxy_server.snapshots.threads import DiskThreads
from skyproxy_server.snapshots.volume import VolumeThread, hangs
from skyproxy_server.snapshots.writing import CopyBuffers, WritingJob

T = TypeVar("T")
_THREADS = 4
_LEAST_BYTES = 64 << 10
"""The bytes that a snapshot counts at least where a token has a bound: its files take some, whatever is in them."""


class SessionSnapshots:
    """The snapshots that a session asks about.

    Args:
        root: the worker's place for snapshots: a folder, or an address of fsspec.
        owner: the name of the session's token.
        jump: has the session's connection count its batches from a number on.
        settings: limits.
        most_bytes: what the snapshots of this token may have, the newest of each name; None: as much as there is.
    """

    def __init__(
        self,
        root: Path | str,
        owner: str,
        jump: Callable[[int], None],
        settings: Settings,
        most_bytes: int | None = None,
    ) -> None:
        self._root = place_of(open_store(root), owner)
        self._jump = jump
        self._most_bytes = most_bytes
        self._max_handles = settings.max_handles
        self._stall_seconds = settings.snapshot_stall_seconds
        self._saved_days = settings.saved_session_days
        self._writer = secrets.token_hex(16)
        self._claimed: set[str] = set()
        self._buffers = CopyBuffers(settings.max_snapshot_copy_bytes, self._stall_seconds)
        self._volume = VolumeThread(self._stall_seconds)
        self._threads = DiskThreads(_THREADS, "skyproxy-snapshot", self._volume.note_progress)
        self._writer_thread = DiskThreads(1, "skyproxy-snapshot-writer")
        self._watch_thread = DiskThreads(1, "skyproxy-snapshot-watch")
        self._jobs: list[WritingJob] = []
        self._adoptable: Adoptable | None = None
        self.copies_out = CopiesOut(self._folder, self._volume)
        self.copies_in = CopiesIn(
            self._folder,
            self._claimed,
            self._threads,
            self._volume,
            settings.max_brought_snapshot_bytes if most_bytes is None else most_bytes,
            self._used_bytes,
        )

    def _folder(self, name: str) -> SnapshotFolder:
        return SnapshotFolder(self._root.child(check_name(name)), self._writer)

    def _used_bytes(self, but_for: str) -> int:
        rows = list_rows(self._root, "", self._volume.note_progress)
        return used_bytes(rows, but_for, 0 if self._most_bytes is None else _LEAST_BYTES)

    def _refuse_too_many(self, state: SessionState, name: str, byte_count: int) -> None:
        """Refuse a snapshot of so many bytes where its token would have more than it may.

        Raises:
            SnapshotError: it would, or the volume hangs.
        """
        if self._most_bytes is None:
            return
        with state.idle():  # waiting for the disk computes nothing
            used = self._volume.run("listing the snapshots", lambda: self._used_bytes(name))
        used += sum(job.byte_count for job in self._jobs if job.name != name)
        if used + max(byte_count, _LEAST_BYTES) > self._most_bytes:
            raise SnapshotError(
                f"the snapshot {name!r} has {byte_count:,} bytes, and others of this token have {used:,}; it may have "
                f"{self._most_bytes:,} on this volume (`snapshots` in the token's file). Nothing was written, and the "
                "session goes on. Delete what is not needed, or have the bound raised"
            )

    def _read(self, state: SessionState, name: str, number: str) -> Loaded:
        """Read a snapshot, for as long as the volume gives something."""
        folder = self._folder(name)
        return self._volume.run(
            f"reading the snapshot {name!r}", lambda: folder.read(number, self._threads, lambda: _room(state))
        )

    def save(
        self, state: SessionState, name: str, slots: list[int] | None = None, names: bytes = b"", wish: str = SHA256
    ) -> Deferred:
        """Write what the session is now. It goes on meanwhile; the answer comes when the snapshot outlives a crash.

        Args:
            state: the session.
            name: what the snapshot is to be found by.
            slots: the tensors to which it is limited; then other sessions may adopt them.
            names: what the client keeps with it.
            wish: the hash by which its pieces are to get their names, if it is here.

        Raises:
            SnapshotNotNowError: something runs that no snapshot can hold.
            SnapshotError: a value is of a kind that no snapshot can hold, or the name is none; or the volume hangs.
        """
        folder = self._folder(name)
        if type(names) is not bytes or len(names) > MAX_NAMES_BYTES:
            raise ProtocolError("what is kept with a snapshot is a limited number of bytes")
        self._jobs = [job for job in self._jobs if not job.is_done]
        if self._volume.is_stuck or (self._jobs and self._jobs[0].is_stalled(self._stall_seconds)):
            raise hangs(self._stall_seconds)
        captured = capture(state, slots)
        self._refuse_too_many(state, name, sum(storage.numel() for storage in captured.storages))
        job = WritingJob(captured, folder, self._claimed, self._buffers, self._threads, names, chosen(wish))
        self._jobs.append(job)
        self._writer_thread.submit(job.write)
        with state.idle():  # waiting for the disk computes nothing
            job.copy(captured.storages)
        self._watch_thread.submit(job.watch, self._stall_seconds)
        return job.answer

    def load(self, state: SessionState, name: str, number: str) -> dict[str, object]:
        """Make the empty session what a snapshot says.

        Raises:
            SnapshotError: there is none, or it cannot be used here, or the volume hangs; the session is as empty as
                before.
        """
        with state.idle():  # waiting for the disk computes nothing
            found = self._read(state, name, number)
        sequence = restore(state, found.document, found.storages, self._max_handles)
        self._jump(sequence)
        return {
            "snapshot": found.name,
            "sequence": sequence,
            "bytes": sum(storage.numel() for storage in found.storages),
        }

    def read_named(self, state: SessionState, place: str) -> NamedSession:
        """Read a named session that was saved.

        Args:
            state: the session that will use it.
            place: the name of its snapshots.

        Raises:
            SnapshotError: it cannot be used here, or the volume hangs.
        """
        found = self._read(state, place, "")
        return restore_named(state, found.document, found.storages, self._max_handles)

    def saved_sessions(self) -> list[SavedSession]:
        """Return what is saved of named sessions, the newest of each name; what has expired is deleted.

        Raises:
            SnapshotError: the volume hangs.
        """
        found: dict[str, SavedSession] = {}
        for one in saved_sessions(self.rows(""), self._saved_days):
            if one.is_expired:
                self.delete(one.place, "")
            else:
                found.setdefault(one.name, one)
        return list(found.values())

    def saved_session(self, name: str) -> SavedSession | None:
        """Return what is saved of one named session; None where nothing is.

        Raises:
            SnapshotError: the volume hangs.
        """
        return next((one for one in self.saved_sessions() if one.name == name), None)

    def delete_saved(self, name: str) -> bool:
        """Delete all that is saved of a named session; return whether there was anything.

        Raises:
            SnapshotError: the volume hangs.
        """
        there = [one for one in saved_sessions(self.rows(""), self._saved_days) if one.name == name]
        deleted = [self.delete(one.place, "") for one in there]
        return any(deleted)

    def open_values(self, state: SessionState, name: str, number: str) -> dict[str, object]:
        """Read the tensors of a snapshot, for the session to adopt; "names", and "rows" about the tensors.

        Raises:
            SnapshotError: there is none, or it cannot be used here, or the volume hangs; nothing has changed.
        """
        self._adoptable = None
        with state.idle():  # waiting for the disk computes nothing
            found = self._read(state, name, number)
        self._adoptable = restore_values(state, found.document, found.storages, self._max_handles)
        return {"names": found.names, "rows": _rows(self._adoptable.tensors)}

    def adopt_values(self, pairs: list[list[int]]) -> None:
        """Make tensors that were read the session's own: pairs of the slot that one had, and of its new one.

        Raises:
            ProtocolError: there are no such tensors.
        """
        adoptable, self._adoptable = self._adoptable, None
        if adoptable is None:
            raise ProtocolError("no tensors of a snapshot were read")
        chosen: dict[int, torch.Tensor] = {}
        for before, now in pairs:
            if before not in adoptable.tensors or type(now) is not int or now < 1:
                raise ProtocolError(f"a snapshot has no tensor {before!r:.40}, or it cannot be {now!r:.40}")
            chosen[now] = adoptable.tensors[before]
        adoptable.install(chosen)

    def rows(self, name: str) -> list[dict[str, object]]:
        """Return a row for each snapshot: of one name, or of all; the newest of a name first.

        Raises:
            SnapshotError: the volume hangs.
        """
        if name:
            check_name(name)
        return self._volume.run(
            "listing the snapshots", lambda: list_rows(self._root, name, self._volume.note_progress)
        )

    def delete(self, name: str, number: str) -> bool:
        """Delete a snapshot, or, without a number, all of a name; return whether there was one.

        Raises:
            SnapshotError: the volume hangs.
        """
        self.finish_writing()
        if not number:  # who owns the name is deleted, too
            self._claimed.discard(name)
        folder = self._folder(name)
        return self._volume.run(f"deleting the snapshot {name!r}", lambda: folder.delete(number))

    def ask_volume(self, what: str, work: Callable[[Callable[[], object]], T]) -> T:
        """Do something on the volume; wait for it, for as long as it says that it goes on.

        Args:
            what: what that is, for people.
            work: what to do; it is given what it is to call now and then.

        Raises:
            SnapshotError: the volume hangs.
        """
        return self._volume.run(what, lambda: work(self._volume.note_progress))

    def finish_writing(self) -> None:
        """Wait until what was begun is written.

        Raises:
            SnapshotError: the volume hangs.
        """
        for job in self._jobs:
            if not job.wait(self._stall_seconds):
                raise hangs(self._stall_seconds)

    def end(self) -> None:
        """The session is over. What is begun is finished, because the copies are there; unless the volume hangs."""
        self._adoptable = None
        self._volume.end(self._end_copies)
        for job in self._jobs:
            if not job.wait(self._stall_seconds):
                break
        for threads in (self._writer_thread, self._watch_thread, self._threads):
            threads.shutdown()

    def _end_copies(self) -> None:
        self.copies_out.end()
        self.copies_in.end()


def _rows(tensors: dict[int, torch.Tensor]) -> list[list[object]]:
    """For each tensor: its slot, what it looks like, its device, the size of its storage, the slots of all that share
    that.
    """
    kin: dict[int, list[int]] = {}
    for slot, tensor in tensors.items():
        key = storage_key(tensor)
        if key is not None:
            kin.setdefault(key, []).append(slot)
    rows: list[list[object]] = []
    for slot, tensor in tensors.items():
        key = storage_key(tensor)
        rows.append(
            [
                slot,
                torch_codec.encode_description(torch_codec.describe(tensor)),
                [tensor.device.type, tensor.device.index or 0],
                tensor.untyped_storage().nbytes() if key is not None else 0,
                kin[key] if key is not None else [],
            ]
        )
    return rows


def _room(state: SessionState) -> int | None:
    """The memory that is left on this machine; None where nobody knows."""
    if state.devices.has_cuda:
        return sum(torch.cuda.mem_get_info(row["index"])[0] for row in state.devices if row["type"] == "cuda")
    return None
