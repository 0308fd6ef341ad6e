"""Temporary folders of processes, and what is left of those that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.runtime.checkpoints import FOLDER_PREFIX, remove_left_folders
from skyproxy.runtime.scratch import hold, make_scratch, remove_abandoned, remove_if_unheld, remove_scratch, scratch

LOCKS = pytest.mark.skipif(sys.platform == "win32", reason="needs the system's locks of files")
MAKER = """
import sys
from skyproxy.runtime.scratch import make_scratch
folder = make_scratch("test")
(folder / "state").write_text("7")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    monkeypatch.undo()


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes have passed since everything here was made."""
    now = time.time
    monkeypatch.setattr("skyproxy.runtime.scratch.time.time", lambda: now() + 120.0)


def test_a_folder_is_its_makers_alone_and_goes_with_the_block() -> None:
    with scratch("test") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        if sys.platform != "win32":
            assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    remove_scratch(folder)  # once more


@LOCKS
def test_a_folder_goes_once_the_process_that_made_it_was_killed(ages: None) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    assert maker.stdin is not None
    try:
        folder = Path(maker.stdout.readline().strip())
        remove_abandoned()
        assert (folder / "state").read_text() == "7"
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        maker.stdin.close()
        maker.stdout.close()
    with scratch("test"):  # whoever makes the next one removes it
        assert not folder.exists()


@LOCKS
def test_a_folder_stays_while_one_of_several_processes_holds_it(ages: None) -> None:
    folder = make_scratch("test")
    other = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(other, fcntl.LOCK_SH)
        hold(folder)
        remove_if_unheld(folder)
        assert folder.exists()
    finally:
        os.close(other)
    remove_if_unheld(folder)
    assert folder.exists()
    remove_scratch(folder)


@LOCKS
def test_a_folder_that_was_made_just_now_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "skyproxy-scratch-test-1"
    folder.mkdir()  # as between `mkdtemp` and the lock
    remove_abandoned()
    assert folder.exists()


@LOCKS
def test_what_others_made_is_left_alone(tmp_path: Path, ages: None) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "skyproxy-scratch-link").symlink_to(kept)
    (tmp_path / "skyproxy-scratch-file").touch()
    remove_abandoned()
    assert (kept / "file").exists()
    assert (tmp_path / "skyproxy-scratch-file").exists()


def test_where_nothing_tells_whose_a_folder_is_none_is_removed(
    tmp_path: Path, ages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "getuid", raising=False)
    monkeypatch.setenv("SKYPROXY_JOBS", str(tmp_path))
    folders = [tmp_path / "skyproxy-scratch-test-1", tmp_path / f"{FOLDER_PREFIX}1"]
    for folder in folders:
        folder.mkdir()
        os.utime(folder, (0, 0))
    remove_abandoned()
    remove_left_folders()
    assert all(folder.exists() for folder in folders)
