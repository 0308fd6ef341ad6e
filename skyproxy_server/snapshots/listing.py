"""The snapshots that lie in a place, as rows."""

from __future__ import annotations

from collections.abc import Callable

from skyproxy.errors import SnapshotError
from skyproxy.snapshots.folder import SnapshotFolder, is_name
from skyproxy.snapshots.stores import FileStore


def list_rows(
    root: FileStore, name: str = "", note_progress: Callable[[], object] = lambda: None
) -> list[dict[str, object]]:
    """Return a row for each snapshot, the newest of a name first; "trouble" says why one cannot be read.

    Args:
        root: the place of a token.
        name: of which snapshots; empty for all.
        note_progress: called with each name.
    """
    rows: list[dict[str, object]] = []
    for each in [name] if name else sorted(_names(root)):
        folder = SnapshotFolder(root.child(each))
        note_progress()
        for number in folder.numbers():
            try:
                rows.append(folder.row(number))
            except (OSError, SnapshotError, TypeError, ValueError) as error:
                rows.append({"name": each, "snapshot": str(number), "trouble": str(error)})
    return rows


def used_bytes(rows: list[dict[str, object]], but_for: str, least_bytes: int = 0) -> int:
    """Return the bytes of the newest snapshot of each name, but for one; each counts some at least."""
    newest: dict[str, int] = {}
    for row in rows:
        name, size = row["name"], row.get("bytes")
        if isinstance(name, str) and isinstance(size, int):
            newest.setdefault(name, max(size, least_bytes))
    newest.pop(but_for, None)
    return sum(newest.values())


def _names(root: FileStore) -> list[str]:
    try:
        return [name for name in root.places() if is_name(name)]
    except OSError:
        return []
