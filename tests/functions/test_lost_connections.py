"""Calls whose connection breaks, or whose client goes away: nothing is lost, and nothing runs twice."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.functions import Payload
from skyproxy.payloads.pieces import flat_size
from skyproxy.protocol.call_messages import CallStart
from tests.functions.gates import count, hold, open_gate
from tests.integration.programs import wait_for


def break_connection(node: skyproxy.Node) -> None:
    """Cuts the functions connection of a node, as a network would."""
    transport = node._runner._channel._transport
    transport._stream.shutdown()


@pytest.fixture
def worker() -> Iterator[skyproxy.Node]:
    """A worker of the test's own."""
    with skyproxy.launch_local("cpu") as node:
        node.run(abs, 1)
        yield node


def connect_again(node: skyproxy.Node) -> skyproxy.Node:
    """Another session with the same worker."""
    return skyproxy.connect(node.url, token=node._worker.token)


def test_a_running_call_survives_its_connection(worker: skyproxy.Node) -> None:
    seen: list[str] = []

    def work() -> tuple[int, torch.Tensor]:
        print("before")
        hold("lost")
        print("after")
        return count("lost"), torch.ones(3)

    first = threading.Event()
    call = worker.submit(work, on_output=lambda stream, text: (seen.append(text), first.set()))
    assert first.wait(60)
    break_connection(worker)
    worker.run(open_gate, "lost")  # on the new connection
    times, tensor = call.result(60)
    assert times == 1
    assert tensor.tolist() == [1, 1, 1]
    assert "".join(seen) == "before\nafter\n"


