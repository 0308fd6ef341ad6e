"""A session on transports of the test's own: what its housekeeping does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  (the device is made when torch is imported, and needs all of the session)

from skyproxy.protocol.messages import Batch, Sequence, Welcome
from skyproxy.session.recorder import Recorder
from skyproxy.session.session import Session
from skyproxy.settings import Settings
from skyproxy.transport.memory import MemoryTransport, memory_transport_pair

INTERVAL_SECONDS = 0.02
QUIET = Settings(ping_interval_seconds=INTERVAL_SECONDS, liveness_timeout_seconds=60.0, close_timeout_seconds=1.0)


class Line:
    """A session whose operations connection counts its signs of life."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations, self.worker = memory_transport_pair()
        self.bulk, self.worker_bulk = memory_transport_pair("bulk")
        self.called = threading.Event()
        self.calls = 0
        monkeypatch.setattr(self.operations, "keep_alive", self.keep_alive)
        monkeypatch.setattr(self.bulk, "keep_alive", lambda: pytest.fail("the bulk connection has its own pings"))
        self.session = Session(self.operations, self.bulk, Welcome(1, "memory", {}, [], {}), QUIET)

    def keep_alive(self) -> None:
        self.calls += 1
        self.called.set()

    def close(self) -> None:
        for end in (self.worker, self.worker_bulk):
            assert isinstance(end, MemoryTransport)
            end.close()
        self.session.close()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    made = Line(monkeypatch)
    yield made
    made.close()


def test_a_silent_operations_connection_is_kept_alive(line: Line) -> None:
    for _ in range(3):
        line.called.clear()
        assert line.called.wait(20)


def test_a_busy_operations_connection_is_left_alone(line: Line) -> None:
    line.called.wait(20)
    before, number = line.calls, 0
    until = time.monotonic() + 10 * INTERVAL_SECONDS
    while time.monotonic() < until:  # polls as fast as it can, so that no pause is as long as the interval
        number += 1
        line.operations.send(Batch(Sequence(number), []))
        line.worker.recv(20)
    assert line.calls - before <= 2  # the machine may have paused us


def test_a_stand_in_takes_what_is_recorded_until_its_end(line: Line) -> None:
    own, stand_in = line.session.recorder, Recorder(lambda batch: None, lambda: (0, 0), QUIET)
    line.session.divert(stand_in)
    line.session.do("graph_begin")
    assert (stand_in.unsent > 0, own.unsent) == (True, 0)
    line.session.end_diversion()
    line.session.end_diversion()  # once more changes nothing
    line.session.do("graph_begin")
    assert own.unsent > 0
