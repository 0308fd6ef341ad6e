"""Has a process of a script under torchrun wait with an exception that ends it, before it ends.

Python imports this module by its name before the script, which so runs as it would without it. Skyproxy itself is
imported once something waits.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import TracebackType

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_plain_hook = sys.excepthook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _plain_hook(kind, error, trace)
    from skyproxy.runtime import rank_debugger

    rank_debugger.look_at(error.with_traceback(trace))


def _import_the_other() -> None:
    """Import the module of this name that there is without this one."""
    others = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_import_the_other()
if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
    _plain_hook = sys.excepthook
    sys.excepthook = _hook