def test_what_was_sent_into_a_broken_connection_is_sent_again_once(
    worker: skyproxy.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = worker._runner._channel._transport
    plain = transport.send

    def cut(message: object) -> None:
        if isinstance(message, CallStart):
            break_connection(worker)
        plain(message)

    monkeypatch.setattr(transport, "send", cut)
    assert [worker.submit(count, "resent").result(60) for _ in range(3)] == [1, 2, 3]


def test_a_start_that_arrives_twice_runs_once(worker: skyproxy.Node) -> None:
    payload = Payload.of(lambda: hold("twice") or count("twice"))
    call = worker.submit_payload(payload)
    pieces = tuple(payload.pickled.pieces)
    start = CallStart(call.id, call.task, [flat_size(piece) for piece in pieces], pieces)
    worker._runner._channel._transport.send(start)
    worker.run(open_gate, "twice")
    assert call.result(60) == 1
    worker._runner._channel._transport.send(start)  # and once more after its end
    assert worker.run(count, "twice") == 2


def test_large_results_and_streams_survive_as_well(worker: skyproxy.Node) -> None:
    def items():
        for number in range(200):
            yield number
            if number == 20:
                hold("stream")

    stream = iter(worker.submit(items))
    assert [next(stream) for _ in range(10)] == list(range(10))
    big = worker.submit(lambda: hold("stream") or bytes(5_000_000))
    break_connection(worker)
    worker.run(open_gate, "stream")
    assert list(stream) == list(range(10, 200))
    assert big.result(60) == bytes(5_000_000)


def test_another_session_takes_over(worker: skyproxy.Node) -> None:
    def work() -> dict[str, torch.Tensor]:
        print("begun")
        hold("takeover")
        print("taken over")
        return {"weights": torch.arange(3.0)}

    begun, printed = threading.Event(), threading.Event()

    def see(stream: str, text: str) -> None:
        (printed if "taken over" in text else begun).set()

    call = worker.submit(work, on_output=see)
    assert begun.wait(60)
    with connect_again(worker) as other:
        again = other.reattach(call.id, on_output=see)
        other.run(open_gate, "takeover")
        state = again.result(60)
        assert state["weights"].device in other.devices
        assert state["weights"].tolist() == [0, 1, 2]
        assert printed.wait(60)  # by whichever of the two was attached when it was printed


def test_a_result_outlives_its_session(worker: skyproxy.Node) -> None:
    with connect_again(worker) as first:
        call = first.submit(lambda: hold("outlive") or [torch.full((2,), 3.0), 5])
        first.run(abs, 1)
        identity = call.id
        first._session.close("as a crash would")
        with pytest.raises(SessionLostError, match="reattach"):
            call.result(60)
    worker.run(open_gate, "outlive")
    tensor, number = worker.reattach(identity).result(60)
    assert tensor.tolist() == [3, 3]
    assert number == 5
    del tensor
    gc.collect()
    with pytest.raises(LookupError, match="has no call"):
        worker.reattach(identity).result(60)


def test_a_call_of_this_session_is_found_again(worker: skyproxy.Node) -> None:
    call = worker.submit(hold, "found")
    assert worker.reattach(call.id) is call
    worker.run(open_gate, "found")
    call.result(60)


def test_unknown_calls_are_unknown(worker: skyproxy.Node) -> None:
    with pytest.raises(LookupError, match="has no call"):
        worker.reattach("0" * 32).result(60)


def test_calls_fail_when_the_worker_dies(worker: skyproxy.Node) -> None:
    call = worker.submit(hold, "never")
    worker._worker.stop()
    with pytest.raises(SessionLostError):
        call.result(60)
    with pytest.raises(SessionLostError):
        worker.run(abs, 1)


def test_closing_the_node_ends_its_waits(worker: skyproxy.Node) -> None:
    other = connect_again(worker)
    call = other.submit(hold, "closing")
    other.close()
    with pytest.raises(SessionLostError):
        call.result(60)
    worker.run(open_gate, "closing")


def test_abandoned_calls_are_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_CALL_GRACE_SECONDS", "0.2")

    def spin() -> None:
        try:
            open_gate("abandoned")
            while True:
                time.sleep(0.001)
        finally:
            open_gate("given up")

    with skyproxy.launch_local("cpu") as worker:
        with connect_again(worker) as other:
            call = other.submit(spin)
            other.run(hold, "abandoned")
            identity = call.id
        worker.run(hold, "given up")
        with pytest.raises(LookupError):
            worker.reattach(identity).result(60)


def test_a_worker_that_lets_little_wait_prints_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_MAX_WAITING_OUTPUT_BYTES", "100")
    seen: list[str] = []

    def speak() -> None:
        for number in range(200):
            print(number)

    with skyproxy.launch_local("cpu") as worker:
        worker.submit(speak, on_output=lambda stream, text: seen.append(text)).result(60)
    assert "".join(seen) == "".join(f"{number}\n" for number in range(200))


def test_a_worker_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_MAX_CALLS", "2")
    with skyproxy.launch_local("cpu") as worker:
        calls = [worker.submit(lambda: open_gate("two run") or hold("bounds")) for _ in range(2)]
        for call in calls:
            assert not call.done()
        with pytest.raises(skyproxy.errors.LimitExceededError, match="its limit"):
            worker.run(abs, 1)
        calls[0].cancel()
        calls[1].cancel()


def test_a_call_is_sent_again_to_a_worker_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYPROXY_MAX_CALLS", "1")
    may_end, begun = tmp_path / "may end", threading.Event()

    def work() -> int:
        print("begun")
        while not may_end.exists():  # a call that opens a gate would be one too many
            time.sleep(0.001)
        return count("full")

    with skyproxy.launch_local("cpu") as worker, connect_again(worker) as other:
        payload = Payload.of(work)
        call = worker.submit_payload(payload, on_output=lambda stream, text: begun.set())
        assert begun.wait(60)
        channel = worker._runner._channel
        before = channel._transport
        break_connection(worker)
        wait_for(lambda: channel._transport is not before, "another connection")
        pieces = tuple(payload.pickled.pieces)
        # As a client does that cannot know whether it had arrived.
        channel._transport.send(CallStart(call.id, call.task, [flat_size(piece) for piece in pieces], pieces))
        with pytest.raises(skyproxy.errors.LimitExceededError, match="its limit"):
            other.run(abs, 1)
        may_end.touch()
        assert call.result(60) == 1
        assert worker.run(count, "full") == 2  # it ran once


def test_a_worker_without_functions_says_so() -> None:
    token = "a-token-that-is-long-enough-for-this"
    environment = {**os.environ, "SKYPROXY_TOKEN": token, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "skyproxy_server", "--port", "0", "--device", "cpu", "--no-functions"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            port = next(line.split()[-1] for line in process.stderr if "listening on" in line)
            with skyproxy.connect(f"ws://127.0.0.1:{port}", token=token) as node:
                assert torch.ones(2, device=node.devices[0]).sum().item() == 2
                with pytest.raises(ConfigurationError, match="--no-functions"):
                    node.run(abs, 1)
        finally:
            process.terminate()
            process.wait(30)
