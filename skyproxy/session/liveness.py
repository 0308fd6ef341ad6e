"""Decides from a clock, and from answers, whether a silent worker or connection counts as gone."""

from __future__ import annotations

LEAVING = "leaving"
"""In the load of a `Pong` that nobody asked for: from a worker, the milliseconds until it ends; from a client, 1 where
its worker is to wait for it, 0 where it need not."""


class Liveness:
    """The time for which a worker has been silent while this process was there to listen.

    A process that was stopped itself (SIGSTOP, a laptop's sleep, a debugger, a machine without a free core) has heard
    nothing either. Whoever looks in regularly sees such a gap between two looks, and the worker gets its time anew.
    """

    def __init__(self, patience_seconds: float, absence_seconds: float, now: float) -> None:
        """Begin to watch.

        Args:
            patience_seconds: silence after which the worker is gone.
            absence_seconds: a gap between two looks that means that this process was stopped.
            now: the time, of any monotonic clock.
        """
        self._patience = patience_seconds
        self._absence = absence_seconds
        self._looked_at = now
        self._listening_since = now

    def is_gone(self, now: float, last_sign: float) -> bool:
        """Look at the clock: whether the worker was silent for too long.

        Args:
            now: the time.
            last_sign: when the worker was last heard of.
        """
        if now - self._looked_at > self._absence:
            self._listening_since = now
        self._looked_at = now
        return now - max(last_sign, self._listening_since) > self._patience


_SLOWEST_BYTES_PER_SECOND = 32 << 10
"""The speed of a link that is still waited for: an answer comes behind what was sent before it."""
_MOST_ON_ITS_WAY_BYTES = 16 << 20
"""The bytes that systems and proxies on the way may hold; the rest of what was sent has arrived, or was never taken."""
_ABSENCE_SECONDS = 1.0


class QuietConnection:
    """Recognizes a connection that broke without a sign, by the bytes that have passed on it while it was asked."""

    def __init__(self, silence_seconds: float, now: float) -> None:
        """Begin to watch.

        Args:
            silence_seconds: after which it is gone, though its other side was asked.
            now: the time, of any monotonic clock.
        """
        self._silence_seconds = silence_seconds
        self._liveness = Liveness(silence_seconds, _ABSENCE_SECONDS, now)
        self._received, self._sent_before, self._heard_at, self._asked_at = -1, 0, now, now

    def look(self, now: float, sent: int, received: int, *, is_awaited: bool) -> tuple[bool, bool]:
        """Look at the clock and at the bytes that have passed in all.

        Args:
            now: the time.
            sent, received: the bytes, in each direction.
            is_awaited: whether anything is to come on it.

        Returns:
            Whether it is gone, and whether its other side is to be asked for a sign.
        """
        if received != self._received or not is_awaited:
            self._received, self._sent_before, self._heard_at = received, sent, now
        on_its_way_bytes = min(sent - self._sent_before, _MOST_ON_ITS_WAY_BYTES)
        on_its_way_seconds = on_its_way_bytes / _SLOWEST_BYTES_PER_SECOND
        is_gone = self._liveness.is_gone(now, self._heard_at + on_its_way_seconds)
        is_to_be_asked = now - max(self._heard_at, self._asked_at) >= self._silence_seconds / 4
        if is_to_be_asked:
            self._asked_at = now
        return is_gone, is_to_be_asked


_STALLED_ANSWERS = 3
_SMALL_BYTES = 64 << 10
"""The bytes that pass through any link between three heartbeats; more may still be on its way."""


class StalledOperations:
    """Recognizes an operations connection that broke without a sign: the bulk connection says that the worker does
    nothing, heartbeat after heartbeat, and what was sent to it is not executed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._before = (-1, -1)

    def is_stalled(self, is_idle: bool, acked_sequence: int, unacked_bytes: int, bytes_received: int) -> bool:
        """Take note of a heartbeat's answer; return whether the connection must be broken.

        Args:
            is_idle: whether the worker executes nothing.
            acked_sequence: the newest batch that it has executed.
            unacked_bytes: the size of those that it has not.
            bytes_received: what has come on the operations connection in all.
        """
        state = (acked_sequence, bytes_received)
        waits = is_idle and unacked_bytes > 0 and state == self._before
        self._before = state
        self._count = self._count + 1 if waits else 0
        on_its_way_bytes = min(unacked_bytes, _MOST_ON_ITS_WAY_BYTES)
        if self._count < _STALLED_ANSWERS * (1 + on_its_way_bytes // _SMALL_BYTES):
            return False
        self._count = 0
        return True
