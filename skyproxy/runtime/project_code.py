"""The user's own modules in a worker process: which folders they are imported from, and what was loaded from there.

A program names its folders, or sends their files; see `skyproxy.functions.project_sync`. Modules that were loaded are
loaded anew once one of their files has changed, all of them: others may hold what they took from it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.machinery
import os
import pickle
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any

from skyproxy.errors import ProtocolError
from skyproxy.runtime.calls import current_call
from skyproxy.runtime.scratch import make_scratch, remove_scratch

OWN_PACKAGES = frozenset({"skyproxy", "skyproxy_server", "skyproxy_operator"})
LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})

Folder = tuple[str, bool]
"""A folder to import from, and whether it comes before what is installed."""
_Signature = tuple[int, int, int]


class _ProjectLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source and remembers which state of it.

    Compiled files are neither read nor written: Python takes one for current where the source has changed within a
    second and kept its size.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        signature = _signature(path)  # before it is read: what changes meanwhile counts as changed
        code: CodeType = self.source_to_code(self.get_data(path), path)
        if fullname.partition(".")[0] not in OWN_PACKAGES:
            PROJECT_CODE.loaded[fullname] = path, signature
        return code


def _signature(path: str) -> _Signature | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class ProjectCode:
    """The folders from which the calling program imports in this process, one program at a time.

    Attributes:
        loaded: the modules that came from its folders: their files, and the state these were in.
        generation: how often modules were unloaded; functions that were made before may hold what these had.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.loaded: dict[str, tuple[str, _Signature | None]] = {}
        self._lock = threading.RLock()
        self._folders: dict[str, tuple[Folder, ...]] = {}
        self._received: dict[str, Path] = {}
        self._active: tuple[Folder, ...] = ()
        self._places: tuple[str, ...] = ()
        self._hooked = False

    # --- what a program says ------------------------------------------------------------------------------------------

    def use(self, session: str, folders: Sequence[Folder]) -> None:
        """Import from folders that this machine has itself.

        Args:
            session: whose calls do.
            folders: in the order of the search.
        """
        with self._lock:
            self._folders[session] = tuple((str(path), bool(first)) for path, first in folders)

    def receive(self, session: str, order: Sequence[bool], changed: Mapping[tuple[int, str], bytes | None]) -> None:
        """Import from folders that are kept here in the state that the program sends.

        Args:
            session: whose calls do.
            order: for each folder, whether it comes before what is installed.
            changed: what to write, by the number of the folder and the path in it; None removes a file.

        Raises:
            ProtocolError: a path leads out of its folder.
        """
        with self._lock:
            base = self._received.get(session)
            if base is None:
                base = self._received[session] = make_scratch("code")
            _write_files(base, len(order), changed)
            self._folders[session] = tuple((str(base / str(number)), first) for number, first in enumerate(order))
            importlib.invalidate_caches()

    def forget(self, session: str) -> None:
        """Drop a program that no longer calls, with the files that it sent."""
        with self._lock:
            folders = self._folders.pop(session, ())
            base = self._received.pop(session, None)
            if base is not None:
                if folders == self._active:
                    self._activate(())
                remove_scratch(base)

    def folders(self, session: str) -> list[str]:
        """The folders that a program imports from."""
        return [path for path, _ in self._folders.get(session, ())]

    def places(self, session: str) -> tuple[Folder, ...]:
        """The same with their order, as `use` takes them."""
        return self._folders.get(session, ())

    # --- what its calls find ------------------------------------------------------------------------------------------

    def enter(self, session: str) -> None:
        """See to it that a call imports its own program's modules, as they are now."""
        folders = self._folders.get(session)
        if folders is None:
            return  # it has none, or has ended: others may be in the midst of an import
        with self._lock:
            if folders != self._active:
                self._activate(folders)
            elif any(_signature(path) != known for path, known in list(self.loaded.values())):
                self._unload()

    def _activate(self, folders: tuple[Folder, ...]) -> None:
        if not self._hooked:
            self._hooked = True
            sys.path_hooks.insert(0, self._finder)
        self._drop_loaded()
        for path, _ in self._active:
            with contextlib.suppress(ValueError):
                sys.path.remove(path)
        for name in self._packages_without_files():
            sys.modules.pop(name, None)
        self._active = folders
        self._places = tuple(os.path.join(path, "") for path, _ in folders)
        for position, path in enumerate(path for path, first in folders if first):
            with contextlib.suppress(ValueError):
                sys.path.remove(path)
            sys.path.insert(position, path)
        sys.path.extend(path for path, first in folders if not first and path not in sys.path)
        # Finders made before, without us, would go on.
        for place in list(sys.path_importer_cache):
            if self._holds(place) or isinstance(sys.path_importer_cache[place], _ProjectFinder):
                del sys.path_importer_cache[place]
        importlib.invalidate_caches()

    def _packages_without_files(self) -> list[str]:
        """The namespace packages of the program; all of them first, because a path asks for the packages above it."""
        found: list[str] = []
        if not self._places:
            return found  # to look at every module would give a process that was just forked a copy of all of them
        for name, module in list(sys.modules.items()):
            places = getattr(module, "__path__", None)
            if getattr(module, "__file__", None) is None and places is not None:
                with contextlib.suppress(Exception):
                    if any(self._holds(place) for place in places):
                        found.append(name)
        return found

    def _unload(self) -> None:
        self._drop_loaded()
        importlib.invalidate_caches()

    def _drop_loaded(self) -> None:
        if self.loaded:
            self.generation += 1
        for name in list(self.loaded):
            module = sys.modules.get(name)
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue  # another call imports it now
            del self.loaded[name]
            sys.modules.pop(name, None)

    def _holds(self, path: str) -> bool:
        return os.path.join(path, "").startswith(self._places) and LIBRARY_FOLDERS.isdisjoint(Path(path).parts)

    def _finder(self, path: str) -> _ProjectFinder:
        if not self._places or not self._holds(path) or not os.path.isdir(path):
            raise ImportError
        return _ProjectFinder(
            path,
            (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
            (_ProjectLoader, importlib.machinery.SOURCE_SUFFIXES),
        )

    def close(self) -> None:
        """Remove what programs have sent."""
        with self._lock:
            for session in list(self._received):
                self.forget(session)


class _ProjectFinder(importlib.machinery.FileFinder):
    """Finds modules in a folder of the program."""


PROJECT_CODE = ProjectCode()
atexit.register(PROJECT_CODE.close)


# --- what a program calls on its workers -----------------------------------------------------------------------------


def use_folders(folders: list[Folder]) -> None:
    """See `ProjectCode.use`."""
    PROJECT_CODE.use(_session(), folders)


def receive_files(order: list[bool], changed: bytes) -> None:
    """See `ProjectCode.receive`; `changed` is pickled and compressed."""
    PROJECT_CODE.receive(_session(), order, pickle.loads(zlib.decompress(changed)))


def pack_files(changed: Mapping[tuple[int, str], bytes | None]) -> bytes:
    """Pack files as `receive_files` takes them."""
    return zlib.compress(pickle.dumps(dict(changed), protocol=5), 1)


def unpack_files(base: Path, packed: bytes) -> None:
    """Write the files of `pack_files`, each folder into one below `base` that has its number.

    Raises:
        ProtocolError: a path leads out of its folder.
    """
    changed = pickle.loads(zlib.decompress(packed))
    _write_files(base, 1 + max((number for number, _ in changed), default=0), changed)


def _write_files(base: Path, folder_count: int, changed: Mapping[tuple[int, str], bytes | None]) -> None:
    for (number, name), content in changed.items():
        place = PurePosixPath(name)
        if not 0 <= number < folder_count or place.is_absolute() or ".." in place.parts or not place.parts:
            raise ProtocolError(f"a project file cannot be called {name!r}")
        path = base / str(number) / place
        if content is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_bytes(content)
        new.replace(path)


def undecorated(module: str, qualname: str, depth: int) -> object:
    """Return a function of a module from below its decorators.

    Args:
        module: its name.
        qualname: of the function in there.
        depth: how often `__wrapped__` leads to it.
    """
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = found.__wrapped__
    return found


def _session() -> str:
    call = current_call()
    return call.session if call is not None else ""
