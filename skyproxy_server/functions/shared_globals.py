"""The globals of functions that travel as code: those of one file share them on a worker, as in the program itself.

Each function brings the values of the globals that it names. What the program has not changed since is left as the
functions here have made it; what it has changed is taken over, by all functions of the file, as in the program. Those
that run meanwhile see nothing of that: what they were sent is what they run with.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import secrets
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import cloudpickle.cloudpickle as _cloudpickle
import torch

from skyproxy.errors import ProtocolError
from skyproxy.payloads.pickling import Unpickler
from skyproxy.payloads.tensors import Row
from skyproxy.runtime.project_code import PROJECT_CODE
from skyproxy.runtime.sent_classes import MAIN, share_globals

_NO_TABLES: dict[str, object] = {"tensors": [], "bases": []}
_FILE = ("__name__", "__file__")
File = tuple[object, ...]


class Digest(NamedTuple):
    """Content of a value that came from the program, equal for two that came from the same one.

    Attributes:
        content: of the value.
        holds_functions: whether there are functions in it: these have the globals for which they were made.
    """

    content: bytes
    holds_functions: bool


class Use:
    """Stands for a call that runs, as long as that holds it."""


class Namespace:
    """The globals of one file.

    Attributes:
        values: what functions have as `__globals__`.
        sent: what the program sent, for each name that it sent.
        version: how often the program has changed what it had sent.
        uses: the calls that run with them.
    """

    def __init__(self, values: dict[str, Any] | None = None, sent: dict[str, Digest] | None = None) -> None:
        self.values: dict[str, Any] = {} if values is None else values
        self.sent: dict[str, Digest] = {} if sent is None else sent
        self.version = 0
        self.uses: weakref.WeakSet[Use] = weakref.WeakSet()

    def without(self, changed: Iterable[str]) -> Namespace:
        """Return the globals for what comes in another version: these, or a copy if calls run with them.

        In a copy, functions and what holds some are missing, for they would go on with the globals of those calls.
        """
        if not self.uses:
            self.version += 1
            for name in changed:
                del self.sent[name]
            return self
        dropped = {name for name, digest in self.sent.items() if digest.holds_functions}.union(changed)
        values = {name: value for name, value in self.values.items() if name not in dropped}
        return Namespace(values, {name: digest for name, digest in self.sent.items() if name not in dropped})


class SharedGlobals:
    """Those of one session."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._current: dict[File, Namespace] = {}
        self._generation = 0

    def make(self, function: SharingFunction) -> tuple[Callable[..., object], Use]:
        """The function for one call, on that call's thread, and what to hold while it runs.

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
            if made is None or not self._is_current(made):
                made = function.made = Made(*self._load(function))
            use = Use()
            for space, _ in made.spaces.values():
                space.uses.add(use)
            return made.function, use

    def _is_current(self, made: Made) -> bool:
        """Return whether the globals that a function was made for are still those of their files, and unchanged."""
        return all(
            self._current.get(file) is space and space.version == version
            for file, (space, version) in made.spaces.items()
        )

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
        for file, space in shared.items():
            if file[0] == MAIN:
                share_globals(file, space)
        return shared

    def _matching(self, file: File, sent: dict[File, dict[str, Digest]]) -> Namespace:
        """The globals of a file that a function fits into, without what it brings in another version."""
        space, brings = self._current.get(file), sent.get(file, {})
        if space is None:
            return Namespace()
        changed = [name for name, digest in brings.items() if space.sent.get(name, digest) != digest]
        return space.without(changed) if changed else space


class Made:
    """A function, and the globals that it was made for, with the versions that they had."""

    def __init__(self, function: Callable[..., object], spaces: dict[File, Namespace]) -> None:
        self.function = function
        self.spaces = {file: (space, space.version) for file, space in spaces.items()}


class SharingFunction:
    """A function that shares its globals.

    Attributes:
        content: its pickle.
        made: the function as it was made last.
        sent: digests of the globals that it brings, once they were looked at.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.made: Made | None = None
        self.sent: dict[File, dict[str, Digest]] | None = None


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
        self, content: bytes, choose: Callable[[File], Namespace], sent: dict[File, dict[str, Digest]] | None = None
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
    """Writes a value so that two that came from the same one are equal, whatever its functions and classes refer to.

    Args:
        file: what it writes to.
        seen: the functions that were written already, by identity.
    """

    def __init__(self, file: io.BytesIO, seen: dict[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._seen = seen

    def persistent_id(self, value: object) -> object:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            # By the number that one of the program has for cloudpickle: another may be where one was that is gone.
            number = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value, id(value))
            return "class", value.__module__, value.__qualname__, number
        return ("module", value.__name__) if isinstance(value, types.ModuleType) else None

    def _function(self, function: types.FunctionType) -> object:
        if id(function) in self._seen:  # it refers to itself, as recursive ones do
            return "function", self._seen[id(function)]
        self._seen[id(function)] = len(self._seen)
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        defaults = function.__defaults__, function.__kwdefaults__
        return "function", function.__module__, function.__qualname__, _text_of(function.__code__), defaults, cells

    def _cell(self, cell: types.CellType) -> object:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing was assigned yet
            return None
        file = io.BytesIO()
        try:
            _Digester(file, self._seen).dump(value)
        except Exception:
            return type(value).__qualname__
        return file.getvalue()


def _text_of(value: object) -> str:
    """Return a text of a constant that those of equal ones share, code among them; 1, 1.0 and True are not equal."""
    if isinstance(value, types.CodeType):
        _, fields = _cloudpickle._code_reduce(value)
        return _text_of(fields)
    if isinstance(value, tuple):
        return "(" + ",".join(map(_text_of, value)) + ")"
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_text_of, value))) + "}"
    return hex(value) if type(value) is int else repr(value)  # no limit of digits


def _digests(values: dict[str, object]) -> dict[str, Digest]:
    return {name: _digest(value) for name, value in values.items()}


def _digest(value: object) -> Digest:
    file = io.BytesIO()
    seen: dict[int, int] = {}
    try:
        _Digester(file, seen).dump(value)
    except Exception:  # it came by a pickle of another kind: each time, it is another one
        return Digest(secrets.token_bytes(32), bool(seen))
    return Digest(hashlib.sha256(file.getbuffer()).digest(), bool(seen))


def named_device(fields: Any) -> torch.device:
    """The device that a client names by its type and index."""
    kind, index = fields
    return torch.device(kind, index) if index is not None else torch.device(kind)


def _no_reference(row: Row, number: int) -> torch.Tensor:
    raise ProtocolError("a function with a remote tensor in it came without its arguments")
