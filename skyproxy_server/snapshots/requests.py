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
from skyproxy.torch_codec import byte_view
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.capture import Captured, capture
from skyproxy_server.snapshots.folder import Draft, SnapshotFolder, check_name, piece_count
from skyproxy_server.snapshots.packs import pieces_of
from skyproxy_server.snapshots.restore import restore

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
        max_handles: how many values a session may hold.
    """

    def __init__(self, root: Path, owner: str, jump: Callable[[int], None], max_handles: int) -> None:
        self._root = folder_of(root, owner)
        self._jump = jump
        self._max_handles = max_handles
        self._writer = secrets.token_hex(16)
        self._claimed: set[str] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "skyproxy-snapshot")

    def _folder(self, name: str) -> SnapshotFolder:
        return SnapshotFolder(self._root / check_name(name), self._writer)

    def save(self, state: SessionState, name: str) -> dict[str, object]:
        """Write what the session is now.

        Raises:
            SnapshotNotNowError: something runs that no snapshot can hold.
            SnapshotError: it cannot be written; the snapshots before are untouched.
        """
        folder = self._folder(name)
        captured = capture(state)
        try:
            if name not in self._claimed:
                folder.claim()
                self._claimed.add(name)
            draft = folder.begin(piece_count(captured.storages), self._threads)
            try:
                return self._write(draft, captured)
            except BaseException:
                draft.abandon()
                raise
        except OSError as error:
            raise SnapshotError(
                f"the snapshot could not be written: {error.strerror} ({error.filename or folder.path.name}). Those "
                "before it are untouched, and the session goes on. Make room on the worker's volume, and try again"
            ) from error

    def _write(self, draft: Draft, captured: Captured) -> dict[str, object]:
        contents = []
        for storage in captured.storages:
            host = storage.cpu()  # a name, for the view of its bytes does not keep it alive
            view = byte_view(host)
            contents.append(draft.put(view[start:end] for start, end in pieces_of(len(view))))
        total = sum(storage.numel() for storage in captured.storages)
        number = draft.finish(captured.document, contents, total)
        return {
            "snapshot": number,
            "sequence": captured.document["sequence"],
            "bytes": total,
            "written_bytes": draft.written_bytes,
        }

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
        self._claimed.discard(name)
        return self._folder(name).delete(number)

    def end(self) -> None:
        """The session is over."""
        self._threads.shutdown(cancel_futures=True)


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
