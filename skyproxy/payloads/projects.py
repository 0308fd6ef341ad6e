"""The modules that are the user's own, the way they travel, and the places where workers find them.

A worker imports them by name from the program's folders, or from copies of these. What it could not find there under
that name travels as code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import math
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import cloudpickle

from skyproxy.interrupts import raised_by_handler
from skyproxy.runtime.project_code import LIBRARY_FOLDERS, OWN_PACKAGES, Folder, undecorated
from skyproxy.settings import SETTINGS

_OWN = frozenset({"__main__", "__mp_main__", "torch"}) | OWN_PACKAGES
_MAX_DECORATORS = 16
_lock = threading.RLock()
_verdicts: dict[tuple[str, str], bool] = {}
_seen: list[object] = []
"""The modules of the program when it was last looked through: it has thousands, and they seldom change."""
_MOMENT_SECONDS = 0.01
_looked: tuple[float, tuple[str, object], int] = -math.inf, ("", 0), 0
"""The time of that look, what was the last of them, and how many there were."""
_found: tuple[tuple[object, ...], tuple[Folder, ...], object] = (), (), None
"""The folders that were found last, what they depend on beside the modules, and the look at those."""
_projects: list[ModuleType] = []
"""The user's among them."""
_by_value: tuple[tuple[Folder, ...], list[ModuleType]] = (), []
"""Those of them that travel as code, given these folders."""
_roots_of_projects: list[str] = []
"""The folders that they were imported from."""


def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages())
    roots.add(site.getusersitepackages())
    return tuple(str(Path(root).resolve()) for root in roots if root)


_roots = _library_roots()
_scripts = str(Path(sysconfig.get_path("scripts")).resolve())
"""Folders in which programs are installed: the "script's folder" of each of them."""


@functools.lru_cache(4096)
def _is_library(path: str) -> bool:
    """Return whether a file or folder belongs to what is installed."""
    resolved = Path(path).resolve()
    if str(resolved).startswith(_roots) or not LIBRARY_FOLDERS.isdisjoint(resolved.parts):
        return True
    below, place = resolved, resolved.parent
    while below != place:
        if below.stem in _installed_names(place):
            return True
        below, place = place, place.parent
    own = _installed_names(resolved)
    return bool(own) and not any(
        found.stem not in own and (found.suffix == ".py" or (found / "__init__.py").is_file())
        for found in resolved.iterdir()
    )


@functools.lru_cache(4096)
def _installed_names(folder: Path) -> frozenset[str]:
    """The names that `pip install --target` has put into a folder, where a program may have modules of its own, too."""
    names: set[str] = set()
    for record in folder.glob("*.dist-info/RECORD"):
        files = importlib.metadata.PathDistribution(record.parent).files or ()
        names.update(Path(file.parts[0]).stem for file in files)
    return frozenset(names)


def is_project_module(module: object) -> bool:
    """Return whether a module is code of the user's project: neither installed, nor Python's own, nor ours."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not isinstance(module, ModuleType):
        return False
    if not isinstance(name, str) or not isinstance(file, str) or name.partition(".")[0] in _OWN:
        return False
    verdict = _verdicts.get((name, file))
    if verdict is None:
        verdict = _verdicts[name, file] = file.endswith(".py") and not _is_library(file)
    return verdict


# --- where they are found --------------------------------------------------------------------------------------------


def project_folders() -> tuple[Folder, ...]:
    """Return the folders that this program imports its own modules from, in the order of the search.

    These are the entries of `sys.path` that hold nothing installed (the script's folder, or the working directory in
    notebooks and with `python -m`), and what editable installs and loaded modules of the user lie in.
    """
    try:
        working = os.getcwd()
    except OSError as error:
        if raised_by_handler(error):
            raise
        working = ""  # it was removed
    global _found
    key = (*sys.path, working, *map(id, sys.meta_path))
    found = _found
    if found[0] == key and found[2] is _looked and _looked_lately():
        return found[1]
    with _lock:
        _project_modules()
        folders = _all_folders(tuple(sys.path), working, (*_editable_folders(), *_roots_of_projects))
        _found = key, folders, _looked
    return folders


@functools.lru_cache(16)
def _all_folders(path: tuple[str, ...], working: str, others: tuple[str, ...]) -> tuple[Folder, ...]:
    found = dict(_folders_in(path, working))
    for folder in others:
        found.setdefault(folder, False)
    return tuple(found.items())


@functools.lru_cache(16)
def _folders_in(path: tuple[str, ...], working: str) -> tuple[Folder, ...]:
    """Return those of the user among the folders of a search path, while this is the working directory."""
    found: dict[str, bool] = {}
    first = True
    for entry in path:
        folder = os.path.abspath(os.path.join(working, entry))
        if _is_library(folder):
            first = False
        elif folder not in found and _is_folder_of_modules(folder):
            found[folder] = first
    return tuple(found.items())


@functools.lru_cache(256)
def _is_folder_of_modules(folder: str) -> bool:
    return os.path.isdir(folder) and str(Path(folder).resolve()) != _scripts


def _editable_folders() -> Iterator[str]:
    """Yield the folders of editable installs that have no entry in `sys.path`: setuptools gives them finders of their
    own.
    """
    for finder in list(sys.meta_path):
        module = getattr(finder, "__module__", None)
        if isinstance(module, str) and module.startswith("__editable__"):
            mapping = getattr(sys.modules.get(module), "MAPPING", None)
            for name, place in mapping.items() if isinstance(mapping, dict) else ():
                if name not in _OWN and (folder := _folder_of_install(name, place)) is not None:
                    yield folder


@functools.lru_cache(4096)
def _folder_of_install(name: str, place: str) -> str | None:
    """The folder from which a package's name leads to where an editable install has it; None where it does not."""
    path = Path(place)
    return str(path.parents[name.count(".")]) if path.name == name.rpartition(".")[2] else None


