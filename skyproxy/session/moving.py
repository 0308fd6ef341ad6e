"""Moves a live session to another worker: `node.move_to(url)`. Tensors of the program stay valid."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from skyproxy.errors import ConfigurationError, ConnectError, SessionLostError, SkyproxyError
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.local_worker import LocalWorker
from skyproxy.session.opening import CheckWay, Opener, Renew
from skyproxy.session.restoring import NewSession
from skyproxy.session.session import Session
from skyproxy.session.successor import Successor, WayBack, check_fits
from skyproxy.transport.links import is_link, read_url
from skyproxy.transport.trust import client_context

logger = logging.getLogger("skyproxy.session")


class NodeMoves:
    """The part of a node that leaves its worker for another one.

    Attributes:
        url: where its worker listens.
        software: versions there.
        session_name: the name of its session, if it has one; it goes with it.
        wake: starts its worker again where that was suspended, and gives the way to it; None where that is not ours to
            do.
        context_name: the saved context that it was opened by; empty for none.
    """

    context_name: str = ""
    wake: Callable[[], WayBack] | None = None
    url: str
    software: dict[str, str]
    session_name: str | None
    _session: Session
    _opener: Opener | None
    _worker: LocalWorker | None
    _on_close: Callable[[], object] | None

    def _restart_worker(self, stop: threading.Event) -> LocalWorker:
        """Start the embedded worker anew."""
        raise NotImplementedError

    def _expect_leave(self) -> None:
        """Have the session suspended when its worker says that it is about to end."""
        self._session.open_anew = Successor(self, None) if self._opener is not None else None

    def _use_way(self, close: Callable[[], object]) -> None:
        """Close this with the node, in place of the way to the worker before."""
        before, self._on_close = self._on_close, close
        if before is not None and before is not close:
            before()

    def move_to(
        self,
        url: str,
        *,
        token: str | None = None,
        certificate: str | Path | None = None,
        server_name: str | None = None,
        insecure: bool = False,
    ) -> None:
        """Go on with this session on another worker; tensors stay valid, and the program notices a pause.

        Both workers must keep snapshots, and that one must run the same torch and have the same devices. Where they do
        not see the same folder of snapshots, this program carries the session's bytes from the one to the other. The
        worker before is told that the session is over; an embedded one ends. The name of the session, and what is put
        under names in it, go with it; who asks the worker before for it is told where it is.

        Args:
            url: "ws://host:port", "wss://host:port" or a "sky://" link.
            token: that worker's; by default the same as before.
            certificate: whom to trust and nobody else.
            server_name: the name in its certificate, where it is not the url's host.
            insecure: whether "ws://" may go to other machines.

        Raises:
            ConfigurationError: one of the workers keeps no snapshots, or that one does not fit; nothing has changed.
            ConnectError: that worker does not answer, or refuses; nothing has changed.
            RemoteError: no snapshot can be taken now; nothing has changed.
            SessionLostError: the session is over.

        Example:
            ```python
            node.move_to("wss://bigger.example:8765", token=token)
            ```
        """
        if is_link(url):
            url, certificate = read_url(url, certificate)
        self._go_to(
            url,
            token,
            client_context(certificate) if certificate is not None else None,
            server_name,
            insecure=insecure,
        )

    def _go_to(
        self,
        url: str,
        token: str | None,
        ssl_context: ssl.SSLContext | None,
        server_name: str | None,
        *,
        insecure: bool = False,
        renew: Renew | None = None,
        check_way: CheckWay | None = None,
    ) -> None:
        """As `move_to`.

        Args:
            url, token, ssl_context, server_name, insecure: the other worker.
            renew: gives its token and certificate anew; None leaves what there was.
            check_way: raises ConnectError while the way to it, a tunnel, is away; None where there is none.
        """
        session, opener = self._session, self._opener
        session.wait_until_awake()
        if opener is None or not session.welcome.limits.get("snapshots"):
            raise ConfigurationError(f"the worker at {self.url} keeps no snapshots. Start it with --snapshots FOLDER.")
        target = opener.copy()
        target.use(url, token, check_way)
        target.trust(ssl_context, server_name, insecure=insecure)
        if renew is not None:
            target.renew_by(renew)
        opened = target.open_session()
        try:
            check_fits(session.welcome, opened.welcome)
            with session.protecting:
                self._move(opener, target, opened)
        except BaseException:
            if opener.welcome is not opened.welcome:  # the session has not gone there
                opened.close()
            raise

    def _move(self, opener: Opener, target: Opener, opened: NewSession) -> None:
        session, carrier = self._session, _Carrier(opener.copy(), target)
        left: list[tuple[Opener, int]] = []

        def leave() -> None:
            left.append((opener.copy(), session.answers))  # it may have been restored since the move began
            opener.become(target)
            self.url, self.software = target.url, dict(opened.welcome.software)

        is_protected = session.protection is not None
        try:
            if not is_protected:
                log = BatchLog(session.settings.max_log_bytes, session.settings.max_frame_bytes)
                session.protect(log, secrets.token_hex(16), _refuse_moving, math.inf, 0)
            session.move(opened, leave, carrier.bring)
        finally:
            if not is_protected:
                session.unprotect()
            if session.lost is None:  # also where the program's wait for the rest was interrupted
                for before, answers in left:
                    self._clear_away(before, answers, carrier)

    def _clear_away(self, before: Opener, answers: int, carrier: _Carrier) -> None:
        """End what the worker before has of the session, or that worker itself if it is embedded."""
        carrier.clear_away()
        worker, self._worker = self._worker, None
        if worker is None:
            if self.session_name is not None:
                carrier.leave_name(before, self.session_name)
            before.end_session(answers)
        else:
            self._session.explain_end = lambda: None
            worker.stop()
            worker.delete_snapshots()


class _Carrier:
    """Carries a session's snapshot from the volume of one worker to that of another one."""

    def __init__(self, before: Opener, target: Opener) -> None:
        self._before = before
        self._target = target
        self._carried = ""

    def bring(self, name: str, number: str, sequence: int) -> None:
        """Copy a snapshot, unless the other worker sees it.

        Raises:
            SnapshotError: it cannot be read, or not be written there.
            ConnectError: a connection that carries it broke, which is not the session's.
        """
        try:
            self._bring(name, number, sequence)
        except SessionLostError as problem:
            raise ConnectError(
                f"the session was not moved, for a connection that carries its snapshot broke: {problem}. It goes on "
                "where it was; try again"
            ) from problem

    def _bring(self, name: str, number: str, sequence: int) -> None:
        from skyproxy.session.snapshot_copies import WorkerCopies  # imported late: few programs move

        with WorkerCopies(self._target) as there:
            if sequence in there.sequences(name):
                return
            with WorkerCopies(self._before) as here:
                self._carried = name
                there.write(here.open(name, number), name)

    def clear_away(self) -> None:
        """Delete what was copied where it came from."""
        from skyproxy.session.snapshot_copies import WorkerCopies

        if self._carried:
            with contextlib.suppress(SkyproxyError, OSError), WorkerCopies(self._before) as here:
                here.delete(self._carried)

    def leave_name(self, before: Opener, name: str) -> None:
        """Have the worker before forget a named session, and tell where it is now; as far as it can be reached."""
        from skyproxy.session.snapshot_copies import WorkerCopies

        if self._target.url == before.url:
            return
        try:
            with WorkerCopies(before) as here:
                here.leave_name(name, before.welcome.session, self._target.url)
        except (SkyproxyError, OSError) as problem:
            logger.warning(
                "skyproxy: the session %r goes on at %s, and %s may still have what was under its names: %s. End it "
                "there: skyproxy sessions end",
                name,
                self._target.url,
                before.url,
                problem,
            )


def _refuse_moving(reason: str, stop: threading.Event) -> NewSession:
    raise SessionLostError(reason)
