"""Named sessions of one worker, so that no other one of its volume has them at the same time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from skyproxy.errors import SnapshotError
from skyproxy_server.named_sessions import NamedSessionElsewhereError
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
    except NamedSessionElsewhereError:
        leases.settle(owner, name, "")
        raise
    except VolumeHangsError:
        is_given_up.set()
        raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError, SnapshotError):
            snapshots.ask_volume(_WHAT, lambda _: leases.settle(owner, name, store.tag_of(owner, name)))
