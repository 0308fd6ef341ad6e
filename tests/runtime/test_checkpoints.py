"""The folder for checkpoints, of a job and of a call."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyproxy
from skyproxy.errors import ConfigurationError
from skyproxy.runtime import CallContext, entered_call


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
