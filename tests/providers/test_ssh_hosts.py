"""Hosts, users and configurations of ssh as they are: a real sshd, and what users have set up for other programs."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConnectError, WorkerStartError
from skyproxy.providers import ssh_connection, ssh_remote, ssh_tunnel
from skyproxy.providers.ssh import SshWorker, find, list_workers, start
from skyproxy.providers.ssh_connection import SshTarget, call
from skyproxy.providers.ssh_tunnel import Tunnel
from tests.integration.programs import wait_for
from tests.providers.test_ssh import (
    KEYGEN,
    NEEDS,
    SSHD,
    WAIT_SECONDS,
    Host,
    answers,
    host,
    process_of,
    run,
    slow_through_sshd,
    state,
    up,
)

__all__ = ["host", "state"]
pytestmark = pytest.mark.timeout(1200)
ASKED: dict[str, object] = {"operation": "status", "name": "nobody"}


# --- configurations --------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine that somebody else has."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture
def service() -> Iterator[int]:
    """What a tunnel leads to: it says hello to each who comes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.sendall(b"hello")

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(WAIT_SECONDS)


def hello(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as client:
        return client.recv(5)


@NEEDS
@pytest.mark.parametrize(
    "lines",
    [
        "LocalForward 127.0.0.1:{taken} 127.0.0.1:1",
        "RemoteForward 127.0.0.1:{taken} 127.0.0.1:1",
        "RemoteCommand exec sleep 1000",
        "RequestTTY force",
        "ControlMaster auto\n  ControlPath {folder}/%C\n  ControlPersist 60",
        "LogLevel QUIET",
        "LogLevel DEBUG",
        "StrictHostKeyChecking ask",
    ],
    ids=lambda text: text.split()[0],
)
def test_what_a_user_has_set_up_for_other_programs_is_in_no_ones_way(
    host: Host, tmp_path: Path, taken: int, service: int, lines: str
) -> None:
    config = tmp_path / "config"
    own = "Host gpu-box\n  " + lines.format(taken=taken, folder=tmp_path) + "\n"
    config.write_text(own + host.config.read_text())
    target = SshTarget("gpu-box", config=str(config))
    assert call(target, sys.executable, ASKED)["alive"] is False
    tunnel = Tunnel(target, service)
    try:
        assert hello(tunnel.port) == b"hello"
    finally:
        tunnel.close()
        target.leave()


@NEEDS
def test_a_port_that_somebody_takes_in_between_is_not_believed_to_be_the_tunnels(
    host: Host, taken: int, service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyproxy.providers import local

    ports = iter([taken, local.free_port()])
    monkeypatch.setattr(local, "free_port", lambda: next(ports))
    tunnel = Tunnel(host.target(), service)
    try:
        assert tunnel.port != taken
        assert hello(tunnel.port) == b"hello"
    finally:
        tunnel.close()


@NEEDS
def test_a_tunnel_to_a_shell_that_waits_for_something_is_given_up(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ssh"
    path.write_text("#!/bin/sh\necho 'Choose: 1) work 2) play'\nexec sleep 1000\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    monkeypatch.setattr(ssh_tunnel, "ANSWER_SECONDS", 1.0)
    with pytest.raises(ConnectError):
        Tunnel(host.target(), 1)


def test_a_long_temporary_folder_is_done_without_a_shared_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(ssh_connection.tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setattr(ssh_connection.shutil, "which", lambda name: "/usr/bin/ssh")
    assert "ControlPath=none" in SshTarget("gpu-box").command()


@pytest.mark.parametrize(
    "url",
    ["ssh://gpu-box", "ssh://me@gpu-box:2222", "ssh://[fd00::1]", "ssh://me@[fd00::1]:2222", "ssh://10.0.0.7:1"],
)
def test_a_host_is_written_as_it_is_read(url: str) -> None:
    target = SshTarget.parse(url)
    assert target.url == url
    assert SshWorker("x", target, "python3", "").url == url


@pytest.mark.parametrize("url", ["ssh://gpu-box:0", "ssh://gpu-box:65536", "ssh://gpu-box:99999"])
def test_a_port_that_there_is_not_is_refused(url: str) -> None:
    with pytest.raises(ssh_connection.ConfigurationError, match="is not a host"):
        SshTarget.parse(url)


def test_what_to_type_names_the_port() -> None:
    told = ssh_connection.failure(SshTarget("gpu-box", "me", 2222), "python3", 255, "Permission denied (password).")
    assert "ssh-copy-id -p 2222 me@gpu-box" in str(told)


# --- who comes in ----------------------------------------------------------------------------------------------------


@pytest.fixture
def asking(host: Host, tmp_path: Path) -> Iterator[Callable[[str], SshTarget]]:
    """An sshd that takes passwords; makes a way to it with a key, which it does not know."""
    key = tmp_path / "host_key"
    subprocess.run([str(KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    process = None
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config = tmp_path / "sshd_config"
        config.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {key}\nPidFile none\nUsePAM no\nStrictModes no\n"
            "AuthorizedKeysFile none\nPasswordAuthentication yes\nKbdInteractiveAuthentication yes\n"
            "PermitRootLogin yes\n"
        )
        with (tmp_path / "sshd.log").open("wb") as log:
            process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=log)
        wait_for(functools.partial(answers, process, port), "sshd listens")
        if process.poll() is None:
            break
    else:
        pytest.skip("sshd does not start here")
    known = tmp_path / "known_hosts"
    known.write_text("asking " + key.with_suffix(".pub").read_text())

    def made(passphrase: str) -> SshTarget:
        own = tmp_path / "own"
        subprocess.run([str(KEYGEN), "-q", "-t", "ed25519", "-N", passphrase, "-f", str(own)], check=True, timeout=60)
        client = tmp_path / "client"
        client.write_text(
            f"Host asking\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias asking\n  IdentityFile {own}\n"
            f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {known}\n  GlobalKnownHostsFile none\n"
        )
        return SshTarget("asking", config=str(client))

    yield made
    process.terminate()
    process.wait(60)


@NEEDS
@pytest.mark.parametrize("passphrase", ["", "a passphrase"], ids=["password", "passphrase"])
def test_nobody_is_asked_for_a_password(
    asking: Callable[[str], SshTarget], passphrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "askpass"
    program.write_text(f"#!/bin/sh\ntouch {asked}\n")
    program.chmod(0o755)
    for name, value in (("SSH_ASKPASS", str(program)), ("SSH_ASKPASS_REQUIRE", "force"), ("DISPLAY", ":0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConnectError, match=r"no password is asked for here.*ssh-copy-id -F \S+ asking.*ssh-add"):
        call(asking(passphrase), sys.executable, ASKED)
    assert not asked.exists()


@NEEDS
def test_a_home_that_cannot_be_written_is_named(host: Host, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nHOME=/proc/nowhere exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(WorkerStartError, match=r"its ~/\.cache cannot be written"):
        start("homeless", host.target(), python=str(python), env={"PIP_NO_INDEX": "1"})
    left = find("homeless")
    assert left is not None
    left.forget()


# --- who leaves ------------------------------------------------------------------------------------------------------


def processes_below(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def interrupt_up(host: Host, seen: Callable[[], object]) -> None:
    """Runs `skyproxy up`, and interrupts it as soon as something is seen on the host."""
    command = [sys.executable, "-c", "from skyproxy.cli.main import main; main()", "up", "ssh://gpu-box", "--gpus", "0"]
    command += ["--ssh-config", str(host.config), "--python", sys.executable, "--env", "PIP_NO_INDEX=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: process.poll() is not None or seen(), "it begins")
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said + errors
    assert "Traceback" not in errors, errors
    assert find("gpu-box") is None


@slow_through_sshd
def test_an_interrupted_installation_leaves_nothing(host: Host, state: Path) -> None:
    cache = host.home / ".cache" / "skyproxy" / "ssh"
    interrupt_up(host, lambda: list(cache.glob("environments/*/bin/python")))
    wait_for(lambda: not processes_below(host.home), "nothing runs there")
    assert host.files() == []


@slow_through_sshd
def test_two_people_with_one_account_do_not_meet(
    host: Host, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = host.home / ".cache" / "skyproxy" / "ssh" / "workers"
    assert up(host).exit_code == 0
    mine, first = find("gpu-box"), process_of(host)
    assert mine is not None
    my_name, my_port, my_token = mine.remote_name, mine.ask("status")["port"], mine.token()
    with monkeypatch.context() as patch:
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            patch.setenv(name, str(tmp_path))
        assert json.loads(run("list", "--json").stdout) == []
        # The environment is there already, so the interrupt strikes while the worker starts.
        interrupt_up(host, lambda: len(list(workers.glob("*/worker.json"))) == 2)
        wait_for(lambda: len(list(workers.iterdir())) == 1, "one worker is left")
        wait_for(lambda: len(processes_below(workers)) == 1, "nothing runs there")
        assert up(host).exit_code == 0
        other = find("gpu-box")
        assert other is not None
        assert (other.remote_name, other.ask("status")["port"], other.token()) != (my_name, my_port, my_token)
        assert other.remote_name != my_name
        assert len(json.loads(run("list", "--json").stdout)) == 1
        assert run("down").exit_code == 0
        assert list_workers() == []
    assert process_of(host) == first
    assert mine.ask("status")["alive"]
    assert run("down").exit_code == 0
    assert host.files() == []


def test_an_environment_that_somebody_installs_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_remote, "ROOT", tmp_path / "a" / "b" / "ssh")
    for name in ("begun", "left"):
        (ssh_remote.ROOT / "environments" / name).mkdir(parents=True)
    request = {"name": "nobody", "keep_environment": False, "environment": ""}
    with ssh_remote._lock(ssh_remote.ROOT / "environments" / "begun.lock"):
        ssh_remote.stop(request, None)  # type: ignore[arg-type]
        assert [path.name for path in sorted((ssh_remote.ROOT / "environments").iterdir())] == ["begun", "begun.lock"]
    ssh_remote.stop(request, None)  # type: ignore[arg-type]
    assert not ssh_remote.ROOT.exists()


@NEEDS
def test_what_was_removed_in_between_is_installed_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def answer(target: SshTarget, python: str, request: dict[str, object], payload: bytes = b"") -> dict[str, object]:
        asked.append(request["operation"])
        if request["operation"] == "start" and asked.count("start") == 1:
            raise ssh_connection.EnvironmentRemovedError("it was removed again")
        return {"environment": "x", "ready": True, "torch": "2.13"}

    from skyproxy.providers import ssh

    monkeypatch.setattr(ssh, "call", answer)
    worker = start("again", host.target())
    assert asked == ["look", "start", "install", "start"]
    worker.forget()
