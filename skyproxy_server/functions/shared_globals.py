"""The globals of functions that travel as code: those of one file share them on a worker, as in the program itself.

Each function brings the values of the globals that it names. What the program has not changed since is left as the
functions here have made it; what it has changed is taken over. Functions that run meanwhile see nothing of that: what
they were sent is what they run with.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import secrets
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle as _cloudpickle
import torch

from skyproxy.errors import ProtocolError
from skyproxy.payloads.pickling import Unpickler
from skyproxy.payloads.tensors import Row
from skyproxy.runtime.project_code import PROJECT_CODE

_NO_TABLES: dict[str, object] = {"tensors": [], "bases": []}
_FILE = ("__name__", "__file__")
File = tuple[object, ...]


class Namespace:
    """The globals of one file, as one version of the program has them.

    Attributes:
        values: what functions have as `__globals__`.
        sent: a digest of what the program sent, for each name that it sent.
    """

    def __init__(self, values: dict[str, Any] | None = None, sent: dict[str, bytes] | None = None) -> None:
        self.values: dict[str, Any] = {} if values is None else values
        self.sent: dict[str, bytes] = {} if sent is None else sent


class SharedGlobals:
    """Those of one session."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._current: dict[File, Namespace] = {}
        self._generation = 0

    def make(self, function: SharingFunction) -> Callable[..., object]:
        """The function for one call, on that call's thread.

        Raises:
            Exception: something that it refers to is missing here.
        """
        with self._lock:
            if self._generation != PROJECT_CODE.generation:
                # Modules of the program were reloaded: globals may hold objects of the old ones.
                self._generation = PROJECT_CODE.generation
                self._current.clear()
                function.made = None
            made = function.made
            if made is None or any(self._current.get(file) is not space for file, space in made[1].items()):
                made = function.made = self._load(function)
            return made[0]

    def _load(self, function: SharingFunction) -> tuple[Callable[..., object], dict[File, Namespace]]:
        if function.sent is None:
            survey = _Loading(function.content, lambda file: Namespace())
            made = survey.function()
            function.sent = {file: _digests(values) for file, values in survey.brought.items()}
            if not any(file in self._current for file in survey.spaces):
                for file, space in survey.spaces.items():
                    space.sent.update(function.sent.get(file, {}))
                return made, self._keep(survey.spaces)
        loading = _Loading(function.content, lambda file: self._matching(file, function.sent or {}), function.sent)
        made = loading.function()
        return made, self._keep(loading.spaces)

    def _keep(self, spaces: dict[File, Namespace]) -> dict[File, Namespace]:
        """Share them from now on, but for those of code that has no name: nobody could tell two of these apart."""
        shared = {file: space for file, space in spaces.items() if file[0] is not None}
        self._current.update(shared)
        return shared

    def _matching(self, file: File, sent: dict[File, dict[str, bytes]]) -> Namespace:
        """The globals of a file that a function fits into; new ones without what it brings in another version."""
        space, brings = self._current.get(file), sent.get(file, {})
        if space is None:
            return Namespace()
        changed = [name for name, digest in brings.items() if space.sent.get(name, digest) != digest]
        if not changed:
            return space
        values, known = dict(space.values), dict(space.sent)
        for name in changed:
            del known[name]
            values.pop(name, None)
        return Namespace(values, known)


class SharingFunction:
    """A function that shares its globals.

    Attributes:
        content: its pickle.
        made: the function, and the globals that it was made for.
        sent: digests of the globals that it brings, once they were looked at.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.made: tuple[Callable[..., object], dict[File, Namespace]] | None = None
        self.sent: dict[File, dict[str, bytes]] | None = None


def load_function(content: bytes) -> Callable[..., object]:
    """A function with globals of its own.

    Raises:
        Exception: something that it refers to is missing here.
    """
    return _callable(Unpickler([content], _NO_TABLES, _no_reference, named_device).unpickle())


class _Loading(Unpickler):
    """Reads a function whose globals are chosen by their file.

    Args:
        choose: the globals for a file.
        sent: what is known of the values that come: those that the globals have in the same version stay.
    """

    def __init__(
        self, content: bytes, choose: Callable[[File], Namespace], sent: dict[File, dict[str, bytes]] | None = None
    ) -> None:
        super().__init__([content], _NO_TABLES, _no_reference, named_device)
        self._choose = choose
        self._sent = sent
        self.spaces: dict[File, Namespace] = {}
        self.brought: dict[File, dict[str, object]] = {}
        self._files: dict[int, File] = {}

    def function(self) -> Callable[..., object]:
        return _callable(self.unpickle())

    def find_class(self, module: str, name: str) -> Any:
        if module == _cloudpickle.__name__:
            if name == "_make_function":
                return self._make
            if name == "_function_setstate":
                return self._set_state
        return super().find_class(module, name)

    def _make(self, code: types.CodeType, base: dict[str, Any], *others: Any) -> object:
        file = tuple(base.get(key) for key in _FILE)
        space = self.spaces.get(file)
        if space is None:
            space = self.spaces[file] = self._choose(file)
            self._files[id(space.values)] = file
            for name, value in base.items():
                space.values.setdefault(name, value)
        return _cloudpickle._make_function(code, space.values, *others)

    def _set_state(self, function: types.FunctionType, state: Any) -> None:
        file, brings = self._files[id(function.__globals__)], state[1]["__globals__"]
        space = self.spaces[file]
        if self._sent is None:
            self.brought.setdefault(file, {}).update(brings)
        else:
            brings = {name: value for name, value in brings.items() if name not in space.sent}
        state[1]["__globals__"] = brings
        _cloudpickle._function_setstate(function, state)
        if self._sent is not None:  # only now: an interrupt may strike between any two lines
            digests = self._sent.get(file, {})
            space.sent.update({name: digests[name] for name in brings if name in digests})


def _callable(found: object) -> Callable[..., object]:
    if not callable(found):
        raise ProtocolError(f"what came as a function is a {type(found).__name__}")
    return found


class _Digester(pickle.Pickler):
    """Writes a value so that two that came from the same one are equal, whatever its functions and classes refer to."""

    def persistent_id(self, value: object) -> object:
        if isinstance(value, types.FunctionType):
            return "function", value.__module__, value.__qualname__, hash(value.__code__), value.__defaults__
        if isinstance(value, type):
            return "class", value.__module__, value.__qualname__, id(value)
        return ("module", value.__name__) if isinstance(value, types.ModuleType) else None


def _digests(values: dict[str, object]) -> dict[str, bytes]:
    return {name: _digest(value) for name, value in values.items()}


def _digest(value: object) -> bytes:
    file = io.BytesIO()
    try:
        _Digester(file, protocol=5).dump(value)
    except Exception:  # it came by a pickle of another kind: each time, it is another one
        return secrets.token_bytes(32)
    return hashlib.sha256(file.getbuffer()).digest()


def named_device(fields: Any) -> torch.device:
    """The device that a client names by its type and index."""
    kind, index = fields
    return torch.device(kind, index) if index is not None else torch.device(kind)


def _no_reference(row: Row, number: int) -> torch.Tensor:
    raise ProtocolError("a function with a remote tensor in it came without its arguments")
