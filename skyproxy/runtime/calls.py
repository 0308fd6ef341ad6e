"""The call that the running code belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CallContext:
    """A worker's knowledge of a call beside its function and arguments.

    Attributes:
        id: names the call on its worker.
        name: the function's name, for people.
        values: what the caller sent beside the call; pools put the topology there, as "pool".
        session: the session that made the call, as its worker names it.
        tell_wait: tells the caller where something of the call waits for a debugger; see `breakpoints.Place`.
        ask: asks the caller to call an actor, and gives what waits for the answer; None where that cannot be.

    Example:
        ```python
        context = skyproxy.runtime.CallContext(id="call-1", name="evaluate", values={"step": 3})
        ```
    """

    id: str
    name: str = ""
    values: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    session: str = ""
    tell_wait: Callable[[dict[str, Any]], object] | None = None
    ask: Callable[[dict[str, Any], bytes], Callable[[], bytes]] | None = None


_CURRENT: ContextVar[CallContext | None] = ContextVar("skyproxy_call", default=None)


def current_call() -> CallContext | None:
    """The call that this code serves; None outside one.

    It follows `contextvars`: tasks of asyncio know it, threads that the function starts only where they were given a
    copy of the context.

    Example:
        ```python
        @skyproxy.function
        def own_name() -> str:
            return skyproxy.runtime.current_call().name


        print(own_name() >> pool)  # own_name
        ```
    """
    return _CURRENT.get()


class ValueOfContext(contextlib.AbstractContextManager[None], Generic[T]):
    """A context variable has this value inside the `with` block. Not a generator: each call enters a few of these."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token: Token[T] = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def entered_call(call: CallContext) -> contextlib.AbstractContextManager[None]:
    """For workers: the code inside the `with` block serves `call`.

    Example:
        ```python
        with skyproxy.runtime.entered_call(skyproxy.runtime.CallContext(id="call-1", name="evaluate")):
            assert skyproxy.runtime.current_call().name == "evaluate"
        ```
    """
    return ValueOfContext(_CURRENT, call)
