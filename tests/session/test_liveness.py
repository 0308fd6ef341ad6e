"""When a silent worker counts as gone."""

from __future__ import annotations

import pytest

from skyproxy.session.liveness import Liveness, QuietConnection, StalledOperations


def watch(until: float, *, since: float = 0.0, step: float = 1.0) -> tuple[Liveness, float]:
    liveness, now = Liveness(patience_seconds=30.0, absence_seconds=5.0, now=since), since
    while now < until:
        now += step
        assert not liveness.is_gone(now, since)
    return liveness, now


def test_a_worker_is_gone_after_its_time() -> None:
    liveness, now = watch(30.0)
    assert liveness.is_gone(now + 1.0, 0.0)


def test_a_sign_of_life_counts() -> None:
    liveness, now = watch(30.0)
    assert not liveness.is_gone(now + 1.0, last_sign=20.0)
    assert not liveness.is_gone(now + 5.0, last_sign=20.0)


def test_a_process_that_was_stopped_itself_listens_anew() -> None:
    liveness, now = watch(10.0)
    woken = now + 3600.0
    assert not liveness.is_gone(woken, 0.0)
    for second in range(1, 31):
        assert not liveness.is_gone(woken + second, 0.0)
    assert liveness.is_gone(woken + 31.0, 0.0)


def test_being_late_again_and_again_is_no_excuse_for_ever() -> None:
    """A busy machine looks in late, but within the absence."""
    liveness, now = watch(30.0, step=5.0)
    assert liveness.is_gone(now + 5.0, 0.0)


def test_a_quiet_connection_is_asked_and_gone_after_its_time() -> None:
    quiet = QuietConnection(silence_seconds=4.0, now=0.0)
    looks = [quiet.look(now / 2, 100, 7, is_awaited=True) for now in range(1, 11)]
    assert [asks for _, asks in looks].count(True) == 4
    assert [gone for gone, _ in looks] == [*[False] * 9, True]


def test_a_connection_that_says_anything_or_from_which_nothing_is_awaited_is_there() -> None:
    quiet = QuietConnection(silence_seconds=4.0, now=0.0)
    assert not any(quiet.look(now / 2, 100, now // 4, is_awaited=True)[0] for now in range(100))
    assert not any(quiet.look(50 + now / 2, 100, 25, is_awaited=False)[0] for now in range(100))
    assert not quiet.look(100.5, 100, 25, is_awaited=True)[0]


def test_an_answer_behind_much_that_was_sent_has_more_time() -> None:
    quiet = QuietConnection(silence_seconds=4.0, now=0.0)
    assert not any(quiet.look(now / 2, 1 << 20, 7, is_awaited=True)[0] for now in range(1, 3))
    assert not any(quiet.look(now / 2, 2 << 20, 7, is_awaited=True)[0] for now in range(3, 70))
    assert quiet.look(40.0, 2 << 20, 7, is_awaited=True)[0] is False  # it was stopped itself
    assert any(quiet.look(40 + now / 2, 2 << 20, 7, is_awaited=True)[0] for now in range(20))


def test_however_much_was_sent_is_not_waited_for_without_an_end() -> None:
    """A link of a gigabyte a second takes much between two answers, and most of it has arrived."""
    quiet = QuietConnection(silence_seconds=4.0, now=0.0)
    assert not any(quiet.look(now / 2, (now % 2) << 32, 7, is_awaited=True)[0] for now in range(2))
    looks = [quiet.look(now / 2, 1 << 32, 7, is_awaited=True)[0] for now in range(2, 1200)]
    assert looks.index(True) / 2 == pytest.approx(516, abs=2)


def test_operations_that_an_idle_worker_does_not_execute_are_stalled_however_much_they_are() -> None:
    """What is much may still be on its way, and has more time; it is not waited for without an end."""
    for unacked_bytes, heartbeats in ((1, 4), (60_000, 4), (70_000, 7), (1 << 20, 52), (1 << 32, 772)):
        stalled = StalledOperations()
        answers = [stalled.is_stalled(True, 7, unacked_bytes, 100) for _ in range(heartbeats)]
        assert answers == [*[False] * (heartbeats - 1), True]
    stalled = StalledOperations()
    assert not any(stalled.is_stalled(True, 7, 1, count) for count in range(99))  # something comes
    assert not any(stalled.is_stalled(False, 7, 1, 99) for _ in range(99))  # it works
    assert not any(stalled.is_stalled(True, 7, 0, 99) for _ in range(99))  # it has done all
