"""Named sessions of one worker, so that no other one of its volume has them at the same time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from skyproxy.errors import SnapshotError
from skyproxy_server.named_errors import NamedSessionElsewhereError, NamedSessionMovedError
from skyproxy_server.named_sessions import Leases
from skyproxy_server.session_state import SessionState
from skyproxy_server.snapshots.volume import VolumeHangsError

logger = logging.getLogger("skyproxy.server")

_WHAT = "looking for workers that have the named session"


@contextlib.contextmanager
def claimed(session: SessionState, name: str, *, tag: str = "", takes: bool = False) -> Iterator[None]:
    """Have a named session for this worker, for a block that brings it here; where it does not, nothing is kept.

    Args:
        session: whose client asks.
        name: of the named session.
        tag: the mark of the use that goes on here.
        takes: whether it is to be taken from another worker that lives.

    Raises:
        NamedSessionElsewhereError: another worker of the volume has it.
        NamedSessionMovedError: it has moved.
        SnapshotError: the worker that has it cannot save it.
        VolumeHangsError: the volume does.
    """
    names, snapshots = session.names, session.snapshots
    leases = names.store.leases if names is not None else None
    if names is None or snapshots is None or leases is None:
        yield
        return
    store, owner = names.store, names.owner
    is_given_up = threading.Event()

    def acquire(note_progress: Callable[[], object]) -> None:
        leases.acquire(owner, name, tag, take=takes, note_progress=note_progress)
        if is_given_up.is_set():
            leases.settle(owner, name, "")

    try:
        if not (leases.holds(owner, name) and store.has(owner, name)):
            snapshots.ask_volume(_WHAT, acquire)
    except OSError as error:
        # A full or broken volume is no reason to refuse what lies in memory.
        logger.warning("other workers of the volume cannot be told of the named session %r: %s", name, error)
    except VolumeHangsError:
        is_given_up.set()
        raise
    except (NamedSessionElsewhereError, NamedSessionMovedError, SnapshotError):
        leases.settle(owner, name, "")
        raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError, SnapshotError):
            snapshots.ask_volume(_WHAT, lambda _: leases.settle(owner, name, store.tag_of(owner, name)))


def rows_elsewhere(session: SessionState) -> list[dict[str, object]]:
    """Return the named sessions of a client's token that other workers of the volume have; none where it is broken."""
    found = _leases_of(session)
    if found is None or session.snapshots is None:
        return []
    leases, owner = found
    try:
        return session.snapshots.ask_volume(_WHAT, lambda _: leases.rows_elsewhere(owner))
    except OSError as error:
        logger.warning("the named sessions of other workers cannot be listed: %s", error)
        return []


def ended_elsewhere(session: SessionState, name: str) -> bool:
    """Have another worker of the volume forget a named session; return whether it had one."""
    found = _leases_of(session)
    if found is None or session.snapshots is None:
        return False
    leases, owner = found
    return session.snapshots.ask_volume(_WHAT, lambda note: leases.end_elsewhere(owner, name, note))


def left_elsewhere(session: SessionState, name: str, used_by: str, where: str) -> bool:
    """Have another process of this worker forget a named session that goes on at another one."""
    found = _leases_of(session)
    if found is None or session.snapshots is None:
        return False
    leases, owner = found
    return session.snapshots.ask_volume(_WHAT, lambda note: leases.leave_elsewhere(owner, name, used_by, where, note))


def _leases_of(session: SessionState) -> tuple[Leases, str] | None:
    names = session.names
    return None if names is None or names.store.leases is None else (names.store.leases, names.owner)
