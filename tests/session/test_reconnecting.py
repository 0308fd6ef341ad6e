"""The decision whether a session outlives a worker's goodbye."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from skyproxy.protocol.messages import Goodbye, Welcome
from skyproxy.session.reconnecting import Reconnector
from skyproxy.transport.base import Transport


@pytest.mark.parametrize("state", ["is_moving", "is_suspended"])
def test_a_goodbye_of_the_worker_that_is_left_ends_nothing(state: str) -> None:
    def reopen(role: str, received: int) -> tuple[Transport, Welcome]:
        raise AssertionError("nothing is opened")

    reconnector = Reconnector(reopen, "there", 1.0)
    ended = Goodbye("done", "the session ended")
    assert not reconnector.outlives(ended)
    recovery = Mock(is_moving=False, is_suspended=False)
    reconnector.recovery = recovery
    assert not reconnector.outlives(ended)
    assert reconnector.outlives(Goodbye("crashed", ""))
    setattr(recovery, state, True)
    assert reconnector.outlives(ended)
