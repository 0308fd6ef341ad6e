"""The users that a worker of root gives to its sessions, one each; no other worker of the machine has them then."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import logging
import os
import pwd
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy_server.isolation.leftovers import IpcObjects, files_of, kill_process, live_processes_of, remove_tree
from skyproxy_server.isolation.session_user import SessionUser, device_groups

logger = logging.getLogger("skyproxy.server")

LOCKS = Path("/run/skyproxy/session-users")
_END_SECONDS = 5.0
_REMOVE_SECONDS = 60.0
_REMOVE_BEFORE_USE_SECONDS = 20.0
_CLOSE_SECONDS = 10.0
_PAUSE_SECONDS = 0.01
_TRIAL = "trial"


class SessionUsersUnavailableError(Exception):
    """Sessions cannot have users of their own here, or none is free."""


@dataclass(slots=True)
class _Claim:
    user: SessionUser
    lock: int


class SessionUsers:
    """The users that sessions of this worker have, from a range that all workers of this machine share.

    A user is claimed by the lock of a file. The file says which folder was the home of the last session, so that what a
    killed worker left is found: its processes end and its files go before the user is given to another session.

    Args:
        first: the smallest number.
        count: how many numbers there are.
        is_required: whether a worker without them must not start.
        locks: the folder of the files.
        sweep: has a process of a user end all others of it, as only that user can; may do nothing.
    """

    def __init__(
        self,
        first: int,
        count: int,
        *,
        is_required: bool = False,
        locks: Path = LOCKS,
        sweep: Callable[[SessionUser], None] = lambda user: None,
    ) -> None:
        """Find out which users may be given out.

        Raises:
            SessionUsersUnavailableError: this process is not root, or nothing can be locked.
        """
        if os.geteuid() != 0:
            raise SessionUsersUnavailableError("only root can give sessions users of their own")
        self._numbers = range(first, first + count)
        self.is_required = is_required
        self.sweep = sweep
        self._locks = locks
        self._groups = device_groups()
        self._claims: dict[str, _Claim] = {}
        self._ours: set[int] = set()
        self._clearing = 0
        self._problem = ""
        self._lock = threading.Lock()
        self._cleared = threading.Condition(self._lock)
        try:
            locks.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = locks.lstat()
            if status.st_uid != 0 or status.st_mode & 0o022 or locks.is_symlink():
                raise SessionUsersUnavailableError(f"{locks} is not root's alone")
            with tempfile.TemporaryFile(dir=locks):
                pass
        except OSError as error:
            raise SessionUsersUnavailableError(f"{locks} cannot be written: {error.strerror}") from error

    def claim(self, session: str) -> SessionUser:
        """Return a user for this session, with an empty home; `release` gives it back.

        Raises:
            SessionUsersUnavailableError: none is free.
        """
        for number in self._numbers:
            try:
                claim = self._claim(number)
            except OSError as error:
                raise SessionUsersUnavailableError(f"no home for a session's user: {error}") from error
            if claim is not None:
                with self._lock:
                    self._claims[session] = claim
                return claim.user
        raise SessionUsersUnavailableError(f"none of the users {self._numbers[0]} to {self._numbers[-1]} is free")

    @contextlib.contextmanager
    def trial(self) -> Iterator[SessionUser | None]:
        """Claim a user to find out whether sessions can have one; None where none can be claimed."""
        try:
            user = self.claim(_TRIAL)
        except SessionUsersUnavailableError as error:
            self._problem = str(error)
            yield None
            return
        try:
            yield user
        finally:
            self.release(_TRIAL)

    def are_usable(self, obstacle: str) -> bool:
        """Return whether sessions can have users, after the trial; say in the log who they are.

        Args:
            obstacle: what the trial has found to be in the way.

        Raises:
            ConfigurationError: they cannot, and were asked for.
        """
        why = self._problem or obstacle
        if not why:
            logger.info("sessions: a user each, %d to %d", self._numbers[0], self._numbers[-1])
            return True
        if self.is_required:
            raise ConfigurationError(
                f"Sessions cannot have users of their own: {why}. Install Python and skyproxy where all users can read "
                "them (not below /root), or leave out --session-users."
            )
        logger.warning(
            "sessions: the worker's own user, root, for all, so whoever runs functions reaches the other sessions: %s. "
            "--session-users off leaves this line out.",
            why,
        )
        return False

    def _claim(self, number: int) -> _Claim | None:
        if _has_account(number):
            return None
        lock = os.open(self._locks / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = os.read(lock, 4096).decode(errors="replace")
            if left:
                # A worker of ours was killed: what belongs to this user now is what its session left.
                usable = self._clear(SessionUser(number, (), left), _REMOVE_BEFORE_USE_SECONDS)
            else:
                # Somebody else's: another program uses this number, so we do not. Looked for once: it takes a while
                # where many processes are.
                usable = number in self._ours or not (live_processes_of(number) or files_of(number))
            if usable:
                return _Claim(self._settle(number, lock), lock)
        except BlockingIOError:
            pass  # another session has it, of this worker or of another one
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def _settle(self, number: int, lock: int) -> SessionUser:
        home = tempfile.mkdtemp(prefix="skyproxy-session-")  # nobody else may enter it
        _write(lock, home)
        os.chown(home, number, number)
        return SessionUser(number, self._groups, home)

    def release(self, session: str) -> None:
        """End what is left of this session's user, and remove its files; then another session may have the user."""
        with self._lock:
            claim = self._claims.pop(session, None)
            if claim is None:
                return
            self._clearing += 1
        try:
            if self._clear(claim.user):
                _write(claim.lock, "")
                self._ours.add(claim.user.number)
            else:
                # The file still says that it was used: the next worker that claims it tries again.
                logger.error("user %d of a session is not used again: something of it stays", claim.user.number)
        except OSError as error:
            logger.error("user %d of a session is not used again: %s", claim.user.number, error)
        finally:
            os.close(claim.lock)
            with self._cleared:
                self._clearing -= 1
                self._cleared.notify_all()

    def _clear(self, user: SessionUser, remove_seconds: float = _REMOVE_SECONDS) -> bool:
        """End all processes of a user and remove its files; return False if something stays."""
        deadline = time.monotonic() + _END_SECONDS
        while pids := live_processes_of(user.number):
            self.sweep(user)
            for pid in pids:
                with contextlib.suppress(OSError):
                    kill_process(pid, user.number)
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        IpcObjects(user.number).remove()
        deadline = time.monotonic() + remove_seconds
        homes = [Path(user.home)] if _is_home(user.home) else []
        removed = [remove_tree(file, deadline) for file in (*homes, *files_of(user.number))]
        return all(removed)

    def close(self) -> None:
        """Give all users back, and wait a while for those that are being given back."""
        with self._lock:
            sessions = list(self._claims)
        for session in sessions:
            self.release(session)
        with self._cleared:
            self._cleared.wait_for(lambda: not self._clearing, _CLOSE_SECONDS)


def _has_account(number: int) -> bool:
    for look in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            look(number)
            return True
    return False


def _is_home(path: str) -> bool:
    """Return whether a path is one that `_settle` makes; what a file says is not believed."""
    return os.path.isabs(path) and os.path.basename(path).startswith("skyproxy-session-")


def _write(lock: int, text: str) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)
