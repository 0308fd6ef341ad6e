"""The delaying proxy of the benchmarks: what it delays, how it cuts, what it limits, and that no byte changes."""

from __future__ import annotations

import importlib
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
delay_proxy = importlib.import_module("delay_proxy")
HelperProcess = importlib.import_module("_helper_process").HelperProcess

Connected = tuple[socket.socket, socket.socket]
Connect = Callable[..., Connected]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes both ends of a connection through a proxy with the given conditions: the client's and the worker's."""
    ends: list[Any] = []

    def make(count: int = 1, **conditions: Any) -> Any:
        listening = socket.create_server(("127.0.0.1", 0))
        proxy = delay_proxy.DelayProxy([listening.getsockname()[:2]], delay_proxy.Conditions(**conditions))
        ends.extend((proxy, listening))
        pairs = []
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", proxy.ports[0]), timeout=20)
            worker, _ = listening.accept()
            worker.settimeout(20)
            for end in (client, worker):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ends.extend((client, worker))
            pairs.append((client, worker))
        return pairs[0] if count == 1 else pairs

    yield make
    for end in reversed(ends):
        end.close()


def seconds_on_the_way(sender: socket.socket, receiver: socket.socket) -> float:
    """One small message; both ends share a clock."""
    started = time.monotonic()
    sender.sendall(b"x")
    assert receiver.recv(1) == b"x"
    return time.monotonic() - started


def received(receiver: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """So many bytes, and the sizes in which they came."""
    parts: list[bytes] = []
    while sum(map(len, parts)) < count:
        part = receiver.recv(1 << 20)
        assert part, "the stream ended early"
        parts.append(part)
    return b"".join(parts), [len(part) for part in parts]


def in_background(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("direction", ["up", "down"])
def test_each_direction_takes_half_a_round_trip(connect: Connect, direction: str) -> None:
    client, worker = connect(rtt_seconds=0.080)
    ends = (client, worker) if direction == "up" else (worker, client)
    times = [seconds_on_the_way(*ends) for _ in range(5)]
    assert min(times) >= 0.0399
    assert min(times) < 0.060  # the best of five: a busy machine may be late, but not always


def test_without_delay_bytes_pass_at_once(connect: Connect) -> None:
    client, worker = connect()
    assert min(seconds_on_the_way(client, worker) for _ in range(5)) < 0.010


def test_delay_does_not_limit_throughput(connect: Connect) -> None:
    client, worker = connect(rtt_seconds=0.400)
    data = random.Random(0).randbytes(16 << 20)
    started = time.monotonic()
    in_background(lambda: client.sendall(data))
    got, _ = received(worker, len(data))
    took = time.monotonic() - started
    assert got == data
    # Were each piece of 256 KiB delayed after the one before, it would take 12.8 s.
    assert 0.200 <= took < 6.4


@pytest.mark.parametrize("rtt_seconds", [0.0, 0.010])
def test_rechunking_keeps_every_byte_in_order(connect: Connect, rtt_seconds: float) -> None:
    client, worker = connect(rechunk=True, rtt_seconds=rtt_seconds, seed=3)
    up, down = random.Random(1).randbytes(3 << 20), random.Random(2).randbytes(2 << 20)
    in_background(lambda: client.sendall(up))
    in_background(lambda: worker.sendall(down))
    got_up: list[bytes] = []
    reader = in_background(lambda: got_up.append(received(worker, len(up))[0]))
    got_down, _ = received(client, len(down))
    reader.join(20)
    assert got_up == [up]
    assert got_down == down


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs a connection that keeps pieces apart")
def test_rechunking_cuts_what_was_sent_in_one_piece() -> None:
    client, taken = socket.socketpair()
    given, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a stream would join pieces again
    with client, taken, given, worker:
        worker.settimeout(20)
        in_background(lambda: client.sendall(bytes(100_000)))
        direction = delay_proxy._Direction(taken, given, 0.0, None, random.Random(1), threading.Event().set)
        direction.start()
        sizes: list[int] = []
        while sum(sizes) < 100_000:
            sizes.append(len(worker.recv(100_000)))
        client.close()  # ends it
    assert len(sizes) > 3
    assert len(set(sizes)) > 3
    assert sum(sizes) == 100_000


def test_a_cap_holds_for_all_connections_together(connect: Any) -> None:
    pairs = connect(count=2, mbit_up=16)  # 2 MB/s
    data = bytes(250_000)
    started = time.monotonic()
    for client, _ in pairs:
        in_background(lambda client=client: client.sendall(data))
    for _, worker in pairs:
        assert received(worker, len(data))[0] == data
    took = time.monotonic() - started
    assert 0.22 <= took < 5.0  # 500,000 bytes at 2 MB/s, less one burst


def test_a_cap_leaves_the_other_direction_alone(connect: Connect) -> None:
    client, worker = connect(mbit_up=1)
    data = bytes(4 << 20)  # would take half a minute
    started = time.monotonic()
    in_background(lambda: worker.sendall(data))
    received(client, len(data))
    assert time.monotonic() - started < 5


def test_the_bucket_lets_through_a_burst_and_then_its_rate() -> None:
    now, slept = [100.0], []
    bucket = delay_proxy.TokenBucket(1000, burst_bytes=100, clock=lambda: now[0], sleep=slept.append)
    bucket.take(100)
    assert slept == [pytest.approx(0.1)]  # nothing was saved up yet
    now[0] += 50
    bucket.take(100)
    assert len(slept) == 1  # one burst passes after a pause, however long it was
    bucket.take(300)
    assert slept[1] == pytest.approx(0.3)


def test_the_end_of_a_stream_passes_after_its_last_byte(connect: Connect) -> None:
    client, worker = connect(rtt_seconds=0.020)
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert received(worker, 10)[0] == b"last words"
    assert worker.recv(1) == b""
    worker.sendall(b"an answer")  # the other direction still works
    assert received(client, 9)[0] == b"an answer"


def test_a_worker_that_is_gone_ends_the_clients_connection(connect: Connect) -> None:
    client, worker = connect(rtt_seconds=0.010)
    worker.close()
    assert client.recv(1) == b""


def test_a_target_that_does_not_answer_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    proxy = delay_proxy.DelayProxy([("127.0.0.1", port)], delay_proxy.Conditions())
    with socket.create_connection(("127.0.0.1", proxy.ports[0]), timeout=20) as client:
        assert client.recv(1) == b""
    proxy.close()


def test_as_a_process_it_says_its_ports_and_ends_with_its_parent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = f"127.0.0.1:{listening.getsockname()[1]}"
        process = HelperProcess("delay_proxy.py", "--to", target, "--to", target, "--rtt-ms", "40")
        try:
            first, second = process.announced["ports"]
            assert first != second
            with socket.create_connection(("127.0.0.1", second), timeout=20) as client:
                worker, _ = listening.accept()
                with worker:
                    assert min(seconds_on_the_way(client, worker) for _ in range(3)) >= 0.0199
        finally:
            process.close()
    assert process._process.returncode == 0
