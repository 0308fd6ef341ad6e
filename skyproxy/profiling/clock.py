"""The clock of another machine, read from here, and how wrong the reading may be."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

READINGS = 16
"""Round trips of which the shortest counts."""


class ClockReading(NamedTuple):
    """An estimate of how far a worker's clock is ahead of ours.

    Attributes:
        at_ns: when that was, on our clock.
        offset_ns: theirs minus ours.
        error_ns: by how much that may be wrong, at most.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def read_clock(ask: Callable[[], int], own: Callable[[], int] = time.time_ns) -> ClockReading:
    """Reads another clock by round trips, as NTP does (RFC 5905).

    The answer was given some time between the question and its arrival. If it was given halfway, the offset is right;
    however the way was shared out, it is wrong by half of the round trip at most. The shortest round trip says most.

    Args:
        ask: gives the other clock, in nanoseconds.
        own: gives ours.
    """
    best: ClockReading | None = None
    for _ in range(READINGS):
        before = own()
        theirs = ask()
        after = own()
        half = (after - before + 1) // 2
        if best is None or half < best.error_ns:
            best = ClockReading(before + half, theirs - (before + half), half)
    assert best is not None
    return best


class Clock:
    """A worker's clock between two readings; it may run faster or slower than ours.

    Attributes:
        error_ns: by how much a time may be wrong that is brought over, at most, if both clocks run evenly.
    """

    def __init__(self, first: ClockReading, last: ClockReading) -> None:
        self.first = first
        self.last = last
        self.error_ns = max(first.error_ns, last.error_ns)
        passed = last.at_ns + last.offset_ns - first.at_ns - first.offset_ns
        self._rate = (last.at_ns - first.at_ns) / passed if passed > 0 else 1.0

    def to_client(self, worker_ns: float) -> float:
        """A time of the worker's on the client's clock, as nanoseconds after the first reading.

        Counted from there, because a float does not hold a date to the nanosecond.
        """
        return (worker_ns - (self.first.at_ns + self.first.offset_ns)) * self._rate
