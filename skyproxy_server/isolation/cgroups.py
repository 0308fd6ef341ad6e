"""A cgroup (version 2) for each session: its part of the processors, its memory with that of its children, its end.

A worker has a folder of its own below the cgroup that it was started in, locked for as long as it lives; what a killed
worker left is known by its lock, which is free, and is cleared away by the next one. See `man 7 cgroups`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CONTROLLERS = ("cpu", "memory")
_PREFIX = "skyproxy-"
_PERIOD_MICROSECONDS = 100_000
_LOCK_SECONDS = 5.0
_EMPTY_SECONDS = 5.0
_PAUSE_SECONDS = 0.005


class CgroupsUnavailableError(Exception):
    """Raised where this worker cannot give sessions cgroups; the text says why."""


@dataclass(frozen=True, slots=True)
class CgroupBounds:
    """Bounds on what all processes of one session together may use.

    Attributes:
        memory_bytes: memory, shared memory and files in memory included; 0: no bound of its own.
        cpus: processors' time per time; 0: as much as there is.
    """

    memory_bytes: int = 0
    cpus: float = 0.0


class Cgroups:
    """The cgroups of one worker's sessions.

    Args:
        base: the cgroup that the worker was started in.
        controllers: what the kernel must be able to bound there.

    Raises:
        CgroupsUnavailableError: there can be none; nothing was changed.
    """

    def __init__(self, base: Path, controllers: tuple[str, ...] = CONTROLLERS) -> None:
        self._base = base
        self._controllers = controllers
        if not os.access(base, os.W_OK) or os.statvfs(base).f_flag & os.ST_RDONLY:
            raise CgroupsUnavailableError(f"this worker may not write {base}")
        try:
            self._begin()
        except OSError as error:
            raise CgroupsUnavailableError(f"{base} accepts no cgroups from this worker: {error}") from error

    def _begin(self) -> None:
        missing = set(self._controllers) - set(_words(self._base / "cgroup.controllers"))
        if missing:
            raise CgroupsUnavailableError(f"{self._base} has no controller for {' and '.join(sorted(missing))}")
        # Only the root of the hierarchy may have both processes and bounded cgroups; it has no type.
        is_root = not (self._base / "cgroup.type").exists()
        with _hold_lock(
            self._base
        ):  # else another worker could take our folder, which is not locked yet, for an abandoned one
            self._clear_left()
            others = set(_pids(self._base)) - {os.getpid()}
            if others and not is_root:
                raise CgroupsUnavailableError(
                    f"{self._base} has {len(others)} other processes, and a cgroup with processes cannot be divided"
                )
            self._own = self._base / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
            self._own.mkdir()
            self._lock = os.open(self._own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            self._divide(is_root)
        except OSError:
            self.close()
            raise

    def _divide(self, is_root: bool) -> None:
        if not is_root:
            place = self._own / "worker"
            place.mkdir()
            _write(place / "cgroup.procs", str(os.getpid()))
        for folder in (self._base, self._own):
            for controller in set(self._controllers) - set(_words(folder / "cgroup.subtree_control")):
                _write(folder / "cgroup.subtree_control", f"+{controller}")

    def _clear_left(self) -> None:
        """Remove what workers left that were killed: nobody holds the lock of such a folder any more."""
        for folder in self._base.glob(f"{_PREFIX}*"):
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its worker lives
            else:
                _remove(folder)
            finally:
                os.close(lock)

    def add(self, session: str, pid: int, bounds: CgroupBounds) -> None:
        """Put a session's process, and so all that it will start, into a cgroup of its own.

        Raises:
            OSError: it cannot be bounded.
        """
        folder = self._own / session
        folder.mkdir()
        if bounds.memory_bytes:
            _write(folder / "memory.max", str(bounds.memory_bytes))
            with contextlib.suppress(FileNotFoundError):  # kernels that do not account for swap
                _write(folder / "memory.swap.max", "0")
        if bounds.cpus:
            quota = max(int(bounds.cpus * _PERIOD_MICROSECONDS), 1000)  # the least that the kernel takes
            _write(folder / "cpu.max", f"{quota} {_PERIOD_MICROSECONDS}")
        _write(folder / "cgroup.procs", str(pid))

    def used_seconds(self, session: str) -> float:
        """Return the processor time that all processes of a session have used, ended ones included.

        Raises:
            OSError: the session has no cgroup any more.
        """
        for line in (self._own / session / "cpu.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "usage_usec":
                return int(value) / 1e6
        return 0.0

    def set_niceness(self, session: str, niceness: int) -> None:
        """Set a session's weight beside the others, as the niceness of a process is to others.

        Raises:
            OSError: the session has no cgroup any more.
        """
        _write(self._own / session / "cpu.weight.nice", str(niceness))

    def remove(self, session: str) -> None:
        """End what is left of a session, and its cgroup."""
        _remove(self._own / session)

    def close(self) -> None:
        """Remove all cgroups of this worker; it goes back to where it was started."""
        for folder in self._own.iterdir():
            if folder.is_dir() and folder.name != "worker":
                _remove(folder)
        with contextlib.suppress(OSError):
            if (self._own / "worker").exists():
                for folder in (self._own, self._base):
                    for controller in self._controllers:
                        _write(folder / "cgroup.subtree_control", f"-{controller}")
                _write(self._base / "cgroup.procs", str(os.getpid()))
        # Where the worker could not leave, a later one removes it.
        for folder in (self._own / "worker", self._own):
            with contextlib.suppress(OSError):
                folder.rmdir()
        os.close(self._lock)


def own_cgroup() -> Path:
    """Return the folder of the cgroup that this process is in.

    Raises:
        CgroupsUnavailableError: the system has no cgroups version 2, or this process cannot see its own.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CgroupsUnavailableError(f"the system reports no cgroups: {error}") from error
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::/")), None)
    if own is None:
        raise CgroupsUnavailableError("the system has no cgroups version 2")
    for line in mounts:
        place, _, kind = line.partition(" - ")
        root, mount_point = place.split()[3:5]
        if kind.split()[:1] == ["cgroup2"] and PurePosixPath(own).is_relative_to(root):
            return Path(mount_point) / PurePosixPath(own).relative_to(root)
    raise CgroupsUnavailableError("the cgroup of this worker is not mounted here")


@contextlib.contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CgroupsUnavailableError(f"{folder} is locked by another program") from None
                time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """End all processes of a cgroup and of those below, and remove it; it stays where a process does not end."""
    _kill(folder)
    deadline = time.monotonic() + _EMPTY_SECONDS
    while folder.exists():
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(below)
        if time.monotonic() > deadline:
            return
        if folder.exists():
            time.sleep(_PAUSE_SECONDS)


def _kill(folder: Path) -> None:
    try:
        _write(folder / "cgroup.kill", "1")
    except OSError:  # kernels before 5.14
        for below, _, _ in os.walk(folder):
            for pid in _pids(Path(below)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _pids(folder: Path) -> list[int]:
    return [int(word) for word in _words(folder / "cgroup.procs")]


def _words(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="ascii").split()
    return []


def _write(file: Path, text: str) -> None:
    """Write a file of the kernel's: never make one."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
