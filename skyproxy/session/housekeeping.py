"""The regular work of a session: sending what lies around, asking whether the worker lives, keeping links open."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from skyproxy.errors import SessionLostError
from skyproxy.protocol.messages import Ping, Pong
from skyproxy.session.liveness import LEAVING, Liveness, StalledOperations
from skyproxy.session.outage import Outage
from skyproxy.session.reconnector import Reconnector
from skyproxy.session.recorder import Recorder
from skyproxy.session.transfers import UploadQueue
from skyproxy.session.waiters import Waiter
from skyproxy.settings import Settings
from skyproxy.transport.base import LinkDownError, Transport

logger = logging.getLogger("skyproxy.session")

_LOOK_SECONDS = 0.05
_STALE_SECONDS = 0.003
_STALE_BESIDE_WORK_SECONDS = 0.02
"""The time after which recorded commands are sent, if no others join them: where the worker has done all that it had,
and where it has not. What waits is looked at as often as the former: each look takes the interpreter from the program.
"""
_REST_SECONDS = 0.25
"""Between two looks where for some time nothing was sent or received: what is recorded then may wait so long."""
_RESTS_AFTER_SECONDS = 5.0
_ABOUT_LOAD = 0
"""The number of pings that ask for the worker's load, and measure nothing."""


