"""The snapshots of a worker as one session finds them: what its requests do."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from skyproxy.errors import SnapshotError
from skyproxy.settings import Settings
from skyproxy_server.reports import Deferred
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.capture import capture
from skyproxy_server.snapshots.folder import SnapshotFolder, check_name
from skyproxy_server.snapshots.restore import restore
from skyproxy_server.snapshots.writing import CopyBudget, WritingJob

_THREADS = 4
_READABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def folder_of(root: Path, owner: str) -> Path:
    """The folder of all snapshots of a token, by the token's name."""
    if _READABLE.fullmatch(owner):
        return root / owner
    return root / f".{hashlib.sha256(owner.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class SessionSnapshots:
    """The snapshots that a session asks about.

    Args:
        root: the worker's folder of snapshots.
        owner: the name of the session's token.
        jump: has the session's connection count its batches from a number on.
        settings: limits.
    """

    def __init__(self, root: Path, owner: str, jump: Callable[[int], None], settings: Settings) -> None:
        self._root = folder_of(root, owner)
        self._jump = jump
        self._max_handles = settings.max_handles
        self._writer = secrets.token_hex(16)
        self._claimed: set[str] = set()
        self._budget = CopyBudget(settings.max_snapshot_copy_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, "skyproxy-snapshot")
        self._writer_thread = ThreadPoolExecutor(1, "skyproxy-snapshot-writer")

    def _folder(self, name: str) -> SnapshotFolder:
        return SnapshotFolder(self._root / check_name(name), self._writer)

    def save(self, state: SessionState, name: str) -> Deferred:
        """Write what the session is now. It goes on meanwhile; the answer comes when the snapshot outlives a crash.

        Raises:
            SnapshotNotNowError: something runs that no snapshot can hold.
            SnapshotError: a value is of a kind that no snapshot can hold, or the name is none.
        """
        folder = self._folder(name)
        captured = capture(state)
        job = WritingJob(captured, folder, self._claimed, self._budget, self._threads)
        self._writer_thread.submit(job.write)
        with state.idle():  # waiting for the disk computes nothing
            job.copy(captured.storages)
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
        """Delete a snapshot, or, without a number, all of a name; return whether there was one."""
        self.finish_writing()
        self._claimed.discard(name)
        return self._folder(name).delete(number)

    def finish_writing(self) -> None:
        """Wait until what was begun is written."""
        self._writer_thread.submit(int).result()  # jobs are done in order

    def end(self) -> None:
        """The session is over."""
        self._writer_thread.shutdown()  # what is begun is finished: the copies are there
        self._threads.shutdown()


def _names(root: Path) -> list[str]:
    try:
        return [item.name for item in root.iterdir() if item.is_dir() and not item.name.startswith(".")]
    except OSError:
        return []


def _room(state: SessionState) -> int | None:
    """The memory that is left on this machine; None where nobody knows."""
    if state.devices.has_cuda:
        return sum(torch.cuda.mem_get_info(row["index"])[0] for row in state.devices if row["type"] == "cuda")
    return None
