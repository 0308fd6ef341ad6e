"""Requests that a client can make about snapshots of its session."""

from __future__ import annotations

from collections.abc import Callable

from skyproxy.errors import SnapshotError
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


def save_snapshot(session: SessionState, name: str) -> object:
    """Write what the session is after this batch; "snapshot", "sequence", "bytes", "written_bytes"."""
    return _snapshots(session).save(session, name)


def load_snapshot(session: SessionState, name: str, number: str = "") -> dict[str, object]:
    """Make the empty session what a snapshot says; the client's next batch is the one behind "sequence"."""
    return _snapshots(session).load(session, name, number)


def list_snapshots(session: SessionState, name: str = "") -> list[dict[str, object]]:
    """Return a row for each snapshot of this token."""
    return _snapshots(session).rows(name)


def delete_snapshot(session: SessionState, name: str, number: str = "") -> bool:
    """Delete a snapshot, or all of a name; return whether there was one."""
    return _snapshots(session).delete(name, number)


def install() -> None:
    """Make these controls known."""
    functions: list[Callable[..., object]] = [save_snapshot, load_snapshot, list_snapshots, delete_snapshot]
    CONTROLS.update({function.__name__: function for function in functions})
