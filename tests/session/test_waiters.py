"""Questions that wait for an answer."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable

import pytest

from skyproxy import interrupts
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.session.waiters import Waiter, Waiters


def test_an_answer_that_came_first_is_there_at_once() -> None:
    waiter = Waiter()
    waiter.set(7, (b"x",))
    assert waiter.wait() == 7
    assert waiter.wait() == 7
    assert waiter.buffers == (b"x",)


def test_only_the_first_answer_counts() -> None:
    waiter = Waiter()
    waiter.set(1)
    waiter.set(2)
    waiter.fail(ValueError())
    assert waiter.wait() == 1


@pytest.mark.parametrize("number", [0, -1, 2, 4, 1 << 62])
def test_an_answer_to_what_nobody_asked_or_that_was_answered_is_refused(number: int) -> None:
    waiters = Waiters()
    first, _ = waiters.open()
    second, waiter = waiters.open()
    assert waiters.take_answered(second) is waiter
    with pytest.raises(ProtocolError, match=f"answered question {number}, which waits for no answer"):
        waiters.take_answered(number)
    assert waiters.take_answered(first) is not None


def test_an_answer_that_nobody_waits_for_any_more_may_come_once() -> None:
    waiters = Waiters()
    number, _ = waiters.open()
    waiters.abandon(number)
    assert waiters.take_answered(number) is None
    with pytest.raises(ProtocolError):
        waiters.take_answered(number)


def test_a_worker_that_takes_over_may_answer_again() -> None:
    waiters = Waiters()
    waiters.may_repeat = True
    number, waiter = waiters.open()
    assert waiters.take_answered(number) is waiter
    assert waiters.take_answered(number) is None


def test_answers_behind_the_end_are_nobodys() -> None:
    waiters = Waiters()
    number, _ = waiters.open()
    waiters.end(SessionLostError("gone"))
    assert waiters.take_answered(number) is None


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="such a signal cannot be made here")
def test_a_signal_that_wakes_no_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that comes a moment before the wait: here, it comes to another thread, and Python's flag is set."""
    monkeypatch.setattr(interrupts, "SIGNAL_LOOK_SECONDS", 0.05)
    waiter = Waiter()
    end = threading.Timer(20, lambda: waiter.set(1))  # else a wait that notices nothing would hold all tests

    class NoticedLock:
        def acquire(self, timeout: float) -> bool:
            waits.set()
            return lock.acquire(timeout=timeout)

        def release(self) -> None:
            lock.release()

    def strike() -> None:
        waits.wait()  # a strike before would end the tests
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    waits, lock = threading.Event(), waiter._lock
    waiter._lock = NoticedLock()  # type: ignore[assignment]
    end.start()
    threading.Thread(target=strike).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            waiter.wait()
        assert not waiter.done
    finally:
        end.cancel()


def test_several_threads_wait_for_one_answer() -> None:
    waiter = Waiter()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(waiter.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    waiter.set(3)
    for thread in threads:
        thread.join(10)
    assert got == [3] * 5


def test_an_error_is_raised_for_each_and_does_not_grow() -> None:
    waiter = Waiter()
    waiter.fail(IndexError("no"))
    depths = []
    for _ in range(3):
        with pytest.raises(IndexError) as caught:
            waiter.wait()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_numbers_are_unique_and_answers_find_their_question() -> None:
    waiters = Waiters()
    opened = [waiters.open() for _ in range(3)]
    numbers = [number for number, _ in opened] + [waiters.next_number()]
    assert len(set(numbers)) == 4
    for number, waiter in reversed(opened):
        assert waiters.take(number) is waiter
        assert waiters.take(number) is None
    assert len(waiters) == 0


def test_an_abandoned_question_is_forgotten() -> None:
    waiters = Waiters()
    number, _ = waiters.open()
    waiters.abandon(number)
    waiters.abandon(number)
    assert waiters.take(number) is None


def test_the_end_fails_what_is_open_and_what_comes_later() -> None:
    waiters = Waiters()
    opened = [waiters.open()[1] for _ in range(3)]
    waiters.end(SessionLostError("gone"))
    for waiter in opened:
        with pytest.raises(SessionLostError, match="gone"):
            waiter.wait()
    with pytest.raises(SessionLostError, match="gone"):
        waiters.open()
    assert len(waiters) == 0


class _Kept:
    """What a program has."""


def test_what_a_session_ended_with_holds_nothing_of_those_who_waited() -> None:
    """It lives as long as the session, and variables may be tensors of that: no collector would find them."""
    waiters = Waiters()
    opened = [waiters.open()[1] for _ in range(2)]
    ended = SessionLostError("gone")
    waiters.end(ended)

    def program(ask: Callable[[], object]) -> weakref.ref[_Kept]:
        kept = _Kept()
        with contextlib.suppress(SessionLostError):
            ask()
        return weakref.ref(kept)

    assert [program(ask)() for ask in (opened[0].wait, opened[1].wait, waiters.open)] == [None] * 3
    assert ended.__traceback__ is None
