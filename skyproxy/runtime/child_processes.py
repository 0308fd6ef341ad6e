"""Functions and classes of a script or a notebook in child processes that a function starts on a worker.

`multiprocessing`, and with it data loaders, process pools and `torch.multiprocessing.spawn`, sends functions and
classes by name: "__main__.square". In a program the child finds that name. On a worker `__main__` is the worker, so
they travel as code there, as they came from the program.
"""

from __future__ import annotations

import io
import pickle
import threading
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as _cloudpickle

from skyproxy import patching
from skyproxy.runtime.sent_classes import complete, find_stand_in, name_in_main
from skyproxy.runtime.sources import SourceTable

_installing = threading.Lock()


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._sources = SourceTable()

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is types.CodeType:
            return self._sources.reduce(obj, with_lines=True)
        reduced = super().reducer_override(obj)
        return complete(obj, reduced) if isinstance(obj, type) else reduced


class _CodeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return find_stand_in(module, name) or super().find_class(module, name)


def install() -> None:
    """Have `pickle` find what came of the program by name, and processes that this one starts get it. Idempotent."""
    name_in_main()
    with _installing:
        if "reducer_override" not in vars(ForkingPickler):
            patching.add(
                ForkingPickler,
                "reducer_override",
                _reduce,
                why="child processes of functions find no functions and classes of the program by their names",
                test="tests/functions/test_child_processes.py::test_a_process_pool_maps_a_function_of_the_program",
                when=patching.When.WORKER,
            )


def _reduce(pickler: ForkingPickler, obj: object) -> Any:
    # What is local to a function is refused, as in any program.
    if not isinstance(obj, types.FunctionType | type) or "<locals>" in obj.__qualname__:
        return NotImplemented
    if _cloudpickle._should_pickle_by_reference(obj):
        return NotImplemented
    file = io.BytesIO()
    _CodePickler(file).dump(obj)
    return load, (file.getvalue(),)


def load(content: bytes) -> Any:
    """Make a function or class that another process of this function sent; what it sends back travels so, too."""
    install()
    return _CodeUnpickler(io.BytesIO(content)).load()


__all__ = ["install", "load"]
