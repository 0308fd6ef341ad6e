"""The web view in a headless Chromium: what it shows of a program, and that nothing it shows can do anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyproxy.webview.server import PageServer
from tests.integration.programs import environment, wait_for
from tests.webview import training
from tests.webview.browser import BROWSER, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here; Debian: apt-get install chromium"),
]
HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=2</script>\"'><svg onload=window.hit=3>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


def test_a_program_that_trains_is_seen(browser: Browser) -> None:
    command = [sys.executable, "-u", training.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        try:
            link = program.stdout.readline().strip()
            with browser.page(link) as page:
                assert program.stdout.readline() == "ready\n"
                page.wait_for_text("sessions", "token (127.0.0.1)")
                lines = Path(training.__file__).read_text().splitlines()
                mark = next(number for number, line in enumerate(lines, 1) if line.endswith("# MARK"))
                page.wait_for_text("errors", f"training.py:{mark} in main")
                assert "IndexError: index 999 is out of bounds" in page.text("errors")
                assert "aten::index.Tensor" in page.text("errors")
                page.wait_for_text("pools", "squares")
                assert page.value("document.querySelectorAll('#pools tr').length") == 3
                page.wait_for_text("jobs", "succeeded")
                assert page.text("job-logs") == "counting: one\ncounting: two"
                page.wait_for_text("profile-note", "longest of")
                assert page.value("document.querySelectorAll('#profile rect').length") > 10
                program.stdin.write("more\n")
                program.stdin.flush()
                points = "document.querySelector('#ops polyline').getAttribute('points').split(' ').length"
                wait_for(lambda: page.value(points) > 2, "the plot grows", 60)
                assert "MiB" in page.text("memory-now") or "GiB" in page.text("memory-now")
                assert "listening on 127.0.0.1" in page.text("log")
                assert page.value("location.hash") == ""
                # The key is the tab's: it goes on after a reload, and the link is worth nothing to another one.
                page.command("Page.reload")
                page.wait_for_text("state", "read at")
            with browser.page(link) as other:
                other.wait_for_text("state", "already used")
                assert other.text("sessions") == ""
        finally:
            program.kill()


def hostile_status() -> dict[str, Any]:
    place = {"sequence": 1, "position": 2, "graph": 0}
    row = {
        "session": HOSTILE,
        "client": HOSTILE,
        "address": HOSTILE,
        "state": HOSTILE,
        "seconds": HOSTILE,
        "commands": HOSTILE,
        "running": {"op": HOSTILE},
        "calls": [{"name": HOSTILE, "seconds": 1}],
        "failures": [{"at": 1.0, "type": HOSTILE, "message": HOSTILE, "op": HOSTILE, **place}],
    }
    devices = [{"type": HOSTILE, "index": HOSTILE, "used_memory_bytes": 1}]
    worker = {"devices": devices, "software": {"torch": HOSTILE}}
    error = {"at": 1.0, "session": HOSTILE, "message": HOSTILE, "op": HOSTILE, "line": HOSTILE, **place}
    job = {"name": HOSTILE, "client": HOSTILE, "state": HOSTILE, "exit_code": HOSTILE, "tail": [HOSTILE]}
    rank = {"rank": HOSTILE, "worker": HOSTILE, "state": HOSTILE, "busy": HOSTILE}
    profile = {"at": 1.0, "total": 10.0, "shown": HOSTILE, "all": HOSTILE}
    return {
        "at": 1.0,
        "title": HOSTILE,
        "history": [(1.0, 1.0, 1.0, 1.0, 1.0)],
        "workers": [
            {"name": HOSTILE, "problem": HOSTILE, "worker": worker, "sessions": [row], "jobs": [job], "log": [HOSTILE]}
        ],
        "program": {
            "sessions": [{"session": HOSTILE, "line": HOSTILE, "queued_batches": HOSTILE, "queued_bytes": HOSTILE}],
            "errors": [error],
            "pools": [{"name": HOSTILE, "waiting": HOSTILE, "ranks": [rank]}],
            "profile": {**profile, "rows": [{"name": HOSTILE, "spans": [[0.0, 5.0, HOSTILE]]}]},
        },
    }


def test_what_others_wrote_is_text_wherever_it_is_shown(browser: Browser) -> None:
    server = PageServer(hostile_status)
    server.start()
    try:
        with browser.page(server.link()) as page:
            page.wait_for_text("errors", HOSTILE)
            for identity in (
                "title",
                "workers",
                "sessions",
                "calls",
                "jobs",
                "job-logs",
                "pools",
                "profile-note",
                "log",
            ):
                assert HOSTILE in page.text(identity), identity
            assert page.value("document.querySelectorAll('main img, main script, [onload], [onerror]').length") == 0
            assert page.value("window.hit === undefined")
            # Even a page that forgot itself could not: the policy refuses what would run or load something.
            for attempt in (
                "document.body.innerHTML = '<b>x</b>'",
                "document.createElement('script').text = 'window.hit = 4'",
                "eval('window.hit = 5')",
            ):
                refused = f"try {{ {attempt}; 'made' }} catch (error) {{ error.name }}"
                assert page.value(refused) in ("TypeError", "EvalError"), attempt
            page.value(
                "document.addEventListener('securitypolicyviolation', (event) => { window.refused = "
                "event.violatedDirective; }); fetch('http://127.0.0.1:9/').catch(() => 0); 0"
            )
            wait_for(lambda: page.value("window.refused || ''") == "connect-src", "the foreign request is refused", 60)
            assert page.value("window.hit === undefined")
    finally:
        server.close()


def test_a_workers_own_page_wants_its_token(browser: Browser) -> None:
    from skyproxy.settings import Settings
    from skyproxy_server.listener import serve
    from skyproxy_server.worker_host import WorkerHost

    token = "a-token-for-the-page-0123456789"
    host = WorkerHost([{"type": "cpu", "index": 0, "name": "cpu"}])
    settings = Settings(close_timeout_seconds=0.3)
    listener = serve("127.0.0.1", 0, token, host, settings=settings, has_page=True)
    try:
        with browser.page(f"http://127.0.0.1:{listener.port}/ui/") as page:
            page.wait_for_text("state", "Enter the worker's token.")
            for given, shown in (("wrong", "The token was refused."), (token, "read at")):
                page.value(f"document.getElementById('token').value = {given!r}; 0")
                page.value("document.querySelector('form').requestSubmit()")
                page.wait_for_text("state", shown)
            page.wait_for_text("workers", "cpu:0")
            assert page.text("sessions") == "No session."
            assert page.value("location.href").endswith("/ui/")
            assert page.value("document.cookie") == ""
    finally:
        listener.close()
