"""What a hostile worker, or a neighbour in a cluster, can do to who types commands."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from skyproxy.cli import connecting, sessions
from skyproxy.cli.fleet import WorkerAccess
from skyproxy.cli.main import app
from skyproxy.cli.output import age_text, bytes_text, fail, note, show_table, warn
from skyproxy.errors import ConnectError, JobFailedError
from skyproxy.jobs import job, output
from skyproxy.transport.worker_report import ask_worker
from tests.transport.test_worker_report import Liar, answer

COPY = "\x1b]52;c;ZXZpbA==\x07\x9d\x1b[31m\r"


def test_no_cell_of_a_table_and_no_message_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name", "bytes"), [{"name": COPY, "bytes": COPY}], "nothing", shorten=("name",))
    note(COPY)
    warn(COPY)
    with pytest.raises(typer.Exit):
        fail(COPY)
    shown = "".join(capsys.readouterr())
    assert shown.count("\\x1b]52") == 5
    assert not any(character in shown for character in "\x07\x9d\r")
    assert "\x1b]" not in shown


@pytest.mark.parametrize("said", [math.inf, math.nan, 10**400, "9", [], {}])
def test_what_is_no_number_is_shown_as_unknown(said: Any) -> None:
    assert age_text(said) == bytes_text(said) == "?"


@pytest.mark.parametrize(
    "report",
    [
        '{"commands": "1"}',
        '{"idle_seconds": NaN}',
        '{"idle_seconds": -1e308}',
        '{"sessions": Infinity}',
        '{"calls_running": true}',
        '{"memory_bytes": 1e300}',
        '{"devices": {}}',
        '{"devices": [7]}',
        '{"devices": [{"type": "cpu"}]}',
        '{"devices": [{"type": "cpu", "index": 0, "used_memory_bytes": "x"}]}',
    ],
)
def test_a_report_with_what_is_no_number_is_an_error_in_words(report: str) -> None:
    liar = Liar(answer(report.encode()))
    try:
        with pytest.raises(ConnectError, match="its answer has"):
            ask_worker(liar.url, "token", timeout_seconds=60)
    finally:
        liar.close()


@pytest.mark.parametrize("said", [None, 7, {}, [7], [{"name": "x"}], ["x"]], ids=str)
def test_sessions_that_are_none_are_an_error_in_words(monkeypatch: pytest.MonkeyPatch, said: object) -> None:
    monkeypatch.setattr(sessions, "_ask", lambda *arguments: said)
    result = CliRunner().invoke(app, ["sessions", "list"])
    assert "sent no list of sessions" in result.output
    assert result.exit_code != 0


def test_a_token_runs_nothing_in_the_shell_that_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = f"x; touch {shlex.quote(str(tmp_path / 'owned'))} $(touch {tmp_path / 'too'})"
    file = tmp_path / "of '$(touch me)'; touch me"
    file.write_text(token + "\n")
    connecting._print_environment("ws://127.0.0.1:1", file, WorkerAccess("ws://127.0.0.1:1", token), "dev")
    printed = capsys.readouterr().out
    assert "touch me" in printed
    assert "owned" not in printed  # a token in a terminal or a history is everybody's
    script = printed + 'printf %s "$SKYPROXY_TOKEN"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == token
    assert list(tmp_path.iterdir()) == [file]


class EndlessLink:
    """A connection to a worker whose job failed, and whose log has no end, and no lines where `piece` has none."""

    piece = b"x\n"
    asked = 0

    def __init__(self, *arguments: object) -> None:
        pass

    def __enter__(self) -> EndlessLink:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, action: str, **values: Any) -> tuple[Mapping[str, object], bytes]:
        type(self).asked += 1
        if action == "log":
            return {"offset": values["offset"], "more": True, "log_bytes": 1 << 62}, self.piece
        row = {"name": "n", "kind": "script", "title": "t", "state": "failed", "exit_code": 1, "signal": None}
        return {**row, "restarts": 0, "preemptions": 0, "age_seconds": 1.0, "seconds": 1.0}, b""


@pytest.fixture(params=[b"x\n", bytes(1 << 20)], ids=["lines", "no line"])
def endless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[EndlessLink]:
    for module in (job, output):
        monkeypatch.setattr(module, "JobLink", EndlessLink)
    monkeypatch.setattr(EndlessLink, "piece", request.param)
    monkeypatch.setattr(EndlessLink, "asked", 0)
    monkeypatch.setattr(job, "_TAIL_BYTES", 40)
    return EndlessLink


def test_the_end_of_a_failed_jobs_log_is_not_read_without_end(endless: type[EndlessLink]) -> None:
    with pytest.raises(JobFailedError) as caught:
        job.Job("n", [lambda: None]).result()  # type: ignore[list-item, return-value]
    assert endless.asked < 200
    assert len(str(caught.value)) < 1000


def test_a_line_without_an_end_is_handed_out_in_parts(endless: type[EndlessLink]) -> None:
    lines = job.Job("n", [lambda: None]).logs()  # type: ignore[list-item, return-value]
    assert len(next(lines)) <= 1 << 21
