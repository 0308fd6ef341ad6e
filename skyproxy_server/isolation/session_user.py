"""The user that a session's process becomes where the worker runs as root: its number, its groups, its home."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyproxy_server import limits

_DEVICES = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd")
"""The device files whose groups a session keeps, below /dev."""
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME", "MPLCONFIGDIR")
"""Folders that the worker's own user may have named; where a session cannot enter them, its home counts."""


@dataclass(frozen=True, slots=True)
class SessionUser:
    """A user that one session has for itself.

    Attributes:
        number: the number of the user, and of its group.
        groups: further groups, those of the devices.
        home: its folder, which nobody else may enter.
    """

    number: int
    groups: tuple[int, ...]
    home: str

    def to_plain(self) -> dict[str, Any]:
        """Return it as what a control message can hold."""
        return {"number": self.number, "groups": list(self.groups), "home": self.home}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> SessionUser:
        """Return the user that such a message tells of."""
        return cls(plain["number"], tuple(plain["groups"]), plain["home"])

    def become(self) -> None:
        """Turn this process, which is root's and has one thread, into one of this user, for good.

        Raises:
            OSError: the system does not let us; then this process must do nothing else.
        """
        os.setgroups(self.groups)
        os.setresgid(self.number, self.number, self.number)
        os.setresuid(self.number, self.number, self.number)

    def move_in(self) -> None:
        """Use its home for everything that a program keeps or puts aside; what it writes is for itself alone."""
        temporary = os.path.join(self.home, "tmp")
        os.makedirs(temporary, mode=0o700, exist_ok=True)
        for name in [name for name in os.environ if name.startswith("XDG_")]:
            del os.environ[name]
        for name in _CACHES:
            if name in os.environ and not os.access(os.environ[name], os.R_OK | os.X_OK):
                del os.environ[name]
        account = f"skyproxy-{self.number}"  # it has no entry in the system's list of users, where libraries would look
        os.environ.update(HOME=self.home, TMPDIR=temporary, USER=account, LOGNAME=account)
        tempfile.tempdir = None
        os.umask(0o077)
        if not os.access(".", os.R_OK | os.X_OK):
            os.chdir(self.home)


def device_groups() -> tuple[int, ...]:
    """Return the groups that may use GPUs here, other than root's."""
    found: set[int] = set()
    for file in _device_files():
        status = file.stat()
        if status.st_gid and status.st_mode & stat.S_IWGRP:
            found.add(status.st_gid)
    return tuple(sorted(found))


def _device_files() -> list[Path]:
    files: list[Path] = []
    for pattern in _DEVICES:
        for file in Path("/dev").glob(pattern):
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(file.stat().st_mode):
                    files.append(file)
    return files


def obstacle(user: SessionUser) -> str:
    """Become a user, in a process for this alone, and return what keeps it from being a session's; or nothing."""
    devices = [
        file for file in _device_files() if os.access(file, os.R_OK | os.W_OK) and file.name.startswith("nvidia")
    ]
    try:
        user.become()
    except OSError as error:
        return f"this worker cannot become user {user.number}: {error.strerror}"
    if not os.access(user.home, os.W_OK | os.X_OK):
        return (
            f"the temporary folder {os.path.dirname(user.home)} cannot be entered by other users; TMPDIR names another"
        )
    if not os.access(sys.executable, os.X_OK):
        return f"the interpreter {os.path.realpath(sys.executable)} cannot be run by other users"
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in loaded:
        if isinstance(file, str) and os.path.isabs(file) and not os.access(file, os.R_OK):
            return f"{file} cannot be read by other users"
    for device in devices:
        if not os.access(device, os.R_OK | os.W_OK):
            return f"{device} is for root and its group only"
    return ""


def become_for_session(user: SessionUser, supervisor: int) -> None:
    """Turn a session's process into one of this user, and end what is left of that user.

    Nobody else has this user, so what belongs to it may look into this process: /proc shows it to itself again.

    Args:
        user: whom to become.
        supervisor: the process whose end is ours, too; a change of the user makes the kernel forget it.
    """
    user.become()
    limits.end_all_others_of_this_user()
    limits.end_with(supervisor)
    limits.show_to_own_user()
    user.move_in()
