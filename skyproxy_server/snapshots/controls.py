"""Requests that a client can make about snapshots of its session."""

from __future__ import annotations

from collections.abc import Callable

from skyproxy.errors import SnapshotError
from skyproxy.snapshots.hashes import SHA256
from skyproxy_server.controls import CONTROLS
from skyproxy_server.session_state import SessionState, SnapshotRequests

_NONE_HERE = (
    "this worker keeps no snapshots. Start it with --snapshots DIR, or set SKYPROXY_SNAPSHOTS there, to a folder that "
    "outlives it. The session goes on"
)


def _snapshots(session: SessionState) -> SnapshotRequests:
    if session.snapshots is None:
        raise SnapshotError(_NONE_HERE)
    return session.snapshots


def save_snapshot(
    session: SessionState, name: str, slots: list[int] | None = None, names: bytes = b"", wish: str = SHA256
) -> object:
    """Write what the session is after this batch, or only some of its tensors; "snapshot", "sequence", "bytes",
    "written_bytes". The client says by which hash the pieces may be named.
    """
    return _snapshots(session).save(session, name, slots, names, wish)


def load_snapshot(session: SessionState, name: str, number: str = "") -> dict[str, object]:
    """Make the empty session what a snapshot says; the client's next batch is the one behind "sequence"."""
    return _snapshots(session).load(session, name, number)


def open_snapshot(session: SessionState, name: str, number: str = "") -> dict[str, object]:
    """Read the tensors of a snapshot beside what the session holds; its "names", and "rows" about the tensors."""
    return _snapshots(session).open_values(session, name, number)


def adopt_snapshot(session: SessionState, pairs: list[list[int]]) -> None:
    """Make tensors that were read the session's own: pairs of the slot that one had, and of its new one."""
    _snapshots(session).adopt_values(pairs)


def read_snapshot(session: SessionState, name: str, number: str = "", offset: int = 0) -> dict[str, object]:
    """Return a part of a snapshot's document, for a client that copies it; "snapshot", "total_bytes", "part"."""
    with session.idle():  # waiting for the disk computes nothing
        return _snapshots(session).copies_out.header(name, number, offset)


def read_snapshot_piece(session: SessionState, digest: bytes) -> bytes:
    """Return some bytes of its tensors."""
    with session.idle():  # waiting for the disk computes nothing
        return _snapshots(session).copies_out.piece(digest)


def begin_snapshot(session: SessionState, name: str, piece_count: int, hash_name: str = SHA256) -> None:
    """Begin to take a snapshot that a client copies here."""
    with session.idle():  # waiting for the disk computes nothing
        _snapshots(session).copies_in.begin(name, piece_count, hash_name)


def write_snapshot_piece(session: SessionState, content: bytes) -> bytes:
    """Take some bytes of its tensors."""
    with session.idle():  # waiting for the disk computes nothing
        return _snapshots(session).copies_in.piece(content)


def write_snapshot(session: SessionState, part: bytes, is_last: bool) -> str:
    """Take a part of its document; with the last part, the name that it has here."""
    with session.idle():  # waiting for the disk computes nothing
        return _snapshots(session).copies_in.header(part, is_last)


def list_snapshots(session: SessionState, name: str = "") -> list[dict[str, object]]:
    """Return a row for each snapshot of this token."""
    with session.idle():  # waiting for the disk computes nothing
        return _snapshots(session).rows(name)


def delete_snapshot(session: SessionState, name: str, number: str = "") -> bool:
    """Delete a snapshot, or all of a name; return whether there was one."""
    with session.idle():  # waiting for the disk computes nothing
        return _snapshots(session).delete(name, number)


def install() -> None:
    """Make these controls known."""
    functions: list[Callable[..., object]] = [save_snapshot, load_snapshot, list_snapshots, delete_snapshot]
    functions += [
        open_snapshot,
        adopt_snapshot,
        read_snapshot,
        read_snapshot_piece,
        begin_snapshot,
        write_snapshot_piece,
        write_snapshot,
    ]
    CONTROLS.update({function.__name__: function for function in functions})
