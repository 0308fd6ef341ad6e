"""What a session's process says, checked; and how long it is listened to."""

from __future__ import annotations

import math

import pytest

from skyproxy_server.isolation.session_words import Allowance, ProcessReport, count, seconds

SAID = {
    "report": 3,
    "commands": 7,
    "idle_seconds": 1.5,
    "calls_running": 1,
    "leaving": 0,
    "devices": [{"type": "cpu", "index": 0, "used_memory_bytes": 9, "name": "x"}, {"type": "cuda", "index": 1}],
    "row": {"state": "idle"},
}


def test_a_report_is_read() -> None:
    assert ProcessReport.parse(SAID) == ProcessReport(3, 7, 1.5, 1, 0, {("cpu", 0): 9}, {"state": "idle"})


@pytest.mark.parametrize("said", [-1, 1 << 63, 1.0, True, "1", None, math.inf, [1]])
def test_what_is_no_count_is_none(said: object) -> None:
    with pytest.raises(ValueError, match="is no count"):
        count(said)


@pytest.mark.parametrize("said", [math.inf, math.nan, "1", None, [1]])
def test_what_is_no_time_is_none(said: object) -> None:
    with pytest.raises(ValueError, match="is no time"):
        seconds(said)


def test_clocks_that_are_read_one_after_another_have_not_gone_back() -> None:
    assert seconds(-0.001) == 0.0


class Clocks:
    """Two clocks that a test moves."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def allowance(self) -> Allowance:
        return Allowance(lambda: self.now, lambda: self.used)


def test_who_says_little_is_listened_to_at_once() -> None:
    clocks = Clocks()
    allowance = clocks.allowance()
    for _ in range(1000):
        clocks.now += 1.0
        clocks.used += 0.05
        assert allowance.pause_seconds() == 0.0


def test_who_talks_without_end_gets_a_tenth_of_a_processor() -> None:
    clocks = Clocks()
    allowance = clocks.allowance()
    for _ in range(1000):
        clocks.now += 0.01
        clocks.used += 0.01
        clocks.now += allowance.pause_seconds()
    assert clocks.used == pytest.approx(10.0)
    assert clocks.now == pytest.approx(90.0, rel=0.1)  # the first second is for nothing
