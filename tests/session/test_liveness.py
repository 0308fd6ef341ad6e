"""When a silent worker counts as gone."""

from __future__ import annotations

from skyproxy.session.liveness import Liveness


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
