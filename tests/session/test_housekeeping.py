"""How often a session is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from skyproxy.session.housekeeping import Housekeeping
from skyproxy.settings import Settings


def housekeeping() -> tuple[Any, SimpleNamespace, SimpleNamespace]:
    """Return it, with the recorder and the connection that it looks at."""
    recorder, link = SimpleNamespace(unsent=0), SimpleNamespace(bytes_sent=0, bytes_received=0)
    made: Any = Housekeeping(recorder, None, link, link, Settings(), lambda reason: None)  # type: ignore[arg-type]
    return made, recorder, link


def longest_pause(made: Any, now: float) -> float:
    """Return the pause that looks without anything to do come to."""
    for _ in range(12):
        made._idle_seconds = made._pause(now)
    return float(made._idle_seconds)


def test_a_session_at_rest_is_looked_at_less_often() -> None:
    made, _, link = housekeeping()
    assert longest_pause(made, 100.0) == 0.05
    assert longest_pause(made, 104.9) == 0.05
    assert longest_pause(made, 105.0) == 0.25
    link.bytes_received += 1
    assert longest_pause(made, 106.0) == 0.05, "something moved"


def test_what_another_connection_of_the_session_moves_counts() -> None:
    made, _, _ = housekeeping()
    calls = SimpleNamespace(bytes_sent=0, bytes_received=0)
    made.auxiliary.append(calls)
    longest_pause(made, 100.0)
    calls.bytes_sent = 7
    assert longest_pause(made, 107.0) == 0.05


def test_what_waits_to_be_sent_is_looked_at_at_once() -> None:
    made, recorder, _ = housekeeping()
    longest_pause(made, 100.0)
    assert longest_pause(made, 200.0) == 0.25
    recorder.unsent = 3
    assert made._pause(200.0) == 0.001
