"""Snapshots of sessions that have users of their own: a group for each token, which its sessions are in.

The folder of a token belongs to root and to that group. So each session of the token, whatever its user, reads and
writes the token's snapshots, and no other one can enter.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import secrets
import stat
from pathlib import Path

from skyproxy.snapshots.locks import SHARED_FILE, SHARED_FOLDER
from skyproxy.snapshots.stores import LocalStore, is_address, open_store
from skyproxy_server.snapshots.places import place_of

logger = logging.getLogger("skyproxy.server")

_FIRST_GROUP = 1 << 30
_GROUPS = 1 << 30
"""Drawn at random of so many, no two folders of one machine have the same, whoever made them."""


class SnapshotGroups:
    """The groups of the folders of snapshots of a worker that runs as root.

    Args:
        location: the folder, or the address of fsspec, which needs no groups; empty where there are no snapshots.
    """

    def __init__(self, location: str) -> None:
        self._location = location

    def location(self) -> str:
        """Return where sessions keep their snapshots; an empty text where they cannot."""
        if not self._location or is_address(self._location):
            return self._location
        root = Path(self._location)
        try:
            root.mkdir(mode=0o711, parents=True, exist_ok=True)
            if not root.stat().st_mode & stat.S_IXOTH and root.stat().st_uid == os.geteuid():
                root.chmod(stat.S_IMODE(root.stat().st_mode) | stat.S_IXOTH)
        except OSError as error:
            return self._refuse(f"{root} cannot be made: {error.strerror}")
        for folder in (root, *root.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return self._refuse(f"{folder} cannot be entered by other users")
        return self._location

    def _refuse(self, why: str) -> str:
        logger.warning("sessions have users of their own, and no snapshots: %s", why)
        self._location = ""
        return ""

    def group_of(self, owner: str) -> int | None:
        """Return the group of a token's folder, which is made where there is none; None where none is needed.

        Raises:
            OSError: it cannot be made.
        """
        if not self._location or is_address(self._location):
            return None
        store = place_of(open_store(self._location), owner)
        assert isinstance(store, LocalStore)
        path = store.path
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(1, "it is not root's own folder", str(path))
        if stat.S_IMODE(status.st_mode) == SHARED_FOLDER:
            return status.st_gid
        group = _unused_group()
        # Until now it was root's alone, so nobody else has a file or a link in it.
        for folder, names, files in os.walk(path):
            for name in files:
                _give(os.path.join(folder, name), group, SHARED_FILE)
            for name in names:
                _give(os.path.join(folder, name), group, SHARED_FOLDER)
        _give(str(path), group, SHARED_FOLDER)
        return group


def _give(path: str, group: int, mode: int) -> None:
    os.chown(path, os.geteuid(), group, follow_symlinks=False)
    if not stat.S_ISLNK(os.lstat(path).st_mode):
        os.chmod(path, mode)


def _unused_group() -> int:
    while True:
        group = _FIRST_GROUP + secrets.randbelow(_GROUPS)
        try:
            grp.getgrgid(group)
        except KeyError:
            return group
