"""Attempts on further connections, which are made again where one breaks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from skyproxy.errors import AuthenticationError, ConnectError, SessionLostError
from skyproxy.interrupts import DeferringSignalHandler
from skyproxy.session import attempts
from skyproxy.session.attempts import attempt
from skyproxy.session.reconnector import Reconnector
from skyproxy.session.session import Session

Act = Callable[[], str]


class Clock:
    """A clock that passes by being slept on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attempts, "time", clock)
    return clock


def session(*, resumes: bool = True) -> Any:
    made: Any = Session.__new__(Session)
    made._ended, made.settings = None, SimpleNamespace(reconnect_seconds=60.0)
    made._reconnector = Reconnector(lambda role, received: None, "somewhere", 60.0, resumes=resumes)  # type: ignore[arg-type,return-value]
    return made


def full() -> ConnectError:
    error = ConnectError("too many")
    error.code_name = "too-many-sessions"
    return error


def meets(*errors: Exception) -> tuple[Act, list[Exception]]:
    left = list(errors)

    def act() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return act, left


def test_a_connection_that_breaks_or_does_not_come_about_is_made_again_after_pauses_that_grow(clock: Clock) -> None:
    act, _ = meets(SessionLostError("it broke"), *[ConnectError("not there") for _ in range(7)])
    assert attempt(session(), act) == "done"
    assert clock.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_it_is_tried_for_as_long_as_the_session_tries_with_its_own(clock: Clock) -> None:
    act, left = meets(*[ConnectError("not there") for _ in range(100)])
    with pytest.raises(ConnectError, match="not there"):
        attempt(session(), act)
    assert 60 <= clock.now - 100 < 62
    assert left


@pytest.mark.parametrize("error", [AuthenticationError("no"), full()])
def test_a_refusal_is_told_at_once(clock: Clock, error: Exception) -> None:
    act, left = meets(error)
    with pytest.raises(type(error)):
        attempt(session(), act)
    assert (left, clock.pauses) == ([], [])


def test_a_worker_makes_room_when_it_notices_that_the_connection_before_is_broken(clock: Clock) -> None:
    act, _ = meets(SessionLostError("it broke"), full(), full())
    assert attempt(session(), act) == "done"
    assert len(clock.pauses) == 3


def test_a_session_that_ends_with_its_connections_is_not_made_to_wait(clock: Clock) -> None:
    act, left = meets(SessionLostError("it broke"))
    with pytest.raises(SessionLostError, match="it broke"):
        attempt(session(resumes=False), act)
    assert (left, clock.pauses) == ([], [])


def test_a_session_that_is_over_says_why_it_is(clock: Clock) -> None:
    over = session()

    def act() -> str:
        over._ended = SessionLostError("the worker is gone")
        raise ConnectError("nobody is there")

    with pytest.raises(SessionLostError, match="the worker is gone"):
        attempt(over, act)
    assert clock.pauses == []


def test_what_an_alarm_raises_is_the_programs(clock: Clock) -> None:
    struck = ConnectError("the program's own")

    def ring(*_: object) -> NoReturn:
        raise struck

    handler = DeferringSignalHandler(ring)

    def act() -> str:
        if not clock.pauses:
            handler(signal.SIGALRM, None)
        return "done"

    with pytest.raises(ConnectError) as caught:
        attempt(session(), act)
    assert caught.value is struck
