"""`skyproxy up ssh://host` on a real sshd, with keys, a configuration, a home and a port of its own."""

from __future__ import annotations

import errno
import functools
import getpass
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from skyproxy.cli import main as cli
from skyproxy.errors import ConfigurationError, ConnectError, SkyproxyError, WorkerStartError
from skyproxy.providers import ssh_connection, ssh_remote
from skyproxy.providers.own_wheel import own_wheel
from skyproxy.providers.ssh import SshWorker, find, list_workers, name_of, start
from skyproxy.providers.ssh_connection import SshTarget, failure
from skyproxy.providers.ssh_tunnel import Tunnel
from skyproxy.transport.worker_report import ask_worker
from tests.integration.programs import wait_for

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
KEYGEN = shutil.which("ssh-keygen")
NEEDS = pytest.mark.skipif(
    sys.platform != "linux" or SSHD is None or KEYGEN is None or shutil.which("ssh") is None,
    reason="needs sshd; on Debian: apt-get install openssh-server",
)


def slow_through_sshd(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that talks to the real sshd: an environment is made there, which takes its time."""
    return NEEDS(pytest.mark.slow(test))


pytestmark = pytest.mark.timeout(1200)
WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Host:
    """An ssh server, and how its user comes in.

    Attributes:
        home: of the user there.
        config: ssh's configuration with the host `gpu-box`, and hosts that cannot be used.
    """

    home: Path
    config: Path

    def target(self, host: str = "gpu-box") -> SshTarget:
        return SshTarget(host, config=str(self.config))

    def files(self) -> list[Path]:
        return sorted(path for path in self.home.rglob("*") if path.is_file())


def keys(folder: Path, name: str) -> Path:
    path = folder / name
    subprocess.run([str(KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=60)
    return path


def answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether an ssh server listens there, or the process that was to be one is gone."""
    if process.poll() is not None:
        return True
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as probe:
            return probe.recv(4) == b"SSH-"
    except OSError:
        return False


def serve(folder: Path, home: Path, host_key: Path, user_key: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts sshd on a free port; another one where somebody takes that in between."""
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config = folder / "sshd_config"
        config.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {user_key}.pub\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin yes\nMaxStartups 100\nSetEnv HOME={home}\n"
        )
        with (folder / "sshd.log").open("wb") as log:
            process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=log)
        wait_for(functools.partial(answers, process, port), "sshd listens")
        if process.poll() is None:
            return process, port
    pytest.skip("sshd does not start here: " + (folder / "sshd.log").read_text(errors="replace"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("sshd")
    home = folder / "home"
    home.mkdir()
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's sshd goes before somebody has logged in
    host_key, user_key, other_key = (keys(folder, name) for name in ("host", "user", "other"))
    process, port = serve(folder, home, host_key, user_key)
    known = folder / "known_hosts"
    known.write_text("gpu-box " + host_key.with_suffix(".pub").read_text())
    config = folder / "config"
    common = (
        f"  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {known}\n  GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n"
    )
    config.write_text(
        f"Host gpu-box\n{common}  HostKeyAlias gpu-box\n  IdentityFile {user_key}\n"
        f"Host stranger\n{common}  HostKeyAlias stranger\n  IdentityFile {user_key}\n"
        f"Host denied\n{common}  HostKeyAlias gpu-box\n  IdentityFile {other_key}\n"
    )
    made = Host(home, config)
    try:
        said = subprocess.run(
            [*made.target().command(shared=False), "echo $HOME"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if said.stdout.strip() != str(home):
            pytest.skip(f"nobody can log in to this sshd as {getpass.getuser()}: {said.stderr}")
        yield made
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A client without contexts and workers."""
    folder = tmp_path_factory.mktemp("client")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SKYPROXY_", "KUBE"))]:
            patch.delenv(name)
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            patch.setenv(name, str(folder))
        yield folder


def run(*arguments: str) -> Result:
    settings = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(cli.app, list(arguments), env=settings)


def up(host: Host, *arguments: str) -> Result:
    given = ["up", "ssh://gpu-box", "--ssh-config", str(host.config), "--python", sys.executable, "--gpus", "0"]
    # What the host's Python has is enough: nothing is asked of a package index.
    return run(*given, "--env", "PIP_NO_INDEX=1", *arguments)


@pytest.fixture(scope="module")
def worker(host: Host) -> Iterator[SshWorker]:
    made = up(host)
    assert made.exit_code == 0, made.output
    assert "gpu-box is ready (cpu)" in made.stdout
    found = find("gpu-box")
    assert found is not None
    yield found
    if find("gpu-box") is not None:
        found.stop()


def python(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import torch, skyproxy
x = torch.arange(4.0, device="sky")
print((x * x).sum().item(), skyproxy.devices()[0].source)
"""


def process_of(host: Host) -> int:
    (record,) = host.home.rglob("worker.json")
    return int(json.loads(record.read_text())["pid"])


@slow_through_sshd
def test_a_worker_over_ssh_is_used_and_leaves_nothing(host: Host, worker: SshWorker) -> None:
    assert python(PROGRAM) == "14.0 saved context 'gpu-box' (ssh)\n"
    (row,) = json.loads(run("list", "--json").stdout)
    assert (row["name"], row["provider"], row["phase"], row["ready"]) == ("gpu-box", "ssh", "Running", True)
    assert run("status").exit_code == 0
    assert "session" in run("logs", "gpu-box").stdout
    assert len(run("logs", "gpu-box", "--tail", "1").stdout.splitlines()) == 1
    again = up(host)
    assert again.exit_code == 0
    assert "is already running" in again.stderr
    process_id, token = process_of(host), worker.token()
    # It belongs to the user, listens to its own machine only, and its token is in no command line.
    command = Path(f"/proc/{process_id}/cmdline").read_bytes()
    assert b"--host\x00127.0.0.1" in command
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert token.encode() not in entry.read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    for path in host.files():
        if "environments" not in path.parts:
            assert path.stat().st_mode & 0o077 == 0, path
    ended = run("down")
    assert ended.exit_code == 0, ended.output
    assert not Path(f"/proc/{process_id}").exists() or Path(f"/proc/{process_id}/stat").read_text().split()[2] == "Z"
    assert host.files() == []
    assert not (host.home / ".cache" / "skyproxy").exists()
    assert json.loads(run("list", "--json").stdout) == []
    assert list_workers() == []
    assert run("status", "gpu-box").exit_code == 3
    # With the environment kept, the next start installs nothing.
    assert up(host).exit_code == 0
    kept = run("down", "--keep-environment")
    assert kept.exit_code == 0, kept.output
    (finished,) = host.home.rglob("finished")
    before = finished.stat().st_mtime_ns
    assert up(host).exit_code == 0
    assert finished.stat().st_mtime_ns == before


@slow_through_sshd
def test_a_tunnel_is_opened_again_where_it_led_before(host: Host, worker: SshWorker) -> None:
    if find("gpu-box") is None:
        assert up(host).exit_code == 0
    port = worker.ask("status")["port"]
    tunnel = Tunnel(worker.target, port)
    url = tunnel.url
    try:
        assert ask_worker(url, worker.token(), timeout_seconds=60)["sessions"] == 0
        first = tunnel._process
        first.kill()
        wait_for(lambda: tunnel._process is not first, "a new tunnel")
        assert ask_worker(url, worker.token(), timeout_seconds=60)["sessions"] == 0
    finally:
        tunnel.close()
    assert tunnel._process.poll() is not None
    assert not tunnel._keeper.is_alive()
    with pytest.raises(ConnectError):
        ask_worker(url, worker.token(), timeout_seconds=5)


@slow_through_sshd
def test_a_killed_worker_is_lost_and_its_name_can_be_taken_again(host: Host, worker: SshWorker) -> None:
    if find("gpu-box") is None:
        assert up(host).exit_code == 0
    process_id = process_of(host)
    os.kill(process_id, 9)
    wait_for(lambda: not worker.ask("status")["alive"], "the worker dies")
    status = run("status", "gpu-box", "--json")
    assert status.exit_code == 1
    assert json.loads(status.stdout)["phase"] == "Lost"
    with pytest.raises(ConnectError, match="is no longer running"):
        worker.open()
    assert up(host).exit_code == 0
    assert run("token", "rotate", "gpu-box").exit_code == 0
    assert python(PROGRAM).startswith("14.0")


def python_of_version(folder: Path, version: str) -> str:
    """This Python, which says that it is another version."""
    path = folder / "old-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -c "import sys; sys.version_info = ({version}); $3"\n')
    path.chmod(0o755)
    return str(path)


@slow_through_sshd
@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("stranger", ConnectError, r"does not know the host's key.*ssh -F \S+ stranger"),
        ("denied", ConnectError, r"ssh-copy-id -F \S+ denied"),
        ("no-such-host.invalid", ConnectError, "cannot log in to no-such-host.invalid"),
    ],
)
def test_who_cannot_log_in_is_told_why(host: Host, name: str, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        start("x", host.target(name))
    assert find("x") is None


@slow_through_sshd
def test_a_host_without_a_fitting_python_says_which_one_it_has(host: Host, tmp_path: Path) -> None:
    with pytest.raises(WorkerStartError, match=r"there is no /no/python on gpu-box.*--python"):
        start("x", host.target(), python="/no/python")
    with pytest.raises(WorkerStartError, match=r"is Python 3\.8, and a worker needs 3\.11"):
        start("x", host.target(), python=python_of_version(tmp_path, "3, 8, 18"))
    assert find("x") is None


@slow_through_sshd
def test_a_host_without_torch_and_without_a_network_says_so_and_keeps_no_half_environment(host: Host) -> None:
    bare = os.path.realpath(sys.executable)
    looked = subprocess.run([bare, "-I", "-c", "import torch"], capture_output=True, timeout=WAIT_SECONDS, check=False)
    if looked.returncode == 0:
        pytest.skip("the Python of this environment has a torch by itself")
    before = set(host.home.rglob("environments/*/finished"))
    with pytest.raises(WorkerStartError, match=r"no torch, and pip could not get it.*--python PATH"):
        start("bare", host.target(), python=bare, env={"PIP_NO_INDEX": "1"})
    assert set(host.home.rglob("environments/*/finished")) == before
    left = find("bare")
    assert left is not None
    left.stop(keep_environment=True)
    assert find("bare") is None


def test_without_ssh_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_connection.shutil, "which", lambda name: None)
    with pytest.raises(ConfigurationError, match="Install OpenSSH's client"):
        SshTarget("gpu-box").command()


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ssh://gpu-box", SshTarget("gpu-box")),
        ("ssh://me@GPU-Box.example.com:2222", SshTarget("GPU-Box.example.com", "me", 2222)),
        ("ssh://me@[fd00::1]/", SshTarget("fd00::1", "me")),
    ],
)
def test_hosts_are_read(text: str, target: SshTarget) -> None:
    assert SshTarget.parse(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://-l@host",
        "ssh://a b",
        "ssh://host:port",
        "ssh://host/path",
        "ssh://a@b@c",
    ],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a host"):
        SshTarget.parse(text)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("GPU-Box.example.com", "gpu-box"),
        ("10.0.0.7", "ssh-10-0-0-7"),
        ("fd00::1", "fd00-1"),
        ("x_1", "x-1"),
        ("7up", "ssh-7up"),
    ],
)
def test_a_worker_is_named_after_its_host(host: str, name: str) -> None:
    assert name_of(SshTarget(host)) == name


@pytest.mark.parametrize(
    ("status", "told", "kind", "shown"),
    [
        (255, "ssh: Could not resolve hostname x: Name or service not known", ConnectError, "no host of that name"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", ConnectError, "key has changed"),
        (255, "Host key verification failed.", ConnectError, "Log in once by hand"),
        (255, "connect to host x port 22: Connection refused", ConnectError, "no ssh server is listening"),
        (255, "connect to host x port 22: Connection timed out", ConnectError, "does not answer"),
        (255, "", ConnectError, "without a message"),
        (127, "sh: 1: exec: python3: not found", WorkerStartError, "there is no python3"),
        (1, "Traceback", WorkerStartError, "ended with 1"),
    ],
)
def test_what_ssh_says_becomes_an_error_that_says_what_to_do(
    status: int, told: str, kind: type[SkyproxyError], shown: str
) -> None:
    error = failure(SshTarget("x"), "python3", status, told)
    assert type(error) is kind
    assert shown in str(error)


class Standard:
    """A process's standard stream over memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.buffer = io.BytesIO(data)


def test_a_full_disk_is_told_from_other_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(request: dict[str, Any], stream: object) -> dict[str, Any]:
        raise OSError(errno.ENOSPC, "No space left on device", "/home/me/.cache")

    output = Standard()
    monkeypatch.setitem(ssh_remote._OPERATIONS, "look", fails)
    monkeypatch.setattr(sys, "stdin", Standard(b'{"operation": "look"}\n'))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(os, "umask", lambda mask: 0)
    ssh_remote.main()
    monkeypatch.undo()
    assert json.loads(output.buffer.getvalue())["error"] == "disk"
    with pytest.raises(ssh_remote.HostError) as caught:
        ssh_remote._run(["sh", "-c", "echo 'OSError: [Errno 28] No space left on device'; exit 1"], "install", {})
    assert caught.value.code == "disk"
    # venv hides why it failed.
    monkeypatch.setattr(ssh_remote, "_LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(ssh_remote.HostError) as caught:
        ssh_remote._run(["sh", "-c", "echo 'ensurepip returned non-zero exit status 1'; exit 1"], "venv", {})
    assert caught.value.code == "disk"


def test_the_own_wheel_is_the_same_each_time_and_has_both_packages() -> None:
    first, second = own_wheel(), own_wheel()
    assert first.digest == second.digest
    assert any(text.startswith("msgpack") for text in first.requirements)
    assert not any("torch" in text for text in first.requirements)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["up", "dev", "--provider", "ssh"], "needs a host"),
        (["up", "dev", "--python", "python3"], "needs a host"),
        (["up", "ssh://gpu-box", "--provider", "local"], "Leave --provider out"),
        (["up", "ssh://gpu-box", "--image", "x"], "cannot have --image"),
        (["down", "gpu-box", "--provider", "local", "--keep-environment"], "workers over ssh"),
    ],
)
def test_options_that_do_not_fit_end_with_2(arguments: list[str], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert problem in " ".join(result.output.split())
