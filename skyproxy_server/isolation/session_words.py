"""The words of a session's process to the supervisor, checked: clients' functions run there, so nothing is believed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_MOST = (1 << 63) - 1
_SHARE = 0.1
_BURST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The answer of a session's process to one question for its state.

    Attributes:
        number: of the question.
        commands: how many it has executed.
        idle_seconds: since it last did something.
        calls_running: functions that run there.
        leaving: sessions that were told that the worker ends, and are waited for.
        used_bytes: memory in use, by the type and the index of the device.
        row: what the web view is to show, as it was said; see `status.checked_row`.
    """

    number: int
    commands: int
    idle_seconds: float
    calls_running: int
    leaving: int
    used_bytes: Mapping[tuple[str, int], int]
    row: object

    @classmethod
    def parse(cls, said: Mapping[str, object]) -> ProcessReport:
        """Read a report.

        Raises:
            ValueError: it is none.
        """
        return cls(
            count(said.get("report")),
            count(said.get("commands")),
            seconds(said.get("idle_seconds")),
            count(said.get("calls_running")),
            count(said.get("leaving")),
            _used_bytes(said.get("devices")),
            said.get("row"),
        )


def count(said: object) -> int:
    """Return a number that something can have been counted to.

    Raises:
        ValueError: it is none.
    """
    if type(said) is not int or not 0 <= said <= _MOST:
        raise ValueError(f"{said!r:.80} is no count")
    return said


def seconds(said: object) -> float:
    """Return a time that can have passed. Clocks that are read one after another may make it a little negative: 0 then.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(said, int | float) or not math.isfinite(said):
        raise ValueError(f"{said!r:.80} is no time")
    return max(float(said), 0.0)


def _used_bytes(said: object) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for row in said if isinstance(said, list) else ():
        if not isinstance(row, Mapping) or not isinstance(row.get("type"), str):
            raise ValueError("a malformed device")
        if "used_memory_bytes" in row:
            found[row["type"], count(row.get("index"))] = count(row["used_memory_bytes"])
    return found


class Allowance:
    """The processor time of the supervisor that one session's words may take: a tenth of a processor, and bursts.

    What a session says costs the supervisor, whom all others need; and who has functions can say things without end.

    Args:
        clock: seconds that only grow.
        used: processor time of the thread that listens to the session.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._used = used
        self._left = _BURST_SECONDS
        self._at = clock()
        self._used_before = used()

    def pause_seconds(self) -> float:
        """Return for how long the session is not listened to, after what it said until now; mostly 0."""
        now, used = self._clock(), self._used()
        earned = _SHARE * (now - self._at)
        self._left = min(self._left + earned - (used - self._used_before), _BURST_SECONDS)
        self._at, self._used_before = now, used
        return max(-self._left / _SHARE, 0.0)
