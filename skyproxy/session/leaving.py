"""Takes leave of a worker that is told to end: a last snapshot, and then the session is suspended."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import Protocol

from skyproxy.errors import RemoteError, SessionLostError, SkyproxyError, say, visible
from skyproxy.protocol.messages import Pong, Welcome
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.handover import OpenAnew
from skyproxy.session.liveness import LEAVING
from skyproxy.session.protection import Protection
from skyproxy.settings import Settings

_MOST_SECONDS = 3600.0
_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 0.005


class LeavingSession(Protocol):
    """A session, as far as its leave from a worker goes."""

    protection: Protection | None
    protecting: threading.Lock
    settings: Settings
    welcome: Welcome
    open_anew: OpenAnew | None

    @property
    def lost(self) -> SessionLostError | None: ...

    def protect(
        self, log: BatchLog, name: str, open_anew: OpenAnew, every_seconds: float, every_steps: int
    ) -> None: ...

    def unprotect(self) -> None: ...

    def post_bulk(self, message: Pong) -> None: ...

    def cut_all(self) -> None: ...

    def between_batches(self, action: Callable[[], object], timeout_seconds: float) -> bool: ...


class WorkerEndHandler:
    """A session's leave from a worker that says that it is about to end.

    A session that is not protected is so from here until it has another worker.
    """

    def __init__(self, session: LeavingSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._is_going_on = False
        self._last_problem = ""

    def on_notice(self, milliseconds: int) -> None:
        """Begin, on a thread of its own; once at a time, whatever the worker says."""
        with self._lock:
            if self._is_going_on or milliseconds <= 0:
                return
            self._is_going_on = True
        until = time.monotonic() + min(milliseconds / 1000, _MOST_SECONDS)
        threading.Thread(target=self._run, args=(until,), name="skyproxy-leaving", daemon=True).start()

    def _run(self, until: float) -> None:
        try:
            self._leave(until)
        except SkyproxyError as problem:
            if self._session.lost is None:
                self._session.post_bulk(Pong(0, {LEAVING: 0}))
                self._say_once(f"the worker is about to end, and this session cannot be suspended: {visible(problem)}")
        finally:
            with self._lock:
                self._is_going_on = False

    def _say_once(self, problem: str) -> None:
        """Tell people what they were not told just before: a worker may say that it ends as often as it likes."""
        if problem != self._last_problem:
            self._last_problem = problem
            say(problem)

    def _leave(self, until: float) -> None:
        session = self._session
        if session.open_anew is None:
            raise SkyproxyError("it was made without a way to open another one")
        session.post_bulk(Pong(0, {LEAVING: 1}))
        worker = session.welcome
        if not session.protecting.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise SkyproxyError("it was never between two snapshots")
        try:
            protection = session.protection
            if session.welcome is not worker or (protection is not None and protection.is_suspended):
                return  # it has moved, or has been told before
            while not self._is_suspended_by(self._sequence_of_snapshot(until), until):
                pass  # a function was called after the snapshot
        finally:
            session.protecting.release()
        say(
            "the worker is about to end, so this session is suspended: its tensors are on the worker's volume. The "
            "next operation brings it back."
        )

    def _is_suspended_by(self, sequence: int, until: float) -> bool:
        """Suspend the session if that can be, now that there is a snapshot; return whether it is."""
        session = self._session
        protection = session.protection
        if protection is None:
            raise SkyproxyError("its protection was ended")

        def suspend() -> None:
            if protection.can_be_suspended(sequence):
                protection.suspend()
                session.cut_all()

        if not session.between_batches(suspend, max(until - time.monotonic(), 0.0)):
            raise SkyproxyError("it was never between two operations")
        return protection.is_suspended

    def _sequence_of_snapshot(self, until: float) -> int:
        while True:
            try:
                return self._take_snapshot(until)
            except RemoteError:  # a function runs, or a graph is being captured: that may be over soon
                if time.monotonic() + _PAUSE_SECONDS >= until:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def _take_snapshot(self, until: float) -> int:
        """Take a snapshot, and wait until the session can go on from there.

        Raises:
            RemoteError: the worker takes none now.
            SessionLostError: the session is over, or there was no time.
        """
        session = self._session
        was_free = session.protection is None
        if was_free:
            assert session.open_anew is not None
            log = BatchLog(session.settings.max_log_bytes, session.settings.max_frame_bytes)
            session.protect(log, secrets.token_hex(16), session.open_anew, math.inf, 0)
        protection = session.protection
        assert protection is not None
        protection.is_passing = protection.is_passing or was_free
        wanted = int(protection.snapshot()["sequence"])
        while (protection.log.durable or 0) < wanted:
            if time.monotonic() >= until or session.lost is not None:
                raise SkyproxyError("answers to earlier questions did not come in time")
            time.sleep(_LOOK_SECONDS)  # an answer may be complete only with a download
        return wanted
