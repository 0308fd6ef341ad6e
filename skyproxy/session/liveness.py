"""Decides from a clock whether a silent worker counts as gone."""

from __future__ import annotations


class Liveness:
    """How long a worker has been silent while this process was there to listen.

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
