"""`skyproxy serve --tls` on one machine and `skyproxy connect` on the other, as docs/howto/run-a-worker.md has them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from skyproxy.cli.identity import _self_signed, own_certificate, own_token
from skyproxy.contexts import ContextStore, connection_files, state_folder
from skyproxy.transport.trust import fingerprint_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(os.name != "posix", reason="homes are chosen by HOME")]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "run-a-worker.md").read_text(encoding="utf-8")
Run = Callable[..., Result]
START_SECONDS = 300.0


class Machine:
    """A home of its own, and where this may be had a network of its own."""

    def __init__(self, home: Path, prefix: tuple[str, ...] = ()) -> None:
        home.mkdir()
        self.home = home
        self._prefix = prefix
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SKYPROXY_", "KUBE"))}
        self._environment = kept | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_STATE_HOME": str(home / "state"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *(item for item in sys.path if item)]),
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        """A command line of the page, on this machine."""
        return subprocess.Popen(
            [*self._prefix, "sh", "-c", f"exec {line}"],
            env=self._environment,
            cwd=self.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, line: str, given: str = "") -> str:
        process = self.start(line)
        output, _ = process.communicate(given, timeout=START_SECONDS)
        assert process.returncode == 0, output
        return output


class Serving:
    """A worker that was started by a line of the page."""

    def __init__(self, machine: Machine, line: str) -> None:
        self.process = machine.start(line)
        self.output = ""
        self._invited = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "It asks for the token" in line:
                self._invited.set()
        self._invited.set()

    def invitation(self) -> tuple[str, Path]:
        """The command that it prints for the other machine, and the file that holds the token."""
        assert self._invited.wait(START_SECONDS)
        command = re.search(r"^ +(skyproxy connect \S+)$", self.output, re.MULTILINE)
        token = re.search(r"asks for the token: (.+)$", self.output, re.MULTILINE)
        assert command is not None, self.output
        assert token is not None, self.output
        return command[1], Path(token[1])

    def until(self, text: str) -> bool:
        """Waits until the worker has written a text; whether it did."""
        deadline = time.monotonic() + START_SECONDS
        while text not in self.output and time.monotonic() < deadline and self._reader.is_alive():
            self._reader.join(0.05)
        return text in self.output

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        self._reader.join(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def command_of_page(start: str) -> str:
    """The one line of a block of the page that begins like this."""
    (found,) = [line for line in PAGE.splitlines() if line.startswith(start)]
    return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Machine, Serving]]:
    machine = Machine(tmp_path / "gpu-machine")
    line = command_of_page("skyproxy serve --tls")
    started = Serving(machine, f"{line} --device cpu --port 0 --advertise 127.0.0.1")
    yield machine, started
    started.close()


def check_a_program(laptop: Machine, command: str, token: Path) -> None:
    """Connects as the page says, and lets a program compute there."""
    told = laptop.run(command, token.read_text())
    assert "sky:0 is now wss://" in told
    program = "import torch, skyproxy; print(torch.arange(4.0).to('sky:0').sum().item(), skyproxy.devices()[0].source)"
    assert "6.0 saved context 'remote' (remote)" in laptop.run(f'python -c "{program}"')


def test_two_commands_connect_two_machines(serving: tuple[Machine, Serving], tmp_path: Path) -> None:
    machine, worker = serving
    command, token = worker.invitation()
    laptop = Machine(tmp_path / "laptop")
    check_a_program(laptop, command, token)
    secret = token.read_text().strip()
    # Output that is no terminal is a log; arguments can be read by everybody.
    assert secret not in worker.output
    assert secret.encode() not in Path(f"/proc/{worker.process.pid}/cmdline").read_bytes()
    for kept in [path for home in (machine.home, laptop.home) for path in home.rglob("*") if path.is_file()]:
        if secret in kept.read_text(errors="replace"):
            assert stat.S_IMODE(kept.stat().st_mode) == 0o600, kept
    (saved,) = laptop.home.rglob("remote.json")
    assert secret not in saved.read_text()
    environment = laptop.run(command + " --env", secret)
    assert "export SKYPROXY_CERTIFICATE=sha256:" in environment
    assert secret not in environment
    laptop.run("skyproxy context remove remote")
    assert list(laptop.home.rglob("*.token")) == []


def test_a_wrong_certificate_and_a_wrong_token_end_with_5(
    serving: tuple[Machine, Serving], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker = serving
    command, token = worker.invitation()
    link = command.split()[-1]
    pinned = link.partition("#")[2]
    other = "sha256:" + ("1" if pinned[7] == "0" else "0") + pinned[8:]
    wrong = run("connect", link.replace(pinned, other), "--token-file", str(token))
    assert wrong.exit_code == 5, wrong.output
    assert pinned in wrong.output
    assert other in wrong.output
    false = token.parent / "false"
    false.write_text("false")
    assert run("connect", link, "--token-file", str(false)).exit_code == 5
    assert ContextStore().names() == []
    assert not connection_files("remote")[0].exists()


def test_a_renewed_certificate_is_told_and_pinned_anew_with_one_command(
    serving: tuple[Machine, Serving], tmp_path: Path
) -> None:
    _, worker = serving
    command, token = worker.invitation()
    laptop = Machine(tmp_path / "laptop")
    check_a_program(laptop, command, token)
    certificate = token.parent / "certificate.pem"
    renewed = certificate.with_name("renewed.pem")
    renewed.write_text(_self_signed())
    renewed.replace(certificate)
    pinned = fingerprint_of(certificate.read_text())
    with pytest.raises(AssertionError, match="the worker has a new certificate") as told:
        laptop.run("skyproxy connect remote")
    assert f"skyproxy connect NAME --certificate {pinned}" in str(told.value)
    # The worker's own log has it, so that nobody has to believe whoever answers.
    assert worker.until(f"its fingerprint is {pinned}")
    assert "sky:0 is now wss://" in laptop.run(f"skyproxy connect remote --certificate {pinned}")
    assert '"certificate": "sha256:' in next(laptop.home.rglob("remote.json")).read_text()
    assert "phase     Running" in laptop.run("skyproxy status remote")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["wss://127.0.0.1:1", "--certificate", "/no/such.pem"], "No such file"),
        (["wss://127.0.0.1:1", "--certificate", "{folder}/empty"], "holds no certificate"),
        (["wss://127.0.0.1:1", "--certificate", "-----BEGIN CERTIFICATE-----"], "complete PEM text"),
        (["wss://127.0.0.1:1", "--certificate", "sha256:12"], "64 hexadecimal digits"),
        (["wss://127.0.0.1:1", "--token-file", "{folder}/empty"], "is empty"),
        (["wss://127.0.0.1:1", "--token-file", "{folder}/binary"], "not plain text"),
        (["wss://127.0.0.1:1", "--token-file", "{folder}/two"], "more than a token"),
        (["wss://127.0.0.1:99999"], "cannot be read"),
        (["wss://"], "a host"),
        (["ws://192.0.2.1:8765"], "would not be encrypted"),
        (["nobody", "--certificate", "sha256:" + "0" * 64], "no saved worker"),
    ],
)
def test_files_and_arguments_are_looked_at_before_the_token_is_asked_for_and_the_network(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("skyproxy.transport.worker_report.socket.create_connection", asked)
    monkeypatch.setattr("skyproxy.cli.connecting.ask_for_token", asked)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "two").write_text("one\ntwo\n")
    result = run("connect", *(item.replace("{folder}", str(tmp_path)) for item in arguments))
    assert result.exit_code == (3 if "nobody" in arguments else 2), (result.output, result.exception)
    assert problem in result.output


def can_make_networks() -> bool:
    """Whether this user may make network namespaces; a container often does not let root either."""
    if sys.platform != "linux" or os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, timeout=30, check=False).returncode == 0


@pytest.fixture
def networks() -> Iterator[tuple[int, int]]:
    """Two processes, each in a network of its own, with a cable between: 10.77.0.1 and 10.77.0.2."""
    if not can_make_networks():
        pytest.skip("needs root, iproute2 and the right to make network namespaces")
    script = "echo ready; cat"
    holders = [
        subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        first, second = (holder.pid for holder in holders)
        inside = ["nsenter", "--net", "--target"]
        for command in (
            [*inside, f"{first}", "ip", "link", "add", "cable", "type", "veth", "peer", "cable", "netns", f"{second}"],
            [*inside, f"{first}", "ip", "address", "add", "10.77.0.1/24", "dev", "cable"],
            [*inside, f"{second}", "ip", "address", "add", "10.77.0.2/24", "dev", "cable"],
            *(
                [*inside, f"{pid}", "ip", "link", "set", name, "up"]
                for pid in (first, second)
                for name in ("cable", "lo")
            ),
            # The page's machines have a way to the world, by which `serve --tls` finds its own address.
            [*inside, f"{first}", "ip", "route", "add", "default", "via", "10.77.0.2"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                pytest.skip(f"no network between namespaces: {done.stderr.strip()}")
        yield first, second
    finally:
        for holder in holders:
            holder.communicate(timeout=30)


@pytest.mark.slow
def test_the_page_holds_literally_between_two_networks(networks: tuple[int, int], tmp_path: Path) -> None:
    there, here = (("nsenter", "--net", "--target", str(process_id)) for process_id in networks)
    worker = Serving(Machine(tmp_path / "gpu-machine", there), command_of_page("skyproxy serve --tls"))
    try:
        command, token = worker.invitation()
        assert command.startswith("skyproxy connect sky://10.77.0.1:8765#sha256:")
        check_a_program(Machine(tmp_path / "laptop", here), command, token)
    finally:
        worker.close()


def test_token_and_certificate_are_made_once_and_only_their_owner_can_read_them(home: Path) -> None:
    token, certificate = own_token(), own_certificate()
    before = token.read_text(), certificate.read_text()
    assert (own_token().read_text(), own_certificate().read_text()) == before
    assert fingerprint_of(before[1]).startswith("sha256:")
    for path in (token, certificate, token.parent):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tls", "--tls-cert", "pyproject.toml"], "Give one of them"),
        (["--advertise", "gpu-box"], "Add --tls"),
        (["--tls-key", "pyproject.toml"], "Give both"),
        (["--tls", "--port-file", "/no/such/folder/port"], "no such folder"),
    ],
)
def test_flags_that_contradict_each_other_end_with_2(
    run: Run, arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    result = run("serve", *arguments)
    assert result.exit_code == 2, result.output
    assert problem in result.output
    assert not own_files().exists()  # nothing is made for a worker that does not start


def own_files() -> Path:
    return state_folder() / "serving"


@pytest.mark.parametrize(
    "arguments", [["--host", "0.0.0.0"], ["--tls-cert", str(ROOT / "README.md")], ["--port", "{taken}"]]
)
def test_a_worker_that_cannot_listen_says_so_before_it_loads_torch_or_makes_a_token(
    tmp_path: Path, arguments: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [item.replace("{taken}", str(taken.getsockname()[1])) for item in arguments]
        program = (
            "import sys; sys.modules['torch'] = None; from skyproxy_server.__main__ import main; "
            f"sys.exit(main({given!r}))"
        )
        made = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
        )
    assert made.returncode == 2, made.stderr
    assert made.stderr.startswith("skyproxy_server: "), made.stderr
    assert "token was made" not in made.stderr


def test_an_empty_answer_to_the_question_for_the_token_ends_with_2(run: Run) -> None:
    result: Any = run("connect", "sky://127.0.0.1:1#sha256:" + "0" * 64)
    assert result.exit_code == 2, result.output
    assert "--token-file" in result.output
