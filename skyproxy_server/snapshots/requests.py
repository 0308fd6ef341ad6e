"""The snapshots of a worker as one session finds them: what its requests do."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SnapshotError
from skyproxy.settings import Settings
from skyproxy.snapshots.folder import MAX_NAMES_BYTES, SnapshotFolder, check_name
from skyproxy.snapshots.stores import Store, open_store
from skyproxy_server.gates import storage_key
from skyproxy_server.named_sessions import NamedSession
from skyproxy_server.reports import Deferred
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.capture import capture
from skyproxy_server.snapshots.copies import CopiesIn, CopiesOut
from skyproxy_server.snapshots.places import place_of
from skyproxy_server.snapshots.restore import Adoptable, restore, restore_named, restore_values
from skyproxy_server.snapshots.threads import DiskThreads
from skyproxy_server.snapshots.writing import CopyBuffers, WritingJob, hangs

_THREADS = 4


class SessionSnapshots:
    """The snapshots that a session asks about.

    Args:
        root: the worker's place for snapshots: a folder, or an address of fsspec.
        owner: the name of the session's token.
        jump: has the session's connection count its batches from a number on.
        settings: limits.
    """

    def __init__(self, root: Path | str, owner: str, jump: Callable[[int], None], settings: Settings) -> None:
        self._root = place_of(open_store(root), owner)
        self._jump = jump
        self._max_handles = settings.max_handles
        self._stall_seconds = settings.snapshot_stall_seconds
        self._writer = secrets.token_hex(16)
        self._claimed: set[str] = set()
        self._buffers = CopyBuffers(settings.max_snapshot_copy_bytes, self._stall_seconds)
        self._threads = DiskThreads(_THREADS, "skyproxy-snapshot")
        self._writer_thread = DiskThreads(1, "skyproxy-snapshot-writer")
        self._watch_thread = DiskThreads(1, "skyproxy-snapshot-watch")
        self._jobs: list[WritingJob] = []
        self._adoptable: Adoptable | None = None
        self.out = CopiesOut(self._folder)
        self.into = CopiesIn(self._folder, self._claimed, self._threads)

    def _folder(self, name: str) -> SnapshotFolder:
        return SnapshotFolder(self._root.child(check_name(name)), self._writer)

    def save(self, state: SessionState, name: str, slots: list[int] | None = None, names: bytes = b"") -> Deferred:
        """Write what the session is now. It goes on meanwhile; the answer comes when the snapshot outlives a crash.

        Args:
            state: the session.
            name: what the snapshot is to be found by.
            slots: the tensors to which it is limited; then other sessions may adopt them.
            names: what the client keeps with it.

        Raises:
            SnapshotNotNowError: something runs that no snapshot can hold.
            SnapshotError: a value is of a kind that no snapshot can hold, or the name is none; or the volume hangs.
        """
        folder = self._folder(name)
        if type(names) is not bytes or len(names) > MAX_NAMES_BYTES:
            raise ProtocolError("what is kept with a snapshot is a limited number of bytes")
        self._jobs = [job for job in self._jobs if not job.is_done]
        if self._jobs and self._jobs[0].is_stalled(self._stall_seconds):
            raise hangs(self._stall_seconds)
        captured = capture(state, slots)
        job = WritingJob(captured, folder, self._claimed, self._buffers, self._threads, names)
        self._jobs.append(job)
        self._writer_thread.submit(job.write)
        with state.idle():  # waiting for the disk computes nothing
            job.copy(captured.storages)
        self._watch_thread.submit(job.watch, self._stall_seconds)
        return job.answer

    def load(self, state: SessionState, name: str, number: str) -> dict[str, object]:
        """Make the empty session what a snapshot says.

        Raises:
            SnapshotError: there is none, or it cannot be used here; the session is as empty as before.
        """
        found = self._folder(name).read(number, self._threads, lambda: _room(state))
        sequence = restore(state, found.document, found.storages, self._max_handles)
        self._jump(sequence)
        return {
            "snapshot": found.name,
            "sequence": sequence,
            "bytes": sum(storage.numel() for storage in found.storages),
        }

    def read_named(self, state: SessionState, name: str) -> tuple[NamedSession, str] | None:
        """Read what was saved of a named session, and the name of its snapshots; None where nothing was.

        Raises:
            SnapshotError: it cannot be used here, or the volume hangs.
        """
        place = self.place_of_named(name)
        if not place:
            return None
        found = self._folder(place).read("", self._threads, lambda: _room(state))
        return restore_named(state, found.document, found.storages, self._max_handles), place

    def place_of_named(self, name: str) -> str:
        """Return the name of the newest snapshots of a named session; empty where there are none.

        Raises:
            SnapshotError: the volume hangs.
        """
        try:
            found = self._threads.submit(self.rows, "").result(self._stall_seconds)
        except TimeoutError:
            raise hangs(self._stall_seconds) from None
        ages = {row["seconds"]: str(row["name"]) for row in found if row.get("session") == name}
        return ages[min(ages)] if ages else ""  # type: ignore[type-var]

    def open_values(self, state: SessionState, name: str, number: str) -> dict[str, object]:
        """Read the tensors of a snapshot, for the session to adopt; "names", and "rows" about the tensors.

        Raises:
            SnapshotError: there is none, or it cannot be used here; nothing has changed.
        """
        self._adoptable = None
        found = self._folder(name).read(number, self._threads, lambda: _room(state))
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
        """Return a row for each snapshot: of one name, or of all; the newest of a name first."""
        names = [check_name(name)] if name else sorted(_names(self._root))
        rows: list[dict[str, object]] = []
        for each in names:
            folder = self._folder(each)
            for number in folder.numbers():
                try:
                    rows.append(folder.row(number))
                except (OSError, SnapshotError, TypeError, ValueError) as error:
                    rows.append({"name": each, "snapshot": str(number), "trouble": str(error)})
        return rows

    def delete(self, name: str, number: str) -> bool:
        """Delete a snapshot, or, without a number, all of a name; return whether there was one.

        Raises:
            SnapshotError: the volume hangs.
        """
        self.finish_writing()
        self._claimed.discard(name)
        return self._folder(name).delete(number)

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
        self.out.end()
        self.into.end()
        for job in self._jobs:
            if not job.wait(self._stall_seconds):
                break
        for threads in (self._writer_thread, self._watch_thread, self._threads):
            threads.shutdown()


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


def _names(root: Store) -> list[str]:
    try:
        return [name for name in root.places() if not name.startswith(".")]
    except OSError:
        return []


def _room(state: SessionState) -> int | None:
    """The memory that is left on this machine; None where nobody knows."""
    if state.devices.has_cuda:
        return sum(torch.cuda.mem_get_info(row["index"])[0] for row in state.devices if row["type"] == "cuda")
    return None
