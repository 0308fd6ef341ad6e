"""Handles of actors in worker processes: their calls go to the program that made the actor, and from there to it.

A handle names its actor by a secret of 128 bits, which only those know that were sent it; it holds no token and no
address. The program hands arguments and results on without reading them.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from skyproxy.errors import ConfigurationError, ProtocolError, RemoteFunctionError
from skyproxy.runtime.actors import call_actor
from skyproxy.runtime.calls import current_call

_VALUE, _ERROR = "value", "error"
_asker: contextvars.ContextVar[str] = contextvars.ContextVar("skyproxy_asking_actor", default="")
"""The actor whose method this is."""


class SentHandles:
    """The handles of this program that were sent to workers, by the names of their actors: such an actor lives until
    its pool ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}

    def add(self, identity: str, handle: object) -> None:
        """Keep a handle: somebody elsewhere has it, too."""
        with self._lock:
            self._known[identity] = handle

    def find(self, identity: str) -> Any:
        """Return the handle of an actor of this program; None where it has ended, or is none."""
        with self._lock:
            return self._known.get(identity)

    def drop(self, identity: str) -> None:
        """The actor has ended."""
        with self._lock:
            handle = self._known.pop(identity, None)
        del handle  # not below the lock: its finalizer runs now


SENT_HANDLES = SentHandles()


# --- where a handle came to ------------------------------------------------------------------------------------------


def find_handle(kind: type, identity: str) -> object:
    """Return the handle that a pickle stands for: that very one in the program that made it, elsewhere one that asks
    there.
    """
    return SENT_HANDLES.find(identity) or SentActor(kind, identity)


