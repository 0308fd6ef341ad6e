"""The worker that goes on where another one ended: where it is, and whether it can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    SessionLostError,
    SkyproxyError,
    VersionMismatchError,
)
from skyproxy.protocol.messages import Welcome
from skyproxy.session.local_worker import LocalWorker
from skyproxy.session.opening import Opener
from skyproxy.session.restoring import NewSession
from skyproxy.session.session import Session
from skyproxy.transport.links import is_link
from skyproxy.transport.trust import client_context

NewWorker = Callable[[], str | tuple[str, str]]
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class WayBack(Protocol):
    """A way to a worker that was started again."""

    @property
    def url(self) -> str: ...

    @property
    def token(self) -> str: ...

    @property
    def certificate(self) -> str | None: ...

    @property
    def server_name(self) -> str | None: ...

    @property
    def close(self) -> Callable[[], None]: ...

    @property
    def check(self) -> Callable[[], object] | None: ...


class SucceededNode(Protocol):
    """A node, as far as its next worker goes.

    Attributes:
        wake: starts the worker again where it was suspended, and gives the way to it; None where that is not ours to
            do.
    """

    url: str
    wake: Callable[[], WayBack] | None
    _session: Session
    _opener: Opener | None
    _worker: LocalWorker | None

    def _restart_worker(self, stop: threading.Event) -> LocalWorker: ...

    def _use_way(self, close: Callable[[], object]) -> None: ...


class Successor:
    """Finds the worker that goes on where a node's worker ended."""

    def __init__(self, node: SucceededNode, new_worker: NewWorker | None) -> None:
        """Make the successor of one node's worker; a call finds it.

        Args:
            node: whose worker it will be.
            new_worker: gives an address; None for the same place.
        """
        self._node = node
        self._new_worker = new_worker

    def __call__(self, reason: str, stop: threading.Event) -> NewSession:
        """Open a session on it, as `session.handover.OpenAnew` says."""
        patience_seconds = self._node._session.settings.reconnect_seconds
        until, pause = time.monotonic() + patience_seconds, _FIRST_PAUSE_SECONDS
        while not stop.is_set():
            try:
                return self._open(stop)
            except (AuthenticationError, VersionMismatchError, ConfigurationError) as problem:
                raise SessionLostError(f"{reason}; and no other worker can go on: {problem}") from problem
            except (SkyproxyError, OSError) as problem:
                if time.monotonic() >= until:
                    raise SessionLostError(
                        f"{reason}, and no other worker came within {patience_seconds:g} s: {problem}"
                    ) from problem
            stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise SessionLostError("the session was closed")

    def _open(self, stop: threading.Event) -> NewSession:
        node, opener = self._node, self._node._opener
        assert opener is not None
        if self._new_worker is not None:
            given = self._new_worker()
            url, token = (given, None) if isinstance(given, str) else given
            if is_link(url):
                raise ConfigurationError("new_worker gave a sky:// link. Give the worker's wss:// address, and token.")
            opener.use(url, token)
        elif node._worker is not None and not node._worker.is_running:
            worker = node._restart_worker(stop)
            opener.use(worker.url, worker.token)
        elif node.wake is not None:
            way = node.wake()
            opener.use(way.url, way.token, way.check)
            trusted = client_context(way.certificate) if way.certificate is not None else None
            opener.trust(trusted, way.server_name, insecure=False)
            node._use_way(way.close)
        opened = opener.open_session(may_renew=True)
        try:
            check_fits(node._session.welcome, opened.welcome)
        except BaseException:
            opened.close()
            raise
        node.url = opener.url
        return opened


def check_fits(before: Welcome, now: Welcome) -> None:
    """Check that a worker can go on with the session.

    Raises:
        ConfigurationError: a worker cannot go on with a session of another one.
    """
    if not now.limits.get("snapshots"):
        raise ConfigurationError("the other worker keeps no snapshots. Start it with --snapshots FOLDER.")
    if before.software.get("torch") != now.software.get("torch"):
        raise ConfigurationError(
            f"the other worker runs torch {now.software.get('torch')!r:.40}, and the session began with "
            f"{before.software.get('torch')!r:.40}"
        )
    kinds = [(row.get("type"), row.get("index")) for row in now.devices]
    missing = [f"{row['type']}:{row['index']}" for row in before.devices if (row["type"], row["index"]) not in kinds]
    if missing:
        raise ConfigurationError(f"the other worker has no {', '.join(missing)}, which the session uses")