def _root_of(module: ModuleType) -> str | None:
    """The folder from which a module's name leads to its file; None where it does not."""
    path = Path(os.path.abspath(str(module.__file__)))
    path = path.parent if path.name == "__init__.py" else path.with_suffix("")
    for part in reversed(module.__name__.split(".")):
        if path.name != part:
            return None
        path = path.parent
    return str(path)


def _travels_by_name(module: ModuleType, folders: tuple[Folder, ...]) -> bool:
    """Return whether `import` of the module's name gives a worker this very file."""
    root, top = _root_of(module), module.__name__.partition(".")[0]
    if root is None or not SETTINGS.sync_project or _is_installed(top):
        return False
    for folder, _ in folders:
        if folder == root:
            return True
        if os.path.isfile(os.path.join(folder, top + ".py")) or os.path.isfile(
            os.path.join(folder, top, "__init__.py")
        ):
            return False  # found first
    return False


@functools.lru_cache(4096)
def _is_installed(name: str) -> bool:
    """Return whether something installed has this name, too: a worker may have loaded that."""
    if name in sys.stdlib_module_names:
        return True
    places = [entry for entry in sys.path if entry and _is_library(os.path.abspath(entry))]
    spec = importlib.machinery.PathFinder.find_spec(name, places)
    return spec is not None and spec.loader is not None


# --- how they travel -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def project_by_value() -> Iterator[None]:
    """Functions and classes of the user's modules that no worker can import are pickled as code in the `with` block.

    cloudpickle knows this for the whole process only, hence the lock: one thread pickles at a time, and what the user
    pickles elsewhere is as it was before.
    """
    with _lock:
        known = cloudpickle.list_registry_pickle_by_value()
        added: list[ModuleType] = []
        try:
            for module in _modules_by_value():
                if module.__name__ not in known:
                    cloudpickle.register_pickle_by_value(module)
                    added.append(module)
            yield
        finally:
            for module in added:
                with contextlib.suppress(ValueError):
                    cloudpickle.unregister_pickle_by_value(module)


def reduce_decorated(function: FunctionType) -> object:
    """Return what pickle needs to find a function that its module has under decorators; NotImplemented for others."""
    name, module = function.__qualname__, sys.modules.get(function.__module__ or "")
    if module is None or "<" in name or not is_project_module(module):
        return NotImplemented
    found: object = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return NotImplemented
    depth = 0
    while found is not function and found is not None and depth < _MAX_DECORATORS:
        found = getattr(found, "__wrapped__", None)
        depth += 1
    if found is not function or not depth or module in _modules_by_value():
        return NotImplemented  # as cloudpickle does it
    return undecorated, (module.__name__, name, depth)


def _modules_by_value() -> list[ModuleType]:
    """The user's modules that travel as code."""
    global _by_value
    folders = project_folders()
    with _lock:
        if _by_value[0] != folders or not _by_value[0]:
            _by_value = folders, [module for module in _project_modules() if not _travels_by_name(module, folders)]
        return _by_value[1]


def _project_modules() -> list[ModuleType]:
    """The user's modules that are loaded now."""
    global _by_value, _looked
    if _looked_lately():
        return _projects
    look = time.monotonic(), _last_name(), len(sys.modules)
    if not _are_same(list(sys.modules.values()), _seen):
        found: dict[str, object] = {**sys.modules}
        _seen[:] = found.values()
        # Some put objects that are not modules there, or modules under other names than their own.
        _projects[:] = [
            module
            for name, module in found.items()
            if isinstance(module, ModuleType) and is_project_module(module) and module.__name__ == name
        ]
        _roots_of_projects[:] = dict.fromkeys(root for root in map(_root_of, _projects) if root is not None)
        _by_value = (), []
    _looked = look  # at the end: others would take the ones before for what was found
    return _projects


def _looked_lately() -> bool:
    """Return whether the modules were looked through a moment ago, and none has come or gone since.

    What is imported, also anew, comes last. Only a module that was put in the place of another one by hand is noticed
    a moment later: looking at all of them takes longer than all else that a short call needs here.
    """
    when, last, count = _looked
    return len(sys.modules) == count and time.monotonic() - when < _MOMENT_SECONDS and _last_name() == last


def _last_name() -> tuple[str, object]:
    """Return the name and the identity of what was put into `sys.modules` last."""
    try:
        name = next(reversed(sys.modules), "")
        return name, id(sys.modules.get(name))
    except RuntimeError as error:  # another thread imports something at this moment
        if raised_by_handler(error):
            raise
        return "", 0


def _are_same(one: list[object], other: list[object]) -> bool:
    """Return whether both have the same objects.

    Lists look at identity first, four times faster than a loop here: only objects in the place of others are asked, and
    modules are equal to themselves alone.
    """
    try:
        return one == other
    except Exception as error:  # of something that is no module, and cannot be compared
        if raised_by_handler(error):
            raise
        return False
