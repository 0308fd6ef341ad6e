"""Memory that a killed program left on its worker makes room for the next program's."""

from __future__ import annotations

import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import skyproxy
from skyproxy.errors import RemoteError
from tests.integration.programs import ROOT, environment, port_in, start_worker, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds the memory of another process")

_MIB = 1 << 20
_HELD = 1024 * _MIB

HOLDER = """
import sys, torch, skyproxy
node = skyproxy.connect(sys.argv[1])
held = torch.ones(int(sys.argv[2]), dtype=torch.uint8, device=node.devices[0])
node.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def small_worker(tmp_path: Path) -> Iterator[tuple[str, str, int]]:
    """The URL, the token and the process of a worker."""
    token = secrets.token_urlsafe(32)
    path = tmp_path / "token"
    path.write_text(token, encoding="ascii")
    path.chmod(0o600)
    log = tmp_path / "worker.log"
    with log.open("wb") as stderr:
        process = start_worker(path, stderr)
        try:
            port = wait_for(lambda: port_in(log, process), "the worker listens")
            yield f"ws://127.0.0.1:{port}", token, process.pid
        finally:
            process.kill()
            process.wait()


def hold_and_die(url: str, token: str) -> None:
    """A program that has a gibibyte on the worker and is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url, str(_HELD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(SKYPROXY_TOKEN=token),
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "held\n"
        program.send_signal(signal.SIGKILL)


def test_what_a_killed_program_left_makes_room(small_worker: tuple[str, str, int]) -> None:
    url, token, pid = small_worker
    with skyproxy.connect(url, token=token) as node:
        device = node.devices[0]
        first = torch.zeros(16, device=device)
        assert (first + 1).sum().item() == 16
        room = psutil.Process(pid).memory_info().vms + _HELD + _HELD // 2
        hold_and_die(url, token)
        wait_for(lambda: sum(row["state"] == "detached" for row in _rows(url, token)) == 1, "the worker notices")
        resource.prlimit(pid, resource.RLIMIT_AS, (room, room))
        second = torch.ones(_HELD, dtype=torch.uint8, device=device)  # fits only where the other one is gone
        assert second[-1].item() == 1
        assert (first + 2).sum().item() == 32
        with pytest.raises(RemoteError, match="can't allocate memory"):
            torch.ones(_HELD, dtype=torch.uint8, device=device).sum().item()
        assert node.alive
        assert (first + 3).sum().item() == 48


def _rows(url: str, token: str) -> list[dict[str, object]]:
    from skyproxy.transport.worker_report import ask_worker

    status = ask_worker(url, token, "/status")
    return list(status["sessions"])
