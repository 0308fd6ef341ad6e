"""Sessions of workers over ssh whose tunnel ends: it is opened again, and they go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.contexts import write_private
from skyproxy.errors import ConnectError
from skyproxy.providers.ssh import SshWorker, find
from skyproxy.providers.ssh_connection import call
from skyproxy.providers.ssh_tunnel import Tunnel
from tests.integration.programs import wait_for
from tests.integration.programs import worker as started_worker
from tests.providers.test_ssh import NEEDS, Host, host, python, run, slow_through_sshd, state, up

__all__ = ["host", "state"]
pytestmark = [NEEDS, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The port and the token of a worker, for tunnels to lead to."""
    with started_worker(tmp_path_factory.mktemp("worker")) as (url, token):
        yield int(url.rpartition(":")[2]), token


class Away:
    """A host that can be away, behind a real tunnel to it.

    Attributes:
        tunnel: to the host.
        is_away: whether nobody can log in now.
        asked: how often a connection was refused because the tunnel is away.
    """

    def __init__(self, tunnel: Tunnel, patch: pytest.MonkeyPatch) -> None:
        self.tunnel, self.is_away, self.asked = tunnel, False, 0
        opened = tunnel._open

        def opens() -> subprocess.Popen[bytes]:
            if self.is_away:
                raise ConnectError("nobody can log in")
            return opened()

        patch.setattr(tunnel, "_open", opens)
        patch.setattr(tunnel, "_LONGEST_PAUSE_SECONDS", 0.1)

    def check(self) -> None:
        try:
            self.tunnel.check()
        except ConnectError:
            self.asked += 1
            raise


@pytest.fixture
def away(sky: str, host: Host, served: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Away]:
    tunnel = Tunnel(host.target(), served[0])
    yield Away(tunnel, monkeypatch)
    tunnel.close()


@pytest.fixture
def node(away: Away, served: tuple[int, str]) -> Iterator[skyproxy.Node]:
    with skyproxy.connect(away.tunnel.url, token=served[1], check_way=away.check) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_session_goes_on_after_its_tunnel_however_long_that_is_away(
    node: skyproxy.Node, away: Away, number: signal.Signals
) -> None:
    x = torch.arange(4.0).to(node.device("cpu"))
    away.is_away = True
    os.kill(away.tunnel._process.pid, number)
    y = x * 2
    # Without a tunnel, nothing listens here: three refusals would be the end of the session.
    wait_for(lambda: away.asked >= 8, "somebody tries to come back")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", away.tunnel.port), 5):
        pass
    with pytest.raises(ConnectError, match="the tunnel to gpu-box has ended and is opened again"):
        away.tunnel.check()
    away.is_away = False
    assert y.sum().item() == 12.0
    assert node.run(torch.sum, x).item() == 6.0
    away.tunnel.check()


def test_a_tunnel_that_hangs_is_ended_and_opened_again(
    node: skyproxy.Node, away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away.tunnel, "_ECHO_SECONDS", 3.0)
    x = torch.arange(4.0).to(node.device("cpu"))
    assert x.sum().item() == 6.0
    away.tunnel.check()
    before = away.tunnel._process
    before.send_signal(signal.SIGSTOP)
    # Nothing ends: the port still takes connections, and says nothing.
    assert (x * 2).sum().item() == 12.0
    assert before.poll() == -signal.SIGKILL
    assert away.tunnel._process is not before
    assert away.asked >= 1
    away.tunnel.check()


def test_what_keeps_a_host_away_is_told_once(away: Away, caplog: pytest.LogCaptureFixture) -> None:
    away.is_away = True
    away.tunnel._process.kill()
    wait_for(lambda: "nobody can log in" in away.tunnel._problem, "an attempt is made")
    assert caplog.text.count("has ended and is opened again") == 1
    opened, attempts = away.tunnel._open, []

    def counts() -> subprocess.Popen[bytes]:
        attempts.append(1)
        return opened()

    away.tunnel._open = counts  # type: ignore[method-assign]
    wait_for(lambda: len(attempts) >= 3, "further attempts are made")
    assert caplog.text.count("nobody can log in") == 1
    away.is_away = False
    wait_for(lambda: away.tunnel._process.poll() is None, "a new tunnel")


def test_a_worker_that_is_being_installed_is_not_lost(host: Host) -> None:
    record = SshWorker("begun", host.target(), sys.executable, "2026-01-01T00:00:00+00:00")
    write_private(record.folder / "worker.json", json.dumps(asdict(record)))
    try:
        (row,) = json.loads(run("list", "--json").stdout)
        assert (row["name"], row["phase"], row["ready"]) == ("begun", "Provisioning", False)
    finally:
        record.forget()


def test_what_is_no_python_is_named(host: Host) -> None:
    with pytest.raises(ConnectError, match=r"/bin/true on gpu-box gave an unexpected answer.*Is it a Python"):
        call(host.target(), "/bin/true", {"operation": "status", "name": "nobody"})


PROGRAM = """
import os, signal
import psutil, torch, skyproxy
x = torch.arange(4.0, device="sky")
x.sum().item()
(tunnel,) = [child for child in psutil.Process().children() if child.name() == "ssh"]
tunnel.send_signal(signal.SIGKILL)
for _ in range(3):
    x = x + 1
print(x.sum().item(), skyproxy.devices()[0].alive)
"""


@slow_through_sshd
def test_a_program_goes_on_after_the_tunnel_of_its_worker(host: Host, state: Path) -> None:
    assert up(host).exit_code == 0
    try:
        assert python(PROGRAM) == "18.0 True\n"
    finally:
        assert run("down").exit_code == 0
    assert find("gpu-box") is None
