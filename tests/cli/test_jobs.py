"""The commands for jobs, against a worker in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from skyproxy.cli.fleet import WorkerAccess, WorkerRow
from skyproxy.cli.jobs import opener_of, show_logs, tell_of_jobs
from skyproxy.cli.main import app
from skyproxy.contexts import Context, ContextStore
from skyproxy.jobs.job import Job
from skyproxy.jobs.link import JobLink, send_job
from skyproxy.jobs.output import JobLine
from tests.jobs.workers import TOKEN, worker_with_jobs
from tests.server.jobs.programs import LONG, payload_of


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The worker dev, saved and chosen; its port."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SKYPROXY_URL", "SKYPROXY_TOKEN", "SKYPROXY_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text(TOKEN)
    with worker_with_jobs(tmp_path / "jobs") as (listener, _):
        options = {"url": f"ws://127.0.0.1:{listener.port}", "token_file": str(tmp_path / "token")}
        ContextStore().save(Context("dev", "remote", options))
        yield listener.port


def skyproxy(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == status, (result.output, result.exception)
    return result


def test_a_script_is_detached_listed_attached_and_removed(dev: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('epochs', sys.argv[1:])\nraise SystemExit(3)\n")
    started = skyproxy(
        "run",
        "--detach",
        "--name",
        "night",
        "--max-restarts",
        "0",
        "--grace",
        "2s",
        str(tmp_path / "train.py"),
        "--x",
        "1",
    )
    assert started.stdout == "night\n"
    assert "skyproxy attach night --on dev" in started.stderr
    attached = skyproxy("attach", "night", status=3)
    assert attached.stdout == "epochs ['--x', '1']\n"
    assert "ended with exit code 3" in attached.stderr
    (row,) = json.loads(skyproxy("jobs", "list", "--json").stdout)
    assert (row["name"], row["state"], row["exit_code"], row["kind"]) == ("night", "failed", 3, "script")
    table = skyproxy("jobs").stdout
    assert table.split()[:8] == ["NAME", "STATE", "EXIT", "RESTARTS", "AGE", "KIND", "TITLE", "NODE"]
    assert "night" in table
    for words in (
        ("jobs", "logs", "night"),
        ("logs", "dev", "--job", "night"),
        ("jobs", "logs", "night", "--tail", "1"),
    ):
        assert skyproxy(*words).stdout == "epochs ['--x', '1']\n"
    assert json.loads(skyproxy("jobs", "logs", "night", "--json").stdout) == {
        "name": "night",
        "line": "epochs ['--x', '1']",
    }
    assert "has ended already" in skyproxy("cancel", "night").stderr
    skyproxy("jobs", "remove", "night")
    assert "There are no jobs" in skyproxy("jobs").stderr


def test_a_running_job_is_cancelled(dev: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONG)
    name = skyproxy("run", "-d", str(tmp_path / "train.py")).stdout.strip()
    assert name.startswith("train-")
    assert "runs. End it first" in skyproxy("jobs", "remove", name, status=1).stderr
    assert "was cancelled" in skyproxy("cancel", name).stderr
    assert "SIGTERM" in skyproxy("jobs").stdout


def test_a_job_that_is_not_there_is_not_found(dev: int) -> None:
    for words in (("attach", "no"), ("cancel", "no"), ("jobs", "logs", "no"), ("jobs", "remove", "no")):
        assert "there is no job 'no'" in skyproxy(*words, status=3).stderr


def test_what_a_job_prints_cannot_command_the_terminal(dev: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('\\x1b]52;c;eA==\\x07 \\x1b[31mred\\x1b[0m')\n")
    name = skyproxy("run", "--detach", str(tmp_path / "train.py")).stdout.strip()
    shown = skyproxy("attach", name).stdout
    assert "\x1b]52" not in shown
    assert "\x07" not in shown
    assert "red" in shown


def test_a_part_of_a_job_of_workers_that_are_no_cluster_says_that_it_is_one(dev: int, tmp_path: Path) -> None:
    text = "print('[rank 2] two')\nprint('[rank 3] three')\n"
    with JobLink(opener_of(WorkerAccess(f"ws://127.0.0.1:{dev}", TOKEN))) as link:
        asked = {"name": "big", "kind": "torchrun", "title": "t", "part": [1, 4]}
        send_job(link, asked, payload_of(tmp_path, text))
    attached = skyproxy("attach", "big")
    assert attached.stdout == "[rank 2] two\n[rank 3] three\n"
    assert "This is node 1 of the 4 that the job big runs on" in attached.stderr
    for words in (("jobs", "logs", "big"), ("logs", "dev", "--job", "big"), ("attach", "big")):
        assert skyproxy(*words, "--rank", "3").stdout == "[rank 3] three\n"
    assert "Name one: --job" in skyproxy("logs", "dev", "--rank", "3", status=2).stderr
    assert "there is no node 7" in skyproxy("jobs", "logs", "big", "--node", "7", status=2).stderr


def test_lines_of_several_nodes_have_their_node(capsys: pytest.CaptureFixture[str]) -> None:
    class Big(Job):
        def log_lines(self, *args: Any, **options: Any) -> Iterator[JobLine]:
            return (JobLine(node, f"{node} {n}\x1b[2J") for node in range(2) for n in range(3))

    job = Big("big", [lambda: None, lambda: None])  # type: ignore[arg-type, return-value]
    show_logs(job, follow=False, tail=2)
    assert capsys.readouterr().out == "[node 0] 0 1\n[node 0] 0 2\n[node 1] 1 1\n[node 1] 1 2\n"
    show_logs(job, follow=True, tail=None, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[3] == {"name": "big", "node": 1, "line": "1 0\x1b[2J"}


def test_options_of_jobs_need_detach(dev: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert "Add --detach" in skyproxy("run", "--name", "x", str(tmp_path / "train.py"), status=2).stderr
    assert "single node" in skyproxy("run", "-d", "--nnodes", "2", str(tmp_path / "train.py"), status=2).stderr


def test_without_a_worker_that_stays_nothing_is_detached(dev: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    skyproxy("context", "clear")
    assert "skyproxy up dev" in skyproxy("run", "-d", str(tmp_path / "train.py"), status=2).stderr


class _Fleet:
    """A fleet whose worker says how many jobs run on it."""

    def __init__(self, running: object, *, ready: bool = True) -> None:
        self._running, self._ready = running, ready

    async def row(self, name: str) -> WorkerRow:
        return WorkerRow(name, "local", "here", "Running", self._ready)

    async def access(self, name: str) -> Any:
        return self

    def report(self) -> dict[str, object]:
        return {"jobs_running": self._running}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        (_Fleet(1), "1 job runs on dev, and ends with it"),
        (_Fleet(2), "2 jobs run on dev, and end with it"),
        (_Fleet(0), ""),
        (_Fleet("many"), ""),
        (_Fleet(2, ready=False), ""),
    ],
)
def test_who_ends_a_worker_is_told_of_its_jobs(fleet: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(tell_of_jobs("dev", fleet))
    said = capsys.readouterr().err
    assert words in said
    assert bool(said) == bool(words)
