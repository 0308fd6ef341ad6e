"""Workers that outlive their starter: what is left behind by crashes, and who may take a name. Life is in tests/cli."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from skyproxy.errors import ConfigurationError, ConnectError, WorkerStartError
from skyproxy.providers import detached
from skyproxy.providers.detached import DetachedWorker, find, list_detached, local_address
from skyproxy.providers.processes import identity_of

GONE = (1 << 22) + 1
"""No process has this number: it is beyond what Linux gives out."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def leave(name: str, process_id: int, identity: str) -> DetachedWorker:
    worker = DetachedWorker(name, process_id, identity, "cpu", "2026-01-01T00:00:00+00:00")
    detached._write(worker, worker.folder)
    return worker


def claim(name: str) -> tuple[DetachedWorker, int]:
    """Claim a name for this process; what was claimed, and the port that it inherits."""
    own = str(identity_of(os.getpid()))
    worker = DetachedWorker(name, os.getpid(), own, "cpu", "2026-01-02T00:00:00+00:00")
    return worker, detached._claim(worker)


@pytest.mark.parametrize("chosen", [None, "/work/jobs"])
def test_jobs_lie_where_the_user_says(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[list[str], str | None]] = []

    def spawn(command: list[str], environment: dict[str, str], log: Path) -> NoReturn:
        begun.append((command, environment.get("SKYPROXY_JOBS")))
        raise WorkerStartError("not here")

    monkeypatch.setattr(detached, "_spawn", spawn)
    monkeypatch.delenv("SKYPROXY_JOBS", raising=False)
    with pytest.raises(WorkerStartError):
        detached.start_detached("dev", env={} if chosen is None else {"SKYPROXY_JOBS": chosen})
    ((command, variable),) = begun
    assert ("--jobs" in command, variable) == (chosen is None, chosen)


def test_a_name_in_use_cannot_be_taken() -> None:
    leave("dev", os.getpid(), str(identity_of(os.getpid())))
    with pytest.raises(ConfigurationError, match="is already running"):
        claim("dev")
    assert [worker.name for worker in list_detached()] == ["dev"]


@pytest.mark.parametrize(
    ("process_id", "identity"), [(GONE, "x"), (os.getpid(), "of an earlier process")], ids=["gone", "reused"]
)
def test_what_a_crash_left_behind_is_taken_over(process_id: int, identity: str) -> None:
    old = leave("dev", process_id, identity)
    (old.folder / "port").write_text("nowhere")
    claimed, port = claim("dev")
    assert port == 0
    assert claimed.process_id == os.getpid()
    assert find("dev") == claimed
    # Nothing of the old one is mistaken for the new one's.
    assert claimed.url is None
    assert [path.name for path in detached.workers_folder().iterdir()] == ["dev"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"name": "dev"}'])
def test_a_broken_record_is_nobody(text: str) -> None:
    worker = leave("dev", GONE, "x")
    (worker.folder / "worker.json").write_text(text)
    assert find("dev") is None
    assert list_detached() == []
    assert claim("dev")[0].name == "dev"


def test_who_comes_next_gets_the_token_the_port_the_jobs_and_the_snapshots_of_who_has_ended() -> None:
    old = leave("dev", GONE, "x")
    snapshot = old.snapshots / "owner" / "name" / "snapshot-00000001.msgpack"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text("what it held")
    job = old.folder / "jobs" / "owner" / "night" / "job.json"
    job.parent.mkdir(parents=True)
    job.write_text("what it runs")
    (old.folder / "token").write_text("secret\n")
    (old.folder / "suspended.json").write_text('{"text": "1 session is suspended"}')
    assert old.is_suspended
    assert old.suspension_text() == "1 session is suspended"
    with pytest.raises(ConnectError, match="skyproxy resume dev"):
        local_address("dev")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (old.folder / "port").write_text(str(port))
        now, inherited = claim("dev")
    assert inherited == 0  # somebody else listens there
    assert (now.token(), now.url, now.is_suspended) == ("secret", None, False)
    assert (snapshot.read_text(), job.read_text()) == ("what it held", "what it runs")


def test_stopping_who_is_gone_removes_the_traces_and_touches_nobody() -> None:
    worker = leave("dev", os.getpid(), "of an earlier process")
    worker.stop()
    worker.stop()
    assert find("dev") is None


def test_the_end_of_a_long_log_is_told() -> None:
    worker = leave("dev", GONE, "x")
    worker.log.write_text("first\n" + "x" * 100_000 + "\nlast words\n")
    assert worker.log_tail().endswith("last words")
    assert "first" not in worker.log_tail()
    with pytest.raises(ConnectError, match=r"(?s)is no longer running.*last words.*skyproxy up dev"):
        local_address("dev")


def test_a_worker_whose_token_is_gone_is_an_error_that_says_what_to_do() -> None:
    worker = leave("dev", os.getpid(), str(identity_of(os.getpid())))
    (worker.folder / "port").write_text("5")
    with pytest.raises(ConfigurationError, match="skyproxy down dev"):
        local_address("dev")
