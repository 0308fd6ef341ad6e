"""Temporary folders that go with the process that made them, however that ends.

A process holds each of its folders with a lock, which the system drops where the process dies. Whoever makes the next
one, and each worker that starts, removes those of the same user that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "skyproxy-scratch-"
_UNHELD_SECONDS = 60.0
"""The age below which a folder may have been made just now, and is not held yet."""
_lock = threading.Lock()
_held: dict[Path, int] = {}
"""The folders that this process holds, each with a descriptor that has the lock."""


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """Make a folder for the time of a block.

    Args:
        purpose: a word for its name, for whoever finds it.
    """
    folder = make_scratch(purpose)
    try:
        yield folder
    finally:
        remove_scratch(folder)


def make_scratch(purpose: str) -> Path:
    """Make a folder that no other user can enter; it lasts until `remove_scratch`, or until this process has ended.

    Args:
        purpose: a word for its name, for whoever finds it.
    """
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-"))
    hold(folder)
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder with all that is in it; what cannot be removed is left."""
    shutil.rmtree(folder, ignore_errors=True)
    with _lock:
        descriptor = _held.pop(folder, None)
        if descriptor is not None:
            os.close(descriptor)


def remove_abandoned() -> None:
    """Remove this user's folders that no process holds; none on Windows, where nothing tells whose they are."""
    if not hasattr(os, "getuid"):
        return
    newest_of_old = time.time() - _UNHELD_SECONDS
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
            with contextlib.suppress(OSError):
                status = folder.lstat()
                if status.st_uid == os.getuid() and max(status.st_mtime, status.st_ctime) < newest_of_old:
                    remove_if_unheld(folder)


def hold(folder: Path) -> None:
    """Have the system know that this process uses a folder, until the folder is gone or the process ends.

    Several processes may hold one. Where the system has no such locks, nobody is told.
    """
    try:
        import fcntl
    except ImportError:
        return
    with _lock:
        for gone in [known for known in _held if not known.exists()]:
            os.close(_held.pop(gone))
        if folder not in _held:
            with contextlib.suppress(OSError):  # of a file system without locks
                descriptor = os.open(folder, os.O_RDONLY)
                _held[folder] = descriptor
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_if_unheld(folder: Path) -> None:
    """Remove a folder, unless a process holds it, or nothing tells."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # somebody else's, or gone
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # held
        pass
    finally:
        os.close(descriptor)


__all__ = ["hold", "make_scratch", "remove_abandoned", "remove_if_unheld", "remove_scratch", "scratch"]
