"""Where the connections of a session come back: at the worker that keeps it, or at another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from skyproxy.errors import ConnectError
from skyproxy.protocol.messages import BULK, OPERATIONS, Goodbye, Welcome
from skyproxy.session.handover import Fresh
from skyproxy.session.reconnector import Reconnector
from skyproxy.transport.base import Transport


def broken_link(goodbye: Goodbye | None = None) -> Mock:
    link = Mock(spec=Transport)
    link.connection = Mock(goodbye=goodbye, answers=0)
    return link


class Recovery:
    """Another worker that is there at once; `ready` is one that a move has prepared."""

    patience_seconds = 60.0
    is_suspended = False

    def __init__(self) -> None:
        self.ready: tuple[Fresh, Fresh] | None = None
        self.found = (Fresh(Mock(spec=Transport), Mock(), 1), Fresh(Mock(spec=Transport), Mock(), 1))
        self.was_asked = threading.Event()
        self.before_leaving: Callable[[], object] = lambda: None
        self.cut_bulk, self.cut_operations = Mock(), Mock()
        self.replay = Mock()

    @property
    def is_leaving(self) -> bool:
        return self.ready is not None

    def leave(self, abandon: Callable[[], object]) -> tuple[Fresh, Fresh] | None:
        ready, self.ready = self.ready, None
        if ready is not None:
            self.before_leaving()
            abandon()
        return ready

    def recover(self, reason: str, stop: threading.Event) -> tuple[Fresh, Fresh]:
        self.was_asked.set()
        return self.found


@pytest.fixture
def recovery() -> Recovery:
    return Recovery()


def never(role: str, received: int) -> tuple[Transport, Welcome]:
    raise AssertionError("nothing is opened")


@pytest.mark.parametrize("state", ["is_leaving", "is_suspended"])
def test_a_goodbye_of_the_worker_that_is_left_ends_nothing(state: str) -> None:
    def reopen(role: str, received: int) -> tuple[Transport, Welcome]:
        raise AssertionError("nothing is opened")

    reconnector = Reconnector(reopen, "there", 1.0)
    ended = Goodbye("done", "the session ended")
    assert not reconnector.outlives(ended, 0)
    recovery = Mock(is_leaving=False, is_suspended=False)
    reconnector.recovery = recovery
    assert not reconnector.outlives(ended, 0)
    assert reconnector.outlives(Goodbye("crashed", ""), 0)
    setattr(recovery, state, True)
    assert reconnector.outlives(ended, 0)


def test_what_the_worker_says_on_a_connection_that_is_left_ends_nothing(recovery: Recovery) -> None:
    reconnector = Reconnector(never, "there", 1.0)
    reconnector.recovery = recovery
    recovery.ready = recovery.found
    reconnector.connect(OPERATIONS, broken_link(), 0, "cut")
    ended = Goodbye("done", "the session ended")
    assert reconnector.outlives(ended, 0)
    assert not reconnector.outlives(ended, 1)


def test_a_worker_that_waits_is_gone_to_at_once_and_nobody_asks_the_one_before(recovery: Recovery) -> None:
    reconnector = Reconnector(never, "there", 1.0)
    reconnector.recovery = recovery
    recovery.ready = recovery.found
    assert reconnector.connect(OPERATIONS, broken_link(), 0, "cut") == recovery.found[0]._replace(recoveries=1)
    assert reconnector.connect(BULK, broken_link(), 0, "cut") == recovery.found[1]._replace(recoveries=1)
    assert not recovery.was_asked.is_set()


def test_a_worker_that_becomes_ready_is_gone_to_while_the_one_before_cannot_be_reached(recovery: Recovery) -> None:
    def silent(role: str, received: int) -> tuple[Transport, Welcome]:
        recovery.ready = recovery.found
        raise ConnectError("no answer")

    reconnector = Reconnector(silent, "there", 1e9)
    reconnector.recovery = recovery
    assert reconnector.connect(OPERATIONS, broken_link(), 0, "cut").recoveries == 1
    assert not recovery.was_asked.is_set()


def test_a_bulk_connection_that_is_alone_broken_comes_back_while_a_worker_waits(recovery: Recovery) -> None:
    back = Mock(spec=Transport)
    reconnector = Reconnector(lambda role, received: (back, Mock()), "there", 1.0)
    reconnector.recovery = recovery
    recovery.ready = recovery.found
    assert reconnector.connect(BULK, broken_link(), 0, "cut").link is back
    assert recovery.is_leaving


def test_a_bulk_connection_is_not_opened_to_the_place_that_the_session_goes_to(recovery: Recovery) -> None:
    """It would be opened as the session's second one there, and the first be cut."""
    opened = Mock(spec=Transport)

    def reopen(role: str, received: int) -> tuple[Transport, Welcome]:
        recovery.ready = recovery.found
        reconnector.connect(OPERATIONS, broken_link(), 0, "cut")  # on the other thread, meanwhile
        return opened, Mock()

    reconnector = Reconnector(reopen, "there", 1.0)
    reconnector.recovery = recovery
    assert reconnector.connect(BULK, broken_link(), 0, "cut") == recovery.found[1]._replace(recoveries=1)
    opened.cut.assert_called_once()


def test_both_connections_leave_a_worker_that_one_of_them_has_given_up(recovery: Recovery) -> None:
    """Else that of the operations could come back, and the other one wait for ever for one elsewhere."""
    reconnector, found = Reconnector(never, "there", 1.0), []
    reconnector.recovery = recovery
    recovery.cut_operations = Mock(side_effect=lambda recoveries: cut.set())
    cut = threading.Event()
    gone = broken_link(Goodbye("crashed", "it crashed"))
    waiting = threading.Thread(target=lambda: found.append(reconnector.connect(BULK, gone, 0, "cut")), daemon=True)
    waiting.start()
    assert cut.wait(60)
    assert reconnector.connect(OPERATIONS, broken_link(), 0, "cut").recoveries == 1
    waiting.join(60)
    assert [fresh.recoveries for fresh in found] == [1]
