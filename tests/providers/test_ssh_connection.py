"""Login shells of hosts that greet, refuse or wait: a script in place of ssh runs the command line here."""

from __future__ import annotations

import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from skyproxy.errors import ConnectError, WorkerStartError
from skyproxy.providers import ssh_connection, ssh_tunnel
from skyproxy.providers.ssh import SshWorker
from skyproxy.providers.ssh_connection import SshTarget
from skyproxy.providers.ssh_tunnel import Tunnel

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(os.name != "posix", reason="the shell is one of POSIX")]

ASKED = {"operation": "status", "name": "nobody"}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts in place of ssh a script: what a host's login shell does with the command line, which is `$command`."""

    def put(script: str) -> None:
        path = tmp_path / "bin" / "ssh"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nHOME={tmp_path}; export HOME\nfor command; do :; done\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    return put


@pytest.mark.parametrize(
    "greeting", ["echo Welcome", "printf 'Welcome '", "echo '{}'", "echo '*** maintenance' >&2", "printf 'a\\rb'"]
)
def test_what_a_profile_prints_is_no_answer(shell: Callable[[str], None], greeting: str) -> None:
    shell(f'{greeting}; exec sh -c "$command"')
    assert ssh_connection.call(SshTarget("gpu-box"), sys.executable, ASKED)["alive"] is False
    shell(f'{greeting}; exec sh -c "$command"')
    tunnel = Tunnel(SshTarget("gpu-box"), 1)
    tunnel.close()


@pytest.mark.parametrize("program", ["dash", "bash", "zsh", "fish", "tcsh", "csh", "ksh", "busybox sh"])
def test_any_login_shell_will_do(shell: Callable[[str], None], program: str) -> None:
    if shutil.which(program.split()[0]) is None:
        pytest.skip(f"{program} is not installed")
    shell(f'exec {program} -c "$command"')
    assert ssh_connection.call(SshTarget("gpu-box"), sys.executable, ASKED)["alive"] is False
    Tunnel(SshTarget("gpu-box"), 1).close()


def test_a_login_shell_that_refuses_says_so(shell: Callable[[str], None]) -> None:
    shell("echo 'This account is currently not available.'; exit 1")
    with pytest.raises(WorkerStartError, match=r"ended with 1\.\nThis account is currently not available"):
        ssh_connection.call(SshTarget("gpu-box"), sys.executable, ASKED)


def test_a_login_shell_that_waits_for_something_is_given_up(
    shell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_connection, "ANSWER_SECONDS", 1.0)
    shell("echo 'Choose: 1) work 2) play'; exec sleep 1000")
    with pytest.raises(ConnectError, match=r"gives no answer within 1 s.*ssh gpu-box true"):
        ssh_connection.call(SshTarget("gpu-box"), sys.executable, ASKED)


def test_a_home_that_cannot_be_written_is_told(shell: Callable[[str], None]) -> None:
    shell('HOME=/dev/null; exec sh -c "$command"')
    asked = {"operation": "start", "name": "x", "environment": "y"}
    with pytest.raises(WorkerStartError, match=r"its ~/\.cache cannot be written.*\n.*Not a directory: '/dev/null"):
        ssh_connection.call(SshTarget("gpu-box"), sys.executable, asked)


@pytest.mark.parametrize(
    "answer", ["7", "[]", "null", '"x"', "[[1]]", "[" * 100_000, "{}", '{"alive": 1, "there": true}']
)
def test_an_answer_of_no_workers_host_is_an_error_of_ours(shell: Callable[[str], None], answer: str) -> None:
    shell(f"cat >/dev/null; echo '{answer}'")
    worker = SshWorker("box", SshTarget("gpu-box"), sys.executable, "2026-01-01T00:00:00+00:00")
    with pytest.raises(ConnectError):
        worker.ask("status")


@pytest.mark.parametrize("port", ['"22"', "-1", "0", "65536", "1.5", "true", "[]", str(10**400)])
def test_a_port_that_cannot_be_is_no_port(shell: Callable[[str], None], port: str) -> None:
    shell(f"""cat >/dev/null; echo '{{"alive": true, "there": true, "port": {port}}}'""")
    worker = SshWorker("box", SshTarget("gpu-box"), sys.executable, "2026-01-01T00:00:00+00:00")
    with pytest.raises(ConnectError, match="gave no port"):
        worker.ask("status")


@pytest.mark.parametrize(
    "error", ["7", "[]", '{"error": 7}', '{"error": []}', '{"error": "removed"}', '{"error": "disk"}']
)
def test_an_error_without_words_is_an_error_of_ours(shell: Callable[[str], None], error: str) -> None:
    shell(f"cat >/dev/null; echo '{error}'")
    with pytest.raises((ConnectError, WorkerStartError)):
        SshWorker("box", SshTarget("gpu-box"), sys.executable, "2026-01-01T00:00:00+00:00").ask("look")


def test_a_host_that_writes_without_end_takes_no_memory(shell: Callable[[str], None]) -> None:
    flood = "head -c 60000000 /dev/zero"
    shell(f'{flood} >&2; {flood}; echo; exec sh -c "$command"')
    tracemalloc.start()
    try:
        assert ssh_connection.call(SshTarget("gpu-box"), sys.executable, ASKED)["alive"] is False
        shell(f"{flood}; exit 255")
        with pytest.raises(ConnectError):
            Tunnel(SshTarget("gpu-box"), 1)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_a_host_that_floods_the_errors_keeps_no_tunnel_from_being_opened(
    shell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_tunnel, "ANSWER_SECONDS", 20.0)
    shell('head -c 60000000 /dev/zero >&2; exec sh -c "$command"')
    tracemalloc.start()
    try:
        tunnel = Tunnel(SshTarget("gpu-box"), 1)
        tunnel.check()
        tunnel.close()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_what_ssh_says_of_a_taken_port_is_seen_in_front_of_a_flood(
    shell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_tunnel.Tunnel, "_ATTEMPTS", 1)
    find = 'for port; do case "$port" in 127.0.0.1:*) port=${port#*:}; break;; esac; done'
    told = 'echo "channel_setup_fwd: cannot listen to port: ${port%%:*}" >&2'
    shell(f'{find}; {told}; yes "without an end" >&2 & sh -c "$command"; kill $!')
    with pytest.raises(ConnectError, match="it is taken"):
        Tunnel(SshTarget("gpu-box"), 1)


def test_no_keys_of_an_agent_and_no_screen_are_lent_to_a_host(shell: Callable[[str], None]) -> None:
    shell("exit 0")
    command = SshTarget("gpu-box").command()
    assert "ForwardAgent=no" in command
    assert "ForwardX11=no" in command
