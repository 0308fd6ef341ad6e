"""The worker's program as a process: its token, its signals, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyproxy.errors import AuthenticationError
from skyproxy.jobs.job import Job
from skyproxy.jobs.link import JobLink, jobs_hello, send_job
from skyproxy.protocol.messages import Ack, Batch, Hello, Sequence
from skyproxy.settings import Settings
from skyproxy.transport.websocket import WebSocketTransport, connect_websocket
from skyproxy_server.__main__ import main
from tests.server.jobs.programs import LONG, payload_of

pytestmark = pytest.mark.timeout(60)

TOKEN = "a-token-that-nobody-should-see-anywhere"
FAST = Settings(close_timeout_seconds=0.3)

# The real program with an echo in place of torch, which would take seconds to load.
PROGRAM = """
import sys, types
from skyproxy.errors import SessionLostError
from skyproxy.protocol.messages import Ack, Welcome
import skyproxy_server.__main__ as program

class Session:
    def __init__(self, transport):
        self.transport = transport
        self.welcome = Welcome(0, "s", {}, [], {})
    def run(self):
        try:
            while True:
                self.transport.send(Ack(self.transport.recv().sequence))
        except SessionLostError:
            pass

class WorkerHost:
    def __init__(self, devices, settings, blobs, functions, snapshots):
        self.devices = devices
    def open_session(self, hello, transport):
        return Session(transport)
    def close(self):
        pass
    def keep_names(self):
        pass
    def activity(self):
        return {}

fake = types.ModuleType("skyproxy_server.worker_host")
fake.WorkerHost = WorkerHost
sys.modules[fake.__name__] = fake
program.inventory = lambda choice: [{"type": choice, "index": 0, "name": "fake"}]
sys.exit(program.main(sys.argv[1:]))
"""


@contextmanager
def program(*arguments: str, token: str | None = None, stdin: int | None = None) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "SKYPROXY_TOKEN"}
    environment["PYTHONPATH"] = os.pathsep.join(item for item in sys.path if item)
    if token is not None:
        environment["SKYPROXY_TOKEN"] = token
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--port", "0", *arguments],
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_with(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern!r} did not come; instead:\n{seen}")


def use(port: int, token: str = TOKEN) -> WebSocketTransport:
    hello = Hello([1], "operations", "", {})
    transport, _ = connect_websocket(f"ws://127.0.0.1:{port}", token, hello, settings=FAST)
    transport.send(Batch(Sequence(1), []))
    assert transport.recv(5) == Ack(Sequence(1))
    return transport


@contextmanager
def embedded() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with program("--embedded", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(TOKEN + "\n")
        process.stdin.flush()
        yield process, json.loads(process.stdout.readline())["port"]


def test_embedded_life_is_tied_to_stdin() -> None:
    with embedded() as (process, port):
        use(port).close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(40) == 0


def test_an_embedded_worker_leaves_no_folder_of_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with embedded() as (process, port):
        with JobLink(
            lambda timeout_seconds=None: connect_websocket(f"ws://127.0.0.1:{port}", TOKEN, jobs_hello())[0]
        ) as link:
            send_job(link, {"name": "mine", "kind": "script", "title": "t"}, payload_of(tmp_path, LONG))
        assert list((tmp_path / "temporary").iterdir()) != []
        assert process.stdin is not None
        process.stdin.close()
        process.wait(40)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_embedded_outlives_the_ctrl_c_that_its_client_got() -> None:
    with embedded() as (process, port):
        process.send_signal(signal.SIGINT)
        use(port).close()
        assert process.poll() is None


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_order(number: signal.Signals) -> None:
    with program(token=TOKEN) as process:
        port = int(line_with(process, r"listening on .* port (\d+)")[1])
        transport = use(port)
        process.send_signal(number)
        with pytest.raises(ConnectionError, match="shutting down"):
            transport.recv(10)
        transport.close()
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


SPOT = """
import signal, sys, time
import skyproxy
place = skyproxy.checkpoint_dir() / "saved"
if place.exists():
    print("again", skyproxy.restart_count(), place.read_text())
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: (place.write_text("state"), sys.exit(143)))
print("begun", flush=True)
time.sleep(600)
"""


def job_of(process: subprocess.Popen[str]) -> Job:
    port = int(line_with(process, r"listening on .* port (\d+)")[1])
    return Job(
        "spot", [lambda timeout_seconds=None: connect_websocket(f"ws://127.0.0.1:{port}", TOKEN, jobs_hello())[0]]
    )


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_job_saves_its_state_when_its_machine_is_taken_away_and_goes_on_with_the_next_worker(tmp_path: Path) -> None:
    with program("--jobs", str(tmp_path / "jobs"), token=TOKEN) as process:
        job = job_of(process)
        with JobLink(job._nodes[0]) as link:
            send_job(link, {"name": "spot", "kind": "script", "title": "spot"}, payload_of(tmp_path, SPOT))
        assert next(job.logs(follow=True)) == "begun"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with program("--jobs", str(tmp_path / "jobs"), token=TOKEN) as process:
        job = job_of(process)
        status = job.wait(50)
        assert (status.state, status.preemptions, status.restarts) == ("succeeded", 1, 0)
        assert list(job.logs())[-1] == "again 1 state"


def test_the_token_is_in_neither_arguments_nor_output(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    with program("--token-file", str(path), "--log-level", "debug") as process:
        port = int(line_with(process, r"listening on .* port (\d+)")[1])
        use(port).close()
        with pytest.raises(AuthenticationError):
            use(port, "wrong")
        arguments = Path(f"/proc/{process.pid}/cmdline")
        if arguments.exists():
            assert TOKEN.encode() not in arguments.read_bytes()
        process.kill()
        assert process.stderr is not None
        assert TOKEN not in process.stderr.read()


@pytest.mark.skipif(os.name != "posix", reason="POSIX file modes and signals")
def test_without_a_token_one_is_made_in_a_file() -> None:
    with program() as process:
        path = Path(line_with(process, r"Clients find it in: (.*)$")[1])
        port = int(line_with(process, r"listening on .* port (\d+)")[1])
        assert path.stat().st_mode & 0o777 == 0o600
        use(port, path.read_text().strip()).close()
        process.terminate()
        assert process.wait(10) == 0
    assert not path.exists()


def test_a_dead_stdin_is_no_token() -> None:
    with program("--embedded") as process:
        assert process.wait(10) == 2
        assert process.stderr is not None
        assert "holds no token" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "seventy"], "'seventy' is not a port"),
        (["--port", "70000"], "not a port"),
        (["--device", "tpu"], "tpu"),
        (["--token", TOKEN], "unrecognized arguments"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_help_tells_where_the_token_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "SKYPROXY_TOKEN" in text
    assert "--insecure" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--tls-key", "some.key"], "without --tls-cert"),
        (["--tls-cert", "no-such.pem"], "no-such.pem"),
        (["--token-file", "no-such-token"], "no-such-token"),
    ],
)
def test_what_cannot_work_ends_with_2(arguments: list[str], problem: str) -> None:
    with program(*arguments, token=TOKEN) as process:
        assert process.wait(20) == 2
        assert process.stderr is not None
        text = process.stderr.read()
    assert problem in text
    assert "Traceback" not in text
