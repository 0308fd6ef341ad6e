"""The Hub's token: set, checked against a Hub on this machine, never shown."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import skyproxy as sky

pytest.importorskip("huggingface_hub")

GOOD = "hf_good_token_of_a_test"
PROGRAM = """
import os, sys
from skyproxy.runtime import InstanceInfo
from skyproxy.runtime.lifecycle import LIFECYCLE
import skyproxy as sky
LIFECYCLE.open([sky.plugins.huggingface(token=sys.argv[1])], InstanceInfo(job="pool/1"))
print("set:", os.environ["HF_TOKEN"] == sys.argv[1])
LIFECYCLE.close()
print("left:", "HF_TOKEN" not in os.environ)
"""


class Hub(BaseHTTPRequestHandler):
    """Knows one token."""

    def do_GET(self) -> None:
        known = self.headers.get("authorization") == f"Bearer {GOOD}"
        body = json.dumps({"name": "somebody", "type": "user"} if known else {"error": "Invalid credentials"}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(30)
    server.server_close()


def logged_in(token: str, endpoint: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: huggingface_hub reads its endpoint when it is imported.
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    environment |= {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, token],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )


def test_a_token_that_the_hub_knows_is_set_while_the_pool_lives(hub: str) -> None:
    done = logged_in(GOOD, hub)
    assert done.stdout == "set: True\nleft: True\n", done.stderr


def test_a_token_that_the_hub_refuses_ends_the_start_and_is_not_shown(hub: str) -> None:
    done = logged_in("hf_wrong_token", hub)
    assert done.returncode == 1
    assert "plugin 'huggingface', around_process, rank 0 of 1: PermissionError" in done.stderr
    assert "https://huggingface.co/settings/tokens" in done.stderr
    assert "hf_wrong_token" not in done.stderr + done.stdout


def test_a_hub_that_is_away_is_no_error() -> None:
    done = logged_in(GOOD, "http://127.0.0.1:9")
    assert done.stdout == "set: True\nleft: True\n", done.stderr
    assert GOOD not in done.stderr


def test_the_token_travels_with_the_plugin() -> None:
    assert pickle.loads(pickle.dumps(sky.plugins.huggingface(token=GOOD))).token == GOOD
