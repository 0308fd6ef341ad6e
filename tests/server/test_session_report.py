"""What is read of a session from outside: its memory now and then, and the op that it runs."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyproxy.protocol import commands
from skyproxy.transport.stream import PlainStream
from skyproxy_server.failures import Failed
from skyproxy_server.session_report import MemoryGauge, failure_rows, queued_operations, running_place


class Clock:
    """Moves on by a second with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_storage_counts_once_and_what_is_no_tensor_not_at_all() -> None:
    x = torch.zeros(100)
    slots = {0: None, 1: x, 2: x[:5], 3: "text", 4: torch.zeros(10, dtype=torch.uint8), 5: torch.zeros(3).to_sparse()}
    assert MemoryGauge().read(slots) == 410


def test_memory_is_not_measured_again_before_it_is_due() -> None:
    clock = Clock()
    gauge = MemoryGauge(clock)
    slots: dict[int, Any] = {1: torch.zeros(100)}
    assert gauge.read(slots) == 400  # took one second
    slots[2] = torch.zeros(100)
    assert gauge.read(slots) == 400
    clock.now += 300
    assert gauge.read(slots) == 800


def test_a_thread_that_executes_nothing_is_at_no_place() -> None:
    assert running_place(threading.get_ident()) is None
    assert running_place(None) is None


def test_the_place_of_a_thread_in_its_stream_is_seen_from_outside() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def step(slots: dict[int, Any], stream: list[Any], position: int) -> int:
        if position == 2:
            inside.set()
            assert go_on.wait(30)
        return position + 1

    stream = [0, 0, 0, 0]
    thread = threading.Thread(target=commands.execute, args=(stream, 0, [step], {}, None))
    thread.start()
    try:
        assert inside.wait(30)
        assert thread.ident is not None
        assert running_place(thread.ident) == (stream, 2)
    finally:
        go_on.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_failure_travels_as_text_that_every_message_can_carry() -> None:
    rows = failure_rows([(1.0, Failed(ValueError("half a character: \ud800" + "x" * 1000), "aten::add", 3, 4))])
    assert rows[0]["message"].startswith("half a character: ?xxx")
    rows[0]["message"].encode("utf-8")
    assert len(rows[0]["message"]) == 300


OP = commands.FIRST_SIGNATURE


@pytest.mark.parametrize(
    ("position", "count"),
    [(0, 2), (2, 1), (6, 1), (8, 0), (99, 0), (1, 0)],
    ids=["first", "behind an EXPECT", "a release", "last", "outside", "not a command"],
)
def test_operations_behind_the_running_one_are_counted_and_nothing_else(position: int, count: int) -> None:
    stream: list[Any] = [OP, "x", commands.EXPECT, 0, OP, "y", commands.RELEASE, [5], OP, "z"]
    state: Any = SimpleNamespace(ops=SimpleNamespace(widths=commands.width_table({OP: 1})))
    assert queued_operations(state, (stream, position)) == count
    assert queued_operations(state, None) == 0


def test_bytes_that_wait_in_a_connection_are_seen_from_outside() -> None:
    near, far = socket.socketpair()
    stream = PlainStream(far)
    near.sendall(bytes(1000))
    assert stream.unread_bytes() == 1000
    stream.recv_into(memoryview(bytearray(600)), 30)
    assert stream.unread_bytes() == 400
    near.close()
    stream.close()
    assert stream.unread_bytes() == 0
