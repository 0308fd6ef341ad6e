"""Which files of the program's folders travel."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch  # noqa: F401

from skyproxy.errors import ConfigurationError
from skyproxy.payloads.project_files import ProjectFiles
from skyproxy.settings import SETTINGS


def write(path: Path, text: str = "x = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def names(files: ProjectFiles, folder: Path) -> set[str]:
    return {name for _, name in files.current(((str(folder), True),))}


def test_what_could_be_imported_travels_and_nothing_else(tmp_path: Path) -> None:
    wanted = ["main.py", "pkg/__init__.py", "pkg/a.py", "pkg/defaults.yaml", "ns/deep/b.py", "data/loader.py"]
    others = [
        ".env",
        "secrets.json",  # beside a script, not in a package
        "notes.txt",
        ".git/hook.py",
        "pkg/__pycache__/a.py",
        "pkg/.hidden.json",
        "my-data/c.py",
        "node_modules/d.py",
        "skyproxy/e.py",
        "lib/site-packages/f.py",
    ]
    for name in [*wanted, *others]:
        write(tmp_path / name)
    write(tmp_path / "env" / "pyvenv.cfg")
    write(tmp_path / "env" / "lib" / "g.py")
    for number in range(600):
        write(tmp_path / "data" / "images" / f"{number}.txt")
    write(tmp_path / "pkg" / "large.json", "0" * 300_000)
    assert names(ProjectFiles(), tmp_path) == set(wanted)


def test_a_link_that_leads_up_ends_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "a.py")
    (tmp_path / "again").symlink_to(tmp_path)
    assert names(ProjectFiles(), tmp_path) == {"a.py"}


def test_new_changed_and_removed_files_are_seen_at_the_next_look(tmp_path: Path) -> None:
    folders = ((str(tmp_path), True),)
    path = write(tmp_path / "pkg" / "a.py")
    files = ProjectFiles()
    before = files.current(folders)[str(tmp_path), "pkg/a.py"].digest
    status = path.stat()
    path.write_text("x = 2\n", encoding="utf-8")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # whatever the disk's clock makes of it
    assert files.current(folders)[str(tmp_path), "pkg/a.py"].digest != before
    write(tmp_path / "pkg" / "inner" / "b.py")
    assert names(files, tmp_path) == {"pkg/a.py", "pkg/inner/b.py"}
    path.unlink()
    assert names(files, tmp_path) == {"pkg/inner/b.py"}


def test_of_a_large_folder_only_what_is_loaded_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "beside.py")
    for number in range(20):
        write(tmp_path / "large_one" / f"m{number}.py")
    try:
        importlib.import_module("large_one.m3")
        files = ProjectFiles(replace(SETTINGS, max_project_files=10))
        with caplog.at_level(logging.WARNING, "skyproxy"):
            assert names(files, tmp_path) == {"beside.py", "large_one/m3.py"}
            names(files, tmp_path)
        assert len(caplog.records) == 1
        assert "SKYPROXY_MAX_PROJECT_FILES" in caplog.text
        with pytest.raises(ConfigurationError, match="SKYPROXY_SYNC_PROJECT=0"):
            names(ProjectFiles(replace(SETTINGS, max_project_bytes=1)), tmp_path)
    finally:
        for name in ("large_one.m3", "large_one"):
            sys.modules.pop(name, None)
