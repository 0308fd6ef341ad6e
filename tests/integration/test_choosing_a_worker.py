"""Which worker `sky:0` is, and whom a connection trusts: programs of their own, against a worker with TLS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from skyproxy.contexts import Context, ContextStore
from skyproxy.errors import AuthenticationError, ConnectError
from skyproxy.providers.worker_report import ask_worker

pytestmark = pytest.mark.timeout(200)

NAME = "w.team.svc"
TOKEN = "a-token-for-the-worker-with-a-certificate"


class Worker:
    """A worker whose certificate says NAME, on a loopback address."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        certificate = authority.issue_cert(NAME)
        certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
        certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text(TOKEN)
        port = folder / "port"
        command = [sys.executable, "-m", "skyproxy_server", "--port", "0", "--device", "cpu", "--port-file", str(port)]
        command += ["--token-file", str(self.token)]
        command += ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
        self.process = subprocess.Popen(command, env=environment())
        pause = threading.Event()
        while not port.exists():
            assert self.process.poll() is None
            pause.wait(0.02)
        self.url = f"wss://127.0.0.1:{port.read_text().strip()}"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item), **more}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"))
    yield made
    made.process.terminate()
    made.process.wait(30)


def python(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


USE = "import torch, skyproxy; torch.ones(2, device='sky').cpu(); print(skyproxy.devices()[0].source)"


def saved(folder: Path, worker: Worker, **changes: str) -> dict[str, str]:
    """A home where that worker is the current context."""
    options = {
        "url": worker.url,
        "token_file": str(worker.token),
        "certificate_file": str(worker.authority),
        "server_name": NAME,
        **changes,
    }
    ContextStore(folder / "skyproxy").save(Context("far", "remote", options))
    return {"XDG_CONFIG_HOME": str(folder)}


def test_nothing_chosen_is_an_embedded_worker(tmp_path: Path) -> None:
    assert python(USE, XDG_CONFIG_HOME=str(tmp_path)).startswith("embedded worker")


def test_a_saved_context_goes_before_the_embedded_worker(worker: Worker, tmp_path: Path) -> None:
    assert python(USE, **saved(tmp_path, worker)) == "saved context 'far' (remote)"
    assert python(USE, **saved(tmp_path, worker), SKYPROXY_CONTEXT="").startswith("embedded worker")


def test_the_environment_goes_before_a_saved_context(worker: Worker, tmp_path: Path) -> None:
    variables = {
        "SKYPROXY_URL": worker.url,
        "SKYPROXY_TOKEN": TOKEN,
        "SKYPROXY_CERTIFICATE": str(worker.authority),
        "SKYPROXY_SERVER_NAME": NAME,
    }
    assert python(USE, **saved(tmp_path, worker, url="wss://127.0.0.1:1"), **variables) == "SKYPROXY_URL"


def test_a_connection_of_ones_own_goes_before_everything(worker: Worker, tmp_path: Path) -> None:
    program = f"""
import pathlib, skyproxy, torch
ended = []
node = skyproxy.connect(
    {worker.url!r}, token={TOKEN!r}, certificate=pathlib.Path({str(worker.authority)!r}).read_text(),
    server_name={NAME!r}, on_close=lambda: ended.append(node.alive))
{USE}
assert ended == []
node.close()
node.close()
print(ended)
"""
    told = python(program, **saved(tmp_path, worker, url="wss://127.0.0.1:1"))
    assert told.splitlines() == ["skyproxy.connect", "[False]"]


REFUSALS = [
    ("server_name='other.team.svc'", "ConnectError"),
    ("server_name=None", "ConnectError"),
    ("certificate=None", "ConnectError"),
    ("certificate='no PEM'", "ConfigurationError"),
    ("ssl_context=ssl.create_default_context()", "ConfigurationError"),
    ("token='not-the-token-of-that-worker'", "AuthenticationError"),
]


def test_whom_one_does_not_trust_one_does_not_talk_to(worker: Worker) -> None:
    # One program for all: starting Python and torch takes most of the time.
    program = f"""
import pathlib, ssl, skyproxy
trusted = pathlib.Path({str(worker.authority)!r}).read_text()
for changes in {[changes for changes, _ in REFUSALS]!r}:
    given = dict(token={TOKEN!r}, certificate=trusted, server_name={NAME!r}) | eval(f"dict({{changes}})")
    try:
        skyproxy.connect({worker.url!r}, **given)
        print("connected")
    except skyproxy.errors.SkyproxyError as error:
        print(type(error).__name__)
"""
    assert python(program).splitlines() == [problem for _, problem in REFUSALS]


def test_a_worker_tells_what_it_does_to_those_with_the_token(worker: Worker) -> None:
    trusted = worker.authority.read_text()
    report = ask_worker(worker.url, TOKEN, certificate=trusted, server_name=NAME)
    assert {"sessions", "commands", "devices", "software"} <= report.keys()
    with pytest.raises(AuthenticationError):
        ask_worker(worker.url, "another-token-than-that", certificate=trusted, server_name=NAME)
    with pytest.raises(ConnectError, match="cannot be reached"):
        ask_worker(worker.url, TOKEN, certificate=trusted, server_name="other")
    with pytest.raises(ConnectError, match="cannot be reached"):
        ask_worker("ws://127.0.0.1:1", TOKEN)
