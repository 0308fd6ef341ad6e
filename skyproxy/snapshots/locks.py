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
def open_lock(path: Path) -> Iterator[int]:
    """Open a file for a lock; in a folder that a group shares, for all of the group."""
    flags, until = os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), time.monotonic() + LOCK_SECONDS
    while (file := _try_open(path, flags, until)) is None:
        time.sleep(LOCK_LOOK_SECONDS)
    try:
        if is_shared(path.parent) and os.fstat(file).st_uid == os.geteuid():
            os.fchmod(file, SHARED_FILE)
        yield file
    finally:
        os.close(file)


def _try_open(path: Path, flags: int, until: float) -> int | None:
    try:
        return os.open(path, flags, 0o600)
    except PermissionError:  # another user of the group is about to share it
        if not is_shared(path.parent) or time.monotonic() >= until:
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


def is_shared(folder: Path) -> bool:
    """Return whether the users of a group share this folder."""
    return os.name == "posix" and stat.S_IMODE(folder.stat().st_mode) == SHARED_FOLDER
