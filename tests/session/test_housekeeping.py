"""How often a session is looked at."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from skyproxy.protocol.messages import Pong
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
    assert made._pause(200.0) == 0.003


class _Recorder:
    """As much of a recorder as is looked at, and how often it was sent."""

    def __init__(self) -> None:
        self.unsent = self.batches = self.sent = 0
        self.has_dropped, self.is_all_executed = False, True

    def flush_unless_busy(self) -> bool:
        self.sent += 1
        self.batches += self.unsent > 0
        self.unsent, self.has_dropped = 0, False
        return True


def test_what_is_recorded_is_sent_once_nothing_has_joined_it_for_a_while() -> None:
    made, _, _ = housekeeping()
    made._recorder = recorder = _Recorder()
    for now in (1.000, 1.003, 1.006):
        recorder.unsent += 4  # the program goes on
        made._flush_stale(now)
    assert not recorder.sent
    made._flush_stale(1.008)
    assert not recorder.sent
    made._flush_stale(1.0095)
    assert recorder.sent == 1


def test_beside_work_it_waits_longer() -> None:
    made, _, _ = housekeeping()
    made._recorder = recorder = _Recorder()
    recorder.unsent, recorder.is_all_executed = 4, False
    for now in (1.0, 1.004, 1.019):
        made._flush_stale(now)
    assert not recorder.sent
    made._flush_stale(1.0205)
    assert recorder.sent == 1


def test_as_much_again_behind_a_batch_is_not_what_waited_before() -> None:
    made, _, _ = housekeeping()
    made._recorder = recorder = _Recorder()
    for now in (1.0, 1.004, 1.008, 1.012):
        recorder.unsent, recorder.batches = 4, recorder.batches + 1  # a loop that sends each round by itself
        made._flush_stale(now)
    assert not recorder.sent


def test_dead_tensors_are_told_of_although_nothing_is_recorded() -> None:
    made, _, _ = housekeeping()
    made._recorder = recorder = _Recorder()
    made._flush_stale(1.0)
    recorder.has_dropped = True
    made._flush_stale(1.004)
    assert recorder.sent == 1


def test_looks_at_what_waits_do_not_do_the_chores_each_time() -> None:
    made, _, _ = housekeeping()
    made._recorder = recorder = _Recorder()
    recorder.is_all_executed, done = False, []
    made._do_chores = done.append
    began = made._chores_at
    for number in range(100):
        recorder.unsent += 1
        made._look(began + number * 0.003)
    assert len(done) == 6


def looks_at_silence(made: Any, seconds: int) -> None:
    begun = made.last_heard
    for second in range(1, seconds + 1):
        made._look_for_signs(begun + second)


def watching(outage: SimpleNamespace | None) -> tuple[Any, list[str], list[str]]:
    """Return housekeeping with three connections, the names of those that it cut, and why it ended the session."""
    cut: list[str] = []
    links: list[Any] = [
        SimpleNamespace(cut=lambda name=name: cut.append(name)) for name in ("operations", "bulk", "calls")
    ]
    reconnector: Any = SimpleNamespace(is_active=True, outage=outage) if outage is not None else None
    ended: list[str] = []
    uploads: Any = SimpleNamespace(last_progress=0.0)
    settings = Settings(silence_seconds=10.0, liveness_timeout_seconds=30.0, ping_interval_seconds=2.0)
    recorder: Any = SimpleNamespace()
    made = Housekeeping(recorder, uploads, links[0], links[1], settings, ended.append, reconnector)
    made.auxiliary.append(links[2])
    return made, cut, ended


def test_all_connections_of_a_silent_worker_are_cut_where_they_are_made_anew() -> None:
    made, cut, ended = watching(SimpleNamespace(is_going_on=False))
    looks_at_silence(made, 10)
    assert not cut
    looks_at_silence(made, 11)
    assert (cut, ended) == (["operations", "bulk", "calls"], [])
    looks_at_silence(made, 10)
    assert len(cut) == 3, "they have their time anew"


def test_while_a_connection_is_made_anew_none_is_cut_for_silence() -> None:
    made, cut, ended = watching(SimpleNamespace(is_going_on=True))
    looks_at_silence(made, 60)
    assert not cut
    assert not ended


def test_a_silent_worker_whose_connections_are_not_made_anew_is_given_up() -> None:
    made, cut, ended = watching(None)
    looks_at_silence(made, 32)
    assert not ended
    looks_at_silence(made, 33)
    assert (cut, ended) == ([], ["the worker answered nothing for 30 s"])


def test_what_cannot_leave_beside_a_thread_that_records_is_not_tried_at_each_look() -> None:
    made, _, _ = housekeeping()
    made._recorder = recorder = _Recorder()
    recorder.unsent, tried = 4, []
    recorder.flush_unless_busy = lambda: bool(tried.append(1))  # type: ignore[func-returns-value,method-assign]
    for now in (1.0, 1.004, 1.005, 1.006):
        made._flush_stale(now)
    assert len(tried) == 1
    made._flush_stale(1.008)
    assert len(tried) == 2


def test_only_the_answer_to_the_latest_ping_tells_how_long_a_round_trip_takes() -> None:
    made, _, _ = housekeeping()
    made._asked_at = (3, time.monotonic() - 1.0)
    made.on_pong(Pong(2))
    assert made.round_trip_seconds == 0.0
    made.on_pong(Pong(3))
    assert made.round_trip_seconds >= 1.0
