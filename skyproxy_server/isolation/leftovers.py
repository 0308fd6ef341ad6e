"""Leftovers of a user on this machine: processes, files in the folders for everybody, memory shared by name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import stat
import time
from pathlib import Path

_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
"""The folders where everybody may make files."""
_IPC_RMID = 0  # of <linux/ipc.h>
_ENDED = ("Z", "X")


def live_processes_of(number: int) -> list[int]:
    """Return the processes that have this user in any of their roles; not those that have ended and are not reaped."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            state, users = _state_and_users(name)
            if state not in _ENDED and number in users:
                found.append(int(name))
    return found


def _state_and_users(pid: str) -> tuple[str, list[int]]:
    state, users = "X", [-1]
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        for line in text.splitlines():
            if line.startswith("State:"):
                state = line.split()[1]
            elif line.startswith("Uid:"):
                users = [int(word) for word in line.split()[1:]]
                break
    return state, users


def kill_process(pid: int, number: int) -> None:
    """End a process if it is still one of this user.

    Raises:
        OSError: it has ended meanwhile.
    """
    descriptor = os.pidfd_open(pid)
    try:
        # The number may have become another process's since; the descriptor is this one's now.
        if number in _state_and_users(str(pid))[1]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def files_of(number: int) -> list[Path]:
    """Return what this user has made in the folders where everybody may make files, and not what lies below."""
    found: list[Path] = []
    for folder in _SHARED_FOLDERS:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == number:
                        found.append(Path(entry.path))
    return found


def remove_tree(path: Path, deadline: float) -> bool:
    """Remove a file, or a folder with all that is in it; return False if something stays.

    However deep it is: folders below folders are moved to the top, so no path gets long and nothing is recursive.
    Nobody else may change it meanwhile.

    Args:
        path: what to remove; a link is removed itself.
        deadline: when to give up, by the monotonic clock.
    """
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return True
        numbers = itertools.count()
        while time.monotonic() < deadline:
            moved = [_take_apart(entry, path, numbers, deadline) for entry in os.listdir(path)]
            if not any(moved):
                path.rmdir()
                return True
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _take_apart(name: str, top: Path, numbers: itertools.count[int], deadline: float) -> bool:
    """Remove an entry of a folder, its folders being moved up first; return whether any were.

    Raises:
        OSError: it cannot be removed.
        TimeoutError: it is too late.
    """
    entry = top / name
    if not stat.S_ISDIR(entry.lstat().st_mode):
        entry.unlink()
        return False
    moved = False
    with os.scandir(entry) as below:
        for child in below:
            if time.monotonic() > deadline:
                raise TimeoutError("too many files")
            if child.is_dir(follow_symlinks=False):
                moved = True
                _move(child.path, top, numbers)
            else:
                os.unlink(child.path)
    try:
        entry.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # some file systems leave names out while others are being removed
            raise
        return True
    return moved


def _move(folder: str, top: Path, numbers: itertools.count[int]) -> None:
    while True:
        target = top / f".removed-{next(numbers)}"
        if not os.path.lexists(target):  # or an empty folder of this name would be replaced, and missed in the list
            os.rename(folder, target)
            return


class IpcObjects:
    """Memory, semaphores and queues that a user has made by number (System V); they outlive its processes."""

    _KINDS = (("shm", "shmid", "shmctl"), ("msg", "msqid", "msgctl"), ("sem", "semid", "semctl"))

    def __init__(self, number: int) -> None:
        self._number = number

    def found(self) -> list[tuple[str, int]]:
        """Return the function that removes each, and its identity."""
        found: list[tuple[str, int]] = []
        for kind, identity, remover in self._KINDS:
            with contextlib.suppress(OSError, ValueError):
                head, *rows = Path(f"/proc/sysvipc/{kind}").read_text(encoding="ascii").splitlines()
                for row in rows:
                    words = dict(zip(head.split(), row.split(), strict=True))
                    if str(self._number) in (words["uid"], words["cuid"]):
                        found.append((remover, int(words[identity])))
        return found

    def remove(self) -> None:
        """Remove them all."""
        library = ctypes.CDLL(None, use_errno=True)
        for remover, identity in self.found():
            arguments = (identity, 0, _IPC_RMID) if remover == "semctl" else (identity, _IPC_RMID, None)
            getattr(library, remover)(*arguments)
