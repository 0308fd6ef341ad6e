"""Snapshots over a real connection: numbering goes on behind the batch that was saved, on another worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyproxy.protocol import commands
from skyproxy.protocol.messages import OPERATIONS, Ack, Batch, Failure, Hello, Reply, Sequence
from skyproxy.settings import Settings
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server.limits import are_sessions_separable
from tests.server.isolation.workers import TOKEN, Worker

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]

ARANGE, ADD_, RAND = range(commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 3)
OPS = [
    *(commands.DEFINE, ARANGE, ["aten::arange", ["v"], {"dtype": ["c", "dtype", "float32"]}, ["n"]]),
    *(commands.DEFINE, ADD_, ["aten::add_.Tensor", ["t", "t"], {}, ["x"]]),
    *(commands.DEFINE, RAND, ["aten::rand_like", ["t"], {}, ["n"]]),
]


class Client:
    """An operations connection that lasts, without what makes it comfortable."""

    def __init__(self, worker: Worker) -> None:
        settings = Settings(handshake_timeout_seconds=30.0)
        hello = Hello([1], OPERATIONS, "", {}, 60)
        self.link, self.welcome = connect_websocket(worker.url, TOKEN, hello, settings=settings)

    def run(self, *stream: Any) -> int:
        sequence = self.link.connection.last_sequence + 1
        self.link.send(Batch(Sequence(sequence), list(stream)))
        return sequence

    def ask(self, *command: Any) -> Any:
        self.run(*command)
        while True:
            message = self.link.recv(60.0)
            if isinstance(message, Reply):
                return bytes(message.buffers[0]) if message.buffers else message.value
            assert not isinstance(message, Failure), message.error
            assert isinstance(message, Ack)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.ask(commands.CALL, 5, name, list(arguments))


@pytest.fixture(params=["--sessions-in-process", "--session-processes"])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Worker]]:
    """Two workers with one folder for snapshots."""
    made: list[Worker] = []
    try:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            made.append(Worker(folder, request.param, "--snapshots", str(tmp_path / "volume")))
        yield made
    finally:
        for worker in made:
            worker.end()


def test_a_session_goes_on_after_its_worker_was_killed(workers: list[Worker]) -> None:
    first = Client(workers[0])
    assert first.welcome.limits["snapshots"] == 1
    first.run(*OPS)
    first.run(ARANGE, 5, 1, commands.DO, "manual_seed", [["cpu", None], 3])
    saved = first.call("save_snapshot", "exp")
    assert saved["sequence"] == first.link.connection.last_sequence == 3
    log: list[list[Any]] = [[RAND, 1, 2], [ADD_, 1, 2, ADD_, 1, 1]]
    for stream in log:
        assert first.run(*stream) > 3
    expected = first.ask(commands.FETCH, 6, 1, 0)
    os.kill(workers[0].process.pid, signal.SIGKILL)

    second = Client(workers[1])
    loaded = second.call("load_snapshot", "exp", "")
    assert loaded == {"snapshot": saved["snapshot"], "sequence": 3, "bytes": saved["bytes"]}
    second.link.connection.jump_to(loaded["sequence"])
    assert [second.run(*stream) for stream in log] == [4, 5]
    assert second.ask(commands.FETCH, 6, 1, 0) == expected
    assert second.call("delete_snapshot", "exp")
    first.link.close()
    second.link.close()
