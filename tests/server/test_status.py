"""What the web view is told, and who is told what."""

from __future__ import annotations

import json
import logging
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.settings import Settings
from skyproxy_server import program_log
from skyproxy_server.auth import Identity
from skyproxy_server.listener import Listener, serve
from skyproxy_server.status import MAX_FAILURES, MAX_TEXT, checked_row, status_report
from skyproxy_server.tokens import Tokens
from skyproxy_server.worker_host import WorkerHost
from tests.integration.programs import wait_for

CODE = "code-0123456789abcdef0123456789"
MATH = "math-0123456789abcdef0123456789"
PROBE = "probe-0123456789abcdef012345678"
CPU = {"type": "cpu", "index": 0, "name": "cpu"}
SETTINGS = Settings(close_timeout_seconds=0.3)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    tokens = {
        "coder": CODE,
        "math": f"{MATH}\nscopes: operations",
        "probe": f"{PROBE}\nscopes: admin",
    }
    for name, text in tokens.items():
        (tmp_path / name).write_text(text + "\n")
        (tmp_path / name).chmod(0o600)
    host = WorkerHost([CPU], SETTINGS, functions=True)
    made = serve("127.0.0.1", 0, Tokens(tmp_path), host, settings=SETTINGS, has_page=True)
    yield made
    made.close()


def get(listener: Listener, path: str, token: str | None = None) -> tuple[int, str, dict[str, str]]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{listener.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def status(listener: Listener, token: str) -> dict[str, Any]:
    code, body, _ = get(listener, "/status", token)
    assert code == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def is_idle(row: dict[str, Any]) -> dict[str, Any] | None:
    return row if row["state"] == "idle" else None


def test_strangers_are_told_nothing(listener: Listener) -> None:
    for token in (None, "wrong"):
        code, body, _ = get(listener, "/status", token)
        assert (code, body) == (401, "wrong token\n")


def test_a_client_sees_its_own_sessions_and_whoever_runs_the_worker_sees_all(listener: Listener) -> None:
    url = f"ws://127.0.0.1:{listener.port}"
    with skyproxy.connect(url, token=CODE) as coder, skyproxy.connect(url, token=MATH) as mathematician:
        for node in (coder, mathematician):
            torch.ones(4, device=node.device("cpu")).sum().item()
        own = status(listener, MATH)
        assert [row["client"] for row in own["sessions"]] == ["math"]
        assert (own["is_admin"], own["worker"], own["log"]) == (False, {}, [])
        assert coder._session.welcome.session[:8] not in json.dumps(own)
        everything = status(listener, PROBE)
        assert sorted(row["client"] for row in everything["sessions"]) == ["coder", "math"]
        assert everything["worker"]["sessions"] == 2
        assert mathematician.worker_status()["sessions"][0]["client"] == "math"


def test_a_session_is_described_by_its_counters(listener: Listener) -> None:
    with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=CODE) as node:
        x = torch.ones(1000, device=node.device("cpu"))
        y = x.view(10, 100)
        broken = torch.ones(2, device=node.device("cpu"))[torch.tensor([7]).to(node.device("cpu")) + 0]
        with pytest.raises(IndexError):
            broken.sum().item()
        # The last value is here before the worker is done with what came behind it.
        row = wait_for(lambda: is_idle(status(listener, CODE)["sessions"][0]), "the session is idle")
        assert row["session"] == node._session.welcome.session[:8]
        assert row["running"] == {}
        assert row["commands"] > 0
        assert 4000 <= row["tensor_bytes"] < 8000  # x and y share a storage
        assert row["tensors"] >= 2
        assert row["bytes_received"] > 0 < row["bytes_sent"]
        failure = row["failures"][-1]
        assert failure["type"] == "IndexError"
        assert failure["op"] == "aten::index.Tensor"
        known = node._session.recent_errors[-1]
        assert (known["sequence"], known["position"]) == (failure["sequence"], failure["position"])
        assert f"{Path(__file__).name}:" in known["line"]
        assert y.shape == (10, 100)


