"""Acts right after somebody's `import torch`, so that the order of imports does not matter. Does not import torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _TorchWatcher:
    """A finder that finds torch as the others do, and makes its loading end with a call."""

    _at_work = False

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._at_work:
            return None
        self._at_work = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._at_work = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def watch_torch(then: Callable[[], None]) -> None:
    """Calls `then` now if torch is loaded, or else as soon as it is."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _TorchWatcher(then))
    elif not getattr(getattr(torch, "__spec__", None), "_initializing", False):
        then()


def stop_watching() -> None:
    """Torch's import does nothing more. For workers: they have the devices, and need none that stands for them."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchWatcher)]
