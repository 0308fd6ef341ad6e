"""Plugins that make credentials: what they say, and that none outlives its time."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes import credential_plugin as module
from skyproxy.kubernetes.credential_plugin import make_credentials

pytestmark = pytest.mark.timeout(60)
VERSION = "client.authentication.k8s.io/v1"


def plugin(script: str, *arguments: str, **more: Any) -> dict[str, Any]:
    """A plugin in Python; `answer` says something in the form of one."""
    head = f"""
    import json, os, sys, time
    def answer(version={VERSION!r}, **status):
        print(json.dumps({{"apiVersion": version, "kind": "ExecCredential", "status": status}}), flush=True)
    """
    text = textwrap.dedent(head) + textwrap.dedent(script)
    return {"apiVersion": VERSION, "command": sys.executable, "args": ["-c", text, *arguments], **more}


def make(row: dict[str, Any]) -> dict[str, str]:
    return asyncio.run(make_credentials(row))


def test_a_token_and_a_certificate_stand_in_the_place_of_the_plugin() -> None:
    assert make(plugin("answer(token='t', expirationTimestamp='2030-01-01T00:00:00Z')")) == {"token": "t"}
    found = make(plugin("answer(clientCertificateData='certificate', clientKeyData='key')"))
    assert {name: base64.b64decode(value) for name, value in found.items()} == {
        "client-certificate-data": b"certificate",
        "client-key-data": b"key",
    }


def test_a_plugin_gets_its_variables_and_arguments_and_is_told_what_it_is_for() -> None:
    script = "answer(token=json.dumps([os.environ['A'], sys.argv[1:], json.loads(os.environ['KUBERNETES_EXEC_INFO'])]))"
    row = plugin(script, "b", "c", env=[{"name": "A", "value": "a"}], interactiveMode="Never")
    variable, arguments, told = json.loads(make(row)["token"])
    assert (variable, arguments) == ("a", ["b", "c"])
    assert told == {"apiVersion": VERSION, "kind": "ExecCredential", "spec": {"interactive": False}}


def test_what_it_says_to_people_is_shown_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on once its words were shown: a login by a code that nobody sees would never end."""
    seen = tmp_path / "seen"

    class Terminal:
        def write(self, text: str) -> None:
            if "enter the code" in text:
                seen.touch()

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Terminal())
    script = """
    print("enter the code", file=sys.stderr, flush=True)
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    answer(token="t")
    """
    assert make(plugin(script, str(seen))) == {"token": "t"}


def test_much_on_both_streams_blocks_nothing() -> None:
    assert make(plugin("sys.stderr.write('x' * 300_000); answer(token='t' * 300_000)")) == {"token": "t" * 300_000}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (plugin("sys.exit('log in first')"), "ended with status 1: log in first"),
        (plugin("print('<html>')"), "did not answer with an ExecCredential"),
        (plugin("answer()"), "did not answer with an ExecCredential"),
        (plugin("answer(clientCertificateData='only that')"), "did not answer with an ExecCredential"),
        (plugin("print('[]')"), "did not answer with an ExecCredential"),
        (plugin("print('[' * 5000)"), "did not answer with an ExecCredential"),
        (plugin("answer('client.authentication.k8s.io/v1beta1', token='t')"), "speaks .*v1beta1, and not"),
        (plugin("while True: print('x' * 100_000)"), "writes without end"),
        ({"apiVersion": VERSION, "command": "no-such-plugin", "installHint": "Get it\nhere."}, "Get it here."),
        ({"apiVersion": VERSION}, "needs apiVersion and command"),
        ({"apiVersion": VERSION, "command": "x", "args": "y"}, "args and env are lists"),
    ],
)
def test_a_plugin_that_is_of_no_use_says_why(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make(row)


FORKS = """
child = os.fork()
if child == 0:
    time.sleep(1000)
open(sys.argv[1], "w").write(f"{os.getpid()} {child}")
time.sleep(1000)
"""


def ends(path: Path) -> None:
    """Wait until both processes that a file names are gone, or are nobody's any more."""
    for number in path.read_text().split():
        status = Path("/proc", number, "status")
        while status.exists() and "State:\tZ" not in status.read_text():
            threading.Event().wait(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_plugin_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.5)
    pids = tmp_path / "pids"
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ConfigurationError, match=r"has not answered for 2 s\. Run it"),
    ):
        make(plugin(FORKS, str(pids)))
    assert "waiting for the credential plugin" in caplog.text
    ends(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_plugin_ends_with_the_one_who_waits_for_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def work() -> None:
        task = asyncio.create_task(make_credentials(plugin(FORKS, str(pids))))
        while not pids.exists() or len(pids.read_text().split()) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    ends(pids)
