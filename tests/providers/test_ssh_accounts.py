"""Two accounts on one host, with one client: each has a worker of its own, and neither notices the other one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.providers.ssh import find
from tests.integration.programs import wait_for
from tests.providers.test_ssh import SSHD, Host, answers, keys, python, run, slow_through_sshd, state

__all__ = ["state"]
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="accounts are made in a mount namespace of the test's own: needs root and unshare",
    ),
]
NAMES = ("alice", "bob")
WHERE = """
import torch, skyproxy, os
x = torch.arange(4.0, device="sky")
print(x.sum().item(), skyproxy.devices()[0].source, skyproxy.list_nodes()[0].run(os.getenv, "HOME"))
"""


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """An sshd that knows two accounts which this machine does not, each with a home of its own.

    Both have the user id of the test, for the checkout's environment need not be readable by another one.
    """
    folder = tmp_path_factory.mktemp("accounts")
    Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's sshd goes before somebody has logged in
    users = folder / "passwd"
    lines = [f"{name}:*:{os.getuid()}:{os.getgid()}::{folder / name}:/bin/sh\n" for name in NAMES]
    users.write_text("".join(lines) + Path("/etc/passwd").read_text())
    host_key, user_key = keys(folder, "host"), keys(folder, "user")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = folder / "sshd_config"
    settings.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {user_key}.pub\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin yes\nMaxStartups 100\n"
    )
    start = f"mount --bind {users} /etc/passwd && exec {SSHD} -D -e -f {settings}"
    with (folder / "sshd.log").open("wb") as log:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", start]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
    try:
        wait_for(functools.partial(answers, process, port), "sshd listens")
        if process.poll() is not None:
            pytest.skip("sshd does not start here: " + (folder / "sshd.log").read_text(errors="replace"))
        (folder / "known_hosts").write_text("gpu-box " + host_key.with_suffix(".pub").read_text())
        config = folder / "config"
        config.write_text(
            f"Host gpu-box\n  HostName 127.0.0.1\n  Port {port}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {folder / 'known_hosts'}\n  GlobalKnownHostsFile none\n"
            f"  StrictHostKeyChecking yes\n  HostKeyAlias gpu-box\n  IdentityFile {user_key}\n"
        )
        for name in NAMES:
            (folder / name).mkdir()
        yield {name: Host(folder / name, config) for name in NAMES}
    finally:
        process.terminate()
        process.wait(60)


@slow_through_sshd
def test_two_accounts_of_one_host_have_a_worker_each(accounts: dict[str, Host]) -> None:
    try:
        for name, host in accounts.items():
            given = ["up", f"ssh://{name}@gpu-box", "--name", f"of-{name}", "--ssh-config", str(host.config)]
            made = run(*given, "--python", sys.executable, "--gpus", "0", "--env", "PIP_NO_INDEX=1")
            assert made.exit_code == 0, made.output
            assert python(WHERE) == f"6.0 saved context 'of-{name}' (ssh) {host.home}\n"
        rows = {row["name"]: row["ready"] for row in json.loads(run("list", "--json").stdout)}
        assert rows == {"of-alice": True, "of-bob": True}

        ended = run("down", "of-alice")
        assert ended.exit_code == 0, ended.output
        assert accounts["alice"].files() == []
        assert python(WHERE) == f"6.0 saved context 'of-bob' (ssh) {accounts['bob'].home}\n"
    finally:
        for name, host in accounts.items():
            worker = find(f"of-{name}")
            if worker is not None:
                worker.stop()
            assert host.files() == []


@slow_through_sshd
def test_a_second_account_under_the_name_of_the_first_is_told_so(accounts: dict[str, Host]) -> None:
    given = ["--ssh-config", str(accounts["alice"].config), "--python", sys.executable, "--gpus", "0"]
    given += ["--env", "PIP_NO_INDEX=1"]
    try:
        made = run("up", "ssh://alice@gpu-box", *given)
        assert made.exit_code == 0, made.output
        other = run("up", "ssh://bob@gpu-box", *given)
        assert other.exit_code != 0
        assert "alice@gpu-box" in other.output
        assert "--name" in other.output
        assert accounts["bob"].files() == []
    finally:
        worker = find("gpu-box")
        if worker is not None:
            worker.stop()
