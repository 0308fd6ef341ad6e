"""What is said about writes that failed because a disk is full, and about those that failed otherwise."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyproxy_server.functions.full_disks import explain_full_disk


def _full(path: str) -> SimpleNamespace:
    return SimpleNamespace(total=10 << 30, used=10 << 30, free=4096)


def _roomy(path: str) -> SimpleNamespace:
    return SimpleNamespace(total=10 << 30, used=0, free=10 << 30)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_what_is_left_of_it(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", _full)
    text = explain_full_disk(OSError(code, "no", str(tmp_path / "model.pt")))
    assert f"{tmp_path} (4 KiB of 10.0 GiB are free)" in text
    assert "ask for a larger disk" in text


@pytest.mark.parametrize(
    "text",
    [
        "PytorchStreamWriter failed writing file data/0: file write failed",
        "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
    ],
)
def test_an_error_of_a_library_that_only_says_that_writing_failed_is_explained_by_the_full_disk(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError(text)
    monkeypatch.setattr(shutil, "disk_usage", _full)
    assert explain_full_disk(error).startswith("A disk of the worker is full: ")
    monkeypatch.setattr(shutil, "disk_usage", _roomy)
    assert explain_full_disk(error) == ""


def test_a_quota_that_the_disk_does_not_show_is_placed_by_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", _roomy)
    name = str(tmp_path / "model.pt")
    assert f"full, at {name}." in explain_full_disk(OSError(errno.EDQUOT, "no", name))


@pytest.mark.parametrize("error", [ValueError("no"), PermissionError(errno.EACCES, "no", "model.pt")])
def test_other_errors_are_not_explained_by_a_disk(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", _full)
    assert explain_full_disk(error) == ""
