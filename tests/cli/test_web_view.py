"""`skyproxy ui` as a program: its link, what it shows, and its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyproxy_server.listener import Listener, serve
from tests.integration.programs import environment

TOKEN = "a-token-for-the-web-view-0123456789"


class Host:
    """A worker's host without torch, with a session of somebody."""

    def activity(self) -> dict[str, Any]:
        return {"sessions": 1, "commands": 5, "devices": [{"type": "cpu", "index": 0, "used_memory_bytes": 7}]}

    def session_rows(self, client: object = None) -> list[dict[str, Any]]:
        return [{"session": "01234567", "client": "token", "state": "idle", "commands": 5, "tensor_bytes": 3}]


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = serve("127.0.0.1", 0, TOKEN, Host())  # type: ignore[arg-type]
    yield made
    made.close()


def ask(url: str, method: str, key: str) -> Any:
    request = urllib.request.Request(url, method=method, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals on Windows")
def test_a_worker_at_a_url_is_shown_until_an_interrupt(listener: Listener, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyproxy.cli.main", "ui", f"ws://127.0.0.1:{listener.port}"]
    homes = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(**homes, SKYPROXY_TOKEN=TOKEN),
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            url, _, secret = program.stdout.readline().strip().partition("#")
            assert url.startswith("http://127.0.0.1:")
            assert "works once" in program.stderr.readline()
            key = ask(url + "enter", "POST", secret)["key"]
            assert program.stderr.readline().startswith("For another tab: http://127.0.0.1:")
            status: dict[str, Any] = {"workers": []}
            while not status["workers"]:  # the first look; the test's own limit bounds it
                status = ask(url + "status", "GET", key)
            assert status["workers"][0]["sessions"][0]["session"] == "01234567"
            assert status["program"] is None
            assert TOKEN not in json.dumps(status)
            program.send_signal(signal.SIGINT)
            assert program.wait(30) == 0
            assert program.stderr.read().strip() == ""
        finally:
            program.kill()


def test_a_wrong_token_is_told_at_once(listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong-0123456789abcdef\n")
    command = [sys.executable, "-m", "skyproxy.cli.main", "ui", f"ws://127.0.0.1:{listener.port}"]
    done = subprocess.run(
        [*command, "--token-file", str(tmp_path / "token")],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "refused the token" in done.stderr
    assert "Traceback" not in done.stderr