class AuxiliaryConnection(Protocol):
    """A connection that others opened for a session, as the session needs to know it."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def keep_alive(self) -> None: ...

    def cut(self) -> bool: ...

    def abandon(self) -> None: ...


class Housekeeping:
    """Flushes, pings and keep-alives of one session, on a thread of its own or on one that sessions share.

    Attributes:
        auxiliary: connections that others opened for the session; counted there, and kept alive.
        last_heard: when a message came in, on the clock of `time.monotonic`.
        round_trip_seconds: how long a message to the worker and back took, the quicker of the last two; 0 at first.
        often: called about twenty times a second, and four times where nothing has moved for long; they must be short.
        tick: called again and again, as often.
        on_leaving: told the milliseconds after which the worker will end, where it says so.
    """

    def __init__(
        self,
        recorder: Recorder,
        uploads: UploadQueue,
        operations: Transport,
        bulk: Transport,
        settings: Settings,
        end: Callable[[str], object],
        reconnector: Reconnector | None = None,
    ) -> None:
        """Make the housekeeping of one session; `run`, or `look_again`, does it.

        Args:
            recorder: whose commands are sent when they lie around.
            uploads: whose progress tells that the worker lives.
            operations, bulk: the session's connections.
            settings: intervals.
            end: ends the session, for a reason.
            reconnector: replaces broken connections, where that is possible. Then a silent one is cut, to be replaced.
        """
        self.auxiliary: list[AuxiliaryConnection] = []
        self.often: list[Callable[[], object]] = []
        self.tick: Callable[[], object] = lambda: None
        self.on_leaving: Callable[[int], object] = lambda milliseconds: None
        self.last_heard = time.monotonic()
        self.round_trip_seconds = 0.0
        self._recorder = recorder
        self._uploads = uploads
        self._operations = operations
        self._bulk = bulk
        self._interval = settings.ping_interval_seconds
        self._patience = settings.liveness_timeout_seconds
        self._end = end
        self._reconnector = reconnector
        self._silence = Liveness(settings.silence_seconds, max(self._interval, 1.0), self.last_heard)
        self._stalled = StalledOperations()
        self._stop = threading.Event()
        self._idle_seconds = 0.001
        self._asked_at = (0, 0.0)
        self._asking: deque[Waiter] = deque(maxlen=64)
        self._round_trips_seconds: deque[float] = deque(maxlen=2)
        self._recorded_before, self._recorded_at = (-1, -1), self.last_heard
        self._chores_at = self.last_heard
        self._bytes_before, self._silent_since = -1, self.last_heard
        self._moved_bytes, self._moved_at = -1, self.last_heard
        self._liveness = Liveness(self._patience + self._interval, max(self._interval, 1.0), self.last_heard)
        # The first ping leaves at once: it tells how far the worker is.
        self._last_ping = self.last_heard - self._interval

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    def ask_load(self) -> Waiter:
        """Ask the worker what it does, past its operations; never blocks. On a broken connection no answer comes."""
        waiter = Waiter()
        self._asking.append(waiter)
        self._bulk.post(Ping(_ABOUT_LOAD))
        return waiter

    def on_pong(self, pong: Pong) -> None:
        """Take the time of a round trip."""
        if LEAVING in pong.load:
            self.on_leaving(pong.load[LEAVING])
            return
        if pong.number == _ABOUT_LOAD:
            while self._asking:
                self._asking.popleft().set(pong.load)
            return
        number, asked_at = self._asked_at
        if pong.number == number:
            self._round_trips_seconds.append(time.monotonic() - asked_at)
            self.round_trip_seconds = min(self._round_trips_seconds)
        outage = self._outage()
        if outage is not None and not outage.is_going_on:
            connection, received = self._operations.connection, self._operations.bytes_received
            is_idle = not pong.load.get("executing", 0)
            if self._stalled.is_stalled(is_idle, connection.acked_sequence, connection.unacked_bytes, received):
                logger.debug("skyproxy: an idle worker does not answer on the operations connection; it is cut")
                self._operations.cut()

    def run(self) -> None:
        """Send what is still unsent, ask a silent worker whether it lives, and give up on a dead one, until `stop`.

        Never waits for the worker itself, nor for a thread that does.
        """
        while not self._stop.wait(self._idle_seconds):
            self._look(time.monotonic())

    def look_again(self) -> float | None:
        """Do once what `run` does again and again; return the seconds until the next time, None once it is stopped."""
        if self._stop.is_set():
            return None
        self._look(time.monotonic())
        return self._idle_seconds

    def _look(self, now: float) -> None:
        self._idle_seconds = self._pause(now)
        try:
            self._flush_stale(now)
            if now >= self._chores_at:
                self._chores_at = now + min(_LOOK_SECONDS, self._interval)
                self._do_chores(now)
        except LinkDownError:
            logger.debug("skyproxy: no ping, for the connection is broken")
        except SessionLostError as error:
            self._end(str(error))
        except Exception:  # the recorder reports a failed flush, at the next wait
            logger.debug("skyproxy: housekeeping could not flush", exc_info=True)

    def _do_chores(self, now: float) -> None:
        self._ping(now)
        self._keep_alive(now)
        self._look_for_signs(now)
        for look in self.often:
            look()
        self.tick()

    def _pause(self, now: float) -> float:
        """Return the seconds until the next look: few where something waits to be sent, many where nothing moves."""
        if self._recorder.unsent:
            self._moved_at = now  # or will have soon
            return _STALE_SECONDS
        moved = sum(link.bytes_sent + link.bytes_received for link in (self._operations, *self.auxiliary))
        if moved != self._moved_bytes:
            self._moved_bytes, self._moved_at = moved, now
        is_resting = now - self._moved_at >= _RESTS_AFTER_SECONDS
        return min(self._idle_seconds * 2, _REST_SECONDS if is_resting else _LOOK_SECONDS)

    def _outage(self) -> Outage | None:
        """Return what tells of broken connections, where such are made anew now."""
        reconnector = self._reconnector
        return reconnector.outage if reconnector is not None and reconnector.is_active else None

    def _look_for_signs(self, now: float) -> None:
        """Give up on a worker that answers nothing; or cut its connections, where they are made anew."""
        outage = self._outage()
        if outage is not None:
            if outage.is_going_on:
                self.last_heard = now
            if self._silence.is_gone(now, max(self.last_heard, self._uploads.last_progress)):
                logger.debug("skyproxy: a silent worker's connections are cut")
                self.last_heard = now
                for link in (self._operations, self._bulk, *self.auxiliary):
                    link.cut()
        elif self._liveness.is_gone(now, max(self.last_heard, self._uploads.last_progress)):
            self._end(f"the worker answered nothing for {self._patience:g} s")

    def _flush_stale(self, now: float) -> None:
        """Send commands that have been waiting for a while.

        A program that merely pauses between two operations is not cut off there: where it is cut, a loop does not
        repeat itself. While the worker has enough to do, nothing is lost by waiting longer.
        """
        recorder = self._recorder
        recorded = recorder.batches, recorder.unsent
        if recorded != self._recorded_before:
            self._recorded_before, self._recorded_at = recorded, now
        elif recorded[1] or recorder.has_dropped:
            patience = _STALE_SECONDS if recorder.is_all_executed else _STALE_BESIDE_WORK_SECONDS
            if now - self._recorded_at >= patience and not recorder.flush_unless_busy():
                self._recorded_at = now  # whoever was waiting goes on recording as soon as it can

    def _ping(self, now: float) -> None:
        # A ping would wait behind a large upload, whose progress tells as much.
        if now - self._last_ping >= self._interval and not self._uploads.busy:
            number = self._asked_at[0] + 1
            self._last_ping = now
            self._asked_at = (number, now)
            self._bulk.send(Ping(number))

    def _keep_alive(self, now: float) -> None:
        moved = self._operations.bytes_sent + self._operations.bytes_received
        if moved != self._bytes_before:
            self._bytes_before, self._silent_since = moved, now
        elif now - self._silent_since >= self._interval:
            self._silent_since = now
            for transport in (self._operations, *self.auxiliary):
                transport.keep_alive()  # gateways cut connections that have been silent for long
