"""Which modules are the user's own: a worker cannot import those, so what they define travels as code."""

from __future__ import annotations

import contextlib
import operator
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

_OWN = frozenset({"__main__", "__mp_main__", "skyproxy", "skyproxy_server", "skyproxy_operator", "torch"})
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})
_lock = threading.RLock()
_verdicts: dict[tuple[str, str], bool] = {}
_seen: dict[str, object] = {}
"""The modules of the program when it was last looked through: it has thousands, and they seldom change."""
_projects: list[ModuleType] = []
"""The user's among them."""


def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages())
    roots.add(site.getusersitepackages())
    return tuple(str(Path(root).resolve()) for root in roots if root)


_roots = _library_roots()


def is_project_module(module: object) -> bool:
    """Whether a module is code of the user's project: neither installed, nor Python's own, nor ours."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not isinstance(module, ModuleType):
        return False
    if not isinstance(name, str) or not isinstance(file, str) or name.partition(".")[0] in _OWN:
        return False
    verdict = _verdicts.get((name, file))
    if verdict is None:
        path = Path(file).resolve()
        inside = str(path).startswith(_roots) or not _LIBRARY_FOLDERS.isdisjoint(path.parts)
        verdict = _verdicts[name, file] = path.suffix == ".py" and not inside
    return verdict


@contextlib.contextmanager
def project_by_value() -> Iterator[None]:
    """Functions and classes of the user's modules are pickled as code inside the `with` block.

    cloudpickle knows this for the whole process only, hence the lock: one thread pickles at a time, and what the user
    pickles elsewhere is as it was before.
    """
    with _lock:
        known = cloudpickle.list_registry_pickle_by_value()
        added: list[ModuleType] = []
        try:
            for module in _project_modules():
                if module.__name__ not in known:
                    cloudpickle.register_pickle_by_value(module)
                    added.append(module)
            yield
        finally:
            for module in added:
                with contextlib.suppress(ValueError):
                    cloudpickle.unregister_pickle_by_value(module)


def _project_modules() -> list[ModuleType]:
    """The user's modules that are loaded now."""
    if not _same(list(sys.modules.values()), list(_seen.values())):
        _seen.clear()
        _seen.update(sys.modules)
        # Some put objects that are no modules there, or modules under other names than their own.
        _projects[:] = [
            module
            for name, module in list(_seen.items())
            if isinstance(module, ModuleType) and is_project_module(module) and module.__name__ == name
        ]
    return _projects


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether both have the very same objects, whatever these think of equality."""
    return len(one) == len(other) and all(map(operator.is_, one, other))
