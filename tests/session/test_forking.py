"""Workers that are copies of one process: as good as new ones, and ended, named and found as those are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from skyproxy.providers.processes import identity_of
from skyproxy.runtime.descendants import MARK_VARIABLE, end_marked
from skyproxy.session import forking
from skyproxy.session.forking import ForkedProcess, ForkServer, can_fork
from skyproxy.session.local_worker import LocalWorker, worker_environment
from skyproxy.settings import SETTINGS
from tests.integration.programs import wait_for

pytestmark = pytest.mark.skipif(not can_fork("cpu"), reason="workers are forked on Linux only")
MARK = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(sys.executable, worker_environment())
    yield server
    server.stop()


@pytest.fixture
def errors() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def start(server: ForkServer, errors: IO[bytes], *arguments: str, **variables: str) -> ForkedProcess:
    return server.start(arguments, worker_environment() | {MARK_VARIABLE: MARK} | variables, errors)


def test_a_forked_worker_is_a_worker(server: ForkServer) -> None:
    worker = LocalWorker("cpu", SETTINGS, server=server)
    try:
        assert isinstance(worker._process, ForkedProcess)
        assert worker.url.startswith("ws://127.0.0.1:")
        assert worker.is_running
        assert os.getsid(worker.process_id) == worker.process_id
    finally:
        worker.stop()
    assert not worker.is_running


def test_it_starts_where_no_variable_bounds_the_threads_of_libraries() -> None:
    variables = {name: value for name, value in worker_environment().items() if not name.endswith("_NUM_THREADS")}
    ForkServer(sys.executable, variables).stop()


def test_it_has_the_variables_it_was_started_with_and_its_mark_is_seen(server: ForkServer, errors: IO[bytes]) -> None:
    process = start(server, errors, "--embedded", "--port", "0", ONLY_HERE="yes")
    try:
        seen = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert f"{MARK_VARIABLE}={MARK}".encode() in seen
        assert sum(entry.startswith(MARK_VARIABLE.encode() + b"=") for entry in seen) == 1
    finally:
        end_marked(MARK)
    assert process.wait(60) == -signal.SIGKILL


def test_the_status_and_the_last_words_of_one_that_ends_at_once_are_known(
    server: ForkServer, errors: IO[bytes]
) -> None:
    process = start(server, errors, "--no-such-option")
    assert process.wait(60) == 2
    assert process.poll() == process.returncode == 2
    process.kill()  # nobody: it has ended
    errors.seek(0)
    assert b"--no-such-option" in errors.read()


def test_a_killed_one_is_told_by_its_signal(server: ForkServer, errors: IO[bytes]) -> None:
    process = start(server, errors, "--embedded", "--port", "0")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL


def test_one_whose_life_line_closes_ends(server: ForkServer, errors: IO[bytes]) -> None:
    process = start(server, errors, "--embedded", "--port", "0")
    assert process.stdin is not None
    process.stdin.write(b"token\n")
    process.stdin.flush()
    assert process.stdout is not None
    assert b"port" in process.stdout.readline()
    process.stdin.close()
    process.wait(60)


def test_no_worker_holds_a_descriptor_of_another(server: ForkServer, errors: IO[bytes]) -> None:
    one, other = (start(server, errors, "--embedded", "--port", "0") for _ in range(2))
    try:
        for process in (one, other):
            assert process.stdin is not None
            process.stdin.write(b"token\n")
            process.stdin.flush()
            assert process.stdout is not None
            process.stdout.readline()  # it has become a worker
        pipes = [_pipes(process.pid) for process in (one, other)]
        assert pipes[0]
        assert not pipes[0] & pipes[1]
    finally:
        for process in (one, other):
            process.kill()
            process.wait(60)


def _pipes(process_id: int) -> set[str]:
    folder = Path(f"/proc/{process_id}/fd")
    return {os.readlink(entry) for entry in folder.iterdir() if os.readlink(entry).startswith("pipe:")}


def test_workers_outlive_the_server_and_their_end_is_still_noticed(errors: IO[bytes]) -> None:
    server = ForkServer(sys.executable, worker_environment())
    process = start(server, errors, "--embedded", "--port", "0")
    server.stop()
    server.stop()
    assert process.poll() is None
    process.kill()
    process.wait(60)
    assert server.try_to_start(["--embedded"], {}, errors) is None


def test_a_worker_whose_server_ends_before_anybody_has_heard_of_it_is_none(
    monkeypatch: pytest.MonkeyPatch, errors: IO[bytes]
) -> None:
    server = ForkServer(sys.executable, worker_environment())
    told: list[int] = []
    process_of = server._process_of

    def late(number: int, *streams: IO[bytes]) -> ForkedProcess:
        with server._changed:
            assert server._changed.wait_for(lambda: number in server._answers, 60)
        told.append(server._answers[number])
        server._process.kill()
        server._reader.join(60)
        return process_of(number, *streams)

    monkeypatch.setattr(server, "_process_of", late)
    try:
        with pytest.raises(OSError, match="has ended"):
            start(server, errors, "--embedded", "--port", "0")
        wait_for(lambda: identity_of(told[0]) is None, "the worker has ended")
    finally:
        server.stop()


def test_where_the_server_cannot_start_workers_are_started_in_the_ordinary_way() -> None:
    with pytest.raises(OSError, match="no threads"):
        ForkServer(sys.executable, worker_environment() | {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"})


def test_a_gpu_is_never_forked() -> None:
    assert not can_fork("auto")
    assert not can_fork("cuda")


def test_numbers_drawn_in_two_of_them_differ_where_those_of_new_processes_do(server: ForkServer) -> None:
    import skyproxy as sky

    def draw() -> tuple[float, int]:
        import random

        return random.random(), os.getpid()

    workers = [LocalWorker("cpu", SETTINGS, server=server) for _ in range(2)]
    drawn = []
    for worker in workers:
        with sky.connect(worker.url, token=worker.token, shares_files=True) as node:
            drawn.append(node.run(draw))
        worker.stop()
    assert len({number for number, _ in drawn}) == 2
    assert [process for _, process in drawn] == [worker.process_id for worker in workers]


def test_a_child_of_the_program_lets_go_of_the_server(monkeypatch: pytest.MonkeyPatch, server: ForkServer) -> None:
    class Recorded:
        def __init__(self) -> None:
            self.calls = 0

        def abandon_in_child(self) -> None:
            self.calls += 1

    recorded = Recorded()
    monkeypatch.setattr(forking, "_servers", [recorded])
    forking._after_fork_in_child()
    assert recorded.calls == 1
