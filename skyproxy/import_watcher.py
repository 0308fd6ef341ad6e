"""Acts right after somebody's first import of a module, so that the order of imports does not matter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeGuard

in_worker = False
"""In the process of a worker the device is registered by whoever opens a node, not by an import."""


class _Watcher:
    """A finder that finds one module as the others do, and makes its loading end with a call."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self.name = name
        self.then = then
        self._at_work = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._at_work:
            return None
        self._at_work = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._at_work = False
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            if loader.exec_module is execute_and_tell:
                loader.exec_module = execute  # type: ignore[method-assign]
            execute(module)
            # What this module imports may come here, too: archives have one loader for all modules, and so has pytest.
            if module.__spec__ is spec and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Calls `then` with the module: now if it is loaded, or else as soon as it is."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Watcher(name, then))
    elif _is_half_imported(spec := module.__spec__):  # by what imports us, so that no finder is asked any more
        _settle(spec, lambda: then(module) if sys.modules.get(name) is module else None)
    else:
        then(module)


class _SettlingSpec(ModuleSpec):
    """The spec of a module that is half imported; calls somebody once it is whole."""

    then: Callable[[], object]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            self.__dict__.pop("then")()


def when_whole(package: str, then: Callable[[], object]) -> None:
    """Call `then` once no module below this package is half imported: now, or when the outermost of them is whole.

    What imports the package's other modules would find that one without its names.
    """
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.startswith(f"{package}.") and _is_half_imported(spec):
            _settle(spec, then)
            return
    then()


def _is_half_imported(spec: ModuleSpec | None) -> TypeGuard[ModuleSpec]:
    return type(spec) is ModuleSpec and getattr(spec, "_initializing", False)


def _settle(spec: ModuleSpec, then: Callable[[], object]) -> None:
    spec.__dict__["then"] = then
    spec.__class__ = _SettlingSpec


def namesakes(packages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the packages in whose place a file of that name was imported, and that file."""
    for name in packages:
        module = sys.modules.get(name)
        if module is not None and not hasattr(module, "__path__") and getattr(module, "__file__", None):
            yield name, str(module.__file__)


def forget_own() -> None:
    """No import calls anything of this package any more; what others asked for stays.

    For the processes of workers, before they import torch: they have the real devices, and need no stand-in for them.
    """
    global in_worker
    in_worker = True
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not (isinstance(finder, _Watcher) and finder.then.__module__ == __package__)
    ]


def forget_all() -> None:
    """No import calls anybody any more."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watcher)]