class SentActor:
    """The handle of an actor in a worker process: its methods, and nothing else."""

    def __init__(self, kind: type, identity: str) -> None:
        self.__dict__.update(_sky_kind=kind, _sky_identity=identity)

    def __getattr__(self, name: str) -> SentMethod:
        kind: type = self.__dict__["_sky_kind"]
        if name.startswith("__") or not is_method(inspect.getattr_static(kind, name, None)):
            raise no_method(self, kind, name)
        return SentMethod(self, name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{name} cannot be set: the attributes of the actor {self.__dict__['_sky_kind'].__name__} live on its "
            "worker; write a method."
        )

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        return SentMethod(self, "__call__")(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return find_handle, (self.__dict__["_sky_kind"], self.__dict__["_sky_identity"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SentActor) and self.__dict__["_sky_identity"] == other.__dict__["_sky_identity"]

    def __hash__(self) -> int:
        return hash(self.__dict__["_sky_identity"])

    def __repr__(self) -> str:
        return f"<actor {self.__dict__['_sky_kind'].__name__}, elsewhere>"


class SentMethod:
    """A method of such an actor."""

    def __init__(self, owner: SentActor, name: str) -> None:
        self.owner = owner
        self.__name__ = name
        self.__qualname__ = f"{owner.__dict__['_sky_kind'].__name__}.{name}"

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        """The result of an ordinary method; a coroutine for one of a coroutine's, whose call has been made by then.

        Raises:
            ConfigurationError: nobody can be asked from here, or the method gives one item after another.
            ActorDiedError: the actor, or its process, is gone.
            Exception: whatever the method raises.
        """
        function = plain_method(self.owner.__dict__["_sky_kind"], self.__name__)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise no_items(self.__qualname__)
        wait = self._ask(args, kwargs)
        return _await_answer(wait) if inspect.iscoroutinefunction(function) else _open(wait())

    def _ask(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Callable[[], bytes]:
        call = current_call()
        if call is None or call.ask is None:
            raise ConfigurationError(
                f"{self.__qualname__} belongs to an actor elsewhere. It can be called from functions of a pool and "
                "methods of actors while they run, in their worker's own process (not with isolate=True), and from "
                "threads that they start."
            )
        words = {"actor": self.owner.__dict__["_sky_identity"], "method": self.__name__, "asker": _asker.get()}
        return call.ask(words, _pickle((args, dict(kwargs))))

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self.owner, self.__name__)

    def __repr__(self) -> str:
        return f"<method {self.__qualname__} of an actor elsewhere>"


async def _await_answer(wait: Callable[[], bytes]) -> object:
    return _open(await asyncio.to_thread(wait))


def _open(answer: bytes) -> object:
    outcome, value = _read(answer)
    if outcome == _ERROR:
        raise value
    return value


# --- where the actor lives -------------------------------------------------------------------------------------------


def call_for_another(identity: str, method: str, content: bytes) -> object:
    """Call a method of an actor of this process for another process; return what `_open` reads.

    Raises:
        ActorDiedError: the actor is not here.
    """
    _asker.set(identity)  # until the end of this call, whose context is its own
    try:
        args, kwargs = _read(content)
        result = call_actor(identity, method, args, kwargs)
    except Exception as error:
        return pickled_error(error)
    return _pickle_later(result) if inspect.iscoroutine(result) else _pickle_result(result)


def call_own_actor(identity: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Do the same for the program itself; return what `call_actor` does."""
    _asker.set(identity)
    return call_actor(identity, method, args, kwargs)


async def _pickle_later(result: Coroutine[object, object, object]) -> bytes:
    try:
        return _pickle_result(await result)
    except Exception as error:
        return pickled_error(error)


def _pickle_result(result: object) -> bytes:
    try:
        return _pickle((_VALUE, result))
    except Exception as error:
        what = f"a {type(result).__qualname__} cannot be pickled ({error})"
        return pickled_error(TypeError(f"the result cannot be sent to whoever has the actor's handle: {what}"))


def pickled_error(error: Exception) -> bytes:
    """Return an error as an answer; in words where it cannot be written."""
    error = error.with_traceback(None)
    try:
        written = _pickle((_ERROR, error))
        _read(written)
        return written
    except Exception:
        return _pickle((_ERROR, RemoteFunctionError(f"{type(error).__qualname__}: {error}")))


def _pickle(value: object) -> bytes:
    from skyproxy.payloads.pickling import Pickler  # late, for it loads torch, which whoever has a handle may not need

    pickled = Pickler(lambda tensor: None).pickle(value)
    return pickle.dumps((pickled.tables, [bytes(piece) for piece in pickled.pieces]), protocol=5)


def _read(content: bytes) -> Any:
    """Return what `_pickle` has written: of the program whose function this is, or of another of its workers."""
    from skyproxy.payloads.pickling import Unpickler
    from skyproxy.payloads.tensors import memory_for

    tables, contents = pickle.loads(content)
    allocate = memory_for(tables, len(contents))
    pieces: list[object] = []
    for index, one in enumerate(contents):
        piece, view = allocate(index, len(one))
        view[:] = one
        pieces.append(piece)
    return Unpickler(pieces, tables, _no_reference).unpickle()


def _no_reference(row: object, number: int) -> NoReturn:
    raise ProtocolError("a tensor by reference, where all go by value")


# --- what both sides know of a class ---------------------------------------------------------------------------------


_METHODS = (staticmethod, classmethod, functools.partialmethod, functools.singledispatchmethod)


def is_method(member: object) -> bool:
    """Return whether something that a class has is a method."""
    return isinstance(member, _METHODS) or (
        callable(member) and not isinstance(member, type) and hasattr(member, "__get__")
    )


def plain_method(kind: type, name: str) -> object:
    """Return the function of a method, without what stands around it.

    Raises:
        TypeError: there is no such method.
    """
    member = inspect.getattr_static(kind, name, None)
    if not is_method(member):
        raise TypeError(f"the actor {kind.__name__} has no method {name}.")
    if isinstance(member, functools.partialmethod | functools.singledispatchmethod):
        return member.func
    return getattr(member, "__func__", None) or getattr(member, "function", member)


def no_method(handle: object, kind: type, name: str) -> AttributeError:
    """Return the error for who wants something else of an actor than a method."""
    found = "is not a method" if inspect.getattr_static(kind, name, None) is not None else "does not exist"
    return AttributeError(
        f"{kind.__name__}.{name} {found}. Of an actor only methods can be used here: its attributes live on "
        "the worker; write a method that returns what you need.",
        name=name,
        obj=handle,
    )


def no_items(method: str) -> ConfigurationError:
    """Return the error for a generator's method that is called from a worker."""
    return ConfigurationError(
        f"{method} gives one item after another, and these come to the program that made the actor alone. Write a "
        "method that returns a list."
    )
