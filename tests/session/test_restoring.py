"""A session that is opened beside another one, or in its place: its answers, while nobody else reads."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from skyproxy.errors import KERNEL_FAILED, SessionLostError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Ping, Pong, Sequence, Welcome
from skyproxy.session import restoring
from skyproxy.session.restoring import NewSession, ReplayProgress
from skyproxy.transport.memory import memory_transport_pair


def test_operations_that_an_idle_worker_never_answers_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two connections broke without a sign; the other one still answers."""
    monkeypatch.setattr(restoring, "_PING_SECONDS", 0.01)
    operations, silent = memory_transport_pair()
    bulk, answering = memory_transport_pair("bulk")

    def answer() -> None:
        try:
            while True:
                message = answering.recv(20)
                assert isinstance(message, Ping)
                answering.post(Pong(message.number, {"executing": 0}))
        except SessionLostError:
            pass

    thread = threading.Thread(target=answer)
    thread.start()
    opened = NewSession(operations, bulk, Welcome(1, "memory", {}, [], {}), silence_seconds=60.0)
    try:
        operations.send(Batch(Sequence(1), [commands.CALL, 1, "stats", []]))
        with pytest.raises(SessionLostError, match="nothing on the operations connection"):
            opened.recv(time.monotonic() + 20)
    finally:
        opened.close()
        silent.close()
        answering.close()
        thread.join(20)


class Babbler:
    """A bulk connection whose worker says that it works, without end."""

    bytes_received = 0

    def recv_ready(self) -> Pong:
        return Pong(0, {"executing": 1})

    def post(self, message: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_worker_that_never_stops_answering_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_PING_SECONDS", 0.01)
    operations, silent = memory_transport_pair()
    bulk: Any = Babbler()
    opened = NewSession(operations, bulk, Welcome(1, "memory", {}, [], {}), silence_seconds=60.0)
    try:
        with pytest.raises(TimeoutError):
            opened.recv(time.monotonic() + 0.05)
    finally:
        opened.close()
        silent.close()


@pytest.mark.parametrize(("reason", "most", "words"), [("killed", 5, "5 workers"), (KERNEL_FAILED, 1, "the worker")])
def test_operations_that_end_one_worker_after_the_other_are_to_blame(reason: str, most: int, words: str) -> None:
    progress = ReplayProgress()
    for reached in (3, 7):
        progress.note_end(reached, reason)  # the second came further
    for _ in range(most - 1):
        progress.note_end(7, reason)
    with pytest.raises(SessionLostError, match=f"{reason}; and so did {words} before it, over the same operations"):
        progress.note_end(7, reason)
