"""Another machine's clock: read within the bound that is stated, brought over wherever it runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyproxy.profiling.clock import Clock, ClockReading, read_clock

SECOND = 1_000_000_000


class Machines:
    """Two clocks and the way between them, in a time of the test's own."""

    def __init__(self, ahead_ns: int, seed: int) -> None:
        self.now = 1_790_000_000 * SECOND
        self.ahead_ns = ahead_ns
        self.random = random.Random(seed)

    def ask(self) -> int:
        self.now += self.random.randrange(1000, 80_000_000)
        answer = self.now + self.ahead_ns
        self.now += self.random.randrange(1000, 80_000_000)
        return answer


@given(st.integers(-(10**15), 10**15), st.integers(0, 2**32))
def test_a_reading_is_never_more_wrong_than_it_says(ahead_ns: int, seed: int) -> None:
    machines = Machines(ahead_ns, seed)
    reading = read_clock(machines.ask, lambda: machines.now)
    assert abs(reading.offset_ns - ahead_ns) <= reading.error_ns
    assert reading.error_ns <= 80_000_000


def test_a_symmetric_way_is_read_exactly() -> None:
    machines = Machines(12345, 0)
    machines.random = random.Random()
    machines.random.randrange = lambda *_: 500  # type: ignore[method-assign,assignment]
    assert read_clock(machines.ask, lambda: machines.now)[1:] == (12345, 500)


@pytest.mark.parametrize("rate", [1.0, 1.0001, 0.9999])
def test_a_clock_that_runs_fast_or_slow_is_brought_over(rate: float) -> None:
    start, ahead = 1_790_000_000 * SECOND, -5 * 3600 * SECOND

    def theirs(own_ns: int) -> int:
        return start + ahead + round((own_ns - start) * rate)

    readings = [ClockReading(at, theirs(at) - at, 10) for at in (start, start + 100 * SECOND)]
    clock = Clock(*readings)
    for passed in (0, 1, 50 * SECOND, 100 * SECOND):
        assert abs(clock.to_client(theirs(start + passed)) - passed) <= 100
    assert clock.error_ns == 10


def test_two_readings_at_one_time_do_no_harm() -> None:
    reading = ClockReading(5 * SECOND, 7, 1)
    assert Clock(reading, reading).to_client(5 * SECOND + 107) == 100
