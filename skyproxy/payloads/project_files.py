"""The files of the program's folders, for workers that have other disks: which they are, and what changed."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads.projects import is_project_module
from skyproxy.runtime.project_code import LIBRARY_FOLDERS, OWN_PACKAGES, Folder
from skyproxy.settings import SETTINGS, Settings

logger = logging.getLogger("skyproxy")

_SKIPPED = LIBRARY_FOLDERS | {"__pycache__", "node_modules"}
_DATA_SUFFIXES = frozenset({".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".txt", ".csv", ".j2", ".jinja", ".sql"})
_MAX_DATA_BYTES = 256 << 10
"""Of a file beside the modules of a package, such as its configuration."""
_MAX_FOREIGN_ENTRIES = 500
"""Entries of a folder without a module among them after which it counts as data."""
_LOOK_SHARE = 20
"""Of many calls at a time, none looks for changes before so many times as long as that took the last time."""

State = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProjectFile:
    """A file as it was read.

    Attributes:
        digest: of its content.
        state: of the file on the disk.
    """

    digest: bytes
    state: State


class _Folder:
    """One folder: what it held when it was looked through, and whether that is all still."""

    def __init__(self, path: str, settings: Settings) -> None:
        self._path = path
        self._settings = settings
        self._inner: dict[str, State | None] = {}
        self._names: list[str] = []
        self._has_warned = False

    def states(self) -> dict[str, State]:
        """Return the files by their path in the folder.

        Raises:
            ConfigurationError: the modules that the program has loaded from here are too many already.
        """
        # New and removed files change the folder that they are in.
        if not self._inner or any(_state(self._full_path(name)) != known for name, known in self._inner.items()):
            self._look_through()
        return {name: state for name in self._names if (state := _state(self._full_path(name))) is not None}

    def _full_path(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _look_through(self) -> None:
        self._inner, self._names = {}, []
        size = 0
        for inner, folder_state, files in _walk(self._path):
            self._inner[inner] = folder_state
            self._names += files
            size += sum(files.values())
            if self._is_too_much(len(self._names) + len(self._inner), size):
                self._take_loaded()
                return

    def _take_loaded(self) -> None:
        self._inner = {"": None}  # looked through every time: the program may have loaded more
        names = {*_loaded_files(self._path), *_entries(self._path)[0]}
        sizes = {name: state[1] for name in sorted(names) if (state := _state(self._full_path(name))) is not None}
        self._names = list(sizes)
        if self._is_too_much(len(sizes), sum(sizes.values())):
            raise ConfigurationError(
                f"the modules that this program has loaded from {self._path} exceed what may be sent to a worker "
                f"(SKYPROXY_MAX_PROJECT_FILES={self._settings.max_project_files}, "
                f"SKYPROXY_MAX_PROJECT_BYTES={self._settings.max_project_bytes:,}). Raise these, or set "
                "SKYPROXY_SYNC_PROJECT=0, and they travel as code."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "skyproxy: %s holds more than %d files and folders, or %d bytes, that could be imported. Workers get "
                "%d files: what lies in it itself, and what this program has loaded; functions can import no others "
                "from there. Start the program in the project's own folder, import what they need before, or raise "
                "SKYPROXY_MAX_PROJECT_FILES and SKYPROXY_MAX_PROJECT_BYTES.",
                self._path,
                self._settings.max_project_files,
                self._settings.max_project_bytes,
                len(self._names),
            )

    def _is_too_much(self, count: int, size: int) -> bool:
        return count > self._settings.max_project_files or size > self._settings.max_project_bytes


class ProjectFiles:
    """The files in the folders of this program that its functions could import."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._views: dict[str, _Folder] = {}
        self._files: dict[tuple[str, str], ProjectFile] = {}
        self._folders: tuple[Folder, ...] = ()
        self._next_look = 0.0

    def current(self, folders: tuple[Folder, ...], *, hurry: bool = False) -> dict[tuple[str, str], ProjectFile]:
        """Return the files by folder and path in it, as they are now.

        Args:
            folders: where to look.
            hurry: whether one of many calls asks. Then what was seen a moment ago will do: at most twenty times as
                long ago as looking takes.

        Raises:
            ConfigurationError: the modules that the program has loaded are too many already.
        """
        with self._lock:
            if hurry and folders == self._folders and time.monotonic() < self._next_look:
                return self._files
            begin = time.monotonic()
            views = {path: self._views.get(path) or _Folder(path, self._settings) for path, _ in folders}
            states = {path: view.states() for path, view in views.items()}
            self._next_look = begin + _LOOK_SHARE * (time.monotonic() - begin)
            found: dict[tuple[str, str], ProjectFile] = {}
            for path, files in states.items():
                for name, state in files.items():
                    known = self._files.get((path, name))
                    if known is None or known.state != state:
                        content = read_file(path, name)
                        if content is None:
                            continue
                        known = ProjectFile(hashlib.sha256(content).digest(), state)
                    found[path, name] = known
            self._views, self._files, self._folders = views, found, folders
            return found


def read_file(folder: str, name: str) -> bytes | None:
    """The content of a file; None where it is gone, or not ours to read."""
    try:
        return Path(folder, name).read_bytes()
    except OSError as error:
        if raised_by_handler(error):
            raise
        return None


def _walk(folder: str) -> Iterator[tuple[str, State, dict[str, int]]]:
    """The folders that modules' names could lead through, their states, and the sizes of the files that count.

    These are modules, and small texts beside the modules of a package.
    """
    waiting = [""]
    seen: set[int] = set()
    while waiting:
        inner = waiting.pop()
        place = os.path.join(folder, inner)
        state = _state(place)  # before its entries are read
        if state is None or state[2] in seen:
            continue  # a link that leads up again
        seen.add(state[2])
        modules, data, folders = _entries(place)
        if not inner:
            folders = [name for name in folders if name not in OWN_PACKAGES]
        files: dict[str, int] = {}
        for name in [*modules, *(data if "__init__.py" in modules else ())]:
            path = os.path.join(inner, name)
            of_file = _state(os.path.join(folder, path))
            if of_file is not None and (name.endswith(".py") or of_file[1] <= _MAX_DATA_BYTES):
                files[path] = of_file[1]
        yield inner, state, files
        waiting += (os.path.join(inner, name) for name in folders)


def _entries(folder: str) -> tuple[list[str], list[str], list[str]]:
    """The modules, other small texts and folders in a folder that a module's name could lead through."""
    modules: list[str] = []
    data: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= _MAX_FOREIGN_ENTRIES and not modules:
                    return [], [], []
                stem, suffix = os.path.splitext(entry.name)
                if suffix == ".py" and entry.is_file():
                    modules.append(entry.name)
                elif suffix in _DATA_SUFFIXES and not entry.name.startswith(".") and entry.is_file():
                    data.append(entry.name)
                elif not suffix and stem.isidentifier() and stem not in _SKIPPED and entry.is_dir():
                    if not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                        folders.append(entry.name)
    except OSError as error:
        if raised_by_handler(error):
            raise
    return modules, data, folders


def _state(path: str) -> State | None:
    try:
        status = os.stat(path)
    except OSError as error:
        if raised_by_handler(error):
            raise
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _loaded_files(folder: str) -> Iterator[str]:
    """The files of the user's modules that were loaded from a folder."""
    inside = os.path.join(folder, "")
    for module in list(sys.modules.values()):
        if is_project_module(module):
            path = os.path.abspath(str(module.__file__))
            if path.startswith(inside):
                yield path.removeprefix(inside)


PROJECT_FILES = ProjectFiles()
