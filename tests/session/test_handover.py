"""Moves of a session to another worker while the one that is left, or that one, ends."""

from __future__ import annotations

import threading
import time

import pytest

from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.session.restoring import NewSession
from tests.session.protected_session import WELCOME, Link, ProtectedSession, Worker, fill, through


@pytest.fixture
def session() -> ProtectedSession:
    """A protected session on its first worker."""
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    return session


class Moving:
    """A move to another worker, on a thread of its own; it waits before it is finished."""

    def __init__(self, session: ProtectedSession) -> None:
        self.session = session
        self.target = Worker(session.volume)
        self.opened = NewSession(Link(self.target), Link(self.target), WELCOME)
        self.left = 0
        self.error: BaseException | None = None
        self.is_saved, self.goes_on, self._is_over = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        through(session, self.is_saved)

    def _run(self) -> None:
        try:
            self.session.protection.move(self.opened, self._leave, self._bring)
        except Exception as error:
            self.error = error
        self._is_over.set()

    def _leave(self) -> None:
        self.left += 1

    def _bring(self, name: str, number: str, sequence: int) -> None:
        self.is_saved.set()
        assert self.goes_on.wait(60)

    def is_ready(self) -> None:
        """Go on until the other worker is ready."""
        self.goes_on.set()
        deadline = time.monotonic() + 60
        while not self.session.protection.is_leaving:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait(self) -> None:
        through(self.session, self._is_over)


@pytest.mark.parametrize("is_found", [True, False])
def test_what_is_restored_once_the_other_worker_is_ready_is_left_for_that_one(
    session: ProtectedSession, is_found: bool
) -> None:
    """What is restored at the worker before is left for the other one, and the move says no earlier that it is done.

    It also goes on where no worker is found for the one that is left.
    """
    moving = Moving(session)
    open_anew, begun, goes_on = session.protection._open_anew, threading.Event(), threading.Event()

    def slow(reason: str, stop: threading.Event) -> NewSession:
        begun.set()
        assert goes_on.wait(60)
        if not is_found:
            raise SessionLostError("no other worker")
        return open_anew(reason, stop)

    session.protection._open_anew = slow
    fill(session, 0.001)
    session.worker.is_dead = True
    reading = threading.Thread(target=session._read, daemon=True)
    reading.start()
    assert begun.wait(60)
    moving.is_ready()
    goes_on.set()
    reading.join(60)
    assert not reading.is_alive()
    assert moving.left == 1
    assert session.operations._link is moving.opened.operations
    assert not moving._is_over.is_set()  # the bulk connection and the uploads are still missing
    session.workers.append(moving.target)
    session.note_rest()
    moving.wait()
    assert moving.error is None
    session.teardown()


def test_what_is_restored_before_the_other_worker_is_ready_is_no_move(session: ProtectedSession) -> None:
    moving = Moving(session)
    session.kill(0, True)
    session.note_rest()
    assert not moving._is_over.is_set()
    moving.is_ready()
    session._read()
    session.workers.append(moving.target)
    session.note_rest()
    moving.wait()
    assert (moving.error, moving.left) == (None, 1)
    session.teardown()


def test_a_session_whose_new_worker_ends_at_once_moves_to_the_next(session: ProtectedSession) -> None:
    moving = Moving(session)
    moving.is_ready()
    session._read()
    assert session.operations._link is moving.opened.operations
    session.workers.append(moving.target)
    session.kill(0, True)  # before it has all
    assert not moving._is_over.is_set()
    session.note_rest()
    moving.wait()
    assert (moving.error, moving.left) == (None, 1)
    session.teardown()


def test_what_cannot_be_done_again_keeps_a_session_where_it_is(session: ProtectedSession) -> None:
    moving = Moving(session)
    fill(session, 0.001)
    session._let_all_through()
    reconnector, back = session.operations._reconnector, Link(session.worker)
    back.connection.continue_from = lambda before, received: []  # type: ignore[method-assign]
    reconnector.resumes, reconnector._reopen = True, lambda role, received: (back, WELCOME)
    moving.is_ready()
    session.log.puncture(session.log.last, "a function was called")
    session._read()
    moving.wait()
    assert isinstance(moving.error, ConfigurationError)
    assert "not moved: since its snapshot a function was called" in str(moving.error)
    assert moving.left == 0
    assert session.operations._link is back
    assert moving.opened.operations.was_closed
