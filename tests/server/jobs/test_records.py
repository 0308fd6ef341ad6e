"""What a worker keeps of a job, and what it accepts as one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ProtocolError
from skyproxy_server.auth import Identity
from skyproxy_server.jobs.records import (
    JobRecord,
    asked_record,
    checked_job_name,
    load_record,
    open_own,
    owner_folder,
)

ME = Identity("me", frozenset({"functions"}))
ASKED: dict[str, Any] = {"name": "night-run", "kind": "script", "title": "train.py"}


def test_a_record_is_read_as_it_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "night-run"
    folder.mkdir()
    record = asked_record({**ASKED, "max_restarts": 2, "env": {"A": "b"}, "part": [1, 3]}, ME, 5.0)
    record.save(folder)
    assert load_record(folder) == record
    assert (record.part, record.grace_seconds, record.env) == ((1, 3), 5.0, {"A": "b"})


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "../x", "a/b", "/etc", "a\\b/", "a\0", "a b", "a\n", "é", "-a", "x" * 64, 7, None],
)
def test_a_name_leads_nowhere_else(name: object) -> None:
    with pytest.raises(ProtocolError, match="name"):
        checked_job_name(name)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"kind": []},
        {"title": 7},
        {"max_restarts": -1},
        {"max_restarts": True},
        {"max_restarts": 1 << 40},
        {"grace_seconds": float("nan")},
        {"grace_seconds": -1},
        {"grace_seconds": "5"},
        {"env": []},
        {"env": {"A": 1}},
        {"env": {"A=B": "x"}},
        {"env": {"": "x"}},
        {"env": {"A": "x\0"}},
        {"env": {"A": "\ud800"}},
        {"env": {"A": "x" * 70_000}},
        {"part": [3, 3]},
        {"part": [-1, 3]},
        {"part": [0, 1 << 40]},
        {"part": [0]},
        {"part": [0.0, 1]},
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        asked_record({**ASKED, **change}, ME, 5.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        "{}",
        "[" * 100_000,
        '{"name": "../x"}',
        json.dumps({"client": {}, "part": [0, 1]}),
    ],
)
def test_a_record_that_a_job_has_changed_is_no_record(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "night-run"
    folder.mkdir()
    (folder / "job.json").write_text(text)
    assert load_record(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"state": "flying"},
        {"kind": "other"},
        {"restarts": "many"},
        {"ended_at": []},
        {"mark": 7},
        {"env": {"A": 1}},
        {"unknown": 1},
    ],
)
def test_a_record_with_a_wrong_field_is_no_record(change: dict[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "night-run"
    folder.mkdir()
    asked_record(ASKED, ME, 5.0).save(folder)
    assert load_record(folder) is not None
    plain = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**plain, **change}))
    assert load_record(folder) is None


def test_a_pipe_and_a_link_are_no_files_of_a_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    for name in ("pipe", "link", "nothing"):
        with pytest.raises(OSError):
            open_own(tmp_path / name)
    with open_own(tmp_path / "secret") as file:
        assert file.read() == b"x"


def test_the_folder_of_a_token_has_no_character_of_its_name(tmp_path: Path) -> None:
    folders = {owner_folder(tmp_path, name) for name in ("a", "../a", "A", "/", "é\ud800")}
    assert len(folders) == 5
    assert all(folder.parent == tmp_path and folder.name.isalnum() for folder in folders)


def test_a_row_tells_no_secret() -> None:
    record = JobRecord("a", ME)
    assert record.mark
    assert record.mark not in str(record.row())
