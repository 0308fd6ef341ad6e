"""Calls of one session that another session of the same token finds again, each in a process of its own."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import RemoteFunctionError, SessionLostError
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import wait_for
from tests.server.isolation.workers import Worker

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]

STRANGER = "a-token-of-somebody-else"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"), SKYPROXY_TOKEN_POLL_SECONDS="0.1")
    try:
        draft = made.tokens / ".draft"
        draft.write_text(f"{STRANGER}\nscopes: operations, functions\n", encoding="ascii")
        draft.chmod(0o600)
        draft.rename(made.tokens / "stranger")
        yield made
    finally:
        made.end()


@pytest.fixture
def sessions(worker: Worker) -> Iterator[Callable[..., skyproxy.Node]]:
    """Makes sessions that end with the test."""
    made: list[skyproxy.Node] = []

    def make(token: str | None = None) -> skyproxy.Node:
        made.append(worker.connect() if token is None else worker.connect(token=token))
        return made[-1]

    yield make
    for node in made:
        node.close()
    wait_for(lambda: worker.activity()["sessions"] == 0, "all sessions end")


def wait_for_file(name: str) -> None:
    """On the worker: go on when there is a file of this name."""
    import os
    import time

    while not os.path.exists(name):
        time.sleep(0.005)


def test_a_running_call_is_taken_over_with_its_output_and_its_tensors(sessions, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")

    def work() -> dict[str, object]:
        print("begun")
        wait_for_file(gate)
        print("taken over")
        weights = torch.arange(6.0).reshape(2, 3)
        return {"weights": weights, "view": weights[1], "name": "plain", "pid": os.getpid()}

    first, second = sessions(), sessions()
    begun, printed = threading.Event(), threading.Event()

    def see(stream: str, text: str) -> None:
        if "begun" in text:
            begun.set()
        if "taken over" in text:
            printed.set()

    call = first.submit(work, on_output=see)
    assert begun.wait(60)
    again = second.reattach(call.id, on_output=see)
    Path(gate).touch()
    state = again.result(60)
    assert printed.wait(60)
    assert state["pid"] == first.run(os.getpid) != second.run(os.getpid)
    assert state["name"] == "plain"
    assert state["weights"].device in second.devices
    assert state["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]
    state["weights"][1, 0] = 30  # what shared its memory there does so here
    assert state["view"].tolist() == [30, 4, 5]


def test_a_result_outlives_its_session_and_is_taken_once(worker: Worker, sessions, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    second = sessions()
    with worker.connect() as first:
        call = first.submit(lambda: wait_for_file(gate) or [torch.full((2,), 3.0), 5])
        first.run(abs, 1)
        identity = call.id
        first._session.close("as a crash would")
        with pytest.raises(SessionLostError, match="reattach"):
            call.result(60)
    Path(gate).touch()
    tensor, number = second.reattach(identity).result(60)
    assert (tensor.tolist(), number) == ([3, 3], 5)
    del tensor
    gc.collect()
    second.run(abs, 1)  # and what was forgotten has been told
    with pytest.raises(LookupError, match="has no call"):
        second.reattach(identity).result(60)
    wait_for(lambda: len(worker.children()) == 2, "the first session's process ends with its last call")


def test_items_of_a_generator_go_on_elsewhere(sessions, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")

    def items():
        for number in range(40):
            if number == 20:
                wait_for_file(gate)
            yield torch.tensor([number])

    first, second = sessions(), sessions()
    call = first.submit(items)
    stream = iter(call)
    assert [int(next(stream)) for _ in range(20)] == list(range(20))
    again = second.reattach(call.id)
    Path(gate).touch()
    numbers = [int(item) for item in again]
    assert numbers == list(range(40))[-len(numbers) :]
    assert len(numbers) >= 20


def test_large_results_travel_between_processes(sessions, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    first, second = sessions(), sessions()
    call = first.submit(lambda: wait_for_file(gate) or (bytes(5_000_000), torch.arange(3 << 19)))
    first.run(abs, 1)  # behind which the call has begun
    again = second.reattach(call.id)
    Path(gate).touch()
    data, tensor = again.result(60)
    assert data == bytes(5_000_000)
    assert torch.equal(tensor.cpu(), torch.arange(3 << 19))


def test_errors_and_cancellation_work_elsewhere(sessions, tmp_path: Path) -> None:
    gate, begun, cancelled = (str(tmp_path / name) for name in ("gate", "begun", "cancelled"))

    def fail() -> None:
        wait_for_file(gate)
        raise LookupError("as intended")

    def spin() -> None:
        try:
            open(begun, "w").close()
            wait_for_file(gate + "-never")
        finally:
            open(cancelled, "w").close()

    first, second = sessions(), sessions()
    failing, spinning = first.submit(fail), first.submit(spin)
    first.run(abs, 1)
    again, other = second.reattach(failing.id), second.reattach(spinning.id)
    Path(gate).touch()
    with pytest.raises(LookupError, match="as intended"):
        again.result(60)
    wait_for(lambda: Path(begun).exists(), "the function is inside its `try`: before, it has nothing to clean up")
    other.cancel()
    wait_for(lambda: Path(cancelled).exists(), "the function is interrupted")


def test_a_call_of_another_token_is_not_found(sessions, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    own, stranger = sessions(), sessions(STRANGER)
    call = own.submit(lambda: wait_for_file(gate) or 7)
    own.run(abs, 1)
    with pytest.raises(LookupError, match="has no call"):
        stranger.reattach(call.id).result(60)
    Path(gate).touch()
    assert call.result(60) == 7


def test_unknown_calls_are_unknown_however_many_are_asked_for(sessions) -> None:
    first, second = sessions(), sessions()
    calls = [second.reattach(f"{number:032x}") for number in range(40)]
    for call in calls:
        with pytest.raises(LookupError, match="has no call"):
            call.result(60)
    assert first.run(abs, -3) == second.run(abs, -3) == 3


def test_who_took_a_call_over_learns_that_its_process_ended(sessions, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")

    def crash() -> None:
        wait_for_file(gate)
        os.kill(os.getpid(), signal.SIGKILL)

    first, second = sessions(), sessions()
    call = first.submit(crash)
    first.run(abs, 1)
    again = second.reattach(call.id)
    second.run(abs, 1)
    Path(gate).touch()
    with pytest.raises((RemoteFunctionError, LookupError), match=r"has ended|has no call"):
        again.result(60)
    assert second.run(abs, -2) == 2


def test_what_sessions_leave_behind_keeps_nobody_out_and_has_a_bound(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SKYPROXY_MAX_SESSIONS="1")
    try:

        def leave(name: str) -> int:
            begun = tmp_path / name

            def work() -> None:
                open(begun, "w").close()
                wait_for_file(str(begun) + "-never")

            with worker.connect() as node:
                pid = node.run(os.getpid)
                node.submit(work)
                wait_for(begun.exists, "the function runs")
            wait_for(lambda: worker.activity()["sessions"] == 0, "the session is over")
            return pid

        first = leave("first")
        assert worker.activity()["processes"] == 1
        second = leave("second")
        # No more than it may have sessions: the one that was left longer is ended.
        wait_for(lambda: not Path(f"/proc/{first}").exists(), "the first process ends")
        wait_for(lambda: worker.activity()["processes"] == 1, "the worker has heard of its end")
        assert Path(f"/proc/{second}").exists()
        assert "left too many functions" in worker.log
        lines = worker.get("/metrics").splitlines()
        assert "skyproxy_worker_sessions 0" in lines
        assert "skyproxy_worker_processes 1" in lines
        (memory,) = [int(line.split()[1]) for line in lines if line.startswith("skyproxy_worker_memory_bytes ")]
        assert memory > 10 << 20
    finally:
        worker.end()


def test_a_process_with_calls_that_nobody_comes_back_for_ends(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SKYPROXY_CALL_GRACE_SECONDS="0.2")
    try:
        begun, interrupted = tmp_path / "begun", tmp_path / "interrupted"

        def spin() -> None:
            open(begun, "w").close()
            try:
                wait_for_file(str(begun) + "-never")
            finally:
                open(interrupted, "w").close()

        with worker.connect() as node:
            identity = node.submit(spin).id
            wait_for(begun.exists, "the function runs")
        wait_for(lambda: interrupted.exists() and len(worker.children()) == 1, "it is given up, and its process ends")
        with worker.connect() as other, pytest.raises(LookupError, match="has no call"):
            other.reattach(identity).result(60)
    finally:
        worker.end()
