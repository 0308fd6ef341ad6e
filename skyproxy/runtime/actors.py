"""Objects that live in a worker process between calls, and whose methods are the calls."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from skyproxy.errors import ActorDiedError
from skyproxy.runtime.actor_loops import ActorLoop
from skyproxy.runtime.calls import current_call


class Actors:
    """The actors of this process, each known to the session that made it and to no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actors: dict[tuple[str, str], object] = {}
        self._loops: dict[tuple[str, str], ActorLoop] = {}

    def put(self, session: str, identity: str, actor: object) -> None:
        """Keep an actor under its name."""
        with self._lock:
            self._actors[session, identity] = actor

    def get(self, session: str, identity: str) -> Any:
        """The actor of this name.

        Raises:
            ActorDiedError: there is none.
        """
        with self._lock:
            try:
                return self._actors[session, identity]
            except KeyError:
                raise ActorDiedError(
                    "this worker process has no such actor: it was ended, or created elsewhere"
                ) from None

    def loop_of(self, session: str, identity: str) -> ActorLoop:
        """The event loop of an actor, which ends with it."""
        with self._lock:
            return self._loops.setdefault((session, identity), ActorLoop())

    def drop(self, session: str, identity: str) -> None:
        """Release an actor; it is not an error if there is none."""
        with self._lock:
            actor = self._actors.pop((session, identity), None)
            loop = self._loops.pop((session, identity), None)
        if loop is not None:
            loop.stop()
        del actor  # not below the lock: what it does at its end is its own business

    def forget(self, session: str) -> None:
        """Let go of those of a session that has ended."""
        with self._lock:
            actors = [self._actors.pop(key) for key in [key for key in self._actors if key[0] == session]]
            loops = [self._loops.pop(key) for key in [key for key in self._loops if key[0] == session]]
        for loop in loops:
            loop.stop()
        actors.clear()


ACTORS = Actors()


# --- what a pool calls on its workers --------------------------------------------------------------------------------


def make_actor(
    identity: str, kind: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Make an actor, and keep it under this name."""
    ACTORS.put(_session(), identity, kind(*args, **kwargs))


def call_actor(identity: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Call a method of an actor; with an empty name, see whether it is there.

    Of an async method, what is returned is to be awaited, or iterated over, and runs on the actor's own loop.

    Raises:
        ActorDiedError: it is not.
        Exception: whatever the method raises.
    """
    actor = ACTORS.get(_session(), identity)
    if not method:
        return None
    function = getattr(actor, method)
    if hasattr(function, "__skyproxy_rewrap__"):
        function = function.function  # a call of a decorated one would wait to be told where to run
    result = function(*args, **kwargs)
    if inspect.iscoroutine(result):
        return ACTORS.loop_of(_session(), identity).run(result)
    if isinstance(result, AsyncGenerator):
        return ACTORS.loop_of(_session(), identity).items(result)
    return result


def drop_actor(identity: str) -> None:
    """Nobody calls this actor any more."""
    ACTORS.drop(_session(), identity)


def _session() -> str:
    call = current_call()
    return call.session if call is not None else ""