def test_an_error_that_is_raised_again_is_shown_once(listener: Listener) -> None:
    with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=CODE) as node:
        broken = torch.ones(2, device=node.device("cpu"))[torch.tensor([7]).to(node.device("cpu")) + 0]
        for _ in range(3):
            with pytest.raises(IndexError):
                broken.sum().item()
        places = [(row["sequence"], row["position"]) for row in node._session.recent_errors]
        assert len(places) == len(set(places))


def test_a_function_that_runs_is_named(listener: Listener) -> None:
    def waits(folder: str) -> None:
        import pathlib
        import time

        pathlib.Path(folder, "begun").touch()
        while not pathlib.Path(folder, "go").exists():
            time.sleep(0.01)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=CODE, trust_worker=True) as node:
            future = node.submit(waits, folder)
            try:
                calls = wait_for(lambda: status(listener, CODE)["sessions"][0]["calls"], "the function is shown")
                assert "waits" in calls[0]["name"]
            finally:
                Path(folder, "go").touch()
            future.result(30)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_served_where_it_was_asked_for_and_holds_nothing(listener: Listener) -> None:
    code, body, headers = get(listener, "/ui/")
    assert code == 200
    assert "<title>skyproxy</title>" in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert get(listener, "/ui/page.js")[2]["Content-Type"] == "text/javascript; charset=utf-8"
    assert get(listener, "/ui")[1] == body  # by way of a redirection
    for path in ("/ui/../status", "/ui/nothing", "/ui/static/page.js", "/ui/%2e%2e/status", "/uix", "//ui/"):
        assert get(listener, path)[0] == 401, path


def test_a_worker_has_no_page_by_default() -> None:
    host = WorkerHost([CPU], SETTINGS)
    listener = serve("127.0.0.1", 0, CODE, host, settings=SETTINGS)
    try:
        assert get(listener, "/ui/")[0] == 401
    finally:
        listener.close()


# --- what a session's own process says -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        None,
        7,
        [],
        {"state": ["running"], "commands": "many", "seconds": math.inf, "failures": {}, "calls": 3, "running": "x"},
        {"session": "another", "client": "owner", "address": "1.2.3.4", "commands": -5, "tensors": 1 << 70},
    ],
)
def test_a_process_that_lies_changes_no_names_and_no_shape(said: object) -> None:
    row = checked_row(said, "0123456789", Identity("math", address="127.0.0.1"))
    assert (row["session"], row["client"], row["address"], row["state"]) == ("01234567", "math", "127.0.0.1", "busy")
    assert (row["commands"], row["tensors"], row["seconds"]) == (0, 0, 0)
    assert (row["running"], row["calls"], row["failures"]) == ({}, [], [])


def test_what_a_process_says_is_bounded() -> None:
    said = {
        "state": "running",
        "failures": [{"message": "x" * 10_000, "at": 1.0, "unknown": 1}] * 1000,
        "running": {"op": "y" * 10_000, "position": 3, "secret": "z"},
    }
    row = checked_row(said, "0", Identity("math"))
    assert len(row["failures"]) == MAX_FAILURES
    assert row["failures"][0] == {"message": "x" * MAX_TEXT, "at": 1.0}
    assert row["running"] == {"op": "y" * MAX_TEXT, "position": 3}


def test_the_log_is_for_whoever_runs_the_worker() -> None:
    program_log.LOG_TAIL.clear()
    program_log.log_to_stderr("INFO")
    for number in range(300):
        logging.getLogger("skyproxy.server").info(f"line {number} \x1b[2J" + "x" * 1000)
    lines = status_report(Identity("owner"), dict, lambda client: [])["log"]
    program_log.LOG_TAIL.clear()
    assert len(lines) == 100
    assert "line 299" in lines[-1]
    assert max(map(len, lines)) <= 300
    assert "\x1b" not in "".join(lines)
