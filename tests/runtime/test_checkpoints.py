"""The folder for checkpoints, of a job and of a call."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import skyproxy
from skyproxy.errors import ConfigurationError
from skyproxy.runtime import CallContext, entered_call
from skyproxy.runtime.checkpoints import FOLDER_PREFIX, LEFT_SECONDS, remove_left_folders


def test_outside_of_both_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYPROXY_CHECKPOINT_DIR", raising=False)
    monkeypatch.delenv("SKYPROXY_RESTART_COUNT", raising=False)
    with pytest.raises(ConfigurationError, match="no folder for checkpoints"):
        skyproxy.checkpoint_dir()
    assert skyproxy.restart_count() == 0


def test_a_job_is_told_by_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYPROXY_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("SKYPROXY_RESTART_COUNT", "3")
    assert skyproxy.checkpoint_dir() == tmp_path / "checkpoints"
    assert skyproxy.checkpoint_dir().is_dir()
    assert skyproxy.restart_count() == 3
    monkeypatch.setenv("SKYPROXY_RESTART_COUNT", "many")
    assert skyproxy.restart_count() == 0


def test_a_call_is_told_by_its_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKYPROXY_CHECKPOINT_DIR", str(tmp_path / "of the job"))
    values = {"checkpoint_dir": str(tmp_path / "of the call"), "restart_count": 2}
    with entered_call(CallContext("id", "session", values)):
        assert skyproxy.checkpoint_dir() == tmp_path / "of the call"
        assert skyproxy.restart_count() == 2


USER = """
import sys, skyproxy
from skyproxy.runtime import CallContext, entered_call
with entered_call(CallContext("id", "name", {"checkpoint_dir": sys.argv[1]})):
    (skyproxy.checkpoint_dir() / "state").write_text("7")
print("there", flush=True)
sys.stdin.read()
"""


def age(folder: Path) -> None:
    then = time.time() - LEFT_SECONDS - 60
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


@pytest.mark.skipif(sys.platform == "win32", reason="needs the system's locks of files")
def test_a_folder_goes_when_its_processes_have_died_and_nothing_has_changed_for_two_weeks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKYPROXY_JOBS", str(tmp_path))
    name = FOLDER_PREFIX + "1f3a"
    folder = tmp_path / name
    (tmp_path / "another").mkdir()
    age(tmp_path)
    user = subprocess.Popen(
        [sys.executable, "-c", USER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdin is not None
    assert user.stdout is not None
    try:
        assert user.stdout.readline() == "there\n"
        age(folder)
        remove_left_folders()
        assert (folder / "state").read_text() == "7"  # a process has it in use
    finally:
        user.kill()
        user.communicate()
    (folder / "state").write_text("8")
    remove_left_folders()
    assert folder.exists()  # it may be between two attempts
    age(folder)
    remove_left_folders()
    assert not folder.exists()
    assert (tmp_path / "another").exists()
