"""Several workers in one: real processes on real ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.instance import InstanceInfo
from skyproxy_server.__main__ import main
from skyproxy_server.processes import environment, wait_for_ports

TOKEN = "a-token-for-several-workers"


def free_ports(count: int) -> int:
    """The first of that many ports in a row that are free."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        try:
            for index in range(count):
                socket.create_server(("127.0.0.1", port + index)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no free ports")


def activity(port: int) -> dict[str, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/activity", headers={"Authorization": f"Bearer {TOKEN}"})
    deadline = time.monotonic() + 100
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                answer: dict[str, object] = json.load(response)
                return answer
        except OSError:
            assert time.monotonic() < deadline, "the worker did not come up"
            time.sleep(0.1)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process with two workers, and the port of the first."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    port = free_ports(2)
    command = [sys.executable, "-m", "skyproxy_server", "--device", "cpu", "--processes", "2"]
    command += ["--jobs", str(tmp_path / "jobs")]  # which one process at a time may use
    process = subprocess.Popen([*command, "--port", str(port), "--token-file", str(token)])
    yield process, port
    if process.poll() is None:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_each_has_its_port_and_all_end_together(pair: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = pair
    activity(port)
    # Who finds the first one finds the others.
    socket.create_connection(("127.0.0.1", port + 1), 5).close()
    assert [activity(port + index)["sessions"] for index in range(2)] == [0, 0]
    first, second = children(process.pid)
    os.kill(second, signal.SIGKILL)
    assert process.wait(60) == 128 + signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_they_end_in_an_orderly_way_when_told_to(pair: tuple[subprocess.Popen[bytes], int], tmp_path: Path) -> None:
    process, port = pair
    for index in range(2):
        activity(port + index)
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == ["worker-0", "worker-1"]
    process.terminate()
    assert process.wait(60) == 0


def test_the_first_waits_for_the_others_and_no_longer_than_it_should() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert wait_for_ports("0.0.0.0", [other.getsockname()[1]], stop)
        gone = other.getsockname()[1]
    waiting: list[bool] = []
    thread = threading.Thread(target=lambda: waiting.append(wait_for_ports("127.0.0.1", [gone], stop)))
    thread.start()
    assert waiting == []
    stop.set()
    thread.join(30)
    assert waiting == [False]


def test_each_knows_its_own_rank() -> None:
    pool = {"node": 1, "total_nodes": 2, "procs_per_node": 4, "head_addr": "a", "job": "j"}
    infos = [
        InstanceInfo.from_mapping(
            json.loads(environment({"COMPUTE_POOL": json.dumps(pool), "A": "b"}, rank)["COMPUTE_POOL"])
        )
        for rank in range(4)
    ]
    assert [(info.local_rank, info.rank, info.world_size) for info in infos] == [(i, 4 + i, 8) for i in range(4)]
    assert environment({"A": "b"}, 3) == {"A": "b"}
    with pytest.raises(ConfigurationError, match="not a JSON object"):
        environment({"COMPUTE_POOL": "[]"}, 0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "1234"], "--token-file"),
        (["--port", "0", "--token-file", "x"], "--port 0"),
        (["--port", "65535", "--token-file", "x"], "fewer than 2 ports"),
        (["--port-file", "x", "--token-file", "x"], "--port-file"),
    ],
)
def test_what_makes_sense_for_one_only_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert main(["--processes", "2", *arguments]) == 2
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert problem in capsys.readouterr().err
