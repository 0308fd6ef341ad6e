"""Locks on files of a folder, and folders that the users of a group share."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_SECONDS, LOCK_LOOK_SECONDS = 2.0, 0.01
SHARED_FOLDER = 0o2770
"""The mode of a folder whose group writes in it, and hands itself on to what is made there."""
SHARED_FILE = 0o660


@contextlib.contextmanager
def open_lock(path: str, folder: int | None) -> Iterator[int]:
    """Open a file for a lock; in a folder that a group shares, for all of the group.

    Args:
        path: the file.
        folder: the open folder that it lies in; None where the system opens none.
    """
    flags, until = os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), time.monotonic() + LOCK_SECONDS
    while (file := _try_open(path, folder, flags, until)) is None:
        time.sleep(LOCK_LOOK_SECONDS)
    try:
        if folder is not None and is_shared(folder):
            share(file, SHARED_FILE)
        yield file
    finally:
        os.close(file)


def _try_open(path: str, folder: int | None, flags: int, until: float) -> int | None:
    try:
        return os.open(path, flags, 0o600, dir_fd=folder)
    except PermissionError:  # another user of the group is about to share it
        if folder is None or not is_shared(folder) or time.monotonic() >= until:
            raise
        return None


def lock(file: int) -> bool | None:
    """Lock an open file until it is closed; return False if somebody else has, None where the system cannot."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_shared(folder: Path | int) -> bool:
    """Return whether the users of a group share this folder, or open folder."""
    return os.name == "posix" and stat.S_IMODE(os.stat(folder).st_mode) == SHARED_FOLDER


def share(opened: int, mode: int) -> None:
    """Share an open file or folder with its group, if it is ours, and nothing that lies elsewhere by another name."""
    status = os.fstat(opened)
    is_elsewhere = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    if status.st_uid == os.geteuid() and not is_elsewhere and stat.S_IMODE(status.st_mode) != mode:
        os.fchmod(opened, mode)
